"""The moments at which a table can be read, as users name them and as its metadata are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import total_ordering
from typing import NamedTuple, TypeAlias


@total_ordering
@dataclass(frozen=True, slots=True)
class Cut:
    """A recorded, exact position in a table's history. The cuts of one table are totally ordered.

    `recorded_at` is in UTC. `name` is None for a cut that is kept only as long as the history.
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
"""A moment at which a table is read: a cut, a cut's name, or a time with a time zone.

Everything that was committed at or before the moment is visible.
"""
BEGINNING = "beginning"
"""The command line's word for the beginning of a table; no cut can have this name."""


def when_of_text(text: str) -> str | datetime:
    """Returns the moment that a text names: a time in ISO 8601, or else a cut's name."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text


def text_of_when(when: When) -> str | int:
    """Returns a moment in the form that the query service takes.

    A time or a cut's name is text, and a cut without a name is its number.
    """
    if isinstance(when, Cut):
        return when.cut_id if when.name is None else when.name
    return when.isoformat() if isinstance(when, datetime) else when


class Remembered(NamedTuple):
    """The state on which a cached position depends: a cut, the schema's version then, and the properties.

    The properties are JSON. The planner checks that the state is still the same.
    """

    cut_id: int
    version: int
    properties: str


@dataclass(frozen=True, slots=True)
class Position:
    """A moment in the form in which metadata are read: the tree of an epoch and the rows of a snapshot.

    - `snapshot`: the text of a pg_snapshot.
    - `at`: the time of the moment, by the database's clock.
    - `made_at`: the time when the epoch was made, in microseconds since 1970. After a restore, an epoch of
      the same number has another time.
    - `remembered`: set if the position comes from a cache; the planner then checks that it is still valid.
    """

    epoch: int
    snapshot: str
    at: datetime
    made_at: int | None = field(default=None, compare=False)
    remembered: Remembered | None = field(default=None, compare=False)
