"""Ingests of few rows, whose files stay in the database until they are compacted.

Each file is encoded in memory, and the statement that adds it stores its bytes. So an ingest needs no object
and no write attempt, and the disk is flushed once. An ingest that is too large is written as objects.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dormouse.data.leaf_sorter import LEAF, LeafLookup, sort_indices
from dormouse.data.newest import Marks
from dormouse.errors import CommitOutcomeUnknown
from dormouse.model.file_reference import INLINED, FileReference, FileWithReferences, is_inlined
from dormouse.model.locks import process_lock
from dormouse.model.loops import backoff_seconds, tries
from dormouse.model.region import encode_key
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, TableRecord, is_keyed
from dormouse.objects.fault import new_digest
from dormouse.objects.names import parquet_suffix, schema_version_of
from dormouse.reading.bundles import encoded, joined_rows
from dormouse.sources.given_rows import are_paths
from dormouse.sources.source import Source
from dormouse.state.context import TableContext
from dormouse.writing.parquet_file import FileFacts, FileShape, LeafFiles, write_groups

if TYPE_CHECKING:
    from dormouse.objects.store import ObjectStore
    from dormouse.reading.where import Deletion
    from dormouse.state.files.attempts import WriteAttempt
    from dormouse.state.files.compaction_jobs import CompactionJob
    from dormouse.state.files.store import FileReferenceStore

ROWS_SHARE = 16
"""The factor of `inline_bytes_max` that gives the largest ingest, in bytes before encoding."""
SMALL_BYTES = 2_048
"""The bytes of rows below which compression and dictionaries gain nothing."""
DATA_BYTES_MAX = 16 * 1024 * 1024
ROWS_MAX = 100_000
TABLES_MAX = 1_000
COUNTED_SECONDS = 1.0
SHAPE_SECONDS = 60.0
"""How long the files of a table keep their encodings before these are tried again."""
FULL_SHARE, LOW_SHARE = 0.75, 0.5
"""The shares of `inline_total_bytes_max` at which a process stops inlining, and begins again.

The first leaves room for what other processes add within `COUNTED_SECONDS`.
"""
ASK_ATTEMPTS_MAX = 8
ASK_WAIT_SECONDS_MAX = 5.0
COUNTED_SHARE = 16
"""The divisor of `inline_total_bytes_max` that gives the bytes after which a process counts again."""


@dataclass(frozen=True, slots=True)
class _Count:
    """The bytes of a table's inlined files, as a process knows them."""

    byte_count: int
    counted_at: float
    is_full: bool
    added: int = 0


class Budget:
    """The limit of the bytes of inlined files of each table. Threads of a process share it."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._lock = process_lock()

    def has_room(self, store: FileReferenceStore) -> bool:
        """Returns whether a table may have more inlined files; counts them about once a second."""
        uuid_, bytes_max = store.table.uuid, store.table.properties.inline_total_bytes_max
        with self._lock:
            known = self._counts.get(uuid_)
        is_old = known is None or time.monotonic() > known.counted_at + COUNTED_SECONDS
        if known is None or is_old or known.added * COUNTED_SHARE > bytes_max:
            _, byte_count = store.inlined.total()
            share = LOW_SHARE if known is not None and known.is_full else FULL_SHARE
            known = _Count(byte_count, time.monotonic(), byte_count >= share * bytes_max)
            with self._lock:
                self._counts[uuid_] = known
        return not known.is_full

    def add(self, table: TableRecord, byte_count: int) -> None:
        """Records bytes that this process added to a table."""
        with self._lock:
            if (known := self._counts.get(table.uuid)) is not None:
                self._counts[table.uuid] = replace(known, added=known.added + byte_count)


BUDGET = Budget()


def may_inline(context: TableContext) -> bool:
    """Returns whether an ingest into the table may be inlined now."""
    return context.properties.inline_bytes_max > 0 and BUDGET.has_room(context.store)


def is_small(data: Any) -> bool:
    """Returns whether given data may be small, and can be read again if it is not."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        return bool(data.nbytes <= DATA_BYTES_MAX)
    if isinstance(data, Mapping):
        return all(_length(column) <= ROWS_MAX for column in data.values())
    return isinstance(data, Sequence) and len(data) <= ROWS_MAX and not are_paths(data)


def _length(column: Any) -> int:
    return len(column) if isinstance(column, Sized) else ROWS_MAX + 1


def begun(source: Source, properties: TableProperties) -> tuple[list[pa.RecordBatch] | None, Source]:
    """Returns all batches of a source if they are small, else None; and the source with all batches."""
    taken: list[pa.RecordBatch] = []
    byte_count, rest = 0, iter(source.batches)
    for batch in rest:
        taken.append(batch)
        byte_count += batch.nbytes
        if byte_count > ROWS_SHARE * properties.inline_bytes_max:
            return None, replace(source, batches=chain(taken, rest))
    return taken, replace(source, batches=iter(taken))


# The leaves of each table's tree, looked up anew about once a second.


@dataclass(frozen=True, slots=True)
class _KnownLeaves:
    """A look-up of leaves, the columns it is for, and when it was made."""

    lookup: LeafLookup
    of_schema: Schema
    made_at: float


_leaves: dict[str, _KnownLeaves] = {}


def _leaves_of(context: TableContext) -> LeafLookup:
    """Returns the leaves of a recent tree: references to a partition that was split since are pushed down."""
    known = _leaves.get(context.table.uuid)
    is_old = known is None or time.monotonic() > known.made_at + COUNTED_SECONDS
    if known is None or is_old or known.of_schema != context.schema:
        if len(_leaves) >= TABLES_MAX:
            _leaves.clear()
        known = _KnownLeaves(LeafLookup(context.partitions.tree()), context.schema, time.monotonic())
        _leaves[context.table.uuid] = known
    return known.lookup


def forget_leaves(table: TableRecord) -> None:
    """Makes the next ingest of this process look up the leaves of a table, which have changed."""
    _leaves.pop(table.uuid, None)


# The shapes of each table's last inlined files: to find a shape takes longer than to write so few rows.


@dataclass(frozen=True, slots=True)
class _KnownShape:
    """A shape, the columns and properties it is for, and when it was found."""

    shape: FileShape
    of: tuple[Schema, TableProperties]
    found_at: float


_shapes: dict[tuple[str, int], _KnownShape] = {}
"""Shapes by the uuid of a table and the magnitude of the number of rows."""


def inlined_name(table: TableRecord, schema_version: int) -> Callable[[str], str]:
    """Returns a function that names the inlined file of one ingest with rows of a partition."""
    prefix = f"{table.object_prefix}{INLINED}/{uuid.uuid4().hex}/0-"
    return lambda partition_id: f"{prefix}{partition_id}{parquet_suffix(schema_version)}"


class InlinedLeaves(LeafFiles):
    """A writer of rows to inlined files, one for each leaf or one for all leaves."""

    def __init__(
        self,
        objects: ObjectStore,
        schema: Schema,
        properties: TableProperties,
        partition_ids: pa.StringArray,
        name_of: Callable[[str], str],
        table_uuid: str,
    ) -> None:
        super().__init__(objects, schema, properties, partition_ids, name_of)
        self._table_uuid = table_uuid

    def files(self, rows: pa.Table, leaves: pa.Int32Array) -> list[FileWithReferences]:
        """Returns the files of some rows in any order; `leaves` has the position of the leaf of each row."""
        if rows.num_rows == 1:
            return [self._file_of_row(rows.select(self._schema.names), str(self._ids[leaves[0].as_py()]))]
        counts = np.bincount(leaves.to_numpy(), minlength=len(self._ids))
        rows = rows.append_column(LEAF, leaves)
        order = [LEAF, *self._schema.key_names] if self._one_file_per_leaf else self._schema.key_names
        places = sort_indices(rows, order, self._newest_first)
        rows = rows if places is None else rows.take(places)
        rows = rows.select(self._schema.names).combine_chunks()
        return list(self.write_in_order(iter(rows.to_batches()), counts))

    def _file_of_row(self, row: pa.Table, leaf: str) -> FileWithReferences:
        """Returns the file that `write_in_order` returns for the row, at less cost."""
        name = self._name_of(leaf if self._one_file_per_leaf else "leaves")
        facts, content = self._stored(name, self._exactly(filter(len, row.to_batches())), 1)
        reference = FileReference(
            filename=name, partition_id=leaf, row_count=1, count_approximate=facts.marks > 0
        )
        return facts.file(name, [reference], content)

    def _stored(
        self, name: str, rows: Iterator[pa.RecordBatch], total: int
    ) -> tuple[FileFacts, bytes | None]:
        marks = Marks()
        batches = list(marks.counted(rows) if is_keyed(self._properties) else rows)
        sink = pa.BufferOutputStream()
        write_groups(sink, iter(batches), self._schema, self._properties, self._shape_of)
        content = sink.getvalue().to_pybytes()
        row_count = sum(batch.num_rows for batch in batches)
        first = self._key(batches[0], 0)
        facts = FileFacts(
            row_count=row_count,
            byte_count=len(content),
            min_key=first,
            max_key=first if row_count == 1 else self._key(batches[-1], -1),
            digest=new_digest(data=content).digest(),
            marks=marks.marks,
        )
        return facts, content

    def _key(self, batch: pa.RecordBatch, row: int) -> bytes:
        keys = self._schema.row_keys
        return encode_key(keys, [batch.column(key.name)[row].as_py() for key in keys])

    def _shape_of(self, first: pa.Table) -> FileShape:
        if first.nbytes <= SMALL_BYTES:
            return FileShape(compression="none", plain_columns=tuple(self._schema.names))
        key, of = (self._table_uuid, first.num_rows.bit_length()), (self._schema, self._properties)
        known = _shapes.get(key)
        if known is None or known.of != of or time.monotonic() > known.found_at + SHAPE_SECONDS:
            if len(_shapes) >= TABLES_MAX:
                _shapes.clear()
            known = _KnownShape(super()._shape_of(first), of, time.monotonic())
            _shapes[key] = known
        return known.shape


def inlined_files(
    context: TableContext, batches: Sequence[pa.RecordBatch]
) -> list[FileWithReferences] | None:
    """Returns files that inline some rows, or None if one of them is too large. Nothing is written.

    The rows fit the table's stored columns.
    """
    rows = pa.Table.from_batches(batches) if batches else None
    if rows is None or not rows.num_rows:
        return None
    lookup, name_of = _leaves_of(context), inlined_name(context.table, context.schema.version)
    writer = InlinedLeaves(
        context.objects,
        context.stored_schema,
        context.properties,
        lookup.leaf_ids,
        name_of,
        context.table.uuid,
    )
    files = writer.files(rows, lookup.indexes(rows))
    bytes_max = context.properties.inline_bytes_max
    return None if any((file.byte_count or 0) > bytes_max for file in files) else files


# Their commit.


def commit_inlined(
    context: TableContext,
    files: Sequence[FileWithReferences],
    commit_id: str,
    source: bytes | None,
    attempt: WriteAttempt | None = None,
) -> bool:
    """Adds inlined files in one statement, and ends the attempt, if one is given.

    Returns False, and adds nothing, if something is in the way.

    If an answer is lost, it repeats the statement: this waits for the lost transaction, and adds nothing
    twice. Raises `CommitOutcomeUnknown` if the database no longer answers.
    """
    unknown: CommitOutcomeUnknown | None = None
    pause = partial(backoff_seconds, seconds_min=0.05, seconds_max=ASK_WAIT_SECONDS_MAX)
    for _ in tries(tries_max=ASK_ATTEMPTS_MAX, pause=pause):
        try:
            applied = context.store.inlined.add(
                files,
                commit_id=commit_id,
                source=source,
                schema_version=context.schema.version,
                attempt_id=None if attempt is None else attempt.attempt_id,
            )
        except CommitOutcomeUnknown as error:
            unknown = error
            continue
        if not applied and unknown is not None:
            applied = bool(context.store.digests([files[0].filename]))  # no other ingest has this name
        if applied:
            BUDGET.add(context.table, sum(file.byte_count or 0 for file in files))
        return applied
    raise unknown or AssertionError


# The inputs of compaction jobs.

JOINED_MIN = 8
"""The fewest inlined inputs of a job that are joined before the merge."""


def with_joined(
    context: TableContext,
    job: CompactionJob,
    places: Sequence[str],
    deletions: Sequence[Sequence[Deletion]],
    folder: Path,
) -> tuple[list[str], list[Sequence[Deletion]]]:
    """Returns the places of a job's inputs and the deletions of each, with one file for many inlined inputs.

    The file is written to the folder. It has the rows that deletions leave of the inlined files that have the
    table's present columns. Files with deletions of a keyed table stay apart.
    """
    paths: dict[int, Path] = {}
    for number, item in enumerate(job.inputs):
        is_alike = is_inlined(item.filename) and not (deletions[number] and is_keyed(context.properties))
        if is_alike and schema_version_of(item.filename) == context.schema.version:
            path = context.objects.local_path(item.filename)
            paths |= {} if path is None else {number: path}
    if len(paths) < JOINED_MIN:
        return list(places), list(deletions)
    joined = folder / f"joined{parquet_suffix(context.schema.version)}"
    gone = [deletions[number] for number in paths]
    rows = joined_rows(paths.values(), gone, context.stored_schema, context.properties)
    joined.write_bytes(encoded(rows, context.stored_schema))
    left = [number for number in range(len(places)) if number not in paths]
    return [str(joined), *(places[n] for n in left)], [(), *(deletions[n] for n in left)]
