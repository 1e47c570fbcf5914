"""Whether DataFusion can be used in this process."""

from __future__ import annotations

from dormouse.objects.forks import ForkGuard

check_not_forked = ForkGuard("DataFusion").check
