"""The reading of files as streams of batches that fit a schema. Errors name the file and the line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_type, check_columns, conform, is_ascending
from dormouse.data.leaf_sorter import LeafLookup
from dormouse.errors import InvalidData, InvalidQuery, one_line
from dormouse.model.loops import portions
from dormouse.model.region import encode_key
from dormouse.model.schema import Schema
from dormouse.model.types import DataType, value_of_text
from dormouse.sources.csv_files import csv_batches, csv_format
from dormouse.sources.data_files import DataFile
from dormouse.sources.given_rows import INDEX
from dormouse.sources.json_files import is_empty, json_batches, json_types
from dormouse.sources.text_reader import naming

# The number of rows to read at once from a Parquet file. It is smaller for wide rows, to limit memory.

_BYTES_MAX = 256 * 1024 * 1024


def batch_rows(path: Path, parquet: pq.ParquetFile, row_groups: Sequence[int], rows_max: int) -> int:
    """Returns a number of rows from 1 to `rows_max`, so that a batch of them has at most about 256 MiB."""
    # a file that was changed in the meantime may have fewer row groups; the reader will refuse it
    group_count = parquet.metadata.num_row_groups
    known = (number for number in row_groups if number < group_count)
    return min((_rows(path, parquet, number, rows_max) for number in known), default=rows_max)


def _rows(path: Path, parquet: pq.ParquetFile, number: int, rows_max: int) -> int:
    group = parquet.metadata.row_group(number)
    rows = max(1, min(rows_max, group.num_rows))
    # values without a dictionary take as much memory as file space
    width = group.total_byte_size / max(1, group.num_rows) if group.total_byte_size > _BYTES_MAX else 0
    if suspects := [*_may_be_long(group, rows)]:
        lookup = pq.ParquetFile(path, metadata=parquet.metadata, memory_map=True, read_dictionary=suspects)
        with lookup as dictionaries:
            for batch in dictionaries.iter_batches(1, [number], suspects, use_threads=False):
                width += sum(pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in batch)
                break
    return max(1, min(rows_max, int(_BYTES_MAX / width))) if width else rows_max


def _may_be_long(group: pq.RowGroupMetaData, rows: int) -> Iterator[str]:
    """Yields the names of columns of which one batch could need more than 256 MiB.

    These are columns with a dictionary: a long value is stored once, but each of `rows` rows repeats it in
    memory.
    """
    for index in range(group.num_columns):
        chunk = group.column(index)
        if (
            chunk.physical_type == "BYTE_ARRAY"
            and "." not in chunk.path_in_schema
            and any("DICTIONARY" in encoding for encoding in chunk.encodings)
            and chunk.total_uncompressed_size * rows > _BYTES_MAX
        ):
            yield chunk.path_in_schema


BATCH_ROWS = 65_536
_PART_BYTES_MIN = 16 * 1024 * 1024
"""The least size of a part. Smaller parts cost more, since each part opens its file again."""

_NUMBERS = {"int", "long", "double", "float", "decimal"}
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?|nan|[+-]?inf(?:inity)?", re.IGNORECASE)
"""The numbers that folder names may have. Python would also accept blanks, underscores and other scripts."""


def prepared(file: DataFile, schema: Schema) -> DataFile:
    """Returns the file with the format or the row groups that reading needs.

    Raises `InvalidData` if it cannot be read or has the wrong columns.
    """
    with naming(file.name):
        if file.kind == "json":
            _check_json(file, schema)
            return file
        if file.kind == "csv":
            # an empty file fits, such as the file of an hour without events
            return file if is_empty(file) else replace(file, format=csv_format(file, schema))
        with parquet_file(file) as parquet:
            _check(file, _plain(parquet.schema_arrow, schema), schema)
            groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
            return replace(
                file,
                group_rows=tuple(group.num_rows for group in groups),
                group_bytes=tuple(group.total_byte_size for group in groups),
            )


def count_rows(files: Sequence[DataFile]) -> int | None:
    """Returns the number of rows of prepared files, or None if a file is not Parquet."""
    if any(file.group_bytes is None for file in files):
        return None
    return sum(sum(file.group_rows) for file in files)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or some row groups of a Parquet file, and its size in bytes."""

    file: DataFile
    bytes: int
    row_groups: tuple[int, ...] | None = None

    def rows(self, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yields its rows, converted to the schema."""
        return read_file(self.file, schema, self.row_groups)


def parts_of(files: Iterable[DataFile], bytes_min: int = _PART_BYTES_MIN) -> Iterator[FilePart]:
    """Yields the parts of prepared files that can be read in parallel.

    A part is a text file, or row groups of a Parquet file with about `bytes_min` bytes.
    """
    for file in files:
        if file.group_bytes is None:
            with naming(file.name):
                yield FilePart(file, file.path.stat().st_size)
            continue
        for groups in portions(range(len(file.group_bytes)), file.group_bytes.__getitem__, bytes_min):
            yield FilePart(file, sum(map(file.group_bytes.__getitem__, groups)), tuple(groups))


def read_file(
    file: DataFile, schema: Schema, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a prepared file, or of some of its row groups, converted to the schema."""
    with naming(file.name):
        folders = _folder_values(file, schema)
        if is_empty(file):
            return
        if file.kind == "csv":
            batches = csv_batches(file, schema)
        elif file.kind == "json":
            # nested types are not read from JSON, but a file may lack such a column
            outside = {*folders, *(field.name for field in schema.fields if field.type.is_nested)}
            outside.difference_update(json_types(file) if outside else ())
            fields = [field for field in schema.fields if field.name not in outside]
            defaults = {field.name: schema.default(field.name) for field in fields}
            batches = json_batches(file, fields, defaults)
        else:
            batches = _parquet(file, schema, row_groups)
        row = sum(file.group_rows[: row_groups[0]]) if row_groups else 0
        for batch in batches:
            if batch.num_rows:
                yield conform(_with_folders(batch, folders), schema, row)
                row += batch.num_rows


def parquet_file(file: DataFile, int96_unit: str = "us") -> pq.ParquetFile:
    return pq.ParquetFile(
        file.path,
        memory_map=True,
        page_checksum_verification=True,
        # Arrow's default for INT96 is nanoseconds, which end in the year 2262
        coerce_int96_timestamp_unit=int96_unit,
    )


def _parquet(file: DataFile, schema: Schema, row_groups: Sequence[int] | None) -> Iterator[pa.RecordBatch]:
    with parquet_file(file) as parquet:
        found = parquet.schema_arrow
        plain = _plain(found, schema)
        _check(file, plain, schema)
        columns = None if len(plain) == len(found) else plain.names
        groups = range(parquet.metadata.num_row_groups) if row_groups is None else row_groups
        rows = batch_rows(file.path, parquet, groups, BATCH_ROWS)
        batches = parquet.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False)
        leaf_columns = [parquet.schema.column(number) for number in range(len(parquet.schema))]
        int96 = [
            column.name
            for column in leaf_columns
            if column.physical_type == "INT96" and column.path in plain.names
        ]
        yield from _whole(batches, file, rows, groups, int96) if int96 else batches


def _whole(
    batches: Iterator[pa.RecordBatch], file: DataFile, rows: int, groups: Sequence[int], int96: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yields the same batches. Raises `InvalidData` if an INT96 time is not a whole number of microseconds.

    Reads the file a second time, in nanoseconds, and compares the two. For times that do not fit into
    64-bit nanoseconds, both sides of the comparison overflow in the same way.
    """
    with parquet_file(file, "ns") as parquet:
        finer = parquet.iter_batches(rows, row_groups=groups, columns=int96, use_threads=False)
        fine, row = pa.record_batch({}), 0
        for batch in batches:
            if row == fine.num_rows:
                fine, row = next(finer), 0
            for name in int96:
                nanoseconds = fine.column(name).slice(row, batch.num_rows).view(pa.int64())
                whole = pc.multiply(batch.column(name).view(pa.int64()), 1_000)
                if pc.any(pc.not_equal(nanoseconds, whole)).as_py():
                    raise InvalidData(
                        f"column {name!r} has nanoseconds, but timestamps have microseconds: round them"
                    )
            row += batch.num_rows
            yield batch


def _plain(columns: pa.Schema, schema: Schema) -> pa.Schema:
    """Returns the columns of a file without the nameless indexes of pandas, unless the schema has them."""
    return pa.schema(
        [field for field in columns if not field.name.startswith(INDEX) or field.name in schema],
    )


def _check_json(file: DataFile, schema: Schema) -> None:
    """Raises `InvalidData` if a JSON file lacks a required column, or has an unknown column or part of one.

    A file without objects fits, such as the file of an hour without events.
    """
    if is_empty(file):
        return
    types = json_types(file)
    _check(file, pa.schema([(name, pa.null()) for name in types]), schema)
    for name, file_type in types.items():
        kind = schema.field(name).type
        part = _unknown_part(file_type, kind)
        if part is not None:
            raise InvalidData(f"column {name!r} has a part {part!r}, which is not in the schema's {kind}")


def _unknown_part(kind: DataType, wanted: DataType) -> str | None:
    """Returns the path of a part of `kind`, at any depth, that the wanted type lacks, or None.

    Reading by the wanted type would drop such a part silently.
    """
    if kind.element is not None and wanted.element is not None:
        return _unknown_part(kind.element, wanted.element)
    known = {part.name: part.type for part in wanted.parts}
    for part in kind.parts if known else ():
        inner = "" if part.name not in known else _unknown_part(part.type, known[part.name])
        if inner is not None:
            return f"{part.name}.{inner}".removesuffix(".")
    return None


def _check(file: DataFile, columns: pa.Schema, schema: Schema) -> None:
    """Raises `InvalidData` if the columns of a file and of its folder names cannot fit the schema."""
    folder_columns = [name for name, _ in file.folders if name not in columns.names]
    check_columns(pa.schema([*columns, *((name, pa.null()) for name in folder_columns)]), schema)


def _folder_values(file: DataFile, schema: Schema) -> Mapping[str, pa.Scalar]:
    """Returns the values of the columns in folder names. Raises `InvalidData` if one does not fit."""
    values = {}
    for name, text in file.folders:
        if name not in schema:
            why = f"column {name!r}, from the name of its folder, is not in the schema"
            raise InvalidData(why, column=name)
        field = schema.field(name)
        if text is not None and field.type.name in _NUMBERS and not _NUMBER.fullmatch(text):
            raise InvalidData(f"its folder says {name}={text}, but {name!r} is {field.type}", column=name)
        try:
            value = None if text is None else value_of_text(field, text)
            values[name] = pa.scalar(value, arrow_type(field.type))
        except (InvalidQuery, pa.ArrowInvalid, OverflowError) as error:
            raise InvalidData(f"its folder says {one_line(error)}") from None
    return values


def _with_folders(batch: pa.RecordBatch, folders: Mapping[str, pa.Scalar]) -> pa.RecordBatch:
    """Returns the batch with the columns of folder names that it lacks."""
    for name, value in folders.items():
        if name in batch.schema.names:
            continue  # the file has the column, too
        batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
    return batch


# A check for key order in Parquet files: statistics hint at it, and only the keys prove it.

_READ_ROWS = 131_072
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError)
"""Errors that are ignored here, since reading the rows later reports them with their place."""


def sorted_keys(files: Sequence[DataFile], schema: Schema) -> Iterator[pa.RecordBatch] | None:
    """Returns the keys of Parquet files whose statistics suggest that they are sorted, else None."""
    if any(file.kind != "parquet" for file in files):
        return None
    try:
        return _keys(files, schema) if _seem_sorted(files, schema.key_names[0]) else None
    except _UNREADABLE:
        return None


def _seem_sorted(files: Sequence[DataFile], name: str) -> bool:
    last: Any = None
    for file in files:
        for bounds in _bounds(pq.read_metadata(file.path), name):
            if bounds is None or (last is not None and bounds[0] < last):
                return False
            last = bounds[1]
    return True


def _bounds(metadata: pq.FileMetaData, name: str) -> Iterator[tuple[Any, Any] | None]:
    """Yields the least and greatest value of a column for each row group with rows, or None if unknown."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    for group in (group for group in groups if group.num_rows):
        columns = map(group.column, range(group.num_columns))
        statistics = next((chunk.statistics for chunk in columns if chunk.path_in_schema == name), None)
        yield None if statistics is None or not statistics.has_min_max else (statistics.min, statistics.max)


def _keys(files: Sequence[DataFile], schema: Schema) -> Iterator[pa.RecordBatch]:
    kinds = [arrow_type(field.type) for field in schema.key_fields]
    for file in files:
        with parquet_file(file) as parquet:
            for batch in parquet.iter_batches(_READ_ROWS, columns=list(schema.key_names), use_threads=False):
                columns = map(batch.column, schema.key_names)
                fitted = [column.cast(kind) for column, kind in zip(columns, kinds, strict=True)]
                yield pa.RecordBatch.from_arrays(fitted, names=list(schema.key_names))


def leaf_counts(
    keys: Iterator[pa.RecordBatch], schema: Schema, lookup: LeafLookup, *, by_leaf: bool
) -> npt.NDArray[np.int64] | None:
    """Counts the rows that belong to each leaf. Returns None if the rows are not in key order.

    Also returns None if a key is null or cannot be read, and with `by_leaf`, if a row belongs to an earlier
    leaf than the row before it.
    """
    counts = np.zeros(len(lookup.leaf_ids), np.int64)
    order, leaf = InOrder(schema), 0
    try:
        for batch in filter(attrgetter("num_rows"), keys):
            if any(column.null_count for column in batch.columns) or not order.goes_on(batch):
                return None
            leaves = lookup.indexes(batch).to_numpy()
            if by_leaf and (leaves[0] < leaf or bool(np.any(leaves[1:] < leaves[:-1]))):
                return None
            leaf = int(leaves[-1])
            counts += np.bincount(leaves, minlength=len(counts))
    except _UNREADABLE:
        return None
    return counts


class InOrder:
    """A check that the rows of consecutive batches are in key order. No batch may be empty."""

    def __init__(self, schema: Schema) -> None:
        self._fields = schema.key_fields
        self._names = list(schema.key_names)
        self._last = b""

    def goes_on(self, batch: pa.RecordBatch) -> bool:
        """Returns whether the next batch is in key order and follows the batches before it."""
        keys = batch.select(self._names)
        first, last = (
            encode_key(self._fields, [column[row].as_py() for column in keys.columns])
            for row in (0, keys.num_rows - 1)
        )
        follows, self._last = self._last <= first, last
        return follows and is_ascending(keys)

    def checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the same batches. Raises `InvalidData` if they are not in key order."""
        for batch in batches:
            if batch.num_rows and not self.goes_on(batch):
                raise InvalidData(
                    "the rows are no longer in key order: the files were changed during the load"
                )
            yield batch
