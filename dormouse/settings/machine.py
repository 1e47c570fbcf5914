"""What this machine has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """The memory of the machine, or of the container when it may have less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):
            found.append(int(Path(name).read_text("ascii")))
    return min(found)
