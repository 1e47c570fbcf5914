"""Moments that a statement finds by itself, on its way to what lies at them or between them.

So what is asked of cuts is one round trip. A time is none of them: what it means takes statements of its own,
and may have to be waited for (`moments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from dormouse.errors import CutExpired, InvalidCut, TableNotFound
from dormouse.model.cut import Cut, Position
from dormouse.model.types import is_text
from dormouse.postgres.queries import load
from dormouse.state.context import TableContext

NAMES_TOLD_MAX = 10
_QUERIES = load(__package__ or "", "ends")
_VALUES = ("kinds", "names", "cut_ids", "ats", "epochs", "snapshots")
ENDS = _QUERIES["ends"]
_FIND = _QUERIES["find"].including(ends=ENDS)
NO_ENDS: Mapping[str, Any] = {name: [] for name in _VALUES}
"""What such a statement is told that is told its ends in another way."""


class Known(Enum):
    """Ends of a history that need no cut."""

    BEGINNING = "beginning"
    """Before the first row, where the history reaches back so far."""
    HEAD = "head"
    """The first epoch that is kept."""
    NOW = "now"


End: TypeAlias = Cut | str | int | Position | Known
"""A cut, by itself, its name or its id; a position; or an end of the history."""


class Found(NamedTuple):
    """Where an end is, and from when on its table can be read; without `snapshot` it is of another server."""

    cut_id: int | None
    name: str | None
    at: datetime
    epoch: int
    snapshot: str | None
    since: datetime
    made_at: int | None

    def cut(self, context: TableContext) -> Cut:
        assert self.cut_id is not None  # noqa: S101 a cut was asked for
        return Cut(self.cut_id, self.name, self.at, self.epoch, context.table.table_id)

    def position(self) -> Position:
        assert self.snapshot is not None  # noqa: S101 as it was checked
        return Position(self.epoch, self.snapshot, self.at, self.made_at)


class Ends:
    """Some moments of a table, as a statement with the part `ends` is told them and tells where they are."""

    def __init__(self, context: TableContext, *ends: End) -> None:
        self._context = context
        self._ends = ends
        given = [_given(context, end) for end in ends]
        self.values: Mapping[str, Any] = {name: [one[n] for one in given] for n, name in enumerate(_VALUES)}

    def look_up(self) -> list[Found]:
        """Alone, in one round trip."""
        rows = self._context.store.own.looked_up(_FIND, self.values, operation="find a moment")
        return self.found(rows[0][0])

    def found(self, told: Sequence[Mapping[str, Any]] | None) -> list[Found]:
        """What the statement told. `InvalidCut` for no cut, `CutExpired`, `TableNotFound`."""
        if told is None:
            raise TableNotFound.gone(self._context.table.name)
        return [self._found(*one) for one in zip(self._ends, told, strict=True)]

    def positions(self, found: Sequence[Found], *, reads: bool = True) -> list[Position]:
        """Where they are; `CutExpired`, unless it `reads` only when a position cannot be told here."""
        positions = list[Position]()
        for end, one in zip(self._ends, found, strict=True):
            position = self._position(end, one, reads=reads)
            if end is Known.NOW and positions:
                # also when the clock was set back since
                position = replace(position, at=max(position.at, positions[-1].at))
            positions.append(position)
        return positions

    def _position(self, end: End, found: Found, *, reads: bool) -> Position:
        if isinstance(end, Position):
            return end
        table, what = self._context.table.name, f"the moment {text_of(found.at)}"
        if found.cut_id is not None:
            what = named(found.cut(self._context))
        if found.snapshot is None:
            raise CutExpired(
                f"{what} of table {table!r} was recorded in another database server, whose transactions "
                "cannot be told here: the database came from a logical copy (pg_dump); the oldest moment "
                f"that can be read is {text_of(found.since)}",
                found.since,
                table=table,
            )
        if reads and end is not Known.NOW:
            refuse_before(self._context, found.at, found.since, what)
        return found.position()

    def _found(self, end: End, told: Mapping[str, Any]) -> Found:
        if told["epoch"] is None:
            raise self._none(end)
        times = (told["at"], told["since"])
        at, since = (text and datetime.fromisoformat(text).astimezone(UTC) for text in times)
        found = Found(
            told["cut_id"], told["name"], at or since, told["epoch"], told["snapshot"], since, told["made_at"]
        )
        # after the database was restored to a moment before a cut, another may have got its id
        if isinstance(end, Cut) and end.recorded_at != found.at:
            raise self._none(end)
        return found

    def _none(self, end: End) -> Exception:
        """Why an end is nowhere."""
        if end is Known.BEGINNING:
            since = oldest(self._context)
            return CutExpired(
                f"the history of table {self._context.table.name!r} does not reach back to its beginning any "
                f"more, but to {text_of(since)}: read what the table has by a query as of a cut, and its "
                "changes after that cut",
                since.astimezone(UTC),
                table=self._context.table.name,
            )
        assert isinstance(end, Cut | str | int)  # noqa: S101 all else is there
        return no_cut(self._context, end)


def oldest(context: TableContext, conn: Any = None) -> datetime:
    """The oldest moment that can be read; `conn` is inside a transaction that asks."""
    rows = _rows(context, "since", conn)
    if not rows:
        raise TableNotFound.gone(context.table.name)
    found: datetime = rows[0][0]
    return found


def check_since(context: TableContext, at: datetime, what: str | None = None, conn: Any = None) -> None:
    """`CutExpired` when a moment cannot be read any more."""
    refuse_before(context, at, oldest(context, conn), what or f"the moment {text_of(at)}")


def refuse_before(context: TableContext, at: datetime, since: datetime, what: str) -> None:
    """`CutExpired` for a moment before the oldest that can be read."""
    if at < since:
        raise CutExpired(
            f"{what} of table {context.table.name!r} cannot be read any more; the oldest moment that can is "
            f"{text_of(since)}",
            since.astimezone(UTC),
            table=context.table.name,
        )


def no_cut(context: TableContext, which: Cut | str | int) -> Exception:
    """Why there is none: it expired, or never was."""
    since, table = oldest(context), context.table.name
    if isinstance(which, Cut) and which.name is None and which.recorded_at < since:
        try:
            refuse_before(context, which.recorded_at, since, named(which))
        except CutExpired as error:
            return error
    names = [repr(row[0]) for row in _rows(context, "names", limit=NAMES_TOLD_MAX + 1)]
    known = ", ".join(names[:NAMES_TOLD_MAX]) + (", …" if len(names) > NAMES_TOLD_MAX else "")
    is_like_time = isinstance(which, str) and which[:1].isdecimal()
    told = repr(which)
    if isinstance(which, Cut):
        told = f"{which.cut_id if which.name is None else which.name!r} of {text_of(which.recorded_at)}"
    return InvalidCut(
        f"table {table!r} has no cut {told}; "
        + (f"its named cuts are {known}" if names else "none of its cuts has a name")
        + ("; a time is written 2026-11-20T14:00, and is an aware datetime in Python" * is_like_time)
    )


def text_of(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(" ")


def named(cut: Cut) -> str:
    return f"the cut {cut.cut_id}" if cut.name is None else f"the cut {cut.name!r}"


def _given(context: TableContext, end: End) -> tuple[Any, ...]:
    """Its kind, and what is known of it: a name, an id, or a position."""
    if isinstance(end, Known):
        return end.value, None, None, None, None, None
    if isinstance(end, Position):
        return "known", None, None, end.at, end.epoch, end.snapshot
    if isinstance(end, datetime):
        raise InvalidCut(f"here only a cut can be named, by itself or its name, and no time such as {end}")
    if isinstance(end, Cut) and end.table_id != context.table.table_id:
        raise InvalidCut(f"{named(end)} is of another table, not of {context.table.name!r}")
    if isinstance(end, bool) or not (isinstance(end, Cut | int) or is_text(end)):
        raise InvalidCut(f"a moment is a cut, a cut's name, or a time with its zone, not {end!r}")
    if isinstance(end, str):
        return "name", end, None, None, None, None
    number = end.cut_id if isinstance(end, Cut) else end
    return "id", None, number if 0 <= number < 1 << 63 else -1, None, None, None


def _rows(context: TableContext, statement: str, conn: Any = None, **values: Any) -> list[Any]:
    own, query = context.store.own, _QUERIES[statement]
    if conn is None:
        return own.looked_up(query, values, operation="find a moment")
    return own.rows_in(conn, query, values)
