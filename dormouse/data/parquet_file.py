"""Sorted Parquet files: written by DataFusion, and what is recorded of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datafusion import SessionContext

from dormouse.data.session import file_url
from dormouse.data.sketches import KeySampler
from dormouse.data.transform import ordered
from dormouse.errors import JobFailed
from dormouse.model.keys import encode_key
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema
from dormouse.model.types import STRING

_CODECS = {"zstd": "zstd(1)", "snappy": "snappy", "lz4": "lz4_raw", "none": "uncompressed"}
_PARQUET = "datafusion.execution.parquet."
_MERGE = re.compile(r"SortPreservingMergeExec: \[(.*?)\]")
_MERGE_COLUMN = re.compile(r"([^\s,]+)@\d+ ASC")
_READ_ROWS = 65_536
_GROUP_ROWS_MIN = 1_000
_GROUP_ROWS_MAX = 1 << 20
_ENCODED_ROWS_MAX = 8_192
_ENCODED_OF_GROUP = 1 / 16
_TELLING_ROWS_MIN = 1_000
_DISTINCT_SHARE_MIN = 0.9


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


def writer_options(properties: TableProperties) -> dict[str, str]:
    """DataFusion's settings to write one Parquet file as the table's properties ask."""
    return {
        "datafusion.execution.minimum_parallel_output_files": "1",
        "datafusion.execution.soft_max_rows_per_output_file": str((1 << 63) - 1),
        _PARQUET + "compression": _CODECS[properties.compression],
        _PARQUET + "statistics_enabled": "page",
        # a column of many values is smaller and faster without a dictionary: it is given up early
        _PARQUET + "dictionary_page_size_limit": "200000",
        _PARQUET + "created_by": "dormouse",
        # readers take the types from Parquet: not Arrow's views, which some of them do not know
        _PARQUET + "skip_arrow_metadata": "true",
    }


@dataclass(frozen=True, slots=True)
class FileShape:
    """How a Parquet file is laid out: rows of a row group, and which columns go without a dictionary."""

    group_rows: int = _GROUP_ROWS_MAX
    plain_columns: tuple[str, ...] = ()

    @staticmethod
    def like(sample: pa.Table, row_group_bytes: int) -> FileShape:
        """For rows like these, in row groups of about so many bytes before encoding.

        Where values hardly repeat, a dictionary would be filled, given up, and have cost time and bytes.
        """
        row_bytes = sample.nbytes / max(1, sample.num_rows)
        group_rows = min(max(int(row_group_bytes / max(row_bytes, 1)), _GROUP_ROWS_MIN), _GROUP_ROWS_MAX)
        plain = (name for name in sample.column_names if _hardly_repeats(sample.column(name)))
        return FileShape(group_rows, tuple(plain) if sample.num_rows >= _TELLING_ROWS_MIN else ())

    def sql(self) -> str:
        """As options of DataFusion's COPY, which takes only names in lower case for what they are."""
        # encoded at once: few calls, yet pages that keep to their size when rows are long
        encoded = min(max(int(self.group_rows * _ENCODED_OF_GROUP), 1), _ENCODED_ROWS_MAX)
        options = {"max_row_group_size": str(self.group_rows), "write_batch_size": str(encoded)}
        options |= {f"dictionary_enabled::{name}": "false" for name in self.plain_columns}
        return ", ".join(f"'format.{key}' '{value}'" for key, value in options.items())


def copy_sorted(
    context: SessionContext, schema: Schema, query: str, output_path: Path, shape: FileShape
) -> FileFacts:
    """Write the rows of a query, in key order, to one Parquet file; nothing is left there on a failure.

    DataFusion's own errors and panics pass through. A session of `sorted_session` with `writer_options` is
    needed.
    """
    # DataFusion takes a name without a suffix for a folder
    written = output_path.with_name(output_path.name + ".parquet")
    try:
        copy = context.sql(copy_sql(schema, query, written, shape))
        check_merges_by_all_keys(schema, copy.execution_plan().display_indent())
        copy.collect()
        facts = file_facts(written, schema) if written.exists() else FileFacts(0)
        if facts.row_count:
            written.replace(output_path)
        return facts
    finally:
        written.unlink(missing_ok=True)


def check_merges_by_all_keys(schema: Schema, plan: str) -> None:
    """Refuses a plan that merges sorted streams by fewer than all keys: its output could be out of order."""
    for merged_by in _MERGE.findall(plan):
        names = tuple(name.strip('"') for name in _MERGE_COLUMN.findall(merged_by))
        if names[: len(schema.key_names)] != schema.key_names:
            raise JobFailed(
                f"DataFusion would merge by {merged_by} instead of {', '.join(schema.key_names)}; "
                "nothing was written"
            )


def copy_sql(schema: Schema, query: str, path: Path, shape: FileShape) -> str:
    """The statement that writes a query's rows in key order to one Parquet file."""
    rows = ordered(schema, query)
    return f"COPY ({rows}) TO '{file_url(path)}' STORED AS PARQUET OPTIONS ({shape.sql()})"


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
    sketches, fields = sampler.sketches(), schema.row_keys
    return FileFacts(
        row_count=sampler.row_count,
        byte_count=path.stat().st_size,
        min_key=encode_key(fields, sampler.first or ()),
        max_key=encode_key(fields, sampler.last or ()),
        sketches=sketches.to_bytes(),
    )


def _hardly_repeats(column: pa.ChunkedArray) -> bool:
    if pa.types.is_nested(column.type) or pa.types.is_boolean(column.type):
        return False
    return bool(pc.count_distinct(column, mode="all").as_py() >= _DISTINCT_SHARE_MIN * len(column))
