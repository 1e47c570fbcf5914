"""The detection of a CSV file's format from its beginning. DuckDB's sniffer proposes, Arrow's reader checks.

DuckDB's reader is not used for the rows: it rounds 1.5 to a whole number, and drops the offsets of times.
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
    TYPES_OF_DUCKDB,
    formats_to_try,
    other_order,
    value_column,
)

SAMPLE_BYTES = 2 * 1024 * 1024
"""The size of the sample: the beginning of the file, after decompression."""
NULL_TEXTS = ("NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "nan", "NaN", "-", "?", ".")
"""Texts that often mean null, in columns whose other values are numbers, times or booleans."""
_READ = {BOOLEAN, LONG, DOUBLE, DATE}
"""The types that Arrow's CSV reader parses itself."""
_WHOLE_AND_LONG = r"^\s*[+-]?[0-9]{16,}\s*$"
_QUOTED = r'(?:^|[,;|\t\r\n{}])"[^"]*(?:""[^"]*)*'
"""A pattern of a quoted cell without its closing quote. A doubled quote is a character of the value."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_OPTIONS = {
    "separator": "delim",
    "quote": "quote",
    "escape": "escape",
    "header": "header",
    "skip_lines": "skip",
}
"""The names of options in `TextFormat`, and in DuckDB's sniffer."""
_DELIMITERS = (",", ";", "\t", "|")
_TITLES_SHARE = 10
"""Skipped lines before the header count as titles only if they are less than 1/10 of the sample's lines."""
_NONE = "(empty)"
GUESSED = "cp1252"


@dataclass(frozen=True)
class Sniffed:
    """The detected format of a file, the types of its columns, and its sample as texts.

    `is_whole` is True if the sample is the whole file. `unsure` has another possible time format for each
    column whose days could be months.
    """

    format: FileFormat
    types: Mapping[str, DataType]
    sample: pa.Table
    is_whole: bool
    unsure: Mapping[str, str]


@dataclass(frozen=True)
class _Proposal:
    """The answer of DuckDB's sniffer."""

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
    """Returns the detected format of a file. Options that the caller gave are used as they are.

    Raises `InvalidData` if the format cannot be detected, or if the file is not UTF-8 and neither an encoding
    was given nor `guess_encoding` is set.
    """
    raw, is_whole = _head(file.path)
    encoding = file.given.encoding or guessed_encoding(raw)
    if not guess_encoding and encoding == GUESSED and file.given.encoding is None:
        raise InvalidData("is not UTF-8: give its encoding, like latin-1")
    said = text_format(**file.given.said)
    text = _decoded(raw, encoding, said.separator, is_whole=is_whole)
    if not text.strip():
        raise InvalidData("is empty, so its columns are unknown")
    with tempfile.TemporaryDirectory(prefix="dormouse-") as folder:
        sample = Path(folder) / "sample.csv"
        sample.write_text(text, UTF_8, newline="")
        how, proposal = _format(sample, text, file, said)
        names, how = _named(sample, how)
        texts = _texts(sample, how, names)
        types, time_formats = _types(texts, proposal, file, how.decimal_point)
        chosen = {**time_formats, **file.given.time_formats}
        types = _confirmed(sample, how, types, {*file.given.types, *chosen})
    others = {
        name: other_order(texts[name], time_format, is_whole=is_whole)
        for name, time_format in time_formats.items()
    }
    how = replace(how, text=how.text.model_copy(update={"encoding": encoding}))
    return Sniffed(
        replace(how, time_formats=tuple(sorted(chosen.items()))),
        types,
        texts,
        is_whole,
        {name: other for name, other in others.items() if other is not None},
    )


def other_format(file: TextFile) -> TextFormat | None:
    """Returns the detected format of a file that was opened with the usual one and whose header is one cell.

    Such a file probably has another separator. Returns None if the header does not contain the detected
    separator, or if the format cannot be detected.
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
    """Returns the encoding of the byte order mark, or UTF-8 if the text is valid UTF-8, else Windows-1252.

    Raises `InvalidData` if only some lines are valid UTF-8, or the text cannot be Windows-1252.
    """
    marked = next((name for mark, name in BYTE_ORDER_MARKS if raw.startswith(mark)), None)
    if marked is not None:
        return marked
    try:
        codecs.getincrementaldecoder(UTF_8)().decode(raw)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
    else:
        return UTF_8
    is_other = [_is_other(text) for text in raw.splitlines() if not text.isascii()]
    if b"\0" in raw:
        raise InvalidData(f"line {line}: is not UTF-8 text; give its encoding, like utf-16")
    if not all(is_other):
        raise InvalidData(
            f"line {line}: is not UTF-8, but other lines are: it has two encodings; convert it to one"
        )
    try:
        raw.decode(GUESSED)
    except UnicodeDecodeError:
        raise InvalidData(f"line {line}: is not UTF-8; give its encoding, like latin-1") from None
    return GUESSED


def _is_other(line: bytes) -> bool:
    try:
        line.decode(UTF_8)
    except UnicodeDecodeError:
        return True
    return False


def _decoded(raw: bytes, encoding: str, delimiter: str, *, is_whole: bool) -> str:
    """Returns the decoded text up to its last whole row, which ends at a line end outside quoted values.

    With `is_whole`, `raw` is the whole file, and all of it is returned. Raises `InvalidData`.
    """
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
    for start, stop in reversed([match.span() for match in quoted if "\n" in match[0][1:]]):
        if start < end < stop:
            end = text.rfind("\n", 0, start + 1)
    return text[: end + 1] if end > 0 else text


def _format(sample: Path, text: str, file: DataFile, said: TextFormat) -> tuple[FileFormat, _Proposal]:
    """Returns the format of a sample, and the sniffer's proposal. `said` has the options that were given."""
    is_said = said.model_fields_set
    if said.skip_lines:  # the sniffer would take quotes in the skipped lines for quotes of cells
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
    proposal, point = _sniffed(sample, given, nulls), "."
    if "null" not in is_said:
        proposal, nulls = _with_nulls(sample, text, given, proposal)
    if proposal.delimiter != "," and "VARCHAR" in proposal.kinds and _DECIMAL_COMMA.search(text):
        with_comma = _sniffed(sample, {**given, "decimal_separator": ","}, nulls)
        if with_comma.kinds.count("DOUBLE") > proposal.kinds.count("DOUBLE"):
            proposal, point = with_comma, ","
    proposal = _unskipped(proposal, text)
    if len(proposal.names) == 1 and "separator" not in is_said:
        proposal = _divided(proposal, text)
    # if the sample has no quotes, assume the usual one for the rest of the file
    quote = proposal.quote or (None if '"' in text else '"')
    how: dict[str, Any] = {
        "separator": proposal.delimiter,
        "quote": quote,
        "escape": proposal.escape if proposal.escape not in ("", quote) else None,
        "header": proposal.has_header,
        "skip_lines": proposal.skip,
        "null": nulls,
    }
    how |= {name: getattr(said, name) for name in is_said if name != "encoding"}
    return FileFormat(text_format(**how), point, proposal.names), proposal


def _divided(proposal: _Proposal, text: str) -> _Proposal:
    """Returns the proposal with another delimiter that is in the first line and in over half of the lines.

    Returns the proposal unchanged if there is none. The sniffer itself proposes a single column for lines
    with different numbers of cells.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    for delimiter in _DELIMITERS:
        divided = sum(delimiter in line for line in lines)
        if delimiter != proposal.delimiter and delimiter in lines[0] and divided * 2 > len(lines):
            names = tuple(next(csv.reader(lines[:1], delimiter=delimiter), []))
            kinds = ("VARCHAR",) * len(names)
            return replace(proposal, delimiter=delimiter, has_header=True, names=names, kinds=kinds, skip=0)
    return proposal


def _unskipped(proposal: _Proposal, text: str) -> _Proposal:
    """Returns the proposal with fewer skipped lines, if the skipped lines look like a header or rows.

    The sniffer skips leading lines that do not fit the following ones, as if they were titles.
    """
    if not proposal.skip:
        return proposal
    lines = text.splitlines()
    before = lines[: proposal.skip]
    if proposal.skip * _TITLES_SHARE <= len(lines) or not any(proposal.delimiter in line for line in before):
        first = next(csv.reader([before[-1]], delimiter=proposal.delimiter), [])
        if proposal.has_header or len(first) != len(proposal.names) - 1:
            return proposal
        # R writes row names, but no header for their column
        return replace(proposal, skip=proposal.skip - 1, has_header=True, names=(proposal.names[0], *first))
    names = tuple(next(csv.reader(lines[:1], delimiter=proposal.delimiter), []))
    return replace(proposal, skip=0, has_header=True, names=names, kinds=("VARCHAR",) * len(names))


def _with_nulls(
    sample: Path, text: str, options: Mapping[str, Any], proposal: _Proposal
) -> tuple[_Proposal, list[str]]:
    """Returns a new proposal with texts like "NA" as null, and the list of these texts.

    Returns the old proposal and an empty list if this does not turn a text column into one of another type.
    """
    if "VARCHAR" not in proposal.kinds:
        return proposal, []
    cells = set(re.split(rf"[{re.escape(proposal.delimiter)}\r\n]", text))
    null_texts = [text for text in NULL_TEXTS if text in cells]
    if not null_texts:
        return proposal, []
    without = _sniffed(sample, {**options, "delim": proposal.delimiter}, null_texts)
    if len(without.kinds) != len(proposal.kinds) or without.kinds.count("VARCHAR") >= proposal.kinds.count(
        "VARCHAR"
    ):
        return proposal, []
    return without, null_texts


def _sniffed(sample: Path, options: Mapping[str, Any], nulls: Sequence[str]) -> _Proposal:
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
            raise InvalidData(
                f"is not a CSV file whose format can be detected: {one_line(why)[:120]}; give its delimiter"
            )
    return _Proposal(
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
    """Returns the names of the columns, and the format. The format has names that differ from the header's.

    Raises `InvalidData` if a name occurs twice.
    """
    names = TextFile(sample, how.text).header
    if names is None:
        return how.names, how
    doubled = next((name for name in names if name and names.count(name) > 1), None)
    if doubled is not None:
        raise InvalidData(f"has two columns {doubled!r}: give one of them another name in its header")
    if len(names) != len(how.names):
        return how.names, how  # the header lacks a name, or other lines are before it
    # the sniffer trims names, and makes up names for columns without one
    chosen = tuple(name or other for name, other in zip(names, how.names, strict=True))
    return chosen, replace(how, names=() if chosen == names else chosen)


def _texts(sample: Path, how: FileFormat, names: Sequence[str]) -> pa.Table:
    """Returns the sample as the reader splits it into cells, all as texts."""
    batches = TextFile(sample, how.text, names).batches(dict.fromkeys(names, pa.string()))
    by_column = zip(*(batch.columns for batch in batches), strict=True)
    columns = [pa.chunked_array(chunks, pa.string()) for chunks in by_column]
    return pa.table(columns or [pa.array([], pa.string())] * len(names), names=list(names))


def _types(
    texts: pa.Table, proposal: _Proposal, file: DataFile, point: str
) -> tuple[dict[str, DataType], dict[str, str]]:
    """Returns the type of each column, and the time formats of columns for which none was given."""
    types: dict[str, DataType] = {}
    time_formats: dict[str, str] = {}
    for name, kind in zip(texts.column_names, proposal.kinds, strict=True):
        column = texts.column(name).combine_chunks()
        given = file.given.types.get(name)
        if given is not None:
            types[name] = given
            continue
        types[name], how = _type(column, kind, proposal, point)
        if how is not None and name not in file.given.time_formats:
            time_formats[name] = how
    return types, time_formats


def _confirmed(
    sample: Path, how: FileFormat, types: Mapping[str, DataType], skipped: set[str]
) -> dict[str, DataType]:
    """Returns the types, with STRING for columns that Arrow cannot parse. Ignores `skipped` columns."""
    confirmed = dict(types)
    text = TextFile(sample, how.text, list(types))
    while True:
        numbers = {
            name: arrow_type(kind)
            for name, kind in confirmed.items()
            if kind in _READ and name not in skipped
        }
        try:
            for _ in text.batches(numbers, decimal_point=how.decimal_point):
                pass
        except UnfitCell as error:
            confirmed[text.names[error.column]] = STRING
        else:
            return confirmed


def _type(column: pa.Array, kind: str, proposal: _Proposal, point: str) -> tuple[DataType, str | None]:
    """Returns the type that DuckDB proposes, if all values of the sample fit it without loss; else STRING.

    Also returns the time format, or None. A STRING column has one if all its values with digits fit it.
    """
    proposed = with_infinities(column, TYPES_OF_DUCKDB.get(kind, STRING), point)
    if proposed == STRING or column.null_count == len(column):
        return STRING, None
    if proposed in (LONG, DOUBLE) and _any(column, f"{LEADING_ZERO}|{HEXADECIMAL}"):
        return STRING, None  # a code, such as a postal code, whose zeros count
    if proposed == DOUBLE and (_any(column, _WHOLE_AND_LONG) or not are_kept(column, point)):
        return STRING, None
    for how in _formats(proposed, proposal):
        if (proposed in _READ and how is None and proposed != DATE) or _fits(column, proposed, how):
            return proposed, how
    if proposed in TIMES:  # a table with a time column can then name the values that do not fit
        times = pc.if_else(pc.match_substring_regex(column, "[0-9]"), column, None)
        return STRING, next(
            (how for how in _formats(proposed, proposal) if _fits(times, proposed, how)), None
        )
    return STRING, None


def _formats(proposed: DataType, proposal: _Proposal) -> list[str | None]:
    sniffed = {DATE: proposal.date_format, TIMESTAMP: proposal.timestamp_format}.get(proposed)
    return [None] if not sniffed else [None, *formats_to_try(sniffed)]


def _fits(column: pa.Array, proposed: DataType, how: str | None) -> bool:
    """Returns whether all texts of a column can be converted to a type, with the time format if given."""
    try:
        value_column(column, Field("column", proposed, nullable=True), how)
    except InvalidData:
        return False
    return True


def _any(column: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(column, pattern)).as_py())
