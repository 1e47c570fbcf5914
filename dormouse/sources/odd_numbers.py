"""Numbers that readers change: codes, hexadecimal, more digits than a double has, 1e400.

Arrow's reader of CSV takes all of them for others, and DuckDB's of JSON makes doubles first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.model.schema import Field
from dormouse.model.types import DOUBLE, FLOAT, INT, LONG, STRING, DataType
from dormouse.sources.data_files import Files
from dormouse.sources.text_format import FileFormat
from dormouse.sources.text_reader import opened
from dormouse.sources.text_values import LEADING_ZERO, UnfitText, are_large, check_exact, first_unkept

if TYPE_CHECKING:
    import numpy.typing as npt

_CODES = {INT: r"^\s*[+-]?0[0-9xX]", LONG: r"^\s*[+-]?0[0-9xX]", DOUBLE: LEADING_ZERO}
_TINY = re.compile(rb"[eE]-[0-9]{2}|[0-9]{16}[eE]-")
"""Ends of numbers that a floating one may take for zero, or round."""
_NO_NUMBER = r"(?i)^\s*[+-]?(?:inf|infinity|nan)\s*$"
_NUMBER = r"^\s*[+-]?(?:[0-9]+(?:%s[0-9]*)?|%s[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"
_DIGITS_MAX = 16
"""A double keeps all fractions of one digit less; their point is counted, too."""
_TAIL_BYTES = 1024
"""More than what is looked for has."""
_UNKNOWN = b"?"
"""Stands for what comes next: no end of a cell."""
_ZERO, _TEN = ord("0"), 10
_NUMBER_BYTES_MAX, _BLOCK_BYTES = 1 << 10, 1 << 20


def _table(characters: str) -> npt.NDArray[np.bool_]:
    found = np.zeros(256, bool)
    found[list(characters.encode())] = True
    return found


_PADDING = _table("+- \t")
_BLANKS = _table(" \t")
_DIGITS = _table("0123456789")
_OF_NUMBERS = _table("0123456789+-.eE")
_AROUND_NUMBERS = _table(" \t\r\n:,[]{}")


class WatchedNumbers:
    """A watch over a file of CSV, of which `checked` reads columns again as text that may have odd numbers.

    They are looked for in the bytes. Where types were inferred, this costs a tenth of reading them.
    """

    def __init__(self, how: FileFormat, given: Files, fields: Sequence[Field]) -> None:
        self._point = how.decimal_point
        # a column that is said to be of numbers has no codes
        is_guess = bool(given.formats)
        self._columns = {f.name: f for f in fields if f.type in (INT, LONG, DOUBLE, FLOAT)}
        self._inferred = {name for name in self._columns if is_guess and name not in given.types}
        self._floating = [f for f in self._columns.values() if f.type in (DOUBLE, FLOAT)]
        self._has_whole = len(self._floating) < len(self._columns)
        self._is_double_inferred = any(f.name in self._inferred for f in self._floating)
        self._before = _table(f'{how.text.separator}{how.text.quote or ""}"\r\n')
        self._has_odd = False
        self._tail = b"\n\n"

    def see(self, text: bytes) -> None:
        """Looks for odd numbers in what comes next of the file; no bytes are its end."""
        if self._columns and not self._has_odd:
            seen = self._tail + text
            self._has_odd = self._odd_in(seen + (_UNKNOWN if text else b"\n"))
            self._tail = seen[-_TAIL_BYTES:]

    def checked(
        self, batches: Iterator[pa.RecordBatch], again: Callable[[list[str]], Iterator[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """The same batches; `again` gives those of the columns as text. `UnfitText`."""
        texts: Iterator[pa.RecordBatch] | None = None
        for number, batch in enumerate(batches):
            if texts is None and (self._has_odd or self._has_large(batch)):
                texts = islice(again([*self._columns]), number, None)
            if texts is not None:
                self._check(batch, next(texts))
            yield batch

    def _has_large(self, batch: pa.RecordBatch) -> bool:
        return any(pc.any(are_large(batch.column(f.name), f.type)).as_py() for f in self._floating)

    def _odd_in(self, text: bytes) -> bool:
        codes = np.frombuffer(text, np.uint8)
        if self._floating and (b"e-" in text or b"E-" in text) and _TINY.search(text):
            return True
        if (self._inferred or (self._has_whole and (b"0x" in text or b"0X" in text))) and self._codes_in(
            codes
        ):
            return True
        return self._is_double_inferred and _longest_fraction(codes, ord(self._point)) > _DIGITS_MAX

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
            column, numbers = texts.column(name), batch.column(name)
            if name in self._inferred:
                _check_no_code(column, field)
            if field.type in (DOUBLE, FLOAT) and self._point != ".":
                column = pc.replace_substring(column, self._point, ".")
            check_exact(column, numbers, field)
            if name in self._inferred and field.type == DOUBLE:
                _check_kept(column, numbers, field)


def has_long_numbers(path: Path, *, even_whole: bool = False) -> bool:
    """Returns whether a file of JSON has a number with an exponent, or with more digits than a double keeps.

    Whole numbers count only with `even_whole`. A number within a text may count, too.
    """
    tail = b"\n"
    with opened(path) as stream:
        while block := bytes(stream.read(_BLOCK_BYTES)):
            if _long_in(tail + block, even_whole):
                return True
            tail = (tail + block)[-_NUMBER_BYTES_MAX:]
    return _long_in(tail + b"\n", even_whole)


def _long_in(text: bytes, even_whole: bool) -> bool:
    codes = np.frombuffer(text, np.uint8)
    others = np.flatnonzero(~_OF_NUMBERS[codes])
    begins, ends = others[:-1] + 1, others[1:]
    lengths = ends - begins
    is_apart = _AROUND_NUMBERS[codes]
    at = (lengths > 0) & is_apart[begins - 1] & is_apart[ends]
    begins, ends, lengths = begins[at], ends[at], lengths[at]
    if even_whole and bool((lengths >= _DIGITS_MAX).any()):
        return True
    marks = np.flatnonzero(((codes[1:] | 32) == ord("e")) & _DIGITS[codes[:-1]]) + 1
    points = np.flatnonzero(codes == ord("."))
    is_long = lengths > _DIGITS_MAX
    return _any_in(marks, begins, ends) or _any_in(points, begins[is_long], ends[is_long])


def _any_in(at: npt.NDArray[np.intp], begins: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]) -> bool:
    """Returns whether a number, of those that begin and end there, has one of these places within."""
    return bool(len(at) and (np.searchsorted(at, begins) < np.searchsorted(at, ends)).any())


def with_infinities(column: pa.Array, proposed: DataType, point: str) -> DataType:
    """Returns DOUBLE for a column of numbers with some that are infinite or NaN; STRING for such words alone.

    DuckDB proposes types by the order of the rows.
    """
    is_word = pc.match_substring_regex(column, _NO_NUMBER)
    if proposed not in (STRING, LONG, DOUBLE) or not pc.any(is_word).as_py():
        return proposed
    others = column.filter(pc.invert(is_word)).drop_null()
    pattern = _NUMBER % (re.escape(point), re.escape(point))
    return DOUBLE if pc.all(pc.match_substring_regex(others, pattern), min_count=1).as_py() else STRING


def are_kept(column: pa.Array, point: str) -> bool:
    """Returns whether doubles keep all digits; True for texts that Arrow does not parse."""
    texts = pc.replace_substring(pc.ascii_trim_whitespace(column), point, ".")
    try:
        return first_unkept(texts, numbers := texts.cast(pa.float64()), DOUBLE, pc.is_valid(numbers)) < 0
    except pa.ArrowInvalid:
        return True


def _longest_fraction(codes: npt.NDArray[np.uint8], point: int) -> int:
    """Returns the length of the longest run of digits that has a point."""
    is_point = codes == point
    if not len(points := np.flatnonzero(is_point)):
        return 0
    ends = np.flatnonzero(~(_DIGITS[codes] | is_point))
    ends = np.concatenate(([-1], ends, [len(codes)]))
    after = np.searchsorted(ends, points)
    return int((ends[after] - ends[after - 1]).max()) - 1


def _check_kept(column: pa.Array, numbers: pa.Array, field: Field) -> None:
    if (row := first_unkept(column, numbers, DOUBLE, pc.is_valid(numbers))) >= 0:
        why = f": it has more digits than a double, which --type {field.name}=string keeps"
        raise UnfitText(field, column[row].as_py(), row, why)


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
