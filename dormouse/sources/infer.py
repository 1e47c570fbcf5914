"""The inference of a table's schema from the columns of files or data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import data_type
from dormouse.errors import InvalidData, InvalidSchema
from dormouse.model.schema import Field, Schema
from dormouse.model.text import did_you_mean
from dormouse.model.types import DOUBLE, FLOAT, INT, LONG, STRING, DataType
from dormouse.sources.data_files import DataFile, Files, find_files
from dormouse.sources.given_rows import INDEX, are_paths, as_arrow
from dormouse.sources.json_files import is_empty
from dormouse.sources.text_reader import naming
from dormouse.sources.text_values import TIMES

SAMPLE_ROWS = 5
_WHOLE = re.compile("0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class Inferred:
    """The result of inferring a schema.

    - `sample`: the first rows of a CSV file as texts, else None.
    - `written`: a description of how the format of the first file differs from the usual one, or "".
    - `files`: the given data; for files, `Files` with the detected formats, to load them with.
    - `unsure`: another possible time format for each column whose days could be months.
    """

    schema: Schema
    sample: pa.Table | None
    written: str
    files: Any
    unsure: Mapping[str, str]


def schema_like(data: Any, row_keys: Sequence[str] = (), sort_keys: Sequence[str] = ()) -> Schema:
    """Returns the schema of files or data, with the given columns as keys; see `infer`."""
    return infer(data, row_keys, sort_keys).schema


def infer(
    data: Any, row_keys: Sequence[str] = (), sort_keys: Sequence[str] = (), types: Mapping[str, DataType] = {}
) -> Inferred:
    """Returns the schema of data, or of the first file that has rows. Columns that are not keys are values.

    `types` replaces inferred types. In text files, the type of a column is one that fits all values of the
    file's beginning, and values are nullable. In other data, types and nullability are those of the data.
    Raises `InvalidData` if the data cannot be read, and `InvalidSchema` if a column's type is not supported
    or a column cannot be a key.
    """
    sample, written, files = None, "", data
    unsure: Mapping[str, str] = {}
    if are_paths(data):
        given = data if isinstance(data, Files) else Files(data)
        types = {**given.types, **types}
        name, columns, sample, files, unsure = _of_files(replace(given, types=types))
        written = _description(files, unsure)
        if given.row_number is not None:
            _check_new(given.row_number, columns)
            columns = {given.row_number: (LONG, False), **columns}
            row_keys = row_keys or [given.row_number]
    else:
        name, columns = "the data", _of_data(data)
    unknown = next((column for column in types if column not in columns), None)
    if unknown is not None:
        raise InvalidSchema(f"{name} has no column {unknown!r}{did_you_mean(unknown, columns)}")
    columns = {column: (types.get(column, kind), null) for column, (kind, null) in columns.items()}
    return Inferred(_schema(name, columns, row_keys, sort_keys, sample), sample, written, files, unsure)


_Columns = dict[str, tuple[DataType, bool]]
"""The type of each column, and whether it may be null."""


def columns_of(data: Any) -> tuple[Any, dict[str, DataType]]:
    """Returns the data to read afterwards, and the types of all columns. Looks into every given file.

    The caller must read the returned data, because the given data may be a stream, of which the first batch
    was taken. Raises `InvalidData` if the data cannot be read, or if the types of a column in several files
    have no common type.
    """
    if are_paths(data):
        given = data if isinstance(data, Files) else Files(data)
        files = find_files(given)
        columns: dict[str, DataType] = {}
        untyped: dict[str, DataType] = {}
        for file in files:
            types, has_rows = _types_of(file)
            if not has_rows:
                untyped |= types
                continue
            for name, kind in types.items():
                columns[name] = _common(file, name, columns.get(name, kind), kind)
        return replace(given, found=tuple(files)), untyped | columns
    rows = as_arrow(data)
    if rows is None and isinstance(data, Iterable) and not isinstance(data, str | bytes):
        batches = iter(data)
        rows = next(batches, None)
        data = [] if rows is None else chain([rows], batches)
    elif isinstance(rows, pa.RecordBatchReader):
        data = rows  # a stream can be opened only once
    if not isinstance(rows, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return data, {}
    return data, columns_of_arrow(rows.schema)


def columns_of_arrow(schema: pa.Schema) -> dict[str, DataType]:
    """Returns the types of columns. Raises `InvalidSchema` for a type that is not supported."""
    return {name: kind for name, (kind, _) in _of_arrow(schema).items()}


def _types_of(file: DataFile) -> tuple[dict[str, DataType], bool]:
    """Returns the types of a file's columns, and whether rows confirm them.

    The second part is False for an empty file, and for a CSV file with only a header.
    """
    has_rows = True
    with naming(file.name):
        if is_empty(file):
            return {}, False
        if file.kind == "csv":
            columns, sample, *_ = _of_csv(file)
            has_rows = sample.num_rows > 0
        else:
            columns = _of_json(file) if file.kind == "json" else _of_parquet(file)
    folders = {name: _of_texts([text])[0] for name, text in file.folders if name not in columns}
    return {name: kind for name, (kind, _) in columns.items()} | folders, has_rows


def _common(file: DataFile, name: str, earlier: DataType, kind: DataType) -> DataType:
    """Returns the type that holds the values of both types. Raises `InvalidData` if there is none."""
    if earlier == kind:
        return kind
    for types in ((INT, LONG, DOUBLE), (FLOAT, DOUBLE)):
        if earlier in types and kind in types:
            return max(earlier, kind, key=types.index)
    raise InvalidData(
        f"file {file.name!r}: column {name!r} is {kind}, but {earlier} in an earlier file: add the column "
        "with the right type (add_column), then ingest the files"
    )


def _check_new(name: str, columns: _Columns) -> None:
    """Raises `InvalidSchema` if the column for the numbers of rows exists already."""
    if name in columns:
        raise InvalidSchema(f"there is a column {name!r} already: make it the key, or choose another name")


def _description(files: Files, unsure: Mapping[str, str]) -> str:
    """Returns a description of how the format of the first text file differs from the usual one."""
    how = [str(file_format) for file_format in files.formats.values()]
    return "; ".join([*how, *(f"times of {name!r} could also be {other}" for name, other in unsure.items())])


def _of_files(given: Files) -> tuple[str, _Columns, pa.Table | None, Files, Mapping[str, str]]:
    """Returns the name of the first file with rows and its columns, then `sample`, `files` and `unsure`.

    The last three are those of `Inferred`.
    """
    files = find_files(given)
    file = next((file for file in files if _has_rows(file)), files[0])
    with naming(file.name):
        if file.kind == "csv":
            columns, sample, given, unsure = _of_csv(file)
        else:
            columns, sample, unsure = _of_json(file) if file.kind == "json" else _of_parquet(file), None, {}
    folder_values = [dict(file.folders) for file in files]
    folders = {
        column: _of_texts([values.get(column) for values in folder_values])
        for column, _ in file.folders
        if column not in columns
    }
    return (
        file.name,
        {**columns, **folders},
        sample,
        replace(given, found=tuple(files), is_inferred=True),
        unsure,
    )


def _has_rows(file: DataFile) -> bool:
    with naming(file.name):
        return not is_empty(file)


def _of_csv(file: DataFile) -> tuple[_Columns, pa.Table, Files, Mapping[str, str]]:
    from dormouse.sources.sniffing import sniff

    sniffed = sniff(file, guess_encoding=True)
    times = {name for name, kind in sniffed.types.items() if kind in TIMES}
    time_formats = tuple((name, how) for name, how in sniffed.format.time_formats if name in times)
    how = replace(sniffed.format, time_formats=time_formats)
    known = replace(
        file.given,
        null_texts=how.text.null or file.given.null_texts,
        formats={str(file.path): how},
    )
    columns = {name: (kind, True) for name, kind in sniffed.types.items()}
    return columns, sniffed.sample, known, sniffed.unsure


def _of_json(file: DataFile) -> _Columns:
    from dormouse.sources.json_files import inferred_json_types

    types = inferred_json_types(file)
    if not types:
        raise InvalidData("is empty, so its columns are unknown")
    return {name: (kind, True) for name, kind in types.items()}


def _of_parquet(file: DataFile) -> _Columns:
    try:
        with pq.ParquetFile(file.path, coerce_int96_timestamp_unit="us") as parquet:
            return _of_arrow(parquet.schema_arrow)
    except pa.ArrowInvalid:
        raise InvalidData("is not a Parquet file, or is damaged") from None


def _of_data(data: Any) -> _Columns:
    if isinstance(data, pa.Schema):
        return _of_arrow(data)
    rows = as_arrow(data)
    if rows is None:
        raise InvalidData(
            f"like is {type(data).__name__}; give files, a pyarrow Table or Schema, a DataFrame, or a dict"
        )
    return _of_arrow(rows.schema)


def _of_arrow(schema: pa.Schema) -> _Columns:
    columns: _Columns = {}
    for column in schema:
        if column.name.startswith(INDEX):
            continue
        kind = data_type(column.type)
        if kind is None and pa.types.is_null(column.type):
            kind = STRING
        if kind is None:
            raise InvalidSchema(
                f"column {column.name!r} is {column.type}, which tables do not support: convert it"
            )
        if column.name in columns:
            raise InvalidData(f"has two columns {column.name!r}")
        columns[column.name] = (kind, column.nullable)
    return columns


def _of_texts(values: Sequence[str | None]) -> tuple[DataType, bool]:
    """Returns the type of texts in folder names, and whether one is null.

    The type is LONG if all texts are whole numbers without leading zeros, else STRING.
    """
    texts = [value for value in values if value is not None]
    is_whole = bool(texts) and all(_WHOLE.fullmatch(text) and -(2**63) <= int(text) < 2**63 for text in texts)
    return (LONG if is_whole else STRING), len(texts) < len(values)


def _schema(
    name: str, columns: _Columns, row_keys: Sequence[str], sort_keys: Sequence[str], sample: pa.Table | None
) -> Schema:
    keys = [key.partition(":")[0] if key not in columns else key for key in (*row_keys, *sort_keys)]
    missing = next((key for key in keys if key not in columns), None)
    if missing is not None:
        raise InvalidSchema(
            f"{name} has no column {missing!r}{did_you_mean(missing, columns)}; "
            f"its columns are {', '.join(columns)}"
        )
    for key in keys:
        _check_key(name, key, columns[key][0], sample)
    fields = [Field(key, columns[key][0]) for key in keys]
    values = [Field(column, *kind) for column, kind in columns.items() if column not in keys]
    split = len(row_keys)
    return Schema(fields[:split], fields[split:], values)


def _check_key(name: str, key: str, kind: DataType, sample: pa.Table | None) -> None:
    if not kind.is_key_type:
        raise InvalidSchema(
            f"key {key!r} of {name} is {kind}, which cannot be a key: choose another key, or give it a type, "
            f"like {key}=string"
        )
    if sample is not None and key in sample.column_names and sample.column(key).null_count:
        raise InvalidSchema(f"key {key!r} of {name} has nulls: choose another key, or use --key-row-number")


def shown_sample(inferred: Inferred) -> list[dict[str, Any]]:
    """Returns the first `SAMPLE_ROWS` rows as dicts of texts, or an empty list without a sample."""
    return [] if inferred.sample is None else inferred.sample.slice(0, SAMPLE_ROWS).to_pylist()
