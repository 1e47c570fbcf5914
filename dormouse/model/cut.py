"""Moments of a table's life, as users name them and as its metadata are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import total_ordering
from typing import NamedTuple, TypeAlias


@total_ordering
@dataclass(frozen=True, slots=True)
class Cut:
    """A recorded, exact position in a table's life. Those of one table are totally ordered.

    `recorded_at` is aware, and in UTC. `name` is None for one that is kept only as long as the history.
    """

    cut_id: int
    name: str | None
    recorded_at: datetime
    epoch: int
    table_id: int

    def __lt__(self, other: Cut) -> bool:
        if not isinstance(other, Cut) or other.table_id != self.table_id:
            return NotImplemented
        return self.cut_id < other.cut_id


When: TypeAlias = Cut | str | datetime
"""A moment: a cut, a cut's name, or an aware datetime: all that was committed at or before it."""
BEGINNING = "beginning"
"""How the command line says "from the table's beginning"; no cut has the name."""


def when_of_text(text: str) -> str | datetime:
    """A moment as it is written: a time in ISO 8601, or else a cut's name. Times may be naive."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text


def text_of_when(when: When) -> str | int:
    """A moment as a service is told it: a time, a name, or the number of a cut that has none."""
    if isinstance(when, Cut):
        return when.cut_id if when.name is None else when.name
    return when.isoformat() if isinstance(when, datetime) else when


class Remembered(NamedTuple):
    """What a position took to be found: a cut, the version of the table's columns, its properties as JSON."""

    cut_id: int
    version: int
    properties: str


@dataclass(frozen=True, slots=True)
class Position:
    """A moment as a table's metadata are read: the tree of `epoch`, what is visible in `snapshot`.

    `snapshot` is a pg_snapshot's text. `at` is when it was the present, as the database's clock told.
    `made_at` is when the epoch was made, in microseconds since 1970: a tree of another past is told by it.
    `remembered`: it was found some time ago; whoever plans asks whether that holds.
    """

    epoch: int
    snapshot: str
    at: datetime
    made_at: int | None = field(default=None, compare=False)
    remembered: Remembered | None = field(default=None, compare=False)
