"""Spark: the session, bulk ingests, merges, compaction jobs as tasks, and tables as DataFrames."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse.spark.frames import read, view, write
    from dormouse.spark.ingest import split_points
    from dormouse.spark.merges import merge

__all__ = ["merge", "read", "split_points", "view", "write"]


def __getattr__(name: str) -> Any:
    """Imports a function's module at its first use, so that tasks import this package quickly."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"split_points": "ingest", "merge": "merges"}.get(name, "frames")
    return getattr(import_module(f"dormouse.spark.{home}"), name)
