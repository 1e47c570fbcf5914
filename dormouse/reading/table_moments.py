"""The moments in the past, or the present, at which queries read tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from dormouse.errors import CutExpired, DormouseError, InvalidCut
from dormouse.model.cut import Cut, Position, When
from dormouse.model.region import number_of_value
from dormouse.reading.checked_files import FileGone
from dormouse.state.context import TableContext
from dormouse.state.history.ends import check_since
from dormouse.state.history.moments import expired_by_erasure, kept, position_of


@contextmanager
def reading_at(context: TableContext, at: Position) -> Iterator[None]:
    """Keeps the files that a table had at a moment from being deleted while the block runs.

    If the block raises `FileGone`, raises the error of `gone_of_moment` instead.
    """
    with kept(context, at):
        try:
            yield
        except FileGone as error:
            raise gone_of_moment(context, at, error) from error


def gone_of_moment(context: TableContext, at: Position, error: FileGone) -> DormouseError:
    """Returns the error for a missing file of a moment: `CutExpired`, or `ObjectNotFound` if it is lost."""
    try:
        check_since(context, at.at)
    except CutExpired as expired:
        return expired
    return expired_by_erasure(context, at.at, [str(error.filename)]) or error.lost()


def at_moment(context: TableContext, as_of: When | None) -> tuple[TableContext, Position | None]:
    """Returns the context with the columns of another moment, and the position of that moment.

    Without `as_of`, returns the context unchanged, and None.
    """
    if as_of is None:
        return context, None
    at = position_of(context, as_of)
    return context.as_of(at), at


def milliseconds_at(position: Position | None) -> int:
    """Returns the time of a position, or now, in milliseconds since 1970; ages of rows count from it."""
    at = datetime.now(UTC) if position is None else position.at
    return number_of_value(at) // 1_000


class Moments:
    """The moments at which several tables are read: a position of each, or the present for all.

    `contexts` have the columns of that moment. A table that cannot be read at that moment has its current
    columns in `contexts` and the reason in `refused`; `read` then raises an error.
    """

    def __init__(self, contexts: Mapping[str, TableContext], as_of: When | None) -> None:
        self._as_of = as_of
        self._read: Collection[str] = ()
        self._positions: dict[str, Position] = {}
        self._errors: dict[str, DormouseError] = {}
        self.contexts = dict(contexts)
        self._now_ms = milliseconds_at(None)
        if as_of is None:
            return
        for name, context in contexts.items():
            try:
                self._positions[name] = position = position_of(context, as_of)
                self.contexts[name] = context.as_of(position)
            except (InvalidCut, CutExpired) as error:
                self._errors[name] = error

    def __bool__(self) -> bool:
        return self._as_of is not None

    @property
    def refused(self) -> dict[str, str]:
        return {name: str(error) for name, error in self._errors.items()}

    def read(self, names: Collection[str], named: Collection[str]) -> None:
        """Records the names of the tables that are read.

        Raises `CutExpired` or `InvalidCut` unless all tables in `named`, which the statement names, can be
        read at the moment. A cut belongs to one table, so it is also refused if several are named.
        """
        if isinstance(self._as_of, Cut) and len(named) > 1:
            listed = ", ".join(map(repr, sorted(named)))
            raise InvalidCut(
                f"a cut is of one table, and the statement reads {listed}: give a time, or the name of a cut "
                "that each of them has"
            )
        for name in named:
            if name in self._errors:
                raise self._errors[name]
        self._read = names

    def of(self, name: str) -> Position | None:
        """Returns the position at which a table is read; None for the present, or for an unread table."""
        return self._positions.get(name)

    def milliseconds(self, name: str) -> int:
        """Returns the time from which ages of a table's rows are counted, in milliseconds since 1970.

        The present is fixed when the object is made.
        """
        return self._now_ms if (at := self.of(name)) is None else milliseconds_at(at)

    def all(self, names: Sequence[str]) -> list[Position] | None:
        return [self._positions[name] for name in names] if self else None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the files that the tables had at the moment from being deleted while the block runs."""
        with ExitStack() as stack:
            for name in self._read if self else ():
                stack.enter_context(kept(self.contexts[name], self._positions[name]))
            yield

    def why_gone(self, error: FileGone) -> DormouseError:
        """Returns the error for a missing file: `CutExpired`, or the error for a lost file."""
        for name, position in self._positions.items():
            if self.contexts[name].table.name == error.table:
                return gone_of_moment(self.contexts[name], position, error)
        return error
