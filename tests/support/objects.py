"""Object stores and the names of their objects."""

from __future__ import annotations

from dormouse.objects import ObjectStore, open_store
from dormouse.objects.names import SKETCHES_SUFFIX

__all__ = [
    "SKETCHES_SUFFIX",
    "ObjectStore",
    "open_store",
]
