"""Several tables at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from dormouse.context import TableContext
from dormouse.errors import CutExpired, DormouseError, InvalidCut
from dormouse.history.moments import kept, position_of
from dormouse.model.cut import Cut, Position, When
from dormouse.query.file_checks import FileGone
from dormouse.query.table_view import gone_of_moment


class Moments:
    """Where tables are read: each at the position of one moment, or all as they are now."""

    def __init__(self, contexts: Mapping[str, TableContext], as_of: When | None) -> None:
        """`InvalidCut`, also for the cut of one table where there are several; `CutExpired`."""
        if isinstance(as_of, Cut) and len(contexts) > 1:
            names = ", ".join(map(repr, sorted(contexts)))
            raise InvalidCut(
                f"a cut is of one table, and the statement reads {names}: give a time, or the name of a cut "
                "that each of them has"
            )
        self._contexts = contexts
        self._positions = (
            None if as_of is None else {name: position_of(one, as_of) for name, one in contexts.items()}
        )

    def __bool__(self) -> bool:
        return self._positions is not None

    def of(self, name: str) -> Position | None:
        """Where a table is read; None: as it is now."""
        return None if self._positions is None else self._positions[name]

    def all(self, names: Sequence[str]) -> list[Position] | None:
        return None if self._positions is None else [self._positions[name] for name in names]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What the tables had then stays until the end."""
        with ExitStack() as stack:
            for name, position in (self._positions or {}).items():
                stack.enter_context(kept(self._contexts[name], position))
            yield

    def why_gone(self, error: FileGone) -> DormouseError:
        """Of a file of the moment: `CutExpired`, or it is lost."""
        for name, position in (self._positions or {}).items():
            if name == error.table:
                return gone_of_moment(self._contexts[name], position, error)
        return error


def refused(contexts: Mapping[str, TableContext], as_of: When | None) -> dict[str, str]:
    """Tables that cannot be read as of a moment, and why."""
    found = {}
    for name, context in contexts.items():
        try:
            Moments({name: context}, as_of)
        except (InvalidCut, CutExpired) as error:
            found[name] = str(error)
    return found
