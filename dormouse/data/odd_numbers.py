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
from dormouse.data.text_values import UnfitText, check_exact
from dormouse.model.schema import Field
from dormouse.model.types import DOUBLE, FLOAT, INT, LONG

if TYPE_CHECKING:
    import numpy.typing as npt

_DIGITS = {DOUBLE: 16, FLOAT: 8}
"""From so many on, a whole number may not be exact."""
_CODES = {INT: r"^\s*[+-]?0[0-9xX]", LONG: r"^\s*[+-]?0[0-9xX]", DOUBLE: r"^\s*[+-]?0[0-9]+\s*$"}
_TAIL_BYTES = 32
"""More than what is looked for has."""
_ZERO, _TEN = ord("0"), 10


def _table(characters: str) -> npt.NDArray[np.bool_]:
    found = np.zeros(256, bool)
    found[list(characters.encode())] = True
    return found


_PADDING = _table("+- \t")


class WatchedNumbers:
    """A stream of CSV, of which `checked` reads those columns again as text that may have odd numbers.

    To look at the bytes costs a tenth of reading them, and they have hardly ever any.
    """

    def __init__(self, stream: BinaryIO, how: TextFormat, given: Files, fields: Sequence[Field]) -> None:
        self._stream = stream
        # a column that is said to be of numbers has no codes
        is_guess = bool(given.formats)
        self._inferred = {
            f.name for f in fields if is_guess and f.type in _CODES and f.name not in given.types
        }
        self._columns = {f.name: f for f in fields if f.name in self._inferred or f.type in _DIGITS}
        self._digits = min((_DIGITS[f.type] for f in self._columns.values() if f.type in _DIGITS), default=0)
        self._before = _table(f'{how.delimiter}{how.quote}"\r\n')
        self._is_odd = bool(self._columns) and "0".encode(how.encoding) != b"0"
        self._tail = b"\n\n"

    def read(self, size: int = -1) -> bytes:
        found = bytes(self._stream.read(size))
        if self._columns and not self._is_odd:
            text = self._tail + found
            self._is_odd = self._has_odd(np.frombuffer(text, np.uint8))
            self._tail = text[-_TAIL_BYTES:]
        return found

    def checked(
        self, batches: Iterator[pa.RecordBatch], again: Callable[[list[str]], Iterator[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """The same batches; `again` gives those of the columns as text. `UnfitText`."""
        texts: Iterator[pa.RecordBatch] | None = None
        for number, batch in enumerate(batches):
            if self._is_odd and texts is None:
                texts = islice(again([*self._columns]), number, None)
            if texts is not None:
                self._check(batch, next(texts))
            yield batch

    def _has_odd(self, codes: npt.NDArray[np.uint8]) -> bool:
        digits = (codes - _ZERO) < _TEN  # what is less wraps around
        if self._inferred:
            follows = digits | ((codes | 32) == ord("x"))
            if self._begin(codes, np.flatnonzero((codes[:-1] == _ZERO) & follows[1:])):
                return True
        step = 1
        while step < self._digits:
            digits = digits[:-step] & digits[step:]
            step *= 2
        return bool(self._digits) and self._begin(codes, np.flatnonzero(digits))

    def _begin(self, codes: npt.NDArray[np.uint8], at: npt.NDArray[np.intp]) -> bool:
        """Whether a cell begins at any of these, before a sign or blanks perhaps."""
        if self._before[codes[at - 1]].any():
            return True
        after = at[_PADDING[codes[at - 1]]]
        return bool((self._before | _PADDING)[codes[after - 2]].any())

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
