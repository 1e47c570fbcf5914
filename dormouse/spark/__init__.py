"""Spark: the session, large ingests, compaction jobs as tasks; and tables as DataFrames."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse.spark.frames import read, view, write

__all__ = ["read", "view", "write"]


def __getattr__(name: str) -> Any:
    """Loads what is needed when it is used: tasks import this package, too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("dormouse.spark.frames"), name)
