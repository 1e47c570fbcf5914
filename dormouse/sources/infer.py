"""A table's schema from the columns of files or data."""

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
    """The schema, rows as they look, how the text is written, and the files with all that was found.

    `unsure` are other formats that the times of a column could have, whose days could be months.
    """

    schema: Schema
    sample: pa.Table | None
    written: str
    files: Any
    unsure: Mapping[str, str]


def schema_like(data: Any, row_keys: Sequence[str] = (), sort_keys: Sequence[str] = ()) -> Schema:
    """Returns the schema of files or data with these keys; see `infer`."""
    return infer(data, row_keys, sort_keys).schema


def infer(
    data: Any, row_keys: Sequence[str] = (), sort_keys: Sequence[str] = (), types: Mapping[str, DataType] = {}
) -> Inferred:
    """The columns of data, or of the first of some files, with these keys; the others are values.

    `types` are those that are not meant to be inferred. Of text, types are those that all values of its
    beginning have, and values are nullable; of all else, as it says. Raises `InvalidData` when it cannot be
    read, `InvalidSchema` when a column has no type of ours, or a key is none that can be.
    """
    sample, written, files = None, "", data
    unsure: Mapping[str, str] = {}
    if are_paths(data):
        given = data if isinstance(data, Files) else Files(data)
        types = {**given.types, **types}
        name, columns, sample, files, unsure = _of_files(replace(given, types=types))
        written = _as_shown(files, unsure)
        if given.row_number is not None:
            columns = {given.row_number: (LONG, False), **_unlike(columns, given.row_number)}
            row_keys = row_keys or [given.row_number]
    else:
        name, columns = "the data", _of_data(data)
    unknown = next((one for one in types if one not in columns), None)
    if unknown is not None:
        raise InvalidSchema(f"{name} has no column {unknown!r}{did_you_mean(unknown, columns)}")
    columns = {one: (types.get(one, kind), null) for one, (kind, null) in columns.items()}
    return Inferred(_schema(name, columns, row_keys, sort_keys, sample), sample, written, files, unsure)


_Columns = dict[str, tuple[DataType, bool]]
"""The type of each column, and whether it may be null."""


def columns_of(data: Any) -> tuple[Any, dict[str, DataType]]:
    """Returns the types of all columns of data, of files those of every file, and the data to be read then.

    Raises `InvalidData` for what cannot be read, and for a column that has no common type in all files.
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
    found = as_arrow(data)
    if found is None and isinstance(data, Iterable) and not isinstance(data, str | bytes):
        batches = iter(data)
        found = next(batches, None)
        data = [] if found is None else chain([found], batches)
    elif isinstance(found, pa.RecordBatchReader):
        data = found  # a stream is read once
    if not isinstance(found, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return data, {}
    return data, columns_of_arrow(found.schema)


def columns_of_arrow(found: pa.Schema) -> dict[str, DataType]:
    """Returns the types of columns; raises `InvalidSchema` for a type that no table has."""
    return {name: kind for name, (kind, _) in _of_arrow(found).items()}


def _types_of(file: DataFile) -> tuple[dict[str, DataType], bool]:
    """Returns a file's columns, and whether there are values of which their types are known."""
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


def _common(file: DataFile, name: str, one: DataType, other: DataType) -> DataType:
    """Returns a type that holds the values of both."""
    if one == other:
        return one
    for types in ((INT, LONG, DOUBLE), (FLOAT, DOUBLE)):
        if one in types and other in types:
            return max(one, other, key=types.index)
    raise InvalidData(
        f"file {file.name!r}: column {name!r} is {other}, and {one} in a file before it: add the column with "
        "the type that is meant (add_column), then ingest the files"
    )


def _unlike(columns: _Columns, row_number: str) -> _Columns:
    if row_number in columns:
        raise InvalidSchema(f"there is a column {row_number!r} already: make it the key, or name another")
    return columns


def _as_shown(files: Files, unsure: Mapping[str, str]) -> str:
    """Describes how the format of the first text file differs from the usual one."""
    how = [str(one) for one in files.formats.values()]
    return "; ".join([*how, *(f"times of {name!r} could also be {one}" for name, one in unsure.items())])


def _of_files(given: Files) -> tuple[str, _Columns, pa.Table | None, Files, Mapping[str, str]]:
    found = find_files(given)
    # files without rows say nothing of their columns
    file = next((one for one in found if _has_rows(one)), found[0])
    with naming(file.name):
        if file.kind == "csv":
            columns, sample, given, unsure = _of_csv(file)
        else:
            columns, sample, unsure = _of_json(file) if file.kind == "json" else _of_parquet(file), None, {}
    told = [dict(one.folders) for one in found]
    folders = {
        column: _of_texts([one.get(column) for one in told])
        for column, _ in file.folders
        if column not in columns
    }
    return (
        file.name,
        {**columns, **folders},
        sample,
        replace(given, found=tuple(found), is_inferred=True),
        unsure,
    )


def _has_rows(file: DataFile) -> bool:
    with naming(file.name):
        return not is_empty(file)


def _of_csv(file: DataFile) -> tuple[_Columns, pa.Table, Files, Mapping[str, str]]:
    from dormouse.sources.sniffing import sniff

    found = sniff(file, guess_encoding=True)
    times = {name for name, kind in found.types.items() if kind in TIMES}
    how = replace(
        found.format, time_formats=tuple(one for one in found.format.time_formats if one[0] in times)
    )
    known = replace(
        file.given,
        null_texts=how.text.null or file.given.null_texts,
        formats={str(file.path): how},
    )
    columns = {name: (kind, True) for name, kind in found.types.items()}
    return columns, found.sample, known, found.unsure


def _of_json(file: DataFile) -> _Columns:
    from dormouse.sources.json_files import inferred_json_types

    types = inferred_json_types(file)
    if not types:
        raise InvalidData("is empty, and says nothing of its columns")
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
    found = as_arrow(data)
    if found is None:
        raise InvalidData(
            f"like is {type(data).__name__}; give files, a pyarrow Table or Schema, a DataFrame, or a dict"
        )
    return _of_arrow(found.schema)


def _of_arrow(found: pa.Schema) -> _Columns:
    columns: _Columns = {}
    for column in found:
        if column.name.startswith(INDEX):
            continue
        kind = data_type(column.type)
        if kind is None and pa.types.is_null(column.type):
            kind = STRING
        if kind is None:
            raise InvalidSchema(f"column {column.name!r} is {column.type}, which no table has: convert it")
        if column.name in columns:
            raise InvalidData(f"has two columns {column.name!r}")
        columns[column.name] = (kind, column.nullable)
    return columns


def _of_texts(values: Sequence[str | None]) -> tuple[DataType, bool]:
    """Returns LONG if all texts (of folder names) are whole numbers, else STRING; and whether one is null."""
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
    values = [Field(one, *found) for one, found in columns.items() if one not in keys]
    split = len(row_keys)
    return Schema(fields[:split], fields[split:], values)


def _check_key(name: str, key: str, kind: DataType, sample: pa.Table | None) -> None:
    if not kind.is_key_type:
        raise InvalidSchema(
            f"key {key!r} of {name} is {kind}, which no key is: name another, or say a type for it, "
            f"like {key}=string"
        )
    if sample is not None and key in sample.column_names and sample.column(key).null_count:
        raise InvalidSchema(f"key {key!r} of {name} has nulls: name another, or --key-row-number")


def shown_sample(found: Inferred) -> list[dict[str, Any]]:
    """Returns the first rows as texts."""
    return [] if found.sample is None else found.sample.slice(0, SAMPLE_ROWS).to_pylist()
