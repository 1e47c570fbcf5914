"""Numbers of CSV that Arrow's reader would make others of: codes, and more digits than a double has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.data_files import Files
from dormouse.data.text_format import TextFormat
from dormouse.data.text_values import LEADING_ZERO, UnfitText, are_large, check_exact
from dormouse.model.schema import Field
from dormouse.model.types import DOUBLE, FLOAT, INT, LONG

if TYPE_CHECKING:
    import numpy.typing as npt

_CODES = {INT: r"^\s*[+-]?0[0-9xX]", LONG: r"^\s*[+-]?0[0-9xX]", DOUBLE: LEADING_ZERO}
_TAIL_BYTES = 1024
"""More than what is looked for has."""
_UNKNOWN = b"?"
"""Stands for what comes next: no end of a cell."""
_ZERO, _TEN = ord("0"), 10


def _table(characters: str) -> npt.NDArray[np.bool_]:
    found = np.zeros(256, bool)
    found[list(characters.encode())] = True
    return found


_PADDING = _table("+- \t")
_BLANKS = _table(" \t")


class WatchedNumbers:
    """A stream of CSV, of which `checked` reads those columns again as text that may have odd numbers.

    Where types were inferred, codes are looked for in the bytes, which costs a tenth of reading them.
    """

    def __init__(self, stream: BinaryIO, how: TextFormat, given: Files, fields: Sequence[Field]) -> None:
        self._stream = stream
        # a column that is said to be of numbers has no codes
        is_guess = bool(given.formats)
        self._inferred = {
            f.name for f in fields if is_guess and f.type in _CODES and f.name not in given.types
        }
        self._floating = [f for f in fields if f.type in (DOUBLE, FLOAT)]
        self._columns = {f.name: f for f in fields if f.name in self._inferred or f in self._floating}
        self._before = _table(f'{how.delimiter}{how.quote}"\r\n')
        # of two, as the first may have a byte order mark
        self._has_codes = bool(self._inferred) and "00".encode(how.encoding)[-2:] != b"00"
        self._tail = b"\n\n"

    def read(self, size: int = -1) -> bytes:
        found = bytes(self._stream.read(size))
        if self._inferred and not self._has_codes:
            text = self._tail + found
            end = _UNKNOWN if found else b"\n"
            self._has_codes = self._codes_in(np.frombuffer(text + end, np.uint8))
            self._tail = text[-_TAIL_BYTES:]
        return found

    def checked(
        self, batches: Iterator[pa.RecordBatch], again: Callable[[list[str]], Iterator[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """The same batches; `again` gives those of the columns as text. `UnfitText`."""
        texts: Iterator[pa.RecordBatch] | None = None
        for number, batch in enumerate(batches):
            if texts is None and (self._has_codes or self._has_large(batch)):
                texts = islice(again([*self._columns]), number, None)
            if texts is not None:
                self._check(batch, next(texts))
            yield batch

    def _has_large(self, batch: pa.RecordBatch) -> bool:
        return any(pc.any(are_large(batch.column(f.name), f.type)).as_py() for f in self._floating)

    def _codes_in(self, codes: npt.NDArray[np.uint8]) -> bool:
        """Whether any cell is of digits after a zero, as no time is, or begins like a hexadecimal one."""
        digits = (codes - _ZERO) < _TEN  # what is less wraps around
        is_hex = (codes | 32) == ord("x")
        at = self._first(codes, np.flatnonzero((codes[:-1] == _ZERO) & (digits | is_hex)[1:]))
        if not len(at) or is_hex[at + 1].any():
            return bool(len(at))
        others = np.flatnonzero(~digits)
        return bool((self._before | _BLANKS)[codes[others[np.searchsorted(others, at)]]].any())

    def _first(self, codes: npt.NDArray[np.uint8], at: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Those of these at which a cell begins, before which a sign or blanks may be."""
        at = at[at > 1]  # the others were seen before, with what is in front of them
        before = codes[at - 1]
        is_padded = _PADDING[before] & (self._before | _PADDING)[codes[at - 2]]
        return at[self._before[before] | is_padded]

    def _check(self, batch: pa.RecordBatch, texts: pa.RecordBatch) -> None:
        for name, field in self._columns.items():
            column = texts.column(name)
            if name in self._inferred:
                _check_no_code(column, field)
            check_exact(column, batch.column(name), field)


def _check_no_code(column: pa.Array, field: Field) -> None:
    row = pc.index(pc.match_substring_regex(column, _CODES[field.type]), True).as_py()
    if row >= 0:
        raise UnfitText(
            field,
            column[row].as_py(),
            row,
            f": it looks like a code, which --type {field.name}=string keeps, and "
            f"--type {field.name}={field.type} does not",
        )
