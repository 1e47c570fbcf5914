"""Helpers that write, read and list the real data files of a table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.datafusion_session import sorted_session, table_file
from dormouse.data.leaf_sorter import MEMORY_BYTES
from dormouse.data.object_access import open_parquet
from dormouse.data.transform import Transform
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.objects import ObjectStore
from dormouse.state.context import TableContext
from dormouse.writing.merge import merged_rows
from dormouse.writing.parquet_file import LeafFiles, writer_options

SKETCHES = ".sketches"


def rows_of(context: TableContext, keys: Iterable[Any]) -> pa.Table:
    """Returns rows that have these keys, and no values. Several key columns are given as tuples."""
    rows = [key if isinstance(key, tuple) else (key,) for key in keys]
    names = context.schema.names
    return pa.Table.from_pylist(
        [dict(zip(names, row, strict=True)) for row in rows], schema=arrow_schema(context.schema)
    )


def add_file(
    context: TableContext, name: str, keys: Iterable[Any], partition_ids: Sequence[str] = ("root",)
) -> str:
    """Adds a file with these keys and a reference from each partition; returns the file's name."""
    name = f"{context.table.object_prefix}{name}.parquet"
    facts = write_object(context.objects, context.schema, name, rows_of(context, keys))
    alone = len(partition_ids) == 1
    references = tuple(
        FileReference(
            filename=name,
            partition_id=partition_id,
            row_count=facts.row_count // len(partition_ids),
            count_approximate=not alone,
            only_contains_data_for_this_partition=alone,
        )
        for partition_id in partition_ids
    )
    file = FileWithReferences(
        filename=name,
        references=references,
        byte_count=facts.byte_count,
        row_count=facts.row_count,
        digest=facts.digest,
    )
    context.store.add_files_with_references([file])
    return name


def write_object(objects: ObjectStore, schema: Schema, name: str, rows: pa.Table) -> FileWithReferences:
    """Writes a sorted Parquet object with its sketches, as an ingest does. There must be at least one row."""
    files = LeafFiles(objects, schema, TableProperties(), ["root"], lambda _: name)
    with files.sorter(MEMORY_BYTES) as sorter:
        for batch in rows.combine_chunks().to_batches():
            sorter.add(batch, pa.array([0] * batch.num_rows, pa.int32()))
        [file] = files.write(sorter)
    return file


def keys_in(context: TableContext, filename: str) -> list[Any]:
    """Returns the row keys of a file, in the file's order; with one key column, plain values."""
    with open_parquet(context.objects, filename) as file:
        rows = file.read(columns=list(context.schema.row_key_names)).to_pylist()
    keys = [tuple(row[name] for name in context.schema.row_key_names) for row in rows]
    return [key[0] for key in keys] if len(context.schema.row_keys) == 1 else keys


def objects_of(context: TableContext) -> set[str]:
    """Returns the names of the table's objects."""
    return {name for name, _ in context.objects.list(context.table.object_prefix.rstrip("/"))}


def merge_plan(
    inputs: Sequence[str],
    schema: Schema,
    *,
    region: Region | None = None,
    properties: TableProperties | None = None,
) -> str:
    """Returns DataFusion's physical plan of a merge as text, without running it."""
    context = sorted_session(options=writer_options())
    files = [table_file(context, schema, file) for file in inputs]
    transform = Transform.parse(schema, properties or TableProperties())
    rows = merged_rows(context, files, transform, region=region, now_ms=0)
    return str(rows.execution_plan().display_indent())


@contextmanager
def as_a_user_without_rights(folder: Path) -> Iterator[None]:
    """Runs the block as a user without the right to change anything in the folder."""
    folder.chmod(0o500)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)
