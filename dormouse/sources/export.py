"""The writers of rows as JSON, CSV, TSV, Arrow and Parquet, which write piece by piece as rows stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from io import BytesIO
from math import isfinite
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import is_like
from dormouse.errors import InvalidInput
from dormouse.model.loops import Progress, no_progress
from dormouse.model.types import BYTES, STRING, base64_text, interval_text
from dormouse.objects.names import COMPRESSIONS

# Arrow columns become JSON and CSV a column at a time, without a Python object for each number or plain text.

_TEXT = pa.large_string()
FEW_VALUES = 1_024
_DAYS = (-719_162, 2_932_897)
"""The first days of the years 1 and 10000, counted from 1970-01-01."""
_OF_DAY = {unit: 86_400 * 1_000**power for power, unit in enumerate(("s", "ms", "us", "ns"))}
_CYCLE_DAYS = 146_097
"""The number of days in 400 years, after which the Gregorian calendar repeats."""
_CONTROL = r"[\x00-\x1f]"


def json_rows(batch: pa.RecordBatch, ending: str = "\n") -> pa.Buffer | bytes:
    """Returns each row as a JSON object in UTF-8, followed by the ending."""
    if not batch.num_rows:
        return b""
    if not batch.num_columns:
        return f"{{}}{ending}".encode() * batch.num_rows
    if batch.num_rows * batch.num_columns <= FEW_VALUES:
        return _few_rows(batch, f"}}{ending}")
    rows = _objects(batch.schema, batch.columns, f"}}{ending}")
    _, offsets, data = rows.buffers()
    bounds = pa.Array.from_buffers(pa.int64(), len(rows) + 1, [None, offsets])
    return data.slice(bounds[0].as_py(), bounds[-1].as_py() - bounds[0].as_py())


def _few_rows(batch: pa.RecordBatch, closing: str) -> bytes:
    """Returns the same as `json_rows`. It is faster for few rows, for which Arrow's calls cost most."""
    parts, columns = [], []
    for number, (field, column) in enumerate(zip(batch.schema, batch.columns, strict=True)):
        parts.append(("," if number else "{") + json.dumps(field.name) + ":")
        columns.append(_few_texts(column))
    rows = zip(*columns, strict=True)
    return "".join(
        text for row in rows for pair in (*zip(parts, row, strict=True), (closing,)) for text in pair
    ).encode()


def python_values(column: pa.Array) -> list[Any]:
    """Returns the values as Python objects, or all as texts if Python cannot hold one of them.

    Python's times are limited to the years 1 to 9999.
    """
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return list((_texts if pa.types.is_nested(column.type) else plain_text)(column).to_pylist())


def _few_texts(column: pa.Array) -> list[str]:
    kind = column.type
    if pa.types.is_integer(kind):
        return ["null" if value is None else str(value) for value in column.to_pylist()]
    if (pa.types.is_float32(kind) or pa.types.is_float64(kind)) and all(
        value is None or isfinite(value) for value in column.to_pylist()
    ):
        return ["null" if text is None else text for text in column.cast(_TEXT).to_pylist()]
    if _is_time(kind):
        values = plain_text(column).to_pylist()
    elif is_like(kind, STRING):
        values = column.to_pylist()
    else:
        texts: list[str] = json_text(column).to_pylist()
        return texts
    return ["null" if value is None else json.dumps(value, ensure_ascii=False) for value in values]


def csv_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type to cast a column to before Arrow's CSV writer writes it: itself or text."""
    if pa.types.is_dictionary(kind):
        return csv_type(kind.value_type)
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return kind if plain else _TEXT


def csv_column(column: pa.Array) -> pa.Array:
    """Returns a column as its `csv_type`: numbers and booleans unchanged, nested as JSON, others as text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == csv_type(column.type):
        return column
    return _texts(column) if pa.types.is_nested(column.type) else plain_text(column)


def json_text(column: pa.Array) -> pa.Array:
    """Returns the JSON text of each value. Nulls become the text "null"."""
    texts = _texts(column)
    return pc.fill_null(texts, "null") if texts.null_count else texts


def plain_text(column: pa.Array) -> pa.Array:
    """Returns values for which JSON has no type as texts without quotes. Nulls stay null."""
    kind = column.type
    if _is_time(kind):
        return _time_texts(column)
    if is_like(kind, BYTES):
        return pa.array([None if v is None else base64_text(v) for v in column.to_pylist()], _TEXT)
    if pa.types.is_interval(kind):
        return pa.array([None if v is None else interval_text(v) for v in column.to_pylist()], _TEXT)
    try:
        return column.cast(_TEXT)
    except pa.ArrowNotImplementedError:
        return pa.array([None if v is None else str(v) for v in column.to_pylist()], _TEXT)


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _time_texts(column: pa.Array) -> pa.Array:
    """Returns days and times in ISO 8601, with Z if the type has a time zone."""
    is_day = pa.types.is_date32(column.type)
    texts = pc.replace_substring(column.cast(_TEXT), " ", "T", max_replacements=1)
    of_day = 1 if is_day else _OF_DAY[column.type.unit]
    counts = column.view(pa.int32() if is_day else pa.int64()).cast(pa.int64())
    endless = (1 << (31 if is_day else 63)) - 1
    first, end = max(_DAYS[0] * of_day, 1 - endless), min(_DAYS[1] * of_day, endless)
    far = pc.or_(pc.less(counts, first), pc.greater_equal(counts, end))
    if not pc.any(far).as_py():
        return texts
    # Arrow gives no text for some years outside 1 to 9999, and a wrong one for others
    ends = "" if is_day or column.type.tz is None else "Z"
    far_texts = [_far_text(count, of_day, endless, ends) for count in counts.filter(far).to_pylist()]
    return pc.replace_with_mask(texts, pc.fill_null(far, False), pa.array(far_texts, _TEXT))


def moment_texts(column: pa.Array) -> pa.Array:
    """Returns milliseconds since 1970 in ISO 8601, in UTC. Times outside the years 1 to 9999 stay numbers."""
    first, end = (days * _OF_DAY["ms"] for days in _DAYS)
    far = pc.or_(pc.less(column, first), pc.greater_equal(column, end))
    near = pc.if_else(far, pa.scalar(0, column.type), column)
    return pc.if_else(far, column.cast(_TEXT), _time_texts(near.cast(pa.timestamp("ms", "UTC"))))


def _far_text(count: int, of_day: int, endless: int, ends: str) -> str:
    """Returns the ISO 8601 text of a day or time in any year. The years before 1 are 0, -1 and so on.

    - `count`: the number of units since 1970.
    - `of_day`: the number of units in a day; 1 if the unit is a day.
    - `endless`: the count that stands for infinity in DuckDB; its negative is minus infinity.
    - `ends`: the text to append, such as Z.
    """
    if abs(count) == endless:
        return "infinity" if count > 0 else "-infinity"
    days, rest = divmod(count, of_day)
    cycles, days = divmod(days, _CYCLE_DAYS)
    day = date(1970, 1, 1) + timedelta(days)
    year = day.year + 400 * cycles
    text = f"{year:0{4 + (year < 0)}}-{day:%m-%d}"
    if of_day == 1:
        return text
    seconds, parts = divmod(rest, of_day // 86_400)
    digits = len(str(of_day // 86_400)) - 1
    clock = f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}T{clock}{f'.{parts:0{digits}}' if digits else ''}{ends}"


def _texts(column: pa.Array) -> pa.Array:
    for are_of, text in _KINDS:
        if any(is_of(column.type) for is_of in are_of):
            return text(column)
    return _quoted(plain_text(column))


def _numbers(column: pa.Array) -> pa.Array:
    if pa.types.is_float16(column.type):
        column = column.cast(pa.float32())
    texts = column.cast(_TEXT)
    finite = pc.is_finite(column)
    if pc.all(finite).as_py() is not False:
        return texts
    named = pc.if_else(
        pc.is_nan(column), '"NaN"', pc.if_else(pc.less(column, 0), '"-Infinity"', '"Infinity"')
    )
    return pc.if_else(finite, texts, named.cast(_TEXT))


def _quoted(texts: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(texts, _CONTROL)).as_py():
        named = [None if v is None else json.dumps(v, ensure_ascii=False) for v in texts.to_pylist()]
        return pa.array(named, _TEXT)
    for special in ("\\", '"'):
        if pc.any(pc.match_substring(texts, special)).as_py():
            texts = pc.replace_substring(texts, special, f"\\{special}")
    return pc.binary_join_element_wise(_literal('"'), texts, _literal('"'), _literal(""))


def _list(column: pa.Array) -> pa.Array:
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    return _bracketed(column, json_text(column.flatten()))


def _map(column: pa.Array) -> pa.Array:
    """Returns each map as a JSON array of [key, value] pairs.

    Casts the maps to lists first, because `flatten` of lists leaves out the entries behind null maps.
    """
    lists = column.cast(pa.list_(pa.struct([("k", column.type.key_type), ("v", column.type.item_type)])))
    entries = lists.flatten()
    keys, values = json_text(entries.field(0)), json_text(entries.field(1))
    pairs = pc.binary_join_element_wise(
        _literal("["), keys, _literal(","), values, _literal("]"), _literal("")
    )
    return _bracketed(lists, pairs)


def _bracketed(lists: pa.Array, texts: pa.Array) -> pa.Array:
    """Returns each list as a JSON array. `texts` has the JSON of the elements of all lists, in order."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(counts)])
    joined = pc.binary_join(pa.LargeListArray.from_arrays(offsets, texts), _literal(","))
    arrays = pc.binary_join_element_wise(_literal("["), joined.cast(_TEXT), _literal("]"), _literal(""))
    return pc.if_else(lists.is_valid(), arrays, pa.scalar(None, _TEXT))


def _struct(column: pa.Array) -> pa.Array:
    if not column.type.num_fields:
        return pc.if_else(column.is_valid(), _literal("{}"), pa.scalar(None, _TEXT))
    objects = _objects(column.type, column.flatten(), "}")
    return pc.if_else(column.is_valid(), objects, pa.scalar(None, _TEXT))


def _objects(fields: Iterable[pa.Field], columns: Sequence[pa.Array], closing: str) -> pa.Array:
    """Returns the JSON object of each row, followed by `closing`. There must be at least one column."""
    parts: list[pa.Array | pa.Scalar] = []
    for number, (field, column) in enumerate(zip(fields, columns, strict=True)):
        parts += [_literal(("," if number else "{") + json.dumps(field.name) + ":"), json_text(column)]
    return pc.binary_join_element_wise(*parts, _literal(closing), _literal(""))


def _literal(text: str) -> pa.Scalar:
    return pa.scalar(text, _TEXT)


# the function that makes the JSON text of each kind of type; all other types become quoted texts
_KINDS: tuple[tuple[tuple[Callable[[pa.DataType], bool], ...], Callable[[pa.Array], pa.Array]], ...] = (
    ((pa.types.is_dictionary,), lambda column: _texts(column.dictionary_decode())),
    ((pa.types.is_integer, pa.types.is_boolean, pa.types.is_null), lambda column: column.cast(_TEXT)),
    ((pa.types.is_floating,), _numbers),
    ((lambda kind: is_like(kind, STRING),), lambda column: _quoted(column.cast(_TEXT))),
    ((pa.types.is_map,), _map),
    ((pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list), _list),
    ((pa.types.is_struct,), _struct),
)


RowsFormat = Literal["csv", "tsv", "json", "lines", "arrow", "parquet"]
_FORMATS: dict[str, RowsFormat] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".json": "json",
    ".jsonl": "lines", ".ndjson": "lines", ".arrow": "arrow", ".arrows": "arrow",
}  # fmt: skip


class Writer(Protocol):
    """A writer of the rows of one answer."""

    def begin(self, schema: pa.Schema) -> bytes:
        """Returns the bytes before the rows."""
        ...

    def rows(self, batch: pa.RecordBatch) -> bytes | pa.Buffer:
        """Writes a batch; returns the bytes that are ready, which can be fewer, or of earlier batches."""
        ...

    def end(self) -> bytes:
        """Returns the bytes after the last row."""
        ...


def export(
    reader: pa.RecordBatchReader, sink: BinaryIO, file_format: str, progress: Progress = no_progress
) -> int:
    """Writes all rows as "csv", "tsv", "json", "lines" (JSON lines), "arrow" or "parquet".

    Returns the number of rows. Calls `progress` before each batch is written, with the number of rows up to
    its end. Raises `InvalidInput` for an unknown format.
    """
    writers: dict[str, Callable[[], Writer]] = {
        "csv": Csv, "tsv": lambda: Csv("\t"), "json": JsonArray, "lines": JsonLines, "arrow": ArrowStream,
        "parquet": Parquet,
    }  # fmt: skip
    if file_format not in writers:
        raise InvalidInput(f"format {file_format!r} is not known; use {', '.join(writers)}")
    return export_by(writers[file_format](), reader, sink, progress)


def export_by(writer: Writer, reader: pa.RecordBatchReader, sink: BinaryIO, progress: Progress) -> int:
    """Writes all rows with the writer, and returns their number."""
    count = 0
    sink.write(writer.begin(reader.schema))
    for batch in reader:
        count += batch.num_rows
        progress(count, None)
        sink.write(writer.rows(batch))
    sink.write(writer.end())
    sink.flush()
    return count


def format_of_name(path: str | PathLike[str]) -> RowsFormat | None:
    """Returns the format that a file name like rows.csv.gz implies, or None."""
    name = Path(fspath(path))
    return _FORMATS.get(Path(name.stem if _compression(name) else name.name).suffix.lower())


def check_compression(path: str | PathLike[str], file_format: RowsFormat) -> None:
    """Raises `InvalidInput` for a name like rows.parquet.gz: such formats have their own compression."""
    name = Path(fspath(path))
    if file_format in ("parquet", "arrow") and _compression(name):
        raise InvalidInput(f"{file_format} is not written as {name.suffix}: call the file {name.stem!r}")


@contextmanager
def compressed(sink: BinaryIO, path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a sink that writes to `sink`, compressed if the name ends like .gz. Leaves `sink` open."""
    compression = _compression(Path(fspath(path)))
    if compression is None:
        yield sink
        return
    # Arrow closes the file that it writes to, so give it another file object
    raw = open(sink.fileno(), "wb", closefd=False)  # noqa: SIM115
    with pa.CompressedOutputStream(pa.PythonFile(raw, mode="w"), compression) as stream:
        yield cast(BinaryIO, stream)


def _compression(name: Path) -> str | None:
    return COMPRESSIONS.get(name.suffix.lower())


class JsonLines:
    """The format JSON lines: one object a line."""

    def begin(self, schema: pa.Schema) -> bytes:
        return b""

    def rows(self, batch: pa.RecordBatch) -> bytes | pa.Buffer:
        return json_rows(batch)

    def end(self) -> bytes:
        return b""


class JsonArray:
    """The format JSON: an array with one object for each row, one row a line."""

    def begin(self, schema: pa.Schema) -> bytes:
        self._held = b""
        return b"["

    def rows(self, batch: pa.RecordBatch) -> bytes:
        # the last comma is held back until the next row, since JSON allows no comma before the end
        written = self._held + bytes(json_rows(batch, ",\n"))
        self._held = b",\n" if written else b""
        return written.removesuffix(b",\n")

    def end(self) -> bytes:
        return b"]\n"


class WriterOfArrow:
    """A writer of Arrow that writes into a buffer. `taken` returns and removes the written bytes."""

    def __init__(self, open_writer: Callable[[pa.NativeFile], Any]) -> None:
        self._file = BytesIO()
        self._writer = open_writer(pa.PythonFile(self._file, mode="w"))

    def write_batch(self, batch: pa.RecordBatch, **more: Any) -> bytes:
        self._writer.write_batch(batch, **more)
        return self.taken()

    def end(self) -> bytes:
        self._writer.close()
        return self.taken()

    def taken(self) -> bytes:
        written = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return written


class _OfArrow:
    """A base class of the formats that Arrow writes."""

    _writer: WriterOfArrow

    def rows(self, batch: pa.RecordBatch) -> bytes:
        return self._writer.write_batch(batch)

    def end(self) -> bytes:
        return self._writer.end()


class Csv(_OfArrow):
    """The format CSV (RFC 4180). Texts are quoted, so that an empty text differs from null."""

    def __init__(self, separator: str = ",", *, header: bool = True) -> None:
        self._how = pa_csv.WriteOptions(include_header=header, delimiter=separator)

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema = pa.schema([field.with_type(csv_type(field.type)) for field in schema])
        self._writer = WriterOfArrow(
            lambda file: pa_csv.CSVWriter(file, self._schema, write_options=self._how)
        )
        return self._writer.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        columns = [csv_column(column) for column in batch.columns]
        return super().rows(pa.RecordBatch.from_arrays(columns, schema=self._schema))


class ArrowStream(_OfArrow):
    """The Arrow IPC streaming format."""

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema = schema
        self._writer = WriterOfArrow(lambda file: pa.ipc.new_stream(file, schema))
        return self._writer.taken()


class Parquet(_OfArrow):
    """Parquet, compressed with zstd."""

    def begin(self, schema: pa.Schema) -> bytes:
        try:
            self._writer = WriterOfArrow(lambda file: pq.ParquetWriter(file, schema, compression="zstd"))
        except pa.ArrowNotImplementedError:
            kinds = ", ".join(f"{field.name!r} is {field.type}" for field in schema)
            raise InvalidInput(
                f"Parquet does not support all of these types; cast them to VARCHAR: {kinds}"
            ) from None
        return self._writer.taken()
