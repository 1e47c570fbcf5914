"""How the text of a file is to be read: its encoding, its dialect, what is null, how times are written."""

from __future__ import annotations

import codecs
import csv
import io
import re
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import pyarrow as pa
import pyarrow.csv as pacsv

from dormouse.errors import InvalidData, one_line
from dormouse.objects.names import COMPRESSIONS

CSV_BLOCK_BYTES = 1024 * 1024
"""Larger ones are no faster, and do not fit a processor's memory."""
UTF_8 = "utf-8"
_MARKED = {"utf-16": codecs.BOM_UTF16_BE, "utf-32": codecs.BOM_UTF32_BE}
"""Encodings of which the beginning tells the order of bytes."""

_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")
_ROW = re.compile(r"(?:CSV parse error: )?Row #(\d+): ")
_CELL = re.compile(r"CSV conversion error to [^:]+: invalid value '(.*)'", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The dialect of a file of CSV; the default is RFC 4180 in UTF-8, with a header.

    `names` are its columns, where they are others than the header has; `skip` is how many lines come before.
    `time_formats` are DuckDB's, as of strptime, of columns whose times are not as ISO 8601 has them. `absent`
    are columns of the table that the file lacks.
    """

    delimiter: str = ","
    quote: str = '"'
    escape: str = '"'
    has_header: bool = True
    skip: int = 0
    encoding: str = UTF_8
    null_texts: tuple[str, ...] = ("",)
    decimal_point: str = "."
    names: tuple[str, ...] = ()
    time_formats: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As a person is told of it, for what is not as usual."""
        usual = TextFormat()
        told = {
            "delimiter": None if self.delimiter == usual.delimiter else repr(self.delimiter),
            "quote": None if self.quote == usual.quote else repr(self.quote) if self.quote else "none",
            "no header": None if self.has_header else "",
            "lines before it": str(self.skip) if self.skip else None,
            "encoding": None if self.encoding == usual.encoding else self.encoding,
            "null": ", ".join(filter(None, self.null_texts)) or None,
            "decimal point": None if self.decimal_point == usual.decimal_point else repr(self.decimal_point),
            **{f"times of {name!r}": how for name, how in self.time_formats},
        }
        return "; ".join(f"{name} {how}".strip() for name, how in told.items() if how is not None)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, of what is compressed unpacked; `InvalidData` for an archive of several files."""
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
                    "unpack it, and give those to be read"
                )
            with archive.open(names[0]) as stream:
                yield cast(BinaryIO, stream)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError) as error:
        raise InvalidData(f"is no zip file that can be read: {one_line(error)}") from None


class NeverClosed(InvalidData):
    """A file ends within a value."""


def csv_rows(
    stream: BinaryIO, how: TextFormat, types: Mapping[str, pa.DataType], only: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """All batches, as of `open_csv`; `NeverClosed` for a file whose last quote is opened and never closed.

    Arrow takes the rest of such a file for one value. So the file gets a row more, which must be found again:
    of a single column an empty line, else one that has too few columns.
    """
    single = _is_single(how, types)
    last = _LastRow("" if single else uuid.uuid4().hex)
    with open_csv(cast(BinaryIO, _Ended(stream, last.text, how)), how, types, only, last.skipped) as reader:
        held: pa.RecordBatch | None = None
        for batch in reader:
            if held is not None and batch.num_rows:
                yield held
            held = batch if batch.num_rows else held
        if single and held is not None:
            last.is_found = not held.column(0)[held.num_rows - 1].is_valid
            held = held.slice(0, held.num_rows - last.is_found)
        if not last.is_found:
            raise NeverClosed("a quote is opened and never closed")
        if held is not None:
            yield held


@dataclass
class _LastRow:
    text: str
    is_found: bool = False

    def skipped(self, row: Any) -> str:
        """What is to become of a row that has too many columns, or too few."""
        if not self.text or row.text != self.text:
            return "error"
        self.is_found = True
        return "skip"


class _Ended(io.RawIOBase):
    """A stream of CSV with one more row at its end."""

    def __init__(self, stream: BinaryIO, text: str, how: TextFormat) -> None:
        self._stream = stream
        self._text = text
        self._encoding = codecs.lookup(how.encoding).name
        self._read = b""
        self._is_over = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._is_over:
            return b""
        found = bytes(self._stream.read(size))
        if found:
            if self._encoding in _MARKED and not self._read:
                self._encoding += "-be" if found.startswith(_MARKED[self._encoding]) else "-le"
            self._read = self._read[:4] + found[-4:]
            return found
        self._is_over = True
        ends = self._read.endswith(tuple(end.encode(self._encoding) for end in ("\n", "\r")))
        return f"{'' if ends or not self._read else chr(10)}{self._text}\n".encode(self._encoding)


def _is_single(how: TextFormat, types: Mapping[str, pa.DataType]) -> bool:
    return len(how.names or types) == 1  # of a file whose folders tell more, too


def open_csv(
    stream: BinaryIO,
    how: TextFormat,
    types: Mapping[str, pa.DataType],
    only: Sequence[str] | None = None,
    unfit: Callable[[Any], str] | None = None,
) -> pacsv.CSVStreamingReader:
    """Batches of the columns as these types, of the others as Arrow takes them; raises Arrow's errors.

    `only` some of the columns; `unfit` says of a row whose columns are too many or too few whether it is
    skipped or an error.
    """
    single = _is_single(how, types)
    return pacsv.open_csv(
        stream,
        # one thread: only then an error tells its row
        read_options=pacsv.ReadOptions(
            use_threads=False,
            block_size=CSV_BLOCK_BYTES,
            encoding=how.encoding,
            skip_rows=how.skip + (how.has_header and bool(how.names)),
            column_names=list(how.names) or None,
            autogenerate_column_names=not how.has_header and not how.names,
        ),
        parse_options=pacsv.ParseOptions(
            delimiter=how.delimiter,
            quote_char=how.quote or False,
            double_quote=how.escape == how.quote,
            escape_char=how.escape if how.escape not in {"", how.quote} else False,
            newlines_in_values=True,
            # of a single column, an empty line is a null
            ignore_empty_lines=not single,
            invalid_row_handler=unfit,
        ),
        convert_options=pacsv.ConvertOptions(
            column_types=dict(types),
            include_columns=None if only is None else list(only),
            null_values=list(how.null_texts),
            strings_can_be_null=True,
            # nothing at all is null, but not two quotes
            quoted_strings_can_be_null=False,
            decimal_point=how.decimal_point,
        ),
    )


def unfit(error: Exception, path: Path, how: TextFormat) -> InvalidData:
    """Returns an error for what Arrow says of a file of CSV, with the line and the name of the column."""
    text = one_line(error)
    row, column = _ROW.search(text), _CSV_COLUMN.search(text)
    rest = _CSV_COLUMN.sub("", _ROW.sub("", text)).strip()
    line = _line(path, how, int(row[1])) if row else None
    at = "" if line is None else f"line {line:,}: "
    name = column_name(path, how, int(column[1])) if column else None
    if name is None:
        return InvalidData(f"{at}{rest}", line=line)
    cell = _CELL.search(str(error))
    value = None if cell is None else f"{' '.join(cell[1].split())[:100]!r}"
    kind = "" if cell is None else f" is {value}, which does not fit {_kind(rest)}"
    return InvalidData(f"{at}column {name!r}{kind or f': {rest}'}", line=line, column=name)


def column_of(error: Exception) -> int | None:
    """The number of the column of which Arrow says that a value does not fit."""
    found = _CSV_COLUMN.search(one_line(error))
    return int(found[1]) if found else None


def _kind(text: str) -> str:
    found = re.search(r"conversion error to ([^:]+):", text)
    return {"int64": "long", "int32": "int", "bool": "boolean", "date32[day]": "date"}.get(
        found[1] if found else "", found[1] if found else "its type"
    )


def line_of(path: Path, how: TextFormat, data_row: int) -> int:
    """The line of a row of data, from 0; raises nothing but for what cannot be opened."""
    return _line(path, how, data_row + 1, of_data=True)


def _line(path: Path, how: TextFormat, row: int, *, of_data: bool = False) -> int:
    """Arrow counts rows of text, with those before the data; values may go on over several lines."""
    rows = _records(path, how)
    wanted = row + how.skip + how.has_header if of_data else row
    line = wanted
    for _ in range(wanted):
        found = next(rows, None)
        if found is None:
            break
        line = found[0]
    return line


def last_line(path: Path, how: TextFormat) -> int:
    """The line on which the last row begins, or one that is longer than Python reads."""
    with opened(path) as stream:
        reader, last, begins = csv.reader(_as_text(stream, how), **_dialect(how)), 1, 1
        try:
            for _ in reader:
                last, begins = begins, reader.line_num + 1
        except csv.Error:
            return begins
        return last


def column_name(path: Path, how: TextFormat, number: int) -> str:
    """Returns the name of a column by its number in the file, from 0."""
    names = list(how.names)
    if not names:
        with opened(path) as stream:
            names = header_of(_as_text(stream, how), how)
    return names[number] if number < len(names) else f"#{number + 1}"


def _records(path: Path, how: TextFormat) -> Iterator[tuple[int, list[str]]]:
    """Each row with the line that it begins on, as Python reads it: slowly, for what went wrong."""
    with opened(path) as stream:
        reader, begins = csv.reader(_as_text(stream, how), **_dialect(how)), 1
        try:
            for row in reader:
                if row or len(how.names) == 1:
                    yield begins, row
                begins = reader.line_num + 1
        except csv.Error:
            return


def file_header(path: Path, how: TextFormat) -> list[str]:
    """Returns the names that the header of a file has; none if it has no header, or none that counts."""
    if not how.has_header or how.names:
        return []
    with opened(path) as stream:
        return header_of(_as_text(stream, how), how)


def header_of(text: TextIO, how: TextFormat) -> list[str]:
    """The names that a file begins with, after the lines before it."""
    for _ in range(how.skip):
        text.readline()
    try:
        return next((row for row in csv.reader(text, **_dialect(how)) if row), [])
    except csv.Error:  # a value that is longer than Python reads
        return []


def _as_text(stream: BinaryIO, how: TextFormat) -> TextIO:
    encoding = "utf-8-sig" if how.encoding == UTF_8 else how.encoding
    return io.TextIOWrapper(stream, encoding, errors="replace", newline="")


def _dialect(how: TextFormat) -> dict[str, Any]:
    options: dict[str, Any] = {"delimiter": how.delimiter, "doublequote": how.escape == how.quote}
    return options | ({"quotechar": how.quote} if how.quote else {"quoting": csv.QUOTE_NONE})
