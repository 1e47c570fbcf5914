"""CSV and TSV files as batches of texts, in bounded memory; what is wrong with a file names its row.

Arrow parses. What it does not tell is made sure here: that no cell's quote is open at the end of the file,
where a row stands, and which row has bytes that are no text.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, Unpack
from uuid import uuid4

import pyarrow as pa
import pyarrow.csv as pacsv

from dormouse.errors import InvalidData, InvalidInput, one_line
from dormouse.model.text import plural
from dormouse.sources.export import format_of_name

# How a CSV file is written: its separator, its quotes, whether it has a header.

NAMED = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}
SKIP_LINES_MAX = 10_000


class CsvOptions(TypedDict, total=False):
    """The fields of a `CsvFormat`."""

    separator: str | None
    quote: str | None
    escape: str | None
    header: bool
    skip_lines: int
    null: str | None


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """RFC 4180 unless it is said otherwise. `InvalidInput` names what cannot be.

    `escape` is a character before a quote, a separator or itself; two quotes in a row are one quote anyway.
    `skip_lines` are lines before the header, or before the first row where there is no header. `null` is
    a text that stands for nothing, like NA, where it is not quoted; a cell without anything does anyway.
    """

    separator: str = ","
    quote: str | None = '"'
    escape: str | None = None
    header: bool = True
    skip_lines: int = 0
    null: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "separator", NAMED.get(str(self.separator), self.separator))
        given = {"separator": self.separator, "quote": self.quote, "escape": self.escape}
        for name, character in given.items():
            if character is None and name != "separator":
                continue
            if not (isinstance(character, str) and len(character) == 1 and character.isascii()):
                raise InvalidInput(f"{name} must be one ASCII character, not {character!r}")
            if character in "\r\n\0":
                raise InvalidInput(f"{name} must not be {character!r}, which ends a row or is no text")
        used = [character for character in given.values() if character is not None]
        if len(set(used)) < len(used):
            raise InvalidInput(f"separator, quote and escape must differ: {', '.join(map(repr, used))}")
        if type(self.header) is not bool:
            raise InvalidInput(f"header must be True or False, not {self.header!r}")
        if type(self.skip_lines) is not int or not 0 <= self.skip_lines <= SKIP_LINES_MAX:
            raise InvalidInput(f"skip_lines must be from 0 to {SKIP_LINES_MAX:,}, not {self.skip_lines!r}")
        if self.null is not None and (not isinstance(self.null, str) or not self.null):
            raise InvalidInput(f"null must be a text, like NA, not {self.null!r}")

    @classmethod
    def like(cls, given: Any) -> CsvFormat:
        """That of something which has all of its fields."""
        return cls(**{field.name: getattr(given, field.name) for field in fields(cls)})

    @classmethod
    def of_file(cls, path: str | PathLike[str], **given: Unpack[CsvOptions]) -> CsvFormat:
        """With the separator that a file's name tells (tabs of .tsv and .tab), unless one is given."""
        if given.get("separator") is None:
            given["separator"] = "\t" if format_of_name(path) == "tsv" else ","
        return cls(**given)  # type: ignore[arg-type]


# The beginning of a CSV file: its encoding, the lines to skip, the cells of its first row.

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


BLOCK_BYTES = (1 << 20, 8 << 20, 64 << 20)
"""What is parsed at once; a larger block is tried where a row does not fit one, up to the last."""

SHORT_ROWS_MAX = 1_000_000
"""Rows of fewer cells that are held until another comes: Arrow gives no batch before it."""

SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class CsvBatch:
    """Some rows that follow each other: a text for each cell, null where there is nothing, not even quotes.

    Rows of `width_min` cells have batches of their own.
    """

    first_row: int
    """The number of the first, from 1; a header has none."""
    columns: list[pa.StringArray]
    bytes_read: int

    @property
    def num_rows(self) -> int:
        return len(self.columns[0])

    @property
    def byte_count(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def label(self, number: int) -> str:
        """Where one of the rows stands, for errors."""
        return f"row {self.first_row + number}"


class CsvFile:
    """A file that is there, with its header read; read as often as `batches` is called.

    Raises `InvalidData` in one line: no such file, empty, not UTF-8.
    """

    def __init__(self, path: str | PathLike[str], how: CsvFormat, name: str | None = None) -> None:
        self.path = Path(fspath(path))
        self.name = name or f"file {str(path)!r}"
        self.how = how
        with _reading(self.name), self.path.open("rb") as file:
            self._head: CsvHead = read_head(file, self.name, how)
            self.byte_count = self.path.stat().st_size

    @property
    def names(self) -> tuple[str, ...] | None:
        """The cells of the header, None without one."""
        return self._head.names

    @property
    def width(self) -> int:
        """How many cells each row has."""
        return self._head.width

    def cells_of(self, record: str) -> list[str]:
        """The cells of one row's text."""
        return cells_of(record, f"a row of {self.name}", self.how)

    def batches(self, width_min: int | None = None, *, must_end: bool = False) -> Iterator[CsvBatch]:
        """All rows, in their order; rows of `width_min` cells are welcome beside those of all.

        Raises `InvalidData`, which names the row: of another number of cells, not UTF-8, larger than the
        largest block, or broken off. With `must_end` the last line must have its end.
        """
        done = 0
        for size in BLOCK_BYTES:
            run = _Run(self, size, width_min, must_end)
            try:
                for batch in run.batches():
                    if (rest := _after(batch, done)) is not None:
                        done = rest.first_row + rest.num_rows - 1
                        yield rest
            except _TooSmall:
                continue
            return
        raise InvalidData(
            f"{self.name}, row {done + 1}: it is larger than {BLOCK_BYTES[-1]:,} bytes; is a quote opened in "
            "it that is never closed?"
        )


def _after(batch: CsvBatch, done: int) -> CsvBatch | None:
    """What of a batch comes after a row: of a file that is read again with larger blocks."""
    known = max(done + 1 - batch.first_row, 0)
    if known >= batch.num_rows:
        return None
    columns = [column.slice(known) for column in batch.columns] if known else batch.columns
    return CsvBatch(batch.first_row + known, columns, batch.bytes_read)


class _TooSmall(Exception):
    """A row is larger than a block."""


@dataclass
class _Run:
    """One reading of a file by blocks of some size."""

    file: CsvFile
    block_bytes: int
    width_min: int | None
    must_end: bool
    end: str = field(default_factory=lambda: uuid4().hex)
    """The first cell of a row that is added after the last."""
    ended_at: int | None = None
    short: list[tuple[int, str]] = field(default_factory=list)
    """Rows of fewer cells that are welcome, with their texts."""
    last_short: int = 0
    wrong: tuple[int, int, str] | None = None
    """The first row that is not: its number, its cells, its text."""

    def batches(self) -> Iterator[CsvBatch]:
        with _reading(self.file.name), self.file.path.open("rb") as raw:
            raw.seek(self.file._head.start)
            source = _Ended(raw, self.file.how.separator.join([self.end] * (self.file.width + 1)))
            row = 1
            for batch in self._parsed(source):
                for part in self._parts(batch, row):
                    yield CsvBatch(row, part, raw.tell())
                    row += len(part[0])
            # Arrow gives no batch of a file that has no other rows
            if self.short and self.short[0][0] == row:
                rest = self._short_rows(row)
                yield CsvBatch(row, rest, raw.tell())
                row += len(rest[0])
            self._check(row)
            if source.breaks_off and self.last_short == row - 1:
                # of a row that was whole, its beginning would be another change
                has = f"{self.width_min} cells, not {self.file.width} as the others, and no line end"
                raise InvalidData(
                    f"{self.file.name}, row {row - 1}: the file ends in the middle of it: it has {has}"
                )
            if source.breaks_off and self.must_end and row > 1:
                raise InvalidData(
                    f"{self.file.name}, row {row - 1}: the file ends without the end of its last line, and a "
                    "part of an id is the id of another row: end the line if the file is whole"
                )

    def _parsed(self, source: _Ended) -> Iterator[pa.RecordBatch]:
        how, names = self.file.how, [str(number) for number in range(self.file.width)]
        try:
            reader = pacsv.open_csv(
                source,
                # one thread: only then a row has a number
                pacsv.ReadOptions(use_threads=False, block_size=self.block_bytes, column_names=names),
                pacsv.ParseOptions(
                    delimiter=how.separator,
                    quote_char=how.quote or False,
                    escape_char=how.escape or False,
                    newlines_in_values=True,
                    ignore_empty_lines=self.file.width > 1,
                    invalid_row_handler=self._other_width,
                ),
                # as bytes: Arrow does not say in which row a text is none
                pacsv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.binary()),
                    null_values=["", *([] if how.null is None else [how.null])],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            with reader:
                yield from reader
        except pa.ArrowInvalid as error:
            if "straddling object" in str(error):
                raise _TooSmall from None
            if len(self.short) > SHORT_ROWS_MAX:
                raise InvalidData(
                    f"{self.file.name}, row {self.last_short}: more than {SHORT_ROWS_MAX:,} rows of "
                    f"{self.width_min} cells follow each other: send them as a file of these columns"
                ) from None
            raise

    def _other_width(self, row: Any) -> str:
        """Called for each row that has not as many cells as the others."""
        if row.text.startswith(self.end):
            self.ended_at = row.number
        elif row.actual_columns == self.width_min and self.end not in row.text:
            self.short.append((row.number, row.text))
            self.last_short = row.number
            if len(self.short) > SHORT_ROWS_MAX:
                return "error"
        elif self.wrong is None:
            self.wrong = (row.number, row.actual_columns, row.text)
        return "skip"

    def _parts(self, batch: pa.RecordBatch, row: int) -> Iterator[list[pa.StringArray]]:
        """A batch cut where rows of fewer cells stood, with these; `row` is the number of its first."""
        at = 0
        while at < batch.num_rows or (self.short and self.short[0][0] == row):
            if self.short and self.short[0][0] == row:
                cells = self._short_rows(row)
                row += len(cells[0])
                yield cells
                continue
            until = self.short[0][0] if self.short else row + batch.num_rows
            if self.wrong is not None:
                until = min(until, self.wrong[0])
            count = min(batch.num_rows - at, until - row)
            if not count:
                self._check(row)
            yield self._texts(batch.slice(at, count), row)
            at, row = at + count, row + count

    def _short_rows(self, row: int) -> list[pa.StringArray]:
        """As many as follow each other."""
        numbers = enumerate(self.short)
        count = next((n for n, (number, _) in numbers if number != row + n), len(self.short))
        texts = [text for _, text in self.short[:count]]
        del self.short[:count]
        cells = [self.file.cells_of(text) for text in texts]
        return [
            pa.array([text or None for text in column], pa.string()) for column in zip(*cells, strict=True)
        ]

    def _texts(self, batch: pa.RecordBatch, row: int) -> list[pa.StringArray]:
        end = self.end.encode()
        if any(end in (column[-1].as_py() or b"") for column in batch.columns):
            raise self._unclosed(row + batch.num_rows - 1)
        try:
            return [column.cast(pa.string()) for column in batch.columns]
        except pa.ArrowInvalid:
            raise self._no_text(batch, row) from None

    def _no_text(self, batch: pa.RecordBatch, row: int) -> InvalidData:
        named = self.file.names or tuple(f"number {n + 1}" for n in range(self.file.width))
        for number in range(batch.num_rows):
            for name, column in zip(named, batch.columns, strict=True):
                if (value := column[number].as_py()) is not None and not _is_text(value):
                    where = f"{self.file.name}, row {row + number}, column {name!r}"
                    return InvalidData(f"{where}: {_shown(repr(value)[1:])} is not UTF-8 text")
        raise AssertionError("Arrow found some")

    def _check(self, row: int) -> None:
        """Whether all is well now that the file ends, or a row that is wrong comes next."""
        where, width = self.file.name, self.file.width
        if self.wrong is not None:
            number, cells, text = self.wrong
            if self.end in text:
                raise self._unclosed(number)
            has = f"{cells} {'cell' if cells == 1 else 'cells'}, not {width} as the others"
            if cells < width and self.ended_at == number + 1:
                raise InvalidData(f"{where}, row {number}: the file ends in the middle of it: it has {has}")
            raise InvalidData(f"{where}, row {number}: it has {has}: {_shown(repr(text))}")
        if self.ended_at is None:
            raise self._unclosed(max(row - 1, 1))

    def _unclosed(self, number: int) -> InvalidData:
        return InvalidData(f"{self.file.name}, row {number}: a quote is opened in it and never closed")


class _Ended:
    """A file as Arrow reads it, with a row added at its end, which a quote that is still open swallows."""

    closed = False

    def __init__(self, file: BinaryIO, row: str) -> None:
        self._file = file
        self._row = row.encode() + b"\n"
        self._last = b"\n"
        self._rest: memoryview | None = None

    @property
    def breaks_off(self) -> bool:
        """Whether what was read last is no line's end."""
        return self._last not in b"\r\n"

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def read(self, size: int) -> bytes:
        found = self._file.read(size) if self._rest is None else b""
        self._last = found[-1:] or self._last
        if len(found) == size:
            return found
        # in one block with the last bytes: Arrow stops at a block that is but half of a line's end
        if self._rest is None:
            self._rest = memoryview(self._row if self._last in b"\r\n" else b"\n" + self._row)
        missing = size - len(found)
        found, self._rest = found + bytes(self._rest[:missing]), self._rest[missing:]
        return found


def _is_text(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Failures of the file as errors of ours."""
    try:
        yield
    except OSError as error:
        raise InvalidData(f"cannot read {name}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise InvalidData(f"{name} cannot be read as CSV: {one_line(error)}") from None
