"""Spark: tables as DataFrames, bulk ingest, compaction as tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse.spark.frames import read, view, write

__all__ = ["read", "view", "write"]


def __getattr__(name: str) -> Any:
    """Loads DataFusion and pyarrow only when they are used: tasks import this package, too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dormouse.spark import frames

    return getattr(frames, name)
