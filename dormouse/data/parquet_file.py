"""Sorted Parquet files: written by DataFusion, and what is recorded of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datafusion import DataFrame
from datafusion.dataframe import ParquetColumnOptions, ParquetWriterOptions

from dormouse.data.bloom_filters import FALSE_POSITIVES, bloom_filter_columns
from dormouse.data.datafusion_session import file_url
from dormouse.data.sketches import KeySampler
from dormouse.errors import JobFailed
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.keys import encode_key
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema
from dormouse.model.types import DOUBLE, STRING

_CODECS = {"zstd": "zstd(1)", "snappy": "snappy", "lz4": "lz4_raw", "none": "uncompressed"}
_MERGE = re.compile(r"SortPreservingMergeExec: \[(.*?)\]")
_MERGE_COLUMN = re.compile(r"([^\s,]+)@\d+ ASC")
_READ_ROWS = 65_536
_GROUP_ROWS_MIN = 1_000
_GROUP_ROWS_MAX = 1 << 20
_ENCODED_ROWS_MAX = 8_192
_ENCODED_OF_GROUP = 1 / 16
_TELLING_ROWS_MIN = 1_000
_DISTINCT_SHARE_MIN = 0.9
_STATISTICS_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is known of a file that was just written; with no rows there is no file.

    `min_key` and `max_key` are its first and last row key as `model.keys.encode_key` gives them; `sketches`
    is the object to keep beside it (`FileSketches.to_bytes`).
    """

    row_count: int
    byte_count: int = 0
    min_key: bytes | None = None
    max_key: bytes | None = None
    sketches: bytes = b""

    @staticmethod
    def of(path: Path, schema: Schema, sampler: KeySampler) -> FileFacts:
        """Of a file whose rows the sampler has seen; `InvalidData` when they are not in order."""
        return FileFacts(
            row_count=sampler.row_count,
            byte_count=path.stat().st_size,
            min_key=encode_key(schema.row_keys, sampler.first or ()),
            max_key=encode_key(schema.row_keys, sampler.last or ()),
            sketches=sampler.sketches().to_bytes(),
        )

    def file(self, name: str, references: Iterable[FileReference]) -> FileWithReferences:
        """What a commit adds."""
        return FileWithReferences(
            filename=name,
            references=tuple(references),
            byte_count=self.byte_count,
            row_count=self.row_count,
            min_key=self.min_key,
            max_key=self.max_key,
        )


def writer_options() -> dict[str, str]:
    """DataFusion's settings to write one Parquet file."""
    return {
        "datafusion.execution.minimum_parallel_output_files": "1",
        "datafusion.execution.soft_max_rows_per_output_file": str((1 << 63) - 1),
    }


@dataclass(frozen=True, slots=True)
class FileShape:
    """How a Parquet file is laid out: rows of a row group, which columns go without a dictionary, and which
    have bloom filters."""

    group_rows: int = _GROUP_ROWS_MAX
    plain_columns: tuple[str, ...] = ()
    bloom_columns: tuple[str, ...] = ()
    compression: str = "zstd"

    @staticmethod
    def like(sample: pa.Table, schema: Schema, properties: TableProperties) -> FileShape:
        """For rows like these, in row groups of about so many bytes before encoding as the properties say.

        Where values hardly repeat, a dictionary would be filled, given up, and have cost time and bytes.
        """
        row_bytes = max(sample.nbytes / max(1, sample.num_rows), 1)
        group_rows = int(properties.row_group_bytes / row_bytes)
        plain = (name for name in sample.column_names if _hardly_repeats(sample.column(name)))
        return FileShape(
            group_rows=min(max(group_rows, _GROUP_ROWS_MIN), _GROUP_ROWS_MAX),
            plain_columns=tuple(plain) if sample.num_rows >= _TELLING_ROWS_MIN else (),
            bloom_columns=bloom_filter_columns(schema, properties),
            compression=properties.compression,
        )

    def options(self, schema: Schema) -> ParquetWriterOptions:
        """As DataFusion takes it; SQL's options would not tell upper from lower case."""
        unbounded = set(schema.names).difference(bounded_columns(schema))
        # encoded at once: few calls, yet pages that keep to their size when rows are long
        encoded = min(max(int(self.group_rows * _ENCODED_OF_GROUP), 1), _ENCODED_ROWS_MAX)
        return ParquetWriterOptions(
            compression=_CODECS[self.compression],
            max_row_group_size=self.group_rows,
            write_batch_size=encoded,
            statistics_enabled="page",
            # a column of many values is smaller and faster without a dictionary: it is given up early
            dictionary_page_size_limit=200_000,
            created_by="dormouse",
            # readers take the types from Parquet: not Arrow's views, which some of them do not know
            skip_arrow_metadata=True,
            statistics_truncate_length=_STATISTICS_BYTES_MAX,
            column_specific_options={
                name: self._column_options(name, bounded=name not in unbounded)
                for name in {*self.plain_columns, *self.bloom_columns, *unbounded}
            },
        )

    def _column_options(self, name: str, *, bounded: bool) -> ParquetColumnOptions:
        bloom = name in self.bloom_columns
        return ParquetColumnOptions(
            dictionary_enabled=False if name in self.plain_columns else None,
            bloom_filter_enabled=True if bloom else None,
            # as if all values differed: the writer folds a filter to the size that its values need
            bloom_filter_ndv=self.group_rows if bloom else None,
            bloom_filter_fpp=FALSE_POSITIVES if bloom else None,
            statistics_enabled=None if bounded else "none",
        )


def bounded_columns(schema: Schema) -> list[str]:
    """The columns of which files have minimum and maximum: of DOUBLE, these would not tell of NaN."""
    return [field.name for field in schema.fields if field.type != DOUBLE and not field.type.is_nested]


def write_sorted(
    rows: DataFrame, schema: Schema, output_path: Path, shape: FileShape, constant: Collection[str] = ()
) -> FileFacts:
    """Write rows that are in key order to one Parquet file; nothing is left there on a failure.

    All rows have one value of the keys that are `constant`. DataFusion's own errors and panics pass through.
    The rows are of a `sorted_session` with `writer_options`.
    """
    # DataFusion takes a name without a suffix for a folder
    written = output_path.with_name(output_path.name + ".parquet")
    try:
        check_merges_by_all_keys(schema, rows.execution_plan().display_indent(), constant)
        rows.write_parquet_with_options(file_url(written), shape.options(schema))
        facts = file_facts(written, schema) if written.exists() else FileFacts(0)
        if facts.row_count:
            written.replace(output_path)
        return facts
    finally:
        written.unlink(missing_ok=True)


def check_merges_by_all_keys(schema: Schema, plan: str, constant: Collection[str] = ()) -> None:
    """Refuses a plan that merges sorted streams by fewer than all keys: its output could be out of order.

    Those that are constant order nothing, and DataFusion leaves them out where it knows.
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
    """Read the row keys of a sorted file, streamed, for its facts; `InvalidData` when not in order."""
    names = schema.row_key_names
    # the first key repeats in runs: as a dictionary it costs next to nothing to decode
    runs = [names[0]] if schema.row_keys[0].type == STRING else []
    with pq.ParquetFile(path, read_dictionary=runs, memory_map=True, pre_buffer=False) as file:
        if not file.metadata.num_rows:
            return FileFacts(0)
        sampler = KeySampler(schema, file.metadata.num_rows)
        for batch in file.iter_batches(_READ_ROWS, columns=list(names)):
            sampler.add(batch)
    return FileFacts.of(path, schema, sampler)


def _hardly_repeats(column: pa.ChunkedArray) -> bool:
    if pa.types.is_nested(column.type) or pa.types.is_boolean(column.type):
        return False
    return bool(pc.count_distinct(column, mode="all").as_py() >= _DISTINCT_SHARE_MIN * len(column))
