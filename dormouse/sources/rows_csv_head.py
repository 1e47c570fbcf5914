"""The beginning of a CSV file: its encoding, the lines to skip, the cells of its first row."""

from __future__ import annotations

import codecs
import csv
import io
from dataclasses import dataclass
from typing import BinaryIO

from dormouse.errors import InvalidData
from dormouse.model.text import plural
from dormouse.sources.rows_csv_format import CsvFormat

HEAD_BYTES_MAX = 1 << 20
"""What is skipped and the header, or the first row of a file without one, are within so many bytes."""


@dataclass(frozen=True, slots=True)
class CsvHead:
    """Where rows begin, in bytes; the cells of the header, or None without one; how many cells a row has."""

    start: int
    names: tuple[str, ...] | None
    width: int


def read_head(file: BinaryIO, name: str, how: CsvFormat) -> CsvHead:
    """Reads the beginning of a file. `InvalidData` for one that is empty or no text of UTF-8."""
    head = file.read(HEAD_BYTES_MAX)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidData(f"{name} is UTF-16: save it as UTF-8")
    start = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    for line in range(how.skip_lines):
        if start >= len(head):
            raise InvalidData(
                f"{name} has {plural(line, 'line')}: there is nothing after the {how.skip_lines:,} to skip"
            )
        start = _end(head, start)
    first = "header" if how.header else "first row"
    while (end := _end(head, start, how)) > start and not head[start:end].strip(b"\r\n"):
        start = end
    if end == start:
        raise InvalidData(f"{name} is empty: it has no {first}")
    if end == len(head) == HEAD_BYTES_MAX:
        raise InvalidData(
            f"the {first} of {name} is longer than {HEAD_BYTES_MAX:,} bytes: is a quote opened "
            "in it that is never closed?"
        )
    cells = _cells(head[start:end], f"the {first} of {name}", how)
    return CsvHead(end, tuple(cells), len(cells)) if how.header else CsvHead(start, None, len(cells))


def _end(data: bytes, start: int, how: CsvFormat | None = None) -> int:
    """Where the next record begins, or without a format the next line; the data's end if this is the last.

    As Arrow reads: a quote opens at the beginning of a cell alone.
    """
    quote, escape, separator = (
        -1 if how is None or mark is None else ord(mark)
        for mark in ((how.quote, how.escape, how.separator) if how else (None, None, None))
    )
    is_quoted, at = False, start
    while at < len(data):
        byte = data[at]
        if byte == escape or (is_quoted and data[at : at + 2] == bytes([byte]) * 2 and byte == quote):
            at += 1
        elif byte == quote and (is_quoted or at == start or data[at - 1] == separator):
            is_quoted = not is_quoted
        elif byte in b"\r\n" and not is_quoted:
            return at + 2 if data[at : at + 2] == b"\r\n" else at + 1
        at += 1
    return len(data)


def _cells(record: bytes, what: str, how: CsvFormat) -> list[str]:
    try:
        text = record.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = record[error.start : error.start + 1]
        raise InvalidData(f"{what} is not UTF-8 text: {repr(wrong)[1:]} at byte {error.start + 1}") from None
    return cells_of(text, what, how)


def cells_of(text: str, what: str, how: CsvFormat) -> list[str]:
    """The cells of one row; `InvalidData` says what cannot be read."""
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=how.separator,
        quotechar=how.quote,
        escapechar=how.escape,
        quoting=csv.QUOTE_MINIMAL if how.quote else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        return next(lines)
    except csv.Error as error:
        unclosed = "a quote is opened in it and never closed" if "unexpected end" in str(error) else error
        raise InvalidData(f"{what} cannot be read: {unclosed}") from None
