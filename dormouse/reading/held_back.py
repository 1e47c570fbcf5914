"""Rows in key order on their way out, of which those of the newest key wait until a larger key is seen.

So a query that is stopped by a file that is gone can read again from the key that it had reached, and go on
without a row lost or given twice, however many rows have equal keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dormouse.model.keys import KeyValue

HELD_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reached:
    """A key in key order, row keys then sort keys: rows before it were given; those of it too, if `given`."""

    key: tuple[KeyValue, ...]
    given: bool


class HeldBack:
    """Batches of a sorted stream go in, and come out as they were but for the places where it stops.

    `names` are the columns of the key. Beyond `bytes_max` rows of one key are given at once; until a larger
    key comes, `interrupt` is then refused.
    """

    def __init__(self, names: Sequence[str], bytes_max: int = HELD_BYTES_MAX) -> None:
        self._names = tuple(names)
        self._bytes_max = bytes_max
        self._held: list[pa.RecordBatch] = []
        self._newest: tuple[KeyValue, ...] | None = None
        self._given_in_part: tuple[KeyValue, ...] | None = None
        self._is_first = True
        self.reached: Reached | None = None

    @property
    def row_count(self) -> int:
        """The rows that wait."""
        return sum(int(batch.num_rows) for batch in self._held)

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Takes a batch; gives what need not wait any more."""
        if not batch.num_rows:
            return
        yield from self._older() if self._key(batch, 0) == self._newest else self._all()
        self._held.append(batch)
        self._newest = self._key(batch, batch.num_rows - 1)
        if self._is_first or self._is_too_much:
            # the reader waits for the first row, and need not wait for the second batch
            self._is_first = False
            yield from self._older()
        if self._is_too_much:
            self._given_in_part = self._newest
            yield from self._all()

    def end(self) -> Iterator[pa.RecordBatch]:
        """Gives all: only rows of larger keys come after this, if any."""
        yield from self._all()
        if self._newest is not None:
            self.reached = Reached(self._newest, given=True)
        self._newest = None

    def interrupt(self) -> Iterator[pa.RecordBatch]:
        """Gives the rows before the newest key, and forgets the rows of that: they are to come again.

        `reached` then tells from where on. See `is_in_part`.
        """
        yield from self._older()
        if self._newest is not None:
            self.reached = Reached(self._newest, given=False)
        self._held, self._newest = [], None

    @property
    def is_in_part(self) -> bool:
        """Whether some rows of the newest key were given already, so that it cannot be read again."""
        return self._newest is not None and self._newest == self._given_in_part

    @property
    def _is_too_much(self) -> bool:
        return sum(int(batch.nbytes) for batch in self._held) > self._bytes_max

    def _all(self) -> Iterator[pa.RecordBatch]:
        held, self._held = self._held, []
        yield from held

    def _older(self) -> Iterator[pa.RecordBatch]:
        """Gives the rows before the newest key."""
        if not self._held:
            return
        *before, last = self._held
        older = self._start_of_newest(last)
        if older:
            # whatever is held before a batch has the key of its first row
            self._held = [last.slice(older)]
            yield from before
            yield last.slice(0, older)

    def _start_of_newest(self, batch: pa.RecordBatch) -> int:
        """The first row of the newest key, which the last row has, by bisection."""
        low, high = 0, int(batch.num_rows) - 1
        if high and self._key(batch, high - 1) != self._newest:
            return high
        while low < high:
            middle = (low + high) // 2
            if self._key(batch, middle) == self._newest:
                high = middle
            else:
                low = middle + 1
        return low

    def _key(self, batch: pa.RecordBatch, row: int) -> tuple[KeyValue, ...]:
        return tuple(batch.column(name)[row].as_py() for name in self._names)
