"""Several tables at one moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from dormouse.errors import CutExpired, DormouseError, InvalidCut
from dormouse.model.cut import Cut, Position, When, milliseconds_at
from dormouse.reading.checked_files import FileGone
from dormouse.reading.table_view import gone_of_moment
from dormouse.state.context import TableContext
from dormouse.state.history.moments import kept, position_of


class Moments:
    """Where tables are read: each at the position of one moment, or all as they are now.

    `contexts` have the columns of then; of a table that cannot be read then, those of now, until it is
    `read`. `refused` says of these why.
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
        """Records which tables are read.

        All that are `named` must be there at the moment: raises `CutExpired` and `InvalidCut`, also for the
        cut of one table where several are named.
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
        """Returns where a table is read; None: as it is now, or not at all."""
        return self._positions.get(name)

    def milliseconds(self, name: str) -> int:
        """When a table is read, as ages are told from, since 1970: of all as they are now, one time."""
        return self._now_ms if (at := self.of(name)) is None else milliseconds_at(at)

    def all(self, names: Sequence[str]) -> list[Position] | None:
        return [self._positions[name] for name in names] if self else None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What the tables had then stays until the end."""
        with ExitStack() as stack:
            for name in self._read if self else ():
                stack.enter_context(kept(self.contexts[name], self._positions[name]))
            yield

    def why_gone(self, error: FileGone) -> DormouseError:
        """Of a file of the moment: `CutExpired`, or it is lost."""
        for name, position in self._positions.items():
            if self.contexts[name].table.name == error.table:
                return gone_of_moment(self.contexts[name], position, error)
        return error
