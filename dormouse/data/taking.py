"""Columns joined from pieces, and rows put in another order, with few copies.

Arrow takes values of fixed width ten times as fast as short texts. So texts are taken as their views, which
have 16 bytes each. A view contains a text of up to 12 bytes, and points to a longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_VIEW_BYTES = 16
_OFFSET_BYTES = 4
Number = TypeVar("Number", bound=np.generic)
_VIEWS = {pa.string(): pa.string_view(), pa.binary(): pa.binary_view()}


def joined(pieces: Sequence[pa.Array]) -> pa.Array:
    """Returns one or more pieces as one array. Consecutive slices of one array are not copied."""
    runs = [pieces[0]]
    for piece in pieces[1:]:
        last = runs[-1]
        if _follows(piece, last):
            rows = len(last) + len(piece)
            runs[-1] = pa.Array.from_buffers(last.type, rows, last.buffers(), offset=last.offset)
        else:
            runs.append(piece)
    return runs[0] if len(runs) == 1 else pa.concat_arrays(runs)


def _follows(piece: pa.Array, last: pa.Array) -> bool:
    """Returns whether both are slices of one array without parts, and `piece` begins where `last` ends."""
    if piece.offset != last.offset + len(last) or piece.type != last.type:
        return False
    if pa.types.is_nested(piece.type) or pa.types.is_dictionary(piece.type):
        return False
    return _addresses(piece) == _addresses(last)


def _addresses(column: pa.Array) -> list[tuple[int, int] | None]:
    """Returns the address and the size of each buffer. A shorter buffer may begin where a longer one does."""
    return [None if buffer is None else (buffer.address, buffer.size) for buffer in column.buffers()]


def at(values: npt.NDArray[Number], places: npt.NDArray[Any]) -> npt.NDArray[Number]:
    """Returns the numbers at some places, faster than NumPy. The result is a copy that may be changed."""
    found = pc.take(pa.array(values), pa.array(places), boundscheck=False)
    return np.frombuffer(found.buffers()[1], values.dtype)


class RowsInOrder:
    """Rows that are put in order piece by piece. `order` has the index of each row, in the new order.

    Texts are taken as views while all views have at most `view_bytes_max`.
    """

    def __init__(self, rows: pa.Table, order: pa.Array, view_bytes_max: int) -> None:
        self._schema = rows.schema
        self._order = order.cast(pa.uint32())  # a run of 2 GiB has fewer rows than 2³²
        self._columns: list[Column] = []
        for chunked in rows.itercolumns():
            whole = _bare(joined(chunked.chunks))
            view_bytes = _VIEW_BYTES * len(whole)
            if whole.type not in _VIEWS:
                column = Column(whole)
            elif (size := _shared_size(whole)) is not None:
                column = FixedTexts(whole, size)
            elif view_bytes <= view_bytes_max:
                view_bytes_max -= view_bytes
                column = Views(whole)
            else:
                column = Column(whole)
            self._columns.append(column)

    def piece(self, start: int, count: int) -> pa.RecordBatch:
        """Returns `count` rows, or those that are left, from the position `start` in the new order."""
        order = self._order.slice(start, count)
        return pa.RecordBatch.from_arrays([one.taken(order) for one in self._columns], schema=self._schema)


def _bare(column: pa.Array) -> pa.Array:
    """Returns the column without a validity buffer if no value is null: Arrow is slow with it."""
    validity, *others = column.buffers()
    if validity is None or column.null_count or column.type not in _VIEWS:
        return column
    return pa.Array.from_buffers(column.type, len(column), [None, *others], 0, column.offset)


def _shared_size(texts: pa.Array) -> int | None:
    """Returns the number of bytes that each text has, from 1 on; None if sizes differ or a text is null."""
    if not len(texts) or texts.null_count:
        return None
    ends = _ends(texts)
    size = int(ends[1] - ends[0])
    same = size and ends[-1] - ends[0] == size * len(texts) and bool(np.all(np.diff(ends) == size))
    return size if same else None


def _ends(texts: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, texts.offset * _OFFSET_BYTES)


class Column:
    """A column in one piece, whose values are taken as they are."""

    def __init__(self, whole: pa.Array) -> None:
        self.type = whole.type
        self.held = whole

    def taken(self, order: pa.Array) -> pa.Array:
        """Returns the values at the indices `order`."""
        return pc.take(self.held, order, boundscheck=False)


class FixedTexts(Column):
    """A column of texts that have the same size."""

    def __init__(self, whole: pa.Array, size: int) -> None:
        super().__init__(whole)
        self._size = size
        content = whole.buffers()[2].slice(int(_ends(whole)[0]))
        self.held = pa.Array.from_buffers(pa.binary(size), len(whole), [None, content])

    def taken(self, order: pa.Array) -> pa.Array:
        content = super().taken(order).buffers()[1]
        ends = np.arange(len(order) + 1, dtype=np.int32) * np.int32(self._size)
        return pa.Array.from_buffers(self.type, len(order), [None, pa.py_buffer(ends), content])


class Views(Column):
    """A column of texts, held as their views."""

    def __init__(self, whole: pa.Array) -> None:
        super().__init__(whole)
        views = whole.cast(_VIEWS[whole.type])
        validity, fixed, *self._texts = views.buffers()
        buffers = [validity if views.null_count else None, fixed]
        self.held = pa.Array.from_buffers(pa.binary(_VIEW_BYTES), len(views), buffers, offset=views.offset)

    def taken(self, order: pa.Array) -> pa.Array:
        found = super().taken(order)
        validity, fixed = found.buffers()
        buffers = [validity if found.null_count else None, fixed, *self._texts]
        views = pa.Array.from_buffers(_VIEWS[self.type], len(found), buffers, offset=found.offset)
        return views.cast(self.type)
