"""Writers of sorted Parquet files, and the facts that are recorded about each file.

`FileShape` describes the layout: row groups, and the encoding and compression of each column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datafusion import DataFrame, ParquetColumnOptions, ParquetWriterOptions

from dormouse.data.arrow_schema import file_schema
from dormouse.data.datafusion_session import file_url, numbered
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.data.newest import Marks, first_of_keys
from dormouse.data.sketches import KeySampler
from dormouse.data.transform import FALSE_POSITIVES, bloom_filter_columns, sized_filters
from dormouse.errors import JobFailed
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.loops import ahead, portions
from dormouse.model.region import encode_key
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed, newest_first
from dormouse.model.types import DATE, INT, LONG, STRING, TIMESTAMP, DataType
from dormouse.objects.fault import digest_of_file
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore

SAMPLE_ROWS = 131_072
ZSTD_LEVEL = 2
"""The compression level, which reads as fast as level 3 and writes nearly as fast as level 1."""
_CODECS = {"zstd": f"zstd({ZSTD_LEVEL})", "snappy": "snappy", "lz4": "lz4_raw", "none": "uncompressed"}
_GROUP_ROWS_MIN = 1_000
_GROUP_ROWS_MAX = 1 << 20
_PAGE_BYTES = 100_000
"""The size of a page before compression. Look-ups read whole pages; each page costs DuckDB overhead."""
_PAGE_ROWS = 4_096
_ENCODED_OF_GROUP = 1 / 16
_TELLING_ROWS_MIN = 1_000
_TRIED_ROWS, _TRIED_ROWS_MIN = 32_768, 4_096
_TRIED_SHARE = 1 / 8
"""The share of the rows with which encodings are tried: trying all would take longer than to write them."""
_PIECES = 8
_UNSURE_BELOW = 4 / 3
"""The ratio to the cheapest encoding's cost below which a dictionary is tried again with more rows."""
_DELTAS = "DELTA_BINARY_PACKED"
_WHOLE_NUMBERS = (INT, LONG, TIMESTAMP, DATE)
"""The types that Parquet can encode as differences."""
_COMPRESSED_SHARE_MAX = 0.7
"""The largest compressed share at which compression is worth the decompression of each page."""
_STATISTICS_BYTES_MAX = 64
_MERGE = re.compile(r"SortPreservingMergeExec: \[(.*?)\]")
_MERGE_COLUMN = re.compile(r"([^\s,]+)@\d+ ASC")
_READ_ROWS = 65_536
SHAPES_MAX = 16
"""The most shapes of the files of a schema whose arguments for pyarrow are cached."""
GROUPS_OF_A_SIZE = 4_096
"""The number of row groups after which the size of the next groups doubles."""


@dataclass(frozen=True, slots=True)
class FileShape:
    """The layout of a file: the rows of a row group, and how columns are encoded, compressed and filtered."""

    group_rows: int = _GROUP_ROWS_MAX
    plain_columns: tuple[str, ...] = ()
    delta_columns: tuple[str, ...] = ()
    uncompressed_columns: tuple[str, ...] = ()
    bloom_columns: tuple[str, ...] = ()
    compression: str = "zstd"

    @staticmethod
    def like(sample: pa.Table, schema: Schema, properties: TableProperties) -> FileShape:
        """Returns the shape for rows like the sample, with row groups of about `properties.row_group_bytes`.

        The size of a row group is that before encoding. Each column of the sample is written with and
        without a dictionary and compression, to find the cheapest way. Compression hardly helps if a
        dictionary has few values. A dictionary of many values costs time and bytes, and is then abandoned.
        """
        row_bytes = max(sample.nbytes / max(1, sample.num_rows), 1)
        group_rows = int(properties.row_group_bytes / row_bytes)
        ways = _tried(sample, schema, properties.compression)
        return FileShape(
            group_rows=min(max(group_rows, _GROUP_ROWS_MIN), _GROUP_ROWS_MAX),
            plain_columns=tuple(name for name, way in ways.items() if way.encoding == _Encoding.PLAIN),
            delta_columns=tuple(name for name, way in ways.items() if way.encoding == _Encoding.DELTAS),
            uncompressed_columns=tuple(name for name, way in ways.items() if way.is_uncompressed),
            bloom_columns=bloom_filter_columns(schema, properties),
            compression=properties.compression,
        )

    def of_datafusion(self, schema: Schema) -> ParquetWriterOptions:
        """Returns the shape as an object of DataFusion, since options in SQL ignore the case of columns."""
        # rows encoded per call: few calls, yet pages stay near their size when rows are long
        encoded = min(max(int(self.group_rows * _ENCODED_OF_GROUP), 1), _PAGE_ROWS)
        return ParquetWriterOptions(
            compression=_CODECS[self.compression],
            max_row_group_size=self.group_rows,
            data_pagesize_limit=_PAGE_BYTES,
            data_page_row_count_limit=_PAGE_ROWS,
            write_batch_size=encoded,
            statistics_enabled="page",
            # a column of many values is smaller and faster without a dictionary: the limit abandons it early
            dictionary_page_size_limit=200_000,
            created_by="dormouse",
            # readers use the types of Parquet: some readers do not support Arrow's view types
            skip_arrow_metadata=True,
            statistics_truncate_length=_STATISTICS_BYTES_MAX,
            column_specific_options={name: self._column(schema, name) for name in schema.names}
            # floats in structs: DuckDB prunes by their statistics, which ignore NaN
            | {
                path: ParquetColumnOptions(statistics_enabled="none")
                for field in schema.fields
                for path, kind in (_leaves(field.name, field.type) if field.type.parts else ())
                if kind.is_floating
            },
        )

    def _column(self, schema: Schema, name: str) -> ParquetColumnOptions:
        bloom = name in self.bloom_columns
        return ParquetColumnOptions(
            compression=_CODECS["none"] if name in self.uncompressed_columns else None,
            encoding=_DELTAS.lower() if name in self.delta_columns else None,
            dictionary_enabled=False if name in (*self.plain_columns, *self.delta_columns) else None,
            bloom_filter_enabled=True if bloom else None,
            # assumes distinct values: the writer then folds a filter to the size that its values need
            bloom_filter_ndv=self.group_rows if bloom else None,
            bloom_filter_fpp=FALSE_POSITIVES if bloom else None,
            statistics_enabled="none" if schema.field(name).type.is_floating else None,
        )

    def of_arrow(self, schema: Schema) -> dict[str, Any]:
        """Returns the shape as arguments of pyarrow's writer.

        They have no bloom filters, and no row groups: those follow from the calls that write rows.
        """
        known: dict[FileShape, dict[str, Any]] = schema.__dict__.setdefault("_shapes", {})
        if self not in known:
            if len(known) >= SHAPES_MAX:
                known.clear()
            known[self] = self._of_arrow(schema)
        return known[self]

    def _of_arrow(self, schema: Schema) -> dict[str, Any]:
        paths = [path for field in schema.fields for path, _ in _leaves(field.name, field.type)]
        codecs = {path: "none" if path in self.uncompressed_columns else self.compression for path in paths}
        without = {*self.plain_columns, *self.delta_columns}
        return {
            "compression": codecs,
            "compression_level": {path: ZSTD_LEVEL for path, codec in codecs.items() if codec == "zstd"}
            or None,
            "use_dictionary": [path for path in paths if path not in without],
            "column_encoding": dict.fromkeys(self.delta_columns, _DELTAS) or None,
            "data_page_size": _PAGE_BYTES,
            "max_rows_per_page": _PAGE_ROWS,
            "write_statistics": [
                field.name for field in schema.fields if not (field.type.is_floating or field.type.is_nested)
            ],
        }


def _leaves(name: str, type_: DataType) -> Iterator[tuple[str, DataType]]:
    """Yields the Parquet columns that store a field, as (path, type)."""
    for part in type_.parts:
        yield from _leaves(f"{name}.{part.name}", part.type)
    if type_.element is None:
        yield from () if type_.parts else [(name, type_)]
    elif type_.key is None:
        yield from _leaves(f"{name}.list.element", type_.element)
    else:
        yield from [(f"{name}.key_value.key", type_.key), *_leaves(f"{name}.key_value.value", type_.element)]


def _pieces(sample: pa.Table, rows_max: int) -> pa.Table:
    """Returns a smaller sample: pieces of consecutive rows, in which equal values follow each other."""
    if sample.num_rows <= rows_max:
        return sample
    starts = (number * sample.num_rows // _PIECES for number in range(_PIECES))
    return pa.concat_tables([sample.slice(start, rows_max // _PIECES) for start in starts])


def _tried(sample: pa.Table, schema: Schema, compression: str) -> dict[str, _Way]:
    """Returns the cheapest way to write each column that is not nested, or {} for too few rows."""
    if sample.num_rows < _TELLING_ROWS_MIN:
        return {}
    names = [field.name for field in schema.fields if not field.type.is_nested]
    rows = min(max(int(sample.num_rows * _TRIED_SHARE), _TRIED_ROWS_MIN), _TRIED_ROWS)
    pieces = _pieces(sample, rows)
    ways = _cheapest(pieces.select(names), schema, compression)
    # a dictionary of values that never repeat in the pieces does not pay with more rows either
    unsure = [name for name, way in ways.items() if way.is_unsure and _repeats(pieces.column(name))]
    if unsure and pieces.num_rows < sample.num_rows:
        # with more rows, the values of a dictionary cost less per row
        ways |= _cheapest(_pieces(sample.select(unsure), SAMPLE_ROWS), schema, compression)
    return ways


def _repeats(column: pa.ChunkedArray) -> bool:
    return bool(pc.count_distinct(column, mode="all").as_py() < len(column))


class _Encoding(IntEnum):
    DICTIONARY, PLAIN, DELTAS = range(3)


class _Way(NamedTuple):
    cost: float
    encoding: _Encoding
    is_uncompressed: bool
    is_unsure: bool = False
    """True if a dictionary may be cheaper with more rows."""


def _cheapest(rows: pa.Table, schema: Schema, compression: str) -> dict[str, _Way]:
    whole = [name for name in rows.column_names if schema.field(name).type in _WHOLE_NUMBERS]
    sizes = {
        _Encoding.DICTIONARY: _sizes(rows, compression, use_dictionary=True),
        _Encoding.PLAIN: _sizes(rows, compression, use_dictionary=False),
        _Encoding.DELTAS: _sizes(
            rows.select(whole),
            compression,
            use_dictionary=False,
            column_encoding=dict.fromkeys(whole, _DELTAS) or None,
        ),
    }
    found = {}
    for name in rows.column_names:
        of_name = [(encoding, *of[name]) for encoding, of in sizes.items() if name in of]
        ways = [_Way(compressed, encoding, False) for encoding, compressed, _ in of_name]
        ways += [_Way(whole * _COMPRESSED_SHARE_MAX, encoding, True) for encoding, _, whole in of_name]
        best, coded = min(ways), min(way for way in ways if way.encoding == _Encoding.DICTIONARY)
        found[name] = best._replace(is_unsure=best.cost < coded.cost < best.cost * _UNSURE_BELOW)
    return found


def _sizes(rows: pa.Table, compression: str, **encodings: Any) -> dict[str, tuple[int, int]]:
    """Returns the (compressed, uncompressed) bytes that each column of the rows has in a Parquet file."""
    if not rows.num_columns:
        return {}
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        compression=compression,
        compression_level=ZSTD_LEVEL if compression == "zstd" else None,
        write_statistics=False,
        store_schema=False,
        **encodings,
    )
    group = pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0)
    found = (group.column(number) for number in range(group.num_columns))
    return {one.path_in_schema: (one.total_compressed_size, one.total_uncompressed_size) for one in found}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The facts about a file that was just written. If `row_count` is 0, there is no file.

    - `min_key`, `max_key`: the first and last row key, encoded by `model.region.encode_key`.
    - `sketches`: the sketches of the keys, to store beside the file (`FileSketches.to_bytes`).
    - `digest`: the XXH3-128 of the file's bytes.
    - `marks`: the number of rows that are marks of deletion.
    """

    row_count: int
    byte_count: int = 0
    min_key: bytes | None = None
    max_key: bytes | None = None
    sketches: bytes = b""
    digest: bytes | None = None
    marks: int = 0

    @staticmethod
    def of(path: Path, schema: Schema, sampler: KeySampler) -> FileFacts:
        """Returns the facts about a file. The sampler must have seen all its rows, and checks their order."""
        return FileFacts(
            row_count=sampler.row_count,
            byte_count=path.stat().st_size,
            min_key=encode_key(schema.row_keys, sampler.first or ()),
            max_key=encode_key(schema.row_keys, sampler.last or ()),
            sketches=sampler.sketches().to_bytes(),
            digest=digest_of_file(path),
        )

    def file(
        self, name: str, references: Iterable[FileReference], content: bytes | None = None
    ) -> FileWithReferences:
        """Returns the file and its references in the form that a commit adds; `content` if it is inlined."""
        return FileWithReferences(
            filename=name,
            references=tuple(references),
            byte_count=self.byte_count,
            row_count=self.row_count,
            min_key=self.min_key,
            max_key=self.max_key,
            digest=self.digest,
            content=content,
        )


def writer_options() -> dict[str, str]:
    """Returns the DataFusion settings that make it write one Parquet file."""
    return {
        "datafusion.execution.minimum_parallel_output_files": "1",
        "datafusion.execution.soft_max_rows_per_output_file": str((1 << 63) - 1),
    }


def write_sorted(
    rows: DataFrame, schema: Schema, output_path: Path, shape: FileShape, constant: Collection[str] = ()
) -> FileFacts:
    """Writes rows in key order to one Parquet file; deletes it on a failure.

    The rows must come from a `sorted_session` with `writer_options`. All rows have the same value of each key
    in `constant`. Errors and panics of DataFusion pass through.
    """
    # DataFusion treats a name without a suffix as a folder
    written = output_path.with_name(output_path.name + ".parquet")
    try:
        check_merges_by_all_keys(schema, rows.execution_plan().display_indent(), constant)
        numbered(rows, schema).write_parquet_with_options(file_url(written), shape.of_datafusion(schema))
        facts = file_facts(written, schema) if written.exists() else FileFacts(0)
        if facts.row_count:
            written.replace(output_path)
        return facts
    finally:
        written.unlink(missing_ok=True)


def write_groups(
    target: Path | pa.NativeFile,
    batches: Iterator[pa.RecordBatch],
    schema: Schema,
    properties: TableProperties,
    shape_of: Callable[[pa.Table], FileShape],
) -> None:
    """Writes one or more batches, which have exactly the schema's types, as one Parquet file.

    `shape_of` returns the shape for the rows of the first row group.
    """
    groups = _row_groups(batches, properties.row_group_bytes)
    first = next(groups)
    shape = shape_of(first)
    with pq.ParquetWriter(
        target,
        first.schema,
        store_schema=False,  # readers use the types of Parquet
        write_page_index=True,
        bloom_filter_options=sized_filters(shape.bloom_columns, first),
        **shape.of_arrow(schema),
    ) as writer:
        writer.write_table(first, row_group_size=first.num_rows)
        del first  # else two row groups would be in memory at once
        for group in groups:
            writer.write_table(group, row_group_size=group.num_rows)
            del group


def _row_groups(batches: Iterator[pa.RecordBatch], bytes_min: int) -> Iterator[pa.Table]:
    """Yields the rows of each row group. Later groups are larger, as readers number them with 16 bits."""
    for number in count():
        size = bytes_min << number // GROUPS_OF_A_SIZE
        some = next(portions(batches, attrgetter("nbytes"), size), None)
        if some is None:
            return
        yield pa.Table.from_batches(some)


def check_merges_by_all_keys(schema: Schema, plan: str, constant: Collection[str] = ()) -> None:
    """Raises `JobFailed` for a plan that merges sorted streams by fewer keys than all.

    The output of such a plan could be out of order. DataFusion may leave out keys with constant values, so
    `constant` keys are not required.
    """
    needed = [name for name in schema.key_names if name not in constant]
    for merged_by in _MERGE.findall(plan):
        names = [name.strip('"') for name in _MERGE_COLUMN.findall(merged_by)]
        if [name for name in names if name not in constant][: len(needed)] != needed:
            raise JobFailed(
                f"DataFusion would merge by {merged_by} instead of {', '.join(schema.key_names)}; "
                "nothing was written"
            )


def file_facts(path: Path, schema: Schema) -> FileFacts:
    """Returns the facts about a file, after reading its keys. Raises `InvalidData` if it is not sorted."""
    names = schema.row_key_names
    # the first key repeats in runs, which decode quickly as a dictionary
    runs = [names[0]] if schema.row_keys[0].type == STRING else []
    with pq.ParquetFile(path, read_dictionary=runs, memory_map=True, pre_buffer=False) as file:
        if not file.metadata.num_rows:
            return FileFacts(0)
        sampler = KeySampler(schema, file.metadata.num_rows)
        for batch in file.iter_batches(_READ_ROWS, columns=list(names)):
            sampler.add(batch)
    return FileFacts.of(path, schema, sampler)


def write_newest(
    path: Path,
    batches: Iterator[pa.RecordBatch],
    schema: Schema,
    properties: TableProperties,
    shape_of: Callable[[pa.Table], FileShape],
) -> FileFacts:
    """Writes batches of a keyed table as `write_groups` does, and counts the marks of deletion."""
    marks = Marks()
    write_groups(path, marks.counted(batches), schema, properties, shape_of)
    facts = file_facts(path, schema)
    if facts.row_count != marks.rows:
        raise JobFailed(f"a file was to have {marks.rows:,} rows, but has {facts.row_count:,}")
    return replace(facts, marks=marks.marks)


# Writers of sorted rows as the files of leaves, each with an object of sketches.

ROW = "__row"
"""The column with the number of a row in its load. It serves for sorting, and is not written."""
WRITTEN_ROWS = 65_536
BATCHES_AHEAD = 4
"""The number of sorted batches made ahead of the encoder."""


class LeafFiles:
    """A writer of sorted rows to files, one for each leaf or one for all leaves.

    For a keyed table it writes only the newest row of each key. `schema` is the schema of the files. A leaf's
    number is its position in `partition_ids`. `name_of` returns the object name for a partition id, or for
    "leaves" if one file has the rows of all leaves.
    """

    def __init__(
        self,
        objects: ObjectStore,
        schema: Schema,
        properties: TableProperties,
        partition_ids: pa.StringArray,
        name_of: Callable[[str], str],
    ) -> None:
        self._objects = objects
        self._schema = schema
        self._arrow = file_schema(schema)
        self._properties = properties
        self._ids = partition_ids
        self._name_of = name_of
        self._shape: FileShape | None = None
        self._shape_rows = 0

    def sorter(self, memory_bytes: int) -> LeafSorter:
        """Returns a sorter that sorts rows in the order that `write` needs."""
        return LeafSorter(
            self._schema,
            len(self._ids),
            by_leaf=self._one_file_per_leaf,
            memory_bytes=memory_bytes,
            descending=self._newest_first,
        )

    @property
    def _newest_first(self) -> Sequence[str]:
        return [*newest_first(self._properties)[:-1], ROW] if is_keyed(self._properties) else ()

    def write(self, sorter: LeafSorter) -> Iterator[FileWithReferences]:
        """Writes all rows of the sorter, and yields each written file. Without rows, there is no file."""
        if sorter.is_small:
            yield from self._written(_Stream(sorter.sorted_batches()), sorter.counts)
            return
        with closing(ahead(sorter.sorted_batches(), BATCHES_AHEAD)) as batches:
            yield from self._written(_Stream(batches), sorter.counts)

    def write_in_order(
        self, batches: Iterator[pa.RecordBatch], counts: npt.NDArray[np.int64]
    ) -> Iterator[FileWithReferences]:
        """Writes rows that are already in order, and yields each written file. Not for keyed tables.

        `counts` has the number of rows of each leaf.
        """
        yield from self._written(_Stream(batches), counts)

    def _written(self, stream: _Stream, counts: npt.NDArray[np.int64]) -> Iterator[FileWithReferences]:
        filled = np.flatnonzero(counts)
        if self._one_file_per_leaf:
            for leaf in filled:
                yield self._write(stream, counts, [int(leaf)])
        elif len(filled):
            yield self._write(stream, counts, filled.tolist())
        stream.check_end()

    @property
    def _one_file_per_leaf(self) -> bool:
        return self._properties.ingest_file_writing == "one_file_per_leaf"

    def _write(
        self, stream: _Stream, counts: npt.NDArray[np.int64], leaves: Sequence[int]
    ) -> FileWithReferences:
        name = self._name_of(str(self._ids[leaves[0]]) if self._one_file_per_leaf else "leaves")
        rows = {str(self._ids[leaf]): int(counts[leaf]) for leaf in leaves}
        total = sum(rows.values())
        taken = stream.take(total)
        if is_keyed(self._properties):
            taken = first_of_keys(taken, self._schema.row_key_names)
        facts, content = self._stored(name, self._exactly(taken), total)
        # one row of each key is left, and the leaves of the dropped rows are not known
        exact = not facts.marks and (self._one_file_per_leaf or facts.row_count == total)
        if len(leaves) == 1:
            rows = dict.fromkeys(rows, facts.row_count)
        references = (
            FileReference(
                filename=name,
                partition_id=partition_id,
                row_count=count,
                count_approximate=not exact,
                only_contains_data_for_this_partition=len(leaves) == 1,
            )
            for partition_id, count in rows.items()
        )
        return facts.file(name, references, content)

    def _stored(
        self, name: str, rows: Iterator[pa.RecordBatch], total: int
    ) -> tuple[FileFacts, bytes | None]:
        """Writes rows as an object, with its sketches; returns its facts, and its content if it is inlined.

        For a table that is not keyed, `total` is their number.
        """
        with self._objects.staged(name) as path:
            if is_keyed(self._properties):
                facts = write_newest(path, rows, self._schema, self._properties, self._shape_of)
            else:
                facts = self._write_all(path, rows, total)
        self._objects.put(name + SKETCHES_SUFFIX, facts.sketches)
        return facts, None

    def _write_all(self, path: Path, batches: Iterator[pa.RecordBatch], total: int) -> FileFacts:
        sampler = KeySampler(self._schema, total)

        def sampled(batch: pa.RecordBatch) -> pa.RecordBatch:
            sampler.add(batch)
            return batch

        write_groups(path, map(sampled, batches), self._schema, self._properties, self._shape_of)
        if (found := pq.read_metadata(path).num_rows) != total:
            raise JobFailed(f"a file was to have {total:,} rows, but has {found:,}")
        return FileFacts.of(path, self._schema, sampler)

    def _exactly(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (pa.RecordBatch.from_arrays(batch.columns, schema=self._arrow) for batch in batches)

    def _shape_of(self, first: pa.Table) -> FileShape:
        if self._shape is None or self._shape_rows < min(first.num_rows, SAMPLE_ROWS):
            self._shape = FileShape.like(first, self._schema, self._properties)
            self._shape_rows = first.num_rows
        return self._shape


class _Stream:
    """A stream of batches from which any number of rows can be taken."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise JobFailed(f"{rows:,} rows were lost while they were sorted; nothing was added")
            piece = batch.slice(0, min(rows, WRITTEN_ROWS))
            self._rest = batch.slice(piece.num_rows) if piece.num_rows < batch.num_rows else None
            rows -= piece.num_rows
            yield piece

    def check_end(self) -> None:
        """Raises `JobFailed` if the stream has more rows."""
        if self._rest is not None or any(batch.num_rows for batch in self._batches):
            raise JobFailed("more rows came out of sorting than went in; nothing was added")
