"""Files as streams of batches that fit a schema; each mistake names its file, and of text its line."""

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
from dormouse.sources.json_files import is_empty, json_batches, json_types
from dormouse.sources.text_reader import naming

# How many rows of a Parquet file are read at once, where some are so wide that a whole batch is too much.

_BYTES_MAX = 256 * 1024 * 1024


def batch_rows(path: Path, parquet: pq.ParquetFile, row_groups: Sequence[int], rows_max: int) -> int:
    """At most `rows_max`, at least 1: so many that a batch of them has about 256 MiB, or less."""
    there = parquet.metadata.num_row_groups  # a file that was changed meanwhile is refused when it is read
    known = (number for number in row_groups if number < there)
    return min((_rows(path, parquet, number, rows_max) for number in known), default=rows_max)


def _rows(path: Path, parquet: pq.ParquetFile, number: int, rows_max: int) -> int:
    group = parquet.metadata.row_group(number)
    rows = max(1, min(rows_max, group.num_rows))
    # what is written as it is takes in memory what it takes in the file
    width = group.total_byte_size / max(1, group.num_rows) if group.total_byte_size > _BYTES_MAX else 0
    if suspects := [*_may_be_long(group, rows)]:
        lookup = pq.ParquetFile(path, metadata=parquet.metadata, memory_map=True, read_dictionary=suspects)
        with lookup as dictionaries:
            for batch in dictionaries.iter_batches(1, [number], suspects, use_threads=False):
                width += sum(pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in batch)
                break
    return max(1, min(rows_max, int(_BYTES_MAX / width))) if width else rows_max


def _may_be_long(group: pq.RowGroupMetaData, rows: int) -> Iterator[str]:
    """Columns with dictionaries that are large enough for a value that is too long so many times."""
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
"""Each part opens its file again."""

_NUMBERS = {"int", "long", "double", "float", "decimal"}
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?|nan|[+-]?inf(?:inity)?", re.IGNORECASE)
"""Python also takes blanks and underscores, and the digits of any script."""

_INDEX = "__index_level_"
"""What pandas calls an index that has no name."""


def prepared(file: DataFile, schema: Schema) -> DataFile:
    """The file with what reading it needs; refuses one that cannot be read or has the wrong columns."""
    with naming(file.name):
        if file.kind == "json":
            _check_json(file, schema)
            return file
        if file.kind == "csv":
            # as of an hour without events
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
    """All rows of prepared files, when they say it."""
    if any(file.group_bytes is None for file in files):
        return None
    return sum(sum(file.group_rows) for file in files)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or some row groups of a Parquet file, and its bytes."""

    file: DataFile
    bytes: int
    row_groups: tuple[int, ...] | None = None


def parts_of(files: Iterable[DataFile], bytes_min: int = _PART_BYTES_MIN) -> Iterator[FilePart]:
    """What can be read beside each other of prepared files: of Parquet files row groups of about so much."""
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
    """The rows of a prepared file, or of some row groups of one, streamed, as the schema has them."""
    with naming(file.name):
        folders = _folder_values(file, schema)
        if is_empty(file):
            return
        if file.kind == "csv":
            batches = csv_batches(file, schema)
        elif file.kind == "json":
            # a map is not read of JSON, but a file may lack it
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
        # nanoseconds, as Arrow takes them by itself, end in 2262
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
        found = [parquet.schema.column(number) for number in range(len(parquet.schema))]
        int96 = [one.name for one in found if one.physical_type == "INT96" and one.path in plain.names]
        yield from _whole(batches, file, rows, groups, int96) if int96 else batches


def _whole(
    batches: Iterator[pa.RecordBatch], file: DataFile, rows: int, groups: Sequence[int], int96: list[str]
) -> Iterator[pa.RecordBatch]:
    """The batches; refuses nanoseconds, which are not read with them.

    As nanoseconds, years that these have not wrap around, and whole microseconds times 1,000 likewise.
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
                        f"column {name!r} has nanoseconds, which a timestamp has not: round them"
                    )
            row += batch.num_rows
            yield batch


def _plain(found: pa.Schema, schema: Schema) -> pa.Schema:
    """Without what pandas has beside the columns."""
    return pa.schema(
        [field for field in found if not field.name.startswith(_INDEX) or field.name in schema],
    )


def _check_json(file: DataFile, schema: Schema) -> None:
    """A column that must not be null is in some object, and no object has another, or other parts of one.

    A file without objects, as of an hour without events, fits.
    """
    if is_empty(file):
        return
    types = json_types(file)
    _check(file, pa.schema([(name, pa.null()) for name in types]), schema)
    for name, found in types.items():
        kind = schema.field(name).type
        part = _unknown_part(found, kind)
        if part is not None:
            raise InvalidData(f"column {name!r} has a part {part!r}, which is not in the schema's {kind}")


def _unknown_part(found: DataType, wanted: DataType) -> str | None:
    """A part, at any depth, of which reading by the wanted type would say nothing."""
    if found.element is not None and wanted.element is not None:
        return _unknown_part(found.element, wanted.element)
    known = {part.name: part.type for part in wanted.parts}
    for part in found.parts if known else ():
        inner = "" if part.name not in known else _unknown_part(part.type, known[part.name])
        if inner is not None:
            return f"{part.name}.{inner}".removesuffix(".")
    return None


def _check(file: DataFile, found: pa.Schema, schema: Schema) -> None:
    """Refuses a file whose columns, with those that its folders tell, can never fit."""
    told_by_folders = [name for name, _ in file.folders if name not in found.names]
    check_columns(pa.schema([*found, *((name, pa.null()) for name in told_by_folders)]), schema)


def _folder_values(file: DataFile, schema: Schema) -> Mapping[str, pa.Scalar]:
    found = {}
    for name, text in file.folders:
        if name not in schema:
            said = f"column {name!r}, which its folder tells, is not in the schema"
            raise InvalidData(said, column=name)
        field = schema.field(name)
        if text is not None and field.type.name in _NUMBERS and not _NUMBER.fullmatch(text):
            raise InvalidData(f"its folder says {name}={text}, and {name!r} is {field.type}", column=name)
        try:
            value = None if text is None else value_of_text(field, text)
            found[name] = pa.scalar(value, arrow_type(field.type))
        except (InvalidQuery, pa.ArrowInvalid, OverflowError) as error:
            raise InvalidData(f"its folder says {one_line(error)}") from None
    return found


def _with_folders(batch: pa.RecordBatch, folders: Mapping[str, pa.Scalar]) -> pa.RecordBatch:
    for name, value in folders.items():
        if name in batch.schema.names:
            continue  # the file says it, too
        batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
    return batch


# Whether the rows of Parquet files come in key order: statistics hint at it, the keys alone prove it.

_READ_ROWS = 131_072
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError)
"""Reading the rows tells what is wrong, and where."""


def sorted_keys(files: Sequence[DataFile], schema: Schema) -> Iterator[pa.RecordBatch] | None:
    """The keys of files whose statistics say that row groups follow each other; None for others."""
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
    """The smallest and largest value of a column in each row group that has rows; None where not known."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    for group in (group for group in groups if group.num_rows):
        columns = map(group.column, range(group.num_columns))
        found = next((one.statistics for one in columns if one.path_in_schema == name), None)
        yield None if found is None or not found.has_min_max else (found.min, found.max)


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
    """How many rows each leaf has; None if rows are not in order: of leaves, `by_leaf`, and of keys."""
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
    """Whether batches that have rows come in the order of their keys."""

    def __init__(self, schema: Schema) -> None:
        self._fields = schema.key_fields
        self._names = list(schema.key_names)
        self._last = b""

    def goes_on(self, batch: pa.RecordBatch) -> bool:
        keys = batch.select(self._names)
        first, last = (
            encode_key(self._fields, [column[row].as_py() for column in keys.columns])
            for row in (0, keys.num_rows - 1)
        )
        follows, self._last = self._last <= first, last
        return follows and is_ascending(keys)

    def checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches; `InvalidData` when they are not in order."""
        for batch in batches:
            if batch.num_rows and not self.goes_on(batch):
                raise InvalidData("the rows are not in the order in which they were a moment ago")
            yield batch
