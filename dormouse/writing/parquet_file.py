"""Sorted Parquet files: written by DataFusion, and what is recorded of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import DataFrame

from dormouse.data.datafusion_session import file_url, numbered
from dormouse.data.file_checks import digest_of_file
from dormouse.data.sketches import KeySampler
from dormouse.data.transform import sized_filters
from dormouse.errors import JobFailed
from dormouse.model.ahead import portions
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.region import encode_key
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import STRING
from dormouse.writing.file_shape import FileShape

_MERGE = re.compile(r"SortPreservingMergeExec: \[(.*?)\]")
_MERGE_COLUMN = re.compile(r"([^\s,]+)@\d+ ASC")
_READ_ROWS = 65_536
GROUPS_OF_A_SIZE = 4_096
"""After which row groups are twice as large."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is known of a file that was just written; with no rows there is no file.

    `min_key` and `max_key` are its first and last row key as `model.keys.encode_key` gives them; `sketches`
    is the object to keep beside it (`FileSketches.to_bytes`); `digest` is the XXH3-128 of its bytes. `marks`
    of its rows are marks of deletion.
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
        """Of a file whose rows the sampler has seen; `InvalidData` when they are not in order."""
        return FileFacts(
            row_count=sampler.row_count,
            byte_count=path.stat().st_size,
            min_key=encode_key(schema.row_keys, sampler.first or ()),
            max_key=encode_key(schema.row_keys, sampler.last or ()),
            sketches=sampler.sketches().to_bytes(),
            digest=digest_of_file(path),
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
            digest=self.digest,
        )


def writer_options() -> dict[str, str]:
    """DataFusion's settings to write one Parquet file."""
    return {
        "datafusion.execution.minimum_parallel_output_files": "1",
        "datafusion.execution.soft_max_rows_per_output_file": str((1 << 63) - 1),
    }


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
        numbered(rows, schema).write_parquet_with_options(file_url(written), shape.of_datafusion(schema))
        facts = file_facts(written, schema) if written.exists() else FileFacts(0)
        if facts.row_count:
            written.replace(output_path)
        return facts
    finally:
        written.unlink(missing_ok=True)


def write_groups(
    path: Path,
    batches: Iterator[pa.RecordBatch],
    schema: Schema,
    properties: TableProperties,
    shape_of: Callable[[pa.Table], FileShape],
) -> None:
    """Writes batches, at least one, that have exactly the schema's types, as one Parquet file.

    `shape_of` tells the shape by the rows of the first row group.
    """
    groups = _row_groups(batches, properties.row_group_bytes)
    first = next(groups)
    shape = shape_of(first)
    with pq.ParquetWriter(
        path,
        first.schema,
        store_schema=False,  # readers take the types from Parquet
        write_page_index=True,
        bloom_filter_options=sized_filters(shape.bloom_columns, first),
        **shape.of_arrow(schema),
    ) as writer:
        writer.write_table(first, row_group_size=first.num_rows)
        del first  # or two row groups would be held at once
        for group in groups:
            writer.write_table(group, row_group_size=group.num_rows)
            del group


def _row_groups(batches: Iterator[pa.RecordBatch], bytes_min: int) -> Iterator[pa.Table]:
    """Rows of so many bytes, then of ever more: readers number row groups by 16 bits."""
    for number in count():
        size = bytes_min << number // GROUPS_OF_A_SIZE
        some = next(portions(batches, attrgetter("nbytes"), size), None)
        if some is None:
            return
        yield pa.Table.from_batches(some)


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
