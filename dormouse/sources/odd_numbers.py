"""The detection of odd numbers, which readers would change silently.

Odd numbers are codes with leading zeros, hexadecimal numbers, and numbers with more digits or a larger
exponent than a double has. Arrow's CSV reader and DuckDB's JSON reader turn them into other numbers.
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
"""A pattern in the text of a number that a floating-point type may round, or turn into zero."""
_NO_NUMBER = r"(?i)^\s*[+-]?(?:inf|infinity|nan)\s*$"
_NUMBER = r"^\s*[+-]?(?:[0-9]+(?:%s[0-9]*)?|%s[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"
_DIGITS_MAX = 16
"""The most characters of a fraction that a double always keeps: 15 digits and the decimal point."""
_TAIL_BYTES = 1024
"""The bytes of a block that are searched again with the next block, to find patterns across both."""
_UNKNOWN = b"?"
"""A stand-in for the byte after a block, which is not known yet. It does not end a cell."""
_ZERO, _TEN = ord("0"), 10
_NUMBER_BYTES_MAX, _BLOCK_BYTES = 1 << 10, 1 << 20


def _table(characters: str) -> npt.NDArray[np.bool_]:
    """Returns an array of 256 booleans, true at the codes of these ASCII characters."""
    table = np.zeros(256, bool)
    table[list(characters.encode())] = True
    return table


_PADDING = _table("+- \t")
_BLANKS = _table(" \t")
_DIGITS = _table("0123456789")
_OF_NUMBERS = _table("0123456789+-.eE")
_AROUND_NUMBERS = _table(" \t\r\n:,[]{}")


class WatchedNumbers:
    """A check that no number of a CSV file is changed by reading it.

    `see` looks for odd numbers in the bytes of the file. If there may be one, `checked` reads the columns of
    numbers again as text and compares. If types were inferred, `see` costs a tenth of the time of reading.
    """

    def __init__(self, how: FileFormat, given: Files, fields: Sequence[Field]) -> None:
        self._point = how.decimal_point
        # if the caller gave the type of a column, its leading zeros do not make it a column of codes
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
        """Looks for odd numbers in the next bytes of the file. Empty bytes mean its end."""
        if self._columns and not self._has_odd:
            seen = self._tail + text
            self._has_odd = self._odd_in(seen + (_UNKNOWN if text else b"\n"))
            self._tail = seen[-_TAIL_BYTES:]

    def checked(
        self, batches: Iterator[pa.RecordBatch], again: Callable[[list[str]], Iterator[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the same batches. Raises `UnfitText` for a number that reading changed.

        `again` reads the named columns from the start of the file as text, in batches of the same rows.
        """
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
        """Returns whether any cell is a zero followed by digits only, or begins like a hexadecimal number.

        Times can begin with a zero, too, but have other characters after it.
        """
        digits = (codes - _ZERO) < _TEN  # bytes below "0" wrap around to large numbers
        is_hex = (codes | 32) == ord("x")
        at = self._first(codes, np.flatnonzero((codes[:-1] == _ZERO) & (digits | is_hex)[1:]))
        if not len(at) or is_hex[at + 1].any():
            return bool(len(at))
        others = np.flatnonzero(~digits)
        return bool((self._before | _BLANKS)[codes[others[np.searchsorted(others, at)]]].any())

    def _first(self, codes: npt.NDArray[np.uint8], at: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Returns the positions in `at` that begin the number of a cell: only a sign or blank may precede."""
        at = at[at > 1]  # the first two bytes overlap with the last block, which was checked
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
    """Returns whether a JSON file has a number with an exponent, or with more digits than a double keeps.

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
    """Returns whether any range from `begins` to `ends` contains a position of `at`, which is sorted."""
    return bool(len(at) and (np.searchsorted(at, begins) < np.searchsorted(at, ends)).any())


def with_infinities(column: pa.Array, proposed: DataType, point: str) -> DataType:
    """Returns the type of a column of texts, some of which may be words like infinity and NaN.

    The type is DOUBLE if all other texts are numbers. It is STRING if others are no numbers, or if all texts
    are such words. Without such words it is `proposed`. DuckDB's own proposal depends on the order of rows.
    """
    is_word = pc.match_substring_regex(column, _NO_NUMBER)
    if proposed not in (STRING, LONG, DOUBLE) or not pc.any(is_word).as_py():
        return proposed
    others = column.filter(pc.invert(is_word)).drop_null()
    pattern = _NUMBER % (re.escape(point), re.escape(point))
    return DOUBLE if pc.all(pc.match_substring_regex(others, pattern), min_count=1).as_py() else STRING


def are_kept(column: pa.Array, point: str) -> bool:
    """Returns whether doubles keep all digits of a column of texts. True if Arrow cannot parse the texts."""
    texts = pc.replace_substring(pc.ascii_trim_whitespace(column), point, ".")
    try:
        return first_unkept(texts, numbers := texts.cast(pa.float64()), DOUBLE, pc.is_valid(numbers)) < 0
    except pa.ArrowInvalid:
        return True


def _longest_fraction(codes: npt.NDArray[np.uint8], point: int) -> int:
    """Returns the most characters of a number with a decimal point. The point counts as a character."""
    is_point = codes == point
    if not len(points := np.flatnonzero(is_point)):
        return 0
    ends = np.flatnonzero(~(_DIGITS[codes] | is_point))
    ends = np.concatenate(([-1], ends, [len(codes)]))
    after = np.searchsorted(ends, points)
    return int((ends[after] - ends[after - 1]).max()) - 1


def _check_kept(column: pa.Array, numbers: pa.Array, field: Field) -> None:
    """Raises `UnfitText` for a text with more digits than its double keeps."""
    if (row := first_unkept(column, numbers, DOUBLE, pc.is_valid(numbers))) >= 0:
        why = f": it has more digits than a double; --type {field.name}=string keeps them"
        raise UnfitText(field, column[row].as_py(), row, why)


def _check_no_code(column: pa.Array, field: Field) -> None:
    """Raises `UnfitText` for a text that looks like a code: a number with leading zeros, or hexadecimal."""
    row = pc.index(pc.match_substring_regex(column, _CODES[field.type]), True).as_py()
    if row >= 0:
        raise UnfitText(
            field,
            column[row].as_py(),
            row,
            f": it looks like a code; --type {field.name}=string keeps its zeros, "
            f"--type {field.name}={field.type} drops them",
        )
