"""The reader of CSV files: batches of texts or of typed values, in bounded memory.

Arrow parses the file. This module adds three features that Arrow's reader lacks. Errors name the line. A
quote that is still open at the end of the file is an error. Rows can be larger than a block.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import zipfile
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from uuid import uuid4

import pyarrow as pa
import pyarrow.csv as pacsv

from dormouse.errors import InvalidData, one_line
from dormouse.model.text import plural
from dormouse.objects.names import COMPRESSIONS
from dormouse.sources.text_format import UTF_8, TextFormat

BLOCK_BYTES = (1 << 20, 8 << 20, 64 << 20)
"""The sizes of the blocks that Arrow parses. If a row does not fit into a block, the next size is tried."""
HEAD_BYTES_MAX = 1 << 20
"""The largest size of the skipped lines and the header (or the first row, if there is no header) together."""
SHORT_ROWS_MAX = 1_000_000
"""The most consecutive short rows. They are held in memory, since Arrow gives no batch before a full row."""
SHOWN_CHARACTERS = 60
_LAST: deque[object] = deque(maxlen=16)
"""The Python objects of the last 16 readers. Kept alive, since the process would abort if a thread of Arrow
dropped the last reference to one while the interpreter shuts down."""
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, UTF_8),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
OTHER_ENCODING = "; give its encoding (--encoding), or convert it to UTF-8"
_COLUMN = re.compile(r"In CSV column #(\d+): ")
_ROW = re.compile(r"(?:CSV parse error: )?Row #(\d+): ")
_CELL = re.compile(r"CSV conversion error to ([^:]+): invalid value '(.*)'", re.DOTALL)
_LINE_END = re.compile(r"\r\n?|\n")
_BEGINNINGS = {"line ": ", ", "row ": ", ", "is ": " ", "has ": " "}
"""The separator between a file's name and a message, by the beginning of the message. Default: a colon."""
_KINDS = {"int64": "long", "int32": "int", "bool": "boolean", "date32[day]": "date"}


class Unreadable(InvalidData):
    """An error for a CSV file, or a row of one, that cannot be read. The message names the line."""


class NotText(Unreadable):
    """An error for bytes that are not text in the file's encoding."""


class NeverClosed(Unreadable):
    """An error for a cell with an opening quote but no closing quote."""


class UnfitCell(Exception):
    """An error for a cell that does not fit its column's type. `row` counts from 1, `column` from 0."""

    def __init__(self, text: str, row: int | None, column: int) -> None:
        super().__init__(text)
        self.row, self.column = row, column


class Watch(Protocol):
    """An observer that gets all bytes of a file, as UTF-8, before the rows that are parsed from them."""

    def see(self, text: bytes) -> None: ...


@contextmanager
def naming(name: str, called: str | None = None) -> Iterator[None]:
    """Adds the name of a file to errors that the block raises. All become `InvalidData`.

    With `called`, messages begin with that text instead, and the error's data does not have the file.
    """
    said, data = (called, {}) if called else (f"file {name!r}", {"file": name})
    try:
        yield
    except InvalidData as error:
        text = str(error)
        between = next((sign for begin, sign in _BEGINNINGS.items() if text.startswith(begin)), ": ")
        raise InvalidData(f"{said}{between}{text}", **error.data, **data) from None
    except (pa.ArrowException, OSError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise InvalidData(f"{said} cannot be read: {why}", **data) from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Yields a stream of the bytes of a file, decompressed if its suffix is that of a compressed file.

    Raises `InvalidData` for a zip archive of several files.
    """
    if path.suffix.lower() == ".zip":
        with _zipped(path) as stream:
            yield stream
        return
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        with path.open("rb") as stream:
            yield stream
        return
    with pa.OSFile(str(path)) as packed, pa.CompressedInputStream(packed, compression) as unpacked:
        yield cast(BinaryIO, unpacked)


@contextmanager
def _zipped(path: Path) -> Iterator[BinaryIO]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [one.filename for one in archive.infolist() if not one.is_dir()]
            if len(names) != 1:
                raise InvalidData(
                    f"is an archive of {len(names)} files ({', '.join(names[:3])}, …): "
                    "unpack it, and give the files to read"
                )
            with archive.open(names[0]) as stream:
                yield cast(BinaryIO, stream)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError) as error:
        raise InvalidData(f"is not a readable zip file: {one_line(error)}") from None


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Consecutive rows of a file.

    A cell is null if it is empty and has no quotes. Short rows, with fewer cells, have batches of their own.
    """

    first_row: int
    """The number of the first row, from 1. The header is not counted."""
    columns: list[pa.Array]
    bytes_read: int
    """The number of bytes of the file that were read so far."""

    @property
    def num_rows(self) -> int:
        return len(self.columns[0])

    @property
    def byte_count(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def slice(self, start: int, count: int | None = None) -> TextBatch:
        columns = [column.slice(start, count) for column in self.columns]
        return TextBatch(self.first_row + start, columns, self.bytes_read)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row in a file. Its line is looked up only when it is formatted, since this is slow."""

    file: TextFile
    row: int
    name: str = ""

    def __str__(self) -> str:
        line = self.file.line_of(self.row)
        where = f"row {self.row:,}" if line is None else f"line {line:,}"
        return f"{self.name}, {where}" if self.name else where


class TextFile:
    """A CSV file whose header was read. `batches` can be called several times.

    `header` has the cells of the header, or is None without one. `names` are the given names of the columns,
    else those of the header, else numbers. Raises `Unreadable` for a file that is empty or not text.
    """

    def __init__(self, path: str | PathLike[str], how: TextFormat, names: Sequence[str] = ()) -> None:
        self.path = Path(fspath(path))
        self.how = how
        with opened(self.path) as stream:
            raw = bytes(stream.read(HEAD_BYTES_MAX))
        marked = next((name for mark, name in BYTE_ORDER_MARKS if raw.startswith(mark)), UTF_8)
        self.encoding = marked if how.encoding == UTF_8 else how.encoding
        cells, before = self._head(raw)
        self.header = tuple(cells) if how.header else None
        self._start, self._lines_before = len(_bytes(before)), len(_LINE_END.findall(before))
        self.width = len(names) or len(cells)
        self.names = tuple(names or self.header or (f"number {n + 1}" for n in range(self.width)))

    def _head(self, raw: bytes) -> tuple[list[str], str]:
        """Returns the cells of the header, or else of the first row; and the text before the first row."""
        what, is_cut = "header" if self.how.header else "first row", len(raw) == HEAD_BYTES_MAX
        # invalid bytes may be in a later row: ignore them here, the reader of that row names its line
        errors = "surrogateescape" if self.encoding == UTF_8 else "replace"
        text = codecs.getincrementaldecoder(self.encoding)(errors).decode(raw, final=not is_cut)
        end = _new_end()
        lines = io.StringIO(
            f"{text}{'' if text[-1:] in ('', chr(10), chr(13)) else chr(10)}{end}\n", newline=""
        )
        lines.seek(text.startswith("\ufeff"))
        for line in range(self.how.skip_lines):
            if lines.tell() >= len(text):
                after = f"there is nothing after the {self.how.skip_lines:,} to skip"
                raise Unreadable(f"has {plural(line, 'line')}: {after}")
            lines.readline()
        reader, cells, begin = csv.reader(lines, **_dialect(self.how)), list[str](), lines.tell()
        try:
            while not cells:
                begin, cells = lines.tell(), next(reader)
        except csv.Error as error:
            raise Unreadable(f"the {what} cannot be read: {error}; is a quote never closed?") from None
        if cells == [end]:
            raise Unreadable(f"is empty: it has no {what}")
        if end in cells[-1] or (is_cut and lines.tell() >= len(text)):
            longer = f"is longer than {HEAD_BYTES_MAX:,} bytes: is a quote opened in it that is never closed?"
            unclosed = "cannot be read: a quote is opened and never closed"
            raise Unreadable(f"the {what} {longer if is_cut else unclosed}")
        for cell in map(_bytes, cells if self.how.header else ()):
            if not _is_text(cell):
                raise NotText(f"the header is not UTF-8 text: {_excerpt(cell)}{OTHER_ENCODING}")
        return cells, text[: lines.tell() if self.how.header else begin]

    def cells_of(self, record: str) -> list[str]:
        """Returns the cells of one row's text."""
        return next(csv.reader(io.StringIO(record, newline=""), **_dialect(self.how)), [])

    def batches(
        self,
        types: Mapping[str, pa.DataType] | None = None,
        *,
        only: Sequence[str] | None = None,
        decimal_point: str = ".",
        watch: Watch | None = None,
        width_min: int | None = None,
        must_end: bool = False,
    ) -> Iterator[TextBatch]:
        """Yields all rows in order: as texts, or with `types` as values of these types.

        - `only`: the names of the columns to read, in the order of the result.
        - `watch` gets the bytes before they are parsed, some of them twice if a row is larger than a block.
        - `width_min`: rows with this number of cells (short rows) are accepted, too.
        - `must_end`: the last line must have a line end.

        Raises `UnfitCell` for a cell that does not fit its type. Raises `Unreadable` for a row that has
        another number of cells, is not text, exceeds the largest block, or is cut off at the file's end.
        """
        done = 0  # after a restart with larger blocks, rows up to this number were yielded already
        for size in BLOCK_BYTES:
            run = _Run(self, size, types, only, decimal_point, watch, width_min, must_end)
            try:
                for batch in run.batches():
                    known = max(done + 1 - batch.first_row, 0)
                    if known < batch.num_rows:
                        done = batch.first_row + batch.num_rows - 1
                        yield batch.slice(known) if known else batch
            except _TooSmall:
                continue
            return
        longer = f"it is larger than {BLOCK_BYTES[-1]:,} bytes; is a quote opened in it that is never closed?"
        raise self.refused(done + 1, longer)

    def refused(self, row: int, why: str, kind: type[Unreadable] = Unreadable, **data: Any) -> Unreadable:
        """Returns an error for a row, given by its number from 1. The message names the line."""
        return kind(f"{Place(self, row)}: {why}", line=self.line_of(row), row=row - 1, **data)

    def unfit(self, error: UnfitCell, advice: str = "") -> Unreadable:
        """Returns the error for a cell that does not fit. Its message names the line and the column."""
        name = self.names[error.column]
        if (cell := _CELL.search(str(error))) is None:
            why = f"column {name!r}: {one_line(error)}"
        else:
            kind, value = _KINDS.get(cell[1], cell[1]), f"{' '.join(cell[2].split())[:100]!r}"
            why = f"column {name!r} is {value}, which does not fit {kind}{advice}"
        return (
            Unreadable(why, column=name) if error.row is None else self.refused(error.row, why, column=name)
        )

    def line_of(self, row: int) -> int | None:
        """Returns the line on which a row begins, both from 1, or None if a cell is too long for Python.

        It is slow, since it parses the file again; only errors use it.
        """
        encoding = "utf-8-sig" if self.encoding == UTF_8 else self.encoding
        with opened(self.path) as stream:
            text = io.TextIOWrapper(stream, encoding, errors="replace", newline="")
            for _ in range(self._lines_before):
                text.readline()
            reader, begins = csv.reader(text, **_dialect(self.how)), self._lines_before + 1
            try:
                for cells in reader:
                    row -= bool(cells) or self.width == 1
                    if not row:
                        return begins
                    begins = self._lines_before + reader.line_num + 1
            except csv.Error:  # a cell is longer than Python reads
                return begins if row == 1 else None
            return None


def _new_end() -> str:
    """Returns a random text, which no file contains and which does not look like a number."""
    return f"z{uuid4().hex}"


class _TooSmall(Exception):
    """An error raised when a row is larger than a block."""


@dataclass
class _Run:
    """One pass over a file with one block size.

    Adds a row that begins with `end` to the file. A quote that is never closed takes this row into its cell.
    """

    file: TextFile
    block_bytes: int
    types: Mapping[str, pa.DataType] | None
    only: Sequence[str] | None
    decimal_point: str
    watch: Watch | None
    width_min: int | None
    must_end: bool
    end: str = field(default_factory=_new_end)
    """The first cell of the additional row."""
    ended_at: int | None = None
    """The number of the additional row, or None until Arrow has parsed it."""
    short: list[tuple[int, str]] = field(default_factory=list)
    """The number and text of each short row (one with `width_min` cells) that is not yielded yet."""
    last_short: int = 0
    """The number of the last short row."""
    wrong: tuple[int, int, str] | None = None
    """The first row with a wrong number of cells: its row number, its number of cells, and its text."""

    def batches(self) -> Iterator[TextBatch]:
        with opened(self.file.path) as raw:
            end = self.file.how.separator.join([self.end] * (self.file.width + 1))
            source = _Source(raw, self.file.encoding, end, self.watch)
            source.read(self.file._start)
            row = 1
            with closing(self._parsed(source)) as parsed:  # closes the parser before the file
                for batch in parsed:
                    for part in self._parts(batch, row):
                        yield TextBatch(row, part, source.bytes_read)
                        row += len(part[0])
            # Arrow gives no batch if the file has only short rows
            if self.short and self.short[0][0] == row:
                rest = self._short_rows(row)
                yield TextBatch(row, rest, source.bytes_read)
                row += len(rest[0])
            self._check(row)
            if source.breaks_off and self.last_short == row - 1 > 0:
                # the row may be the beginning of a full row, and would then make another change
                has = f"{self.width_min} cells, not {self.file.width} as the others, and no line end"
                raise self.file.refused(row - 1, f"the file ends in the middle of it: it has {has}")
            if source.breaks_off and self.must_end and row > 1:
                why = "so its last value may be cut off and mean another row: end the line if it is whole"
                raise self.file.refused(row - 1, f"the file ends without a line end, {why}")

    def _parsed(self, source: _Source) -> Generator[pa.RecordBatch, None, None]:
        how, numbers = self.file.how, [str(number) for number in range(self.file.width)]
        named = dict(zip(self.file.names, numbers, strict=True))
        plain = pa.binary() if self.types is None else pa.string()
        types: dict[str, Any] = dict.fromkeys(numbers, plain)
        types |= {named[name]: kind for name, kind in (self.types or {}).items() if name in named}
        parsing = pacsv.ParseOptions(
            delimiter=how.separator,
            quote_char=how.quote or False,
            escape_char=how.escape or False,
            newlines_in_values=True,
            # in a file with a single column, an empty line is a null
            ignore_empty_lines=self.file.width > 1,
            invalid_row_handler=self._other_width,
        )
        try:
            # Arrow's threads read a small file from memory, which halves its cost
            beginning = source.beginning(self.block_bytes)
            stream = pa.PythonFile(source, mode="r") if beginning is None else pa.BufferReader(beginning)
            _LAST.append((stream, parsing))
            with pacsv.open_csv(
                stream,
                # only with one thread do errors have the number of the row
                pacsv.ReadOptions(use_threads=False, block_size=self.block_bytes, column_names=numbers),
                parsing,
                pacsv.ConvertOptions(
                    # texts are read as bytes: Arrow does not report which row has invalid text
                    column_types=types,
                    include_columns=None if self.only is None else [named[name] for name in self.only],
                    null_values=["", *how.null],
                    strings_can_be_null=True,
                    # an empty cell is null, but two quotes are an empty text
                    quoted_strings_can_be_null=False,
                    decimal_point=self.decimal_point,
                ),
            ) as reader:
                yield from reader
        except UnicodeDecodeError:
            line = source.lines + 1
            raise NotText(f"line {line:,}: is not {self.file.encoding}{OTHER_ENCODING}", line=line) from None
        except pa.ArrowInvalid as error:
            raise self._unparsed(error) from None

    def _unparsed(self, error: Exception) -> Exception:
        """Returns the project's own error for an error of Arrow, or the same error if it is unknown."""
        text = str(error)
        if "straddling object" in text:
            return _TooSmall()
        if len(self.short) > SHORT_ROWS_MAX:
            return self.file.refused(
                self.last_short,
                f"more than {SHORT_ROWS_MAX:,} rows of {self.width_min} cells follow each other: "
                "put them into a file that has only these columns",
            )
        row, column = _ROW.search(text), _COLUMN.search(text)
        number = int(row[1]) if row else None
        if self.wrong is not None and (number is None or self.wrong[0] <= number):
            return self._wrong(*self.wrong)
        if column is None:
            return error
        if self.end in text:
            return self._unclosed(number or 1)
        if "invalid UTF8" in text:
            for _ in self.file.batches():  # reads texts as bytes, which raises an error with the row
                pass
        return UnfitCell(_COLUMN.sub("", _ROW.sub("", text)).strip(), number, int(column[1]))

    def _other_width(self, row: Any) -> str:
        """Records a row with a wrong number of cells. Returns "error" after too many short rows."""
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

    def _parts(self, batch: pa.RecordBatch, row: int) -> Iterator[list[pa.Array]]:
        """Yields the rows of a batch, and the short rows between them, in the order of the file.

        Each part has either short rows or other rows. `row` is the number of the batch's first row.
        """
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

    def _short_rows(self, row: int) -> list[pa.Array]:
        """Removes the consecutive short rows that begin at `row`, and returns their columns."""
        numbers = enumerate(self.short)
        count = next((n for n, (number, _) in numbers if number != row + n), len(self.short))
        cells = [self.file.cells_of(text) for _, text in self.short[:count]]
        del self.short[:count]
        return [
            pa.array([text or None for text in column], pa.string()) for column in zip(*cells, strict=True)
        ]

    def _texts(self, batch: pa.RecordBatch, row: int) -> list[pa.Array]:
        """Returns the columns of a batch, with bytes as texts. `row` is the number of its first row.

        Raises `NeverClosed` if a cell contains the additional row, and `NotText` for bytes that are not
        UTF-8.
        """
        end = self.end.encode()
        for column in batch.columns:
            if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
                last = column[-1].as_buffer()
                if last is not None and end in last.to_pybytes():
                    raise self._unclosed(row + batch.num_rows - 1)
        if self.types is not None:
            return list(batch.columns)
        try:
            return [column.cast(pa.string()) for column in batch.columns]
        except pa.ArrowInvalid:
            raise self._no_text(batch, row) from None

    def _no_text(self, batch: pa.RecordBatch, row: int) -> NotText:
        for number in range(batch.num_rows):
            for name, column in zip(self.file.names, batch.columns, strict=True):
                if (value := column[number].as_py()) is not None and not _is_text(value):
                    why = f"column {name!r}: {_excerpt(value)} is not UTF-8 text{OTHER_ENCODING}"
                    return cast(NotText, self.file.refused(row + number, why, NotText, column=name))
        raise AssertionError("Arrow found invalid text, but no cell has any")

    def _check(self, row: int) -> None:
        """Raises an error if a row has a wrong number of cells, or if the file ends within a quoted cell."""
        if self.wrong is not None:
            raise self._wrong(*self.wrong)
        if self.ended_at is None:
            raise self._unclosed(max(row - 1, 1))

    def _wrong(self, number: int, cells: int, text: str) -> Unreadable:
        if self.end in text:
            return self._unclosed(number)
        has = f"it has {plural(cells, 'cell')}, not {self.file.width} as the others"
        if cells < self.file.width and self.ended_at == number + 1:
            return self.file.refused(number, f"the file ends in the middle of it: {has}")
        return self.file.refused(number, f"{has}: {_excerpt(text)}")

    def _unclosed(self, number: int) -> Unreadable:
        return self.file.refused(number, "a quote is opened and never closed", NeverClosed)


class _Source(io.RawIOBase):
    """A file-like object for Arrow: the bytes of a file, converted to UTF-8, and then the text `row`."""

    def __init__(self, file: BinaryIO, encoding: str, row: str, watch: Watch | None) -> None:
        self._file = file
        self._decoder = None if encoding == UTF_8 else codecs.getincrementaldecoder(encoding)()
        self._row = row
        self._watch = watch
        self._held = b""
        self._last = b"\n"
        self._is_over = False
        self.bytes_read = self.lines = 0

    @property
    def breaks_off(self) -> bool:
        """True if the file, as far as it was read, ends without a line end."""
        return self._last not in b"\r\n"

    def readable(self) -> bool:
        return True

    def beginning(self, size: int) -> bytes | None:
        """Returns all bytes if there are fewer than `size`, else None. Then `read` still returns all."""
        text = self.read(size)
        self._held = text + self._held
        return text if len(text) < size else None

    def read(self, size: int = -1) -> bytes:
        # return the full size: Arrow stops at a block that is only half of a line end
        parts, length = [self._held], len(self._held)
        while length < size and not self._is_over:
            parts.append(self._next(size - length))
            length += len(parts[-1])
        text = parts[-1] if len(parts) == 2 and not self._held else b"".join(parts)
        self._held = text[size:]
        return text[:size]

    def _next(self, size: int) -> bytes:
        raw = bytes(self._file.read(size))
        self.bytes_read += len(raw)
        text = raw if self._decoder is None else self._decoded(raw)
        self._last = text[-1:] or self._last
        self._is_over = not raw
        if self._watch is not None:
            self._watch.see(text)
        return text if raw else text + f"{chr(10) if self.breaks_off else ''}{self._row}\n".encode()

    def _decoded(self, raw: bytes) -> bytes:
        try:
            text = cast(codecs.IncrementalDecoder, self._decoder).decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            self.lines += raw.count(b"\n", 0, error.start)
            raise
        self.lines += text.count("\n")
        return text.encode()


def _dialect(how: TextFormat) -> dict[str, Any]:
    """Returns the format as options of Python's `csv.reader`."""
    quotes = {"quotechar": how.quote} if how.quote else {"quoting": csv.QUOTE_NONE}
    return {"delimiter": how.separator, "escapechar": how.escape, **quotes}


def _bytes(text: str) -> bytes:
    return text.encode(UTF_8, "surrogateescape")


def _is_text(value: bytes) -> bool:
    try:
        value.decode(UTF_8)
    except UnicodeDecodeError:
        return False
    return True


def _excerpt(text: str | bytes) -> str:
    shown = repr(text).removeprefix("b")
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"
