"""The look-up of moments in the same statement that reads at these moments or between them.

So a read needs only one round trip. A moment given as a time is not supported here. It needs other
statements, and perhaps a wait: see `moments`.
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
"""The values of the part `ends` for a statement that gets epochs, and so looks up no moments."""


class Known(Enum):
    """The moments of a history that are known without a cut."""

    BEGINNING = "beginning"
    """The moment before the first row. It is refused if the history no longer reaches back so far."""
    HEAD = "head"
    """The first epoch that was not truncated."""
    NOW = "now"


End: TypeAlias = Cut | str | int | Position | Known
"""A moment: a cut, the name or id of a cut, a position, or a known moment of the history."""


class Found(NamedTuple):
    """A moment that was looked up.

    `since` is the oldest moment of its table that can be read. `snapshot` is None for a cut that was recorded
    in another database server.
    """

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
        assert self.snapshot is not None  # noqa: S101 `Ends` has checked it
        return Position(self.epoch, self.snapshot, self.at, self.made_at)


class Ends:
    """Moments of a table, in the form of values for a statement.

    The statement includes the part `ends`, which looks them up.
    """

    def __init__(self, context: TableContext, *ends: End) -> None:
        self._context = context
        self._ends = ends
        given = [_given(context, end) for end in ends]
        self.values: Mapping[str, Any] = {name: [row[n] for row in given] for n, name in enumerate(_VALUES)}

    def look_up(self) -> list[Found]:
        """Looks the moments up in a separate statement; returns them in their order."""
        rows = self._context.store.own.looked_up(_FIND, self.values, operation="find a moment")
        return self.read(rows[0][0])

    def read(self, answer: Sequence[Mapping[str, Any]] | None) -> list[Found]:
        """Returns the moments in `answer`, the value of `ends` that a statement returned, in their order.

        Raises `InvalidCut` for a cut that does not exist, `CutExpired` and `TableNotFound`.
        """
        if answer is None:
            raise TableNotFound.gone(self._context.table.name)
        return [self._found(end, row) for end, row in zip(self._ends, answer, strict=True)]

    def positions(self, moments: Sequence[Found], *, reads: bool = True) -> list[Position]:
        """Returns the positions of moments.

        Raises `CutExpired` for a moment that can no longer be read. Without `reads`, raises it only for a cut
        that was recorded in another database server.
        """
        positions = list[Position]()
        for end, moment in zip(self._ends, moments, strict=True):
            position = self._position(end, moment, reads=reads)
            if end is Known.NOW and positions:
                # now is not before the other moment, even if the clock was set back since
                position = replace(position, at=max(position.at, positions[-1].at))
            positions.append(position)
        return positions

    def _position(self, end: End, moment: Found, *, reads: bool) -> Position:
        if isinstance(end, Position):
            return end
        table, what = self._context.table.name, f"the moment {text_of(moment.at)}"
        if moment.cut_id is not None:
            what = named(moment.cut(self._context))
        if moment.snapshot is None:
            raise CutExpired(
                f"{what} of table {table!r} was recorded in another database server, whose transactions are "
                "not known here: the database came from a logical copy (pg_dump); the oldest moment that can "
                f"be read is {text_of(moment.since)}",
                moment.since,
                table=table,
            )
        if reads and end is not Known.NOW:
            refuse_before(self._context, moment.at, moment.since, what)
        return moment.position()

    def _found(self, end: End, row: Mapping[str, Any]) -> Found:
        if row["epoch"] is None:
            raise self._none(end)
        times = (row["at"], row["since"])
        at, since = (text and datetime.fromisoformat(text).astimezone(UTC) for text in times)
        moment = Found(
            row["cut_id"], row["name"], at or since, row["epoch"], row["snapshot"], since, row["made_at"]
        )
        # after the database was restored to a moment before a cut, another cut may have its id
        if isinstance(end, Cut) and end.recorded_at != moment.at:
            raise self._none(end)
        return moment

    def _none(self, end: End) -> Exception:
        """Returns the error for a moment that does not exist in the database."""
        if end is Known.BEGINNING:
            since = oldest(self._context)
            return CutExpired(
                f"the history of table {self._context.table.name!r} does not reach back to its beginning, "
                f"only to {text_of(since)}: read what the table has by a query as of a cut, and its changes "
                "after that cut",
                since.astimezone(UTC),
                table=self._context.table.name,
            )
        assert isinstance(end, Cut | str | int)  # noqa: S101 the other kinds always have a row
        return no_cut(self._context, end)


def oldest(context: TableContext, conn: Any = None) -> datetime:
    """Returns the oldest moment that can be read; with `conn`, as the transaction of this connection sees it.

    Raises `TableNotFound`.
    """
    rows = _rows(context, "since", conn)
    if not rows:
        raise TableNotFound.gone(context.table.name)
    since: datetime = rows[0][0]
    return since


def check_since(context: TableContext, at: datetime, what: str | None = None, conn: Any = None) -> None:
    """Raises `CutExpired` if the moment `at` can no longer be read. `what` describes it in the message."""
    refuse_before(context, at, oldest(context, conn), what or f"the moment {text_of(at)}")


def refuse_before(context: TableContext, at: datetime, since: datetime, what: str) -> None:
    """Raises `CutExpired` if the moment `at` is before `since`, the oldest that can be read.

    `what` describes the moment in the message.
    """
    if at < since:
        raise CutExpired(
            f"{what} of table {context.table.name!r} can no longer be read; the oldest moment that can is "
            f"{text_of(since)}",
            since.astimezone(UTC),
            table=context.table.name,
        )


def no_cut(context: TableContext, which: Cut | str | int) -> Exception:
    """Returns the error for a cut that does not exist, or that has expired."""
    since, table = oldest(context), context.table.name
    if isinstance(which, Cut) and which.name is None and which.recorded_at < since:
        try:
            refuse_before(context, which.recorded_at, since, named(which))
        except CutExpired as error:
            return error
    names = [repr(row[0]) for row in _rows(context, "names", limit=NAMES_TOLD_MAX + 1)]
    known = ", ".join(names[:NAMES_TOLD_MAX]) + (", …" if len(names) > NAMES_TOLD_MAX else "")
    is_like_time = isinstance(which, str) and which[:1].isdecimal()
    shown = repr(which)
    if isinstance(which, Cut):
        shown = f"{which.cut_id if which.name is None else which.name!r} of {text_of(which.recorded_at)}"
    return InvalidCut(
        f"table {table!r} has no cut {shown}; "
        + (f"its named cuts are {known}" if names else "none of its cuts has a name")
        + ("; a time is written 2026-11-20T14:00, and is an aware datetime in Python" * is_like_time)
    )


def text_of(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(" ")


def named(cut: Cut) -> str:
    return f"the cut {cut.cut_id}" if cut.name is None else f"the cut {cut.name!r}"


def _given(context: TableContext, end: End) -> tuple[Any, ...]:
    """Returns the six values of a moment for the statement, in the order of `_VALUES`."""
    if isinstance(end, Known):
        return end.value, None, None, None, None, None
    if isinstance(end, Position):
        return "known", None, None, end.at, end.epoch, end.snapshot
    if isinstance(end, datetime):
        raise InvalidCut(f"give a cut or the name of a cut here, not a time such as {end}")
    if isinstance(end, Cut) and end.table_id != context.table.table_id:
        raise InvalidCut(f"{named(end)} belongs to another table, not to {context.table.name!r}")
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
