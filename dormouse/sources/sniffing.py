"""What a file of CSV is like, told from its beginning: DuckDB's sniffer proposes, Arrow's reader must agree.

DuckDB's own reader is not asked for the rows: it rounds 1.5 to a whole number, and drops offsets of times.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import DependencyMissing, InvalidData, not_installed, one_line
from dormouse.model.types import BOOLEAN, DATE, DOUBLE, LONG, STRING, TIMESTAMP, DataType, Field
from dormouse.sources.data_files import DataFile, Files
from dormouse.sources.odd_numbers import are_kept, with_infinities
from dormouse.sources.text_format import (
    USUAL,
    UTF_8,
    FileFormat,
    TextFormat,
    has_tabs,
    text_format,
)
from dormouse.sources.text_reader import BYTE_ORDER_MARKS, OTHER_ENCODING, TextFile, UnfitCell, opened
from dormouse.sources.text_values import (
    HEXADECIMAL,
    LEADING_ZERO,
    TIMES,
    formats_to_try,
    other_order,
    value_column,
)

SAMPLE_BYTES = 2 * 1024 * 1024
"""Of the beginning of a file, unpacked."""
NULL_TEXTS = ("NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "nan", "NaN", "-", "?", ".")
"""What stands for null in files of others, where the other values are numbers, times or truths."""
_OF_DUCKDB = {
    "BOOLEAN": BOOLEAN, "BIGINT": LONG, "DOUBLE": DOUBLE, "DATE": DATE, "TIMESTAMP": TIMESTAMP,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMP,
}  # fmt: skip
_READ = {BOOLEAN, LONG, DOUBLE, DATE}
"""What the reader takes by itself."""
_WHOLE_AND_LONG = r"^\s*[+-]?[0-9]{16,}\s*$"
_QUOTED = r'(?:^|[,;|\t\r\n{}])"[^"]*(?:""[^"]*)*'
"""A value in quotes, but for its end: it begins where one can, and a quote within another is a character."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_OPTIONS = {
    "separator": "delim",
    "quote": "quote",
    "escape": "escape",
    "header": "header",
    "skip_lines": "skip",
}
"""Our names of options, and the sniffer's."""
_DELIMITERS = (",", ";", "\t", "|")
_TITLES_SHARE = 10
"""Of the lines of a file, at most one in so many comes before its rows."""
_NONE = "(empty)"
GUESSED = "cp1252"


@dataclass(frozen=True)
class Sniffed:
    """A file's format, the types of its columns, and its first rows, as texts.

    `unsure` are other formats of times whose days could be months.
    """

    format: FileFormat
    types: Mapping[str, DataType]
    sample: pa.Table
    is_whole: bool
    unsure: Mapping[str, str]


@dataclass(frozen=True)
class _Found:
    """What DuckDB's sniffer says."""

    delimiter: str
    quote: str
    escape: str
    skip: int
    has_header: bool
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    date_format: str | None
    timestamp_format: str | None


def sniff(file: DataFile, *, guess_encoding: bool) -> Sniffed:
    """What the file is like; what is given of it is taken as it is. `InvalidData` when it cannot be told.

    What is not UTF-8 is refused when its encoding would have to be guessed, and may not be.
    """
    raw, is_whole = _head(file.path)
    encoding = file.given.encoding or guessed_encoding(raw)
    if not guess_encoding and encoding == GUESSED and file.given.encoding is None:
        raise InvalidData("is not UTF-8: say which encoding it has, like latin-1")
    said = text_format(**file.given.said)
    text = _decoded(raw, encoding, said.separator, is_whole=is_whole)
    if not text.strip():
        raise InvalidData("is empty, and says nothing of its columns")
    with tempfile.TemporaryDirectory(prefix="dormouse-") as folder:
        sample = Path(folder) / "sample.csv"
        sample.write_text(text, UTF_8, newline="")
        how, found = _format(sample, text, file, said)
        names, how = _named(sample, how)
        texts = _texts(sample, how, names)
        types, time_formats = _types(texts, found, file, how.decimal_point)
        chosen = {**time_formats, **file.given.time_formats}
        types = _confirmed(sample, how, types, {*file.given.types, *chosen})
    others = {name: other_order(texts[name], one, is_whole=is_whole) for name, one in time_formats.items()}
    how = replace(how, text=how.text.model_copy(update={"encoding": encoding}))
    return Sniffed(
        replace(how, time_formats=tuple(sorted(chosen.items()))),
        types,
        texts,
        is_whole,
        {name: other for name, other in others.items() if other is not None},
    )


def other_format(file: TextFile) -> TextFormat | None:
    """Returns the format that a file is found to have, if nothing was said of it and its header is one cell.

    None if that is no other, or cannot be told: another separator is in that cell.
    """
    if file.how != USUAL or file.header is None or len(file.header) > 1:
        return None
    given = DataFile(file.path, str(file.path), "csv", Files(file.path))
    try:
        other = sniff(given, guess_encoding=False).format.text
    except (InvalidData, DependencyMissing):
        return None
    return other if other.header and other.separator in file.header[0] else None


def _head(path: Path) -> tuple[bytes, bool]:
    with opened(path) as stream:
        raw = stream.read(SAMPLE_BYTES + 1)
    return bytes(raw[:SAMPLE_BYTES]), len(raw) <= SAMPLE_BYTES


def guessed_encoding(raw: bytes) -> str:
    """UTF-8 where it is, or what a byte order mark says; else Windows-1252. `InvalidData` for a mixture."""
    marked = next((name for mark, name in BYTE_ORDER_MARKS if raw.startswith(mark)), None)
    if marked is not None:
        return marked
    try:
        codecs.getincrementaldecoder(UTF_8)().decode(raw)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
    else:
        return UTF_8
    is_other = [_is_other(one) for one in raw.splitlines() if not one.isascii()]
    if b"\0" in raw:
        raise InvalidData(f"line {line}: is no text of UTF-8; say which encoding it has, like utf-16")
    if not all(is_other):
        raise InvalidData(
            f"line {line}: is not UTF-8, but other lines are: it has two encodings; make it one, or say which"
        )
    try:
        raw.decode(GUESSED)
    except UnicodeDecodeError:
        raise InvalidData(f"line {line}: is not UTF-8; say which encoding it has, like latin-1") from None
    return GUESSED


def _is_other(line: bytes) -> bool:
    try:
        line.decode(UTF_8)
    except UnicodeDecodeError:
        return True
    return False


def _decoded(raw: bytes, encoding: str, delimiter: str, *, is_whole: bool) -> str:
    """Whole rows, as far as can be told: up to the end of a line that no value goes over."""
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
        text = decoder.decode(raw, final=is_whole).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InvalidData(f"line {line}: is not {encoding}{OTHER_ENCODING}") from None
    if is_whole:
        return text
    end = text.rfind("\n")
    quoted = re.finditer(_QUOTED.format(re.escape(delimiter)), text)
    for start, stop in reversed([found.span() for found in quoted if "\n" in found[0][1:]]):
        if start < end < stop:
            end = text.rfind("\n", 0, start + 1)
    return text[: end + 1] if end > 0 else text


def _format(sample: Path, text: str, file: DataFile, said: TextFormat) -> tuple[FileFormat, _Found]:
    is_said = said.model_fields_set
    if said.skip_lines:  # quotes in which the sniffer takes for those of cells
        lines = io.StringIO(text, newline="")
        for _ in range(said.skip_lines):
            lines.readline()
        text, sample = lines.read(), sample.with_name("rows.csv")
        sample.write_text(text, UTF_8, newline="")
    options = {name: getattr(said, name) for name in is_said if name in _OPTIONS}
    given = {_OPTIONS[name]: "" if value is None else value for name, value in options.items()}
    if "separator" not in is_said and has_tabs(file.path):
        given["delim"] = "\t"
    nulls: Sequence[str] = said.null
    found, point = _sniffed(sample, given, nulls), "."
    if "null" not in is_said:
        found, nulls = _with_nulls(sample, text, given, found)
    if found.delimiter != "," and "VARCHAR" in found.kinds and _DECIMAL_COMMA.search(text):
        with_comma = _sniffed(sample, {**given, "decimal_separator": ","}, nulls)
        if with_comma.kinds.count("DOUBLE") > found.kinds.count("DOUBLE"):
            found, point = with_comma, ","
    found = _unskipped(found, text)
    if len(found.names) == 1 and "separator" not in is_said:
        found = _divided(found, text)
    # as usual for what comes after the sample, where it has no quotes
    quote = found.quote or (None if '"' in text else '"')
    how: dict[str, Any] = {
        "separator": found.delimiter,
        "quote": quote,
        "escape": found.escape if found.escape not in ("", quote) else None,
        "header": found.has_header,
        "skip_lines": found.skip,
        "null": nulls,
    }
    how |= {name: getattr(said, name) for name in is_said if name != "encoding"}
    return FileFormat(text_format(**how), point, found.names), found


def _divided(found: _Found, text: str) -> _Found:
    """By what divides most lines, too: where these are not all alike, the sniffer sees a single column."""
    lines = [line for line in text.splitlines() if line.strip()]
    for delimiter in _DELIMITERS:
        divided = sum(delimiter in line for line in lines)
        if delimiter != found.delimiter and delimiter in lines[0] and divided * 2 > len(lines):
            names = tuple(next(csv.reader(lines[:1], delimiter=delimiter), []))
            kinds = ("VARCHAR",) * len(names)
            return replace(found, delimiter=delimiter, has_header=True, names=names, kinds=kinds, skip=0)
    return found


def _unskipped(found: _Found, text: str) -> _Found:
    """With the lines that look like rows: the sniffer takes what does not fit what follows for a title."""
    if not found.skip:
        return found
    lines = text.splitlines()
    before = lines[: found.skip]
    if found.skip * _TITLES_SHARE <= len(lines) or not any(found.delimiter in line for line in before):
        first = next(csv.reader([before[-1]], delimiter=found.delimiter), [])
        if found.has_header or len(first) != len(found.names) - 1:
            return found
        # the names of rows, as R writes them, have no name
        return replace(found, skip=found.skip - 1, has_header=True, names=(found.names[0], *first))
    names = tuple(next(csv.reader(lines[:1], delimiter=found.delimiter), []))
    return replace(found, skip=0, has_header=True, names=names, kinds=("VARCHAR",) * len(names))


def _with_nulls(
    sample: Path, text: str, options: Mapping[str, Any], found: _Found
) -> tuple[_Found, list[str]]:
    """Without what stands for null, if some column is of another type then."""
    if "VARCHAR" not in found.kinds:
        return found, []
    cells = set(re.split(rf"[{re.escape(found.delimiter)}\r\n]", text))
    there = [one for one in NULL_TEXTS if one in cells]
    if not there:
        return found, []
    without = _sniffed(sample, {**options, "delim": found.delimiter}, there)
    if len(without.kinds) != len(found.kinds) or without.kinds.count("VARCHAR") >= found.kinds.count(
        "VARCHAR"
    ):
        return found, []
    return without, there


def _sniffed(sample: Path, options: Mapping[str, Any], nulls: Sequence[str]) -> _Found:
    try:
        import duckdb
    except ImportError:
        raise not_installed("duckdb", "sql") from None
    given = "".join(f", {name} = ${name}" for name in options)
    statement = f"select * from sniff_csv($path, sample_size = -1, nullstr = $nulls{given}%s)"
    with duckdb.connect(config={"threads": 1}) as connection:
        for strictness in ("", ", strict_mode = false"):
            try:
                parameters = {"path": str(sample), "nulls": ["", *nulls], **options}
                answer = connection.execute(statement % strictness, parameters)
                row = answer.to_arrow_table().to_pylist()[0]
                break
            except duckdb.Error as error:
                why = error
        else:
            raise InvalidData(f"is no CSV whose format can be told: {one_line(why)[:120]}; say its delimiter")
    return _Found(
        row["Delimiter"],
        row["Quote"].replace(_NONE, ""),
        row["Escape"].replace(_NONE, ""),
        int(row["SkipRows"]),
        bool(row["HasHeader"]),
        tuple(column["name"] for column in row["Columns"]),
        tuple(column["type"] for column in row["Columns"]),
        row["DateFormat"],
        row["TimestampFormat"],
    )


def _named(sample: Path, how: FileFormat) -> tuple[tuple[str, ...], FileFormat]:
    """The names, and the format without them, where the header has them; none may be there twice."""
    names = TextFile(sample, how.text).header
    if names is None:
        return how.names, how
    doubled = next((name for name in names if name and names.count(name) > 1), None)
    if doubled is not None:
        raise InvalidData(f"has two columns {doubled!r}: give one of them another name in its header")
    if len(names) != len(how.names):
        return how.names, how  # one is missing, or others are before it
    # the sniffer trims names, and gives those to columns that have none
    chosen = tuple(name or other for name, other in zip(names, how.names, strict=True))
    return chosen, replace(how, names=() if chosen == names else chosen)


def _texts(sample: Path, how: FileFormat, names: Sequence[str]) -> pa.Table:
    """The sample as the reader will take it, without types."""
    batches = TextFile(sample, how.text, names).batches(dict.fromkeys(names, pa.string()))
    columns = [
        pa.chunked_array(some, pa.string()) for some in zip(*(one.columns for one in batches), strict=True)
    ]
    return pa.table(columns or [pa.array([], pa.string())] * len(names), names=list(names))


def _types(
    texts: pa.Table, found: _Found, file: DataFile, point: str
) -> tuple[dict[str, DataType], dict[str, str]]:
    types: dict[str, DataType] = {}
    time_formats: dict[str, str] = {}
    for name, kind in zip(texts.column_names, found.kinds, strict=True):
        column = texts.column(name).combine_chunks()
        given = file.given.types.get(name)
        if given is not None:
            types[name] = given
            continue
        types[name], how = _type(column, kind, found, point)
        if how is not None and name not in file.given.time_formats:
            time_formats[name] = how
    return types, time_formats


def _confirmed(
    sample: Path, how: FileFormat, types: Mapping[str, DataType], skipped: set[str]
) -> dict[str, DataType]:
    """Text in place of each type that the reader, too, must know, and does not find in the sample."""
    found = dict(types)
    text = TextFile(sample, how.text, list(types))
    while True:
        numbers = {
            name: arrow_type(kind) for name, kind in found.items() if kind in _READ and name not in skipped
        }
        try:
            for _ in text.batches(numbers, decimal_point=how.decimal_point):
                pass
        except UnfitCell as error:
            found[text.names[error.column]] = STRING
        else:
            return found


def _type(column: pa.Array, kind: str, found: _Found, point: str) -> tuple[DataType, str | None]:
    """What DuckDB says, if every text of the sample is such a value, and loses nothing as one; else text.

    A text has the format of times that all of its values with digits are written in.
    """
    proposed = with_infinities(column, _OF_DUCKDB.get(kind, STRING), point)
    if proposed == STRING or column.null_count == len(column):
        return STRING, None
    if proposed in (LONG, DOUBLE) and _any(column, f"{LEADING_ZERO}|{HEXADECIMAL}"):
        return STRING, None  # a code
    if proposed == DOUBLE and (_any(column, _WHOLE_AND_LONG) or not are_kept(column, point)):
        return STRING, None
    for how in _formats(proposed, found):
        if (proposed in _READ and how is None and proposed != DATE) or _fits(column, proposed, how):
            return proposed, how
    if proposed in TIMES:  # of which a table that has times names the value that is none
        times = pc.if_else(pc.match_substring_regex(column, "[0-9]"), column, None)
        return STRING, next((how for how in _formats(proposed, found) if _fits(times, proposed, how)), None)
    return STRING, None


def _formats(proposed: DataType, found: _Found) -> list[str | None]:
    sniffed = {DATE: found.date_format, TIMESTAMP: found.timestamp_format}.get(proposed)
    return [None] if not sniffed else [None, *formats_to_try(sniffed)]


def _fits(column: pa.Array, proposed: DataType, how: str | None) -> bool:
    try:
        value_column(column, Field("column", proposed, nullable=True), how)
    except InvalidData:
        return False
    return True


def _any(column: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(column, pattern)).as_py())
