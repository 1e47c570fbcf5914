"""Queries: what to read of a table (planner), and its rows in key order (executor)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dormouse.reading.planner import PlanSummary

if TYPE_CHECKING:
    from dormouse.reading.executor import query
    from dormouse.reading.streams import Answer
    from dormouse.reading.table_view import explain

__all__ = ["Answer", "PlanSummary", "explain", "query"]

_MODULES = {"Answer": "answer", "explain": "table_view", "query": "executor"}


def __getattr__(name: str) -> Any:
    """Loads DataFusion only when it is used: the client of a query service does without."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
