"""A consumer, as users hold it: no change is missed, and none comes twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dormouse.errors import InvalidCut, InvalidInput
from dormouse.model.cut import Position
from dormouse.reading.changes import changes
from dormouse.reading.interruption import Interruption
from dormouse.state.context import TableContext
from dormouse.state.history.consumers import Consumers, ConsumerState
from dormouse.state.history.moments import now


@dataclass(slots=True)
class _Read:
    """What was read last: from where, up to which moment, and whether to its last row."""

    start: ConsumerState
    till: Position
    is_whole: bool = False

    def end(self) -> None:
        self.is_whole = True


class Consumer:
    """A named position in a table's life; made by `Table.consumer`. Of one thread at a time."""

    def __init__(self, context: TableContext, name: str, check_writable: Callable[[], None]) -> None:
        self.name = name
        self._context = context
        self._consumers = Consumers(context)
        self._check_writable = check_writable
        self._read: _Read | None = None

    def __repr__(self) -> str:
        return f"Consumer({self._context.table.name!r}, {self.name!r})"

    def read(
        self, columns: Sequence[str] | None = None, *, interruption: Interruption | None = None
    ) -> pa.RecordBatchReader:
        """The changes since the position, up to now, as `Table.changes` gives them.

        Until they are acknowledged, the next `read` gives them again, and what came since. Raises
        `ConsumerExpired`, `InvalidInput` when the consumer was dropped, `InvalidCut` when an old
        Dormouse restored the table since, and what `Table.changes` raises.
        """
        self._read = None
        self._context = self._context.followed()
        start = self._consumers.get(self.name)
        position = self._consumers.checked(start)
        self._read = read = _Read(start, now(self._context, position))
        try:
            return changes(
                self._context, position, read.till, columns, interruption=interruption, at_end=read.end
            )
        except InvalidCut as error:
            how = self._consumers.how_to_go_on(self.name)
            raise InvalidCut(f"consumer {self.name!r} cannot go on: {error}. {how}") from None

    def acknowledge(self) -> None:
        """Moves the position to the moment up to which was read last: once its rows are safe where they go.

        Raises `InvalidInput` when not all of them were read, `ConsumerOvertaken` when another reader has
        acknowledged since: what was made of these rows is then to be dropped; and `ConsumerExpired`.
        """
        self._check_writable()
        read = self._read
        if read is None:
            raise InvalidInput(f"consumer {self.name!r}: nothing was read since the last acknowledge")
        if not read.is_whole:
            raise InvalidInput(
                f"consumer {self.name!r}: not all rows of the last read were taken, and acknowledging would "
                "skip the others: read them to the end first"
            )
        self._consumers.acknowledge(read.start, read.till)
        self._read = None
