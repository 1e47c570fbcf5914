"""The functions of the current time, which have one value for all steps of a statement."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

_TYPES = {
    "now": "TIMESTAMPTZ", "transaction_timestamp": "TIMESTAMPTZ", "get_current_timestamp": "TIMESTAMPTZ",
    "current_date": "DATE", "today": "DATE", "get_current_time": "TIMETZ", "current_localtime": "TIME",
    "current_localtimestamp": "TIMESTAMP",
}  # fmt: skip
"""The functions by name, each with the type of its value."""
_NAMES = {
    *_TYPES, "current_timestamp", "current_time", "localtime", "localtimestamp", "ago", "pg_conf_load_time",
    "pg_postmaster_start_time",
}  # fmt: skip
"""The names that a statement may use: those of the functions, and of keywords and macros that call them."""
_KEYWORDS = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
_UNKNOWN = "(random() * 0)::BIGINT"
"""A number that DuckDB does not evaluate while planning."""


def tells_time(words: Iterable[str]) -> bool:
    """Returns whether a statement with these words may depend on the current time."""
    return not _NAMES.isdisjoint(words)


def is_moment(name: str) -> bool:
    """Returns whether a name alone, without parentheses, is the current time if no column has it."""
    return name.lower() in _KEYWORDS


def microseconds() -> int:
    """Returns the current time in microseconds since 1970."""
    return time.time_ns() // 1_000


def macros(moment: int | None) -> Iterator[str]:
    """Yields the statements that replace the functions by macros.

    The macros return a moment, in microseconds since 1970, and end with the connection. Without a moment they
    return an unknown one, which DuckDB does not evaluate while planning.
    """
    kind, number = ("MACRO", _UNKNOWN) if moment is None else ("TEMP MACRO", str(moment))
    for name, type_name in _TYPES.items():
        yield f"CREATE OR REPLACE {kind} {name}() AS make_timestamptz({number})::TIMESTAMP::{type_name}"


def dropped() -> Iterator[str]:
    """Yields the statements that drop the macros of a moment."""
    for name in _TYPES:
        yield f"DROP MACRO temp.{name}"
