"""The changes of row tables.

Under the table's write lock a change writes its files first, then commits all metadata in one transaction.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.file_checks import differ
from dormouse.data.leaf_sorter import LeafLookup
from dormouse.errors import AmbiguousRows, CommitFailed, InvalidColumn, InvalidRow
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.json_values import json_value
from dormouse.model.loops import Progress, no_progress
from dormouse.model.schema import Schema
from dormouse.model.table import ROW_ID, ROW_VERSION, TableRecord
from dormouse.rows.applying import Application, ColumnPlan, Reshaped
from dormouse.rows.batches import (
    BLOCK_ROWS_MAX,
    Flags,
    Ints,
    RowBatch,
    check_names,
    checked_rows,
    inserts,
    patches,
    removals,
    updates,
)
from dormouse.rows.changes import (
    LOCK_SECONDS_MAX,
    AddColumn,
    Change,
    Changed,
    DropColumn,
    Insert,
    LoadCsv,
    Patch,
    Remove,
    RenameColumn,
    RetypeColumn,
    Row,
    RowIds,
    Update,
    as_dicts,
    check_change_id,
    check_wait,
)
from dormouse.rows.columns import Column, column_named
from dormouse.rows.csv_loads import loads
from dormouse.rows.reading import RowReader
from dormouse.rows.store import HeldLock, Recorded, RowLocks, RowStore
from dormouse.rows.values import array_of, row_label, with_default
from dormouse.sources.source import DIGEST_BYTES, Hash, add_files
from dormouse.sources.text_format import UTF_8
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.shapes import NextShape
from dormouse.writing.ingest import commit_files
from dormouse.writing.parquet_file import LeafFiles

if TYPE_CHECKING:
    import psycopg

# Upserts by columns: looks up the rows that exist, and writes those that differ or are new.

Locate = Callable[[pa.RecordBatch], pa.Table]
"""A function that looks up the rows of a table that have some keys.

It takes a batch of keys. For each found row, it returns `position` (the position of the key in the batch),
ROW_ID, ROW_VERSION and all columns of the table.
"""


def upserts(
    rows: Any, on: Sequence[str], columns: Sequence[Column], locate: Locate
) -> tuple[list[RowBatch], int]:
    """Returns the rows of an upsert to write, in blocks, and the number of rows that need no change.

    `on` names the key columns. An existing row keeps the values of columns that the given row does not have.
    Raises `InvalidRow`, `InvalidColumn`, and `AmbiguousRows` if two given rows, or two rows of the table,
    have the same key.
    """
    keys = _keys(on, columns)
    if not (listed := checked_rows(as_dicts(rows), "upsert")):
        return [], 0
    for number, row in enumerate(listed):
        if missing := next((name for name in on if name not in row), None):
            raise InvalidRow(f"{row_label(number)}: it has no {missing!r}, by which rows are looked up")
    check_names(listed, columns, row_label, keys=())
    named = [column for column in columns if any(column.name in row for row in listed)]
    cells = {
        column.name: with_default(column, array_of(column, [row.get(column.name) for row in listed]))
        for column in named
    }
    given = {
        column.name: np.fromiter((column.name in row for row in listed), np.bool_, len(listed))
        for column in named
    }
    table = pa.table([cells[key.name] for key in keys], [key.name for key in keys])
    _check_once(table, "rows {} and {}")
    batches, unchanged = [], 0
    for start in range(0, len(listed), BLOCK_ROWS_MAX):
        stop = min(start + BLOCK_ROWS_MAX, len(listed))
        block = slice(start, stop)
        block_cells = {name: array[block] for name, array in cells.items()}
        flags = {name: each[block] for name, each in given.items()}
        existing = locate(
            pa.RecordBatch.from_arrays([block_cells[key.name] for key in keys], [key.name for key in keys])
        )
        _check_existing(existing, keys)
        batch, same = _batch(block_cells, flags, existing, stop - start, start)
        unchanged += same
        if len(batch):
            batches.append(batch)
    return batches, unchanged


def _keys(on: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    if isinstance(on, str) or not isinstance(on, Sequence) or not on:
        raise InvalidColumn(f"on is a list of the columns by which rows are looked up, not {on!r}")
    keys = [column_named(columns, name) for name in on]
    if len({key.name for key in keys}) < len(keys):
        raise InvalidColumn(f"on names a column twice: {', '.join(on)}")
    return keys


def _check_once(table: pa.Table, which: str) -> None:
    """Raises `AmbiguousRows` if two rows of an upsert have the same key."""
    numbered = table.append_column("__row", pa.array(np.arange(table.num_rows)))
    groups = numbered.group_by(table.column_names).aggregate(
        [("__row", "count"), ("__row", "min"), ("__row", "max")]
    )
    twice = groups.filter(pc.greater(groups.column("__row_count"), 1))
    if twice.num_rows:
        first = twice.sort_by("__row_min").slice(0, 1).to_pylist()[0]
        key = _key_text({name: first[name] for name in table.column_names})
        named = which.format(first["__row_min"] + 1, first["__row_max"] + 1)
        raise AmbiguousRows(f"{named} of the upsert both have {key}")


def _check_existing(existing: pa.Table, keys: Sequence[Column]) -> None:
    """Raises `AmbiguousRows` if two rows of the table have the same key of an upsert."""
    positions = existing.column(0).to_numpy()
    again = np.flatnonzero(positions[1:] == positions[:-1])
    if len(again):
        first, second = existing.slice(int(again[0]), 2).to_pylist()
        key = _key_text({column.name: first[column.name] for column in keys})
        raise AmbiguousRows(
            f"rows of {ROW_ID} {first[ROW_ID]} and {second[ROW_ID]} both have {key}: look rows up by more "
            f"columns, or update one by its id"
        )


def _batch(
    cells: Mapping[str, pa.Array], given: Mapping[str, Flags], existing: pa.Table, count: int, start: int
) -> tuple[RowBatch, int]:
    """Returns those rows of a block that are new or differ from the table, and the number of other rows."""
    positions = existing.column(0).to_numpy()
    ids, versions = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    ids[positions], versions[positions] = (
        existing.column(ROW_ID).to_numpy(),
        existing.column(ROW_VERSION).to_numpy(),
    )
    differs = np.zeros(len(positions), np.bool_)
    for name, array in cells.items():
        before = existing.column(name).combine_chunks()
        differs |= differ(array.take(pa.array(positions)), before) & given[name][positions]
    kept = ids == 0
    kept[positions] = differs
    at = np.flatnonzero(kept)

    def label(number: int, at: Ints = at) -> str:
        return row_label(start + int(at[number]))

    taken = pa.array(at)
    return RowBatch(
        ids[at],
        versions[at],
        {name: array.take(taken) for name, array in cells.items()},
        {name: flags[at] for name, flags in given.items()},
        label=label,
    ), int((~differs).sum())


def _key_text(key: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value!r}" for name, value in key.items())


# Digests of changes. They show when a change id is used again for a different change.


def digest_of_changes(changes: Sequence[Change]) -> bytes | None:
    """Returns a digest of some changes, of 16 bytes.

    Returns None if rows come from an iterator or a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for change in changes:
        digest.update(type(change).__name__.encode())
        match change:
            case Insert() | Update() | Patch() | Remove():
                is_known = _add_rows(digest, change.rows)
            case LoadCsv():
                is_known = _add_file(digest, change)
            case AddColumn():
                is_known = _add(digest, change.column.to_json())
            case _:
                is_known = _add(digest, asdict(change))
        if not is_known:
            return None
    return digest.digest()


def digest_of_upsert(rows: Iterable[Row], on: Sequence[str]) -> bytes | None:
    """Returns a digest of an upsert, of 16 bytes, or None if the rows come from an iterator."""
    digest, rows = hashlib.blake2b(b"upsert", digest_size=DIGEST_BYTES), as_dicts(rows)
    return digest.digest() if _add(digest, list(on)) and _add_rows(digest, rows) else None


def _add_rows(digest: Hash, rows: object) -> bool:
    return isinstance(rows, Sequence) and all(_add(digest, row) for row in rows)


def _add(digest: Hash, value: object) -> bool:
    """Adds a value to a digest and returns True, or False if it has no JSON form.

    Uses the JSON that a client sends over HTTP, so that a change gives the same digest in Python and over
    HTTP. Uses the `repr` of values that JSON lacks.
    """
    try:
        text = json.dumps(json_value(value), sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):
        return False
    digest.update(text.encode() + b"\0")
    return True


def _add_file(digest: Hash, change: LoadCsv) -> bool:
    if not isinstance(change.path, str | PathLike):
        return False
    try:
        add_files(digest, [(Path(change.path), ())])
    except OSError:
        return False
    options = asdict(replace(change, path=""))
    if options["encoding"] == UTF_8:  # earlier releases had no encoding: keeps their digests valid
        del options["encoding"]
    return _add(digest, options)


# The files of a change: one for each leaf partition, with its rows sorted by id and version.

MEMORY_BYTES = 32 * 1024 * 1024


class RowFiles:
    """A writer of the files of a change. As a context manager, it deletes its local files at the end."""

    def __init__(self, context: TableContext, attempt: WriteAttempt, schema: Schema) -> None:
        """Opens the writer. `schema` is the schema that the table will have after the commit of the files."""
        self.attempt = replace(attempt, schema_version=schema.version)
        self._lookup = LeafLookup(context.partitions.tree())
        self._writer = LeafFiles(
            context.objects, schema, context.properties, self._lookup.leaf_ids, self.attempt.object_name
        )
        self._open = ExitStack()
        self._sorter = self._open.enter_context(self._writer.sorter(MEMORY_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Adds the rows of a block."""
        self._sorter.add(rows, self._lookup.indexes(rows))

    def written(self) -> Sequence[FileWithReferences]:
        """Writes all added rows to the object store, durably, and returns the files."""
        return list(self._writer.write(self._sorter))


LOCK_WAIT_SECONDS = 60.0
Batches = Callable[[Any, Sequence[Column]], Iterator[RowBatch]]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A change whose rows are in blocks already, because an upsert has looked them up."""

    batches: Sequence[RowBatch]


_BATCHES: dict[type, Batches] = {
    LookedUp: lambda change, _: iter(change.batches),
    Insert: inserts,
    Update: updates,
    Patch: patches,
    Remove: lambda change, _: removals(change),
    LoadCsv: loads,
}
_KINDS = (Insert, Update, Patch, Remove, LoadCsv, AddColumn, RenameColumn, RetypeColumn, DropColumn)


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """The options of a change.

    A change with a `change_id` is made only once. If a change id is used again, the two digests are compared.
    `wait_seconds` is the timeout for the table's write lock.
    """

    dry_run: bool = False
    changed_by: str | None = None
    change_id: str | None = None
    digest: bytes | None = None
    wait_seconds: float = LOCK_WAIT_SECONDS
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        check_wait(self.wait_seconds, LOCK_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class PreparedChanges:
    """The changes to make, and the number of rows that need no change."""

    changes: Sequence[Change | LookedUp]
    unchanged: int = 0


Prepare = Callable[[HeldLock, tuple[Column, ...]], PreparedChanges]
"""A function that takes the table's lock and the table's columns, and returns the changes to make."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The results of a run of changes.

    `rewritten` is the number of rows that were written again because a column type changed. `descriptions`
    has a text for each change of columns. `columns` has a (version, columns) pair for each version at which
    they changed.
    """

    rewritten: int
    descriptions: tuple[str, ...]
    columns: tuple[tuple[int, tuple[Column, ...]], ...]


@dataclass(frozen=True)
class RowChanges:
    """The changes of one row table."""

    context: Callable[[], TableContext]
    store: RowStore
    reader: RowReader
    locks: RowLocks

    def make(self, prepare: Prepare, options: ChangeOptions) -> Changed:
        """Prepares changes under the table's write lock, makes all of them or none, and returns the result.

        If the change id was used before, returns the result of that change. A dry run takes no lock and
        changes nothing. Raises `RowLockHeld`, `RowConflict`, `InvalidRow`, `InvalidColumn` and
        `CommitIdReused`.
        """
        if options.change_id is not None:
            check_change_id(options.change_id)
        with self._locked(options) as held:
            if options.change_id is not None:
                done = self.store.change_of_id(options.change_id, options.digest)
                if done is not None:
                    return changed_of(done)
            columns = self.store.state().columns
            prepared = prepare(held, columns)
            if options.dry_run:
                return self._dry_run(held, columns, prepared, options)
            return self._commit(held, columns, prepared, options)

    def _locked(self, options: ChangeOptions) -> AbstractContextManager[HeldLock]:
        """Returns the table's write lock. For a dry run, returns an object that locks nothing."""
        if not options.dry_run:
            return self.locks.write(options.wait_seconds)
        state = self.store.state()
        return nullcontext(HeldLock(self.locks.lease(), state.version, state.next_id))

    def _dry_run(
        self, held: HeldLock, columns: tuple[Column, ...], prepared: PreparedChanges, options: ChangeOptions
    ) -> Changed:
        """Returns the result that the changes would have, and writes nothing."""
        plan = ColumnPlan(self.context().followed().schema, columns)
        steps = plan.planned(prepared.changes)
        application = Application(
            self.store, self.reader, held, columns, plan, lambda rows: None, prepared.unchanged
        )
        outcome = _run(application, prepared.changes, steps, columns, options.progress)
        return changed_of(application.recorded(outcome.rewritten))

    def _commit(
        self, held: HeldLock, columns: tuple[Column, ...], prepared: PreparedChanges, options: ChangeOptions
    ) -> Changed:
        """Writes the files of the changes, then commits them with the metadata in one transaction."""
        with self.context().writing(loads=True) as (context, attempt):
            plan = ColumnPlan(context.schema, columns)
            steps = plan.planned(prepared.changes)
            with RowFiles(context, attempt, plan.schema) as files:
                application = Application(
                    self.store, self.reader, held, columns, plan, files.add, prepared.unchanged
                )
                outcome = _run(application, prepared.changes, steps, columns, options.progress)
                done = application.recorded(outcome.rewritten)
                if application.version == held.version:
                    context.attempts.discard(attempt)
                    if options.change_id is not None:
                        self.store.record_unchanged(held.lease, done, options.change_id, options.digest)
                    return changed_of(done)
                written = files.written()
            old, new = application.ranges()

            def metadata(conn: psycopg.Connection[Any]) -> None:
                held.lease.fence(conn)
                _reshape(conn, context, plan)
                self.store.replace_ranges(conn, old, new)
                self.store.record(
                    conn,
                    done,
                    next_id=application.next_id,
                    changed_by=options.changed_by or this_user(),
                    change_id=options.change_id,
                    digest=options.digest,
                    columns_changed=outcome.descriptions,
                    columns=outcome.columns,
                )

            commit_files(context, files.attempt, written, f"rows-{held.token.hex}", with_them=metadata)
            held.given_back = True
        return changed_of(done)


def changed_of(done: Recorded) -> Changed:
    """Returns the result of a change, for callers, from its record."""
    counts = {name: getattr(done, name) for name in ("inserted", "updated", "deleted", "unchanged")}
    versions = list(range(done.first_version, done.last_version + 1))
    return Changed(RowIds(done.first_id, done.inserted), versions, counts)


@cache
def this_user() -> str:
    """Returns the user of this process and the name of the machine, as `user@host`."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def _run(
    application: Application,
    changes: Sequence[Change | LookedUp],
    steps: Sequence[Reshaped | None],
    columns: tuple[Column, ...],
    progress: Progress,
) -> _Outcome:
    """Runs the changes in order, and returns their results. Raises `InvalidRow` and `RowConflict`."""
    descriptions: list[str] = []
    since: list[tuple[int, tuple[Column, ...]]] = []
    rows = 0
    for change, step in zip(changes, steps, strict=True):
        if step is not None:
            columns = step.columns
            since.append((application.next_version(), columns))
            descriptions.append(step.description)
            continue
        for batch in _BATCHES[type(change)](change, columns):
            application.rows(batch, columns)
            rows += len(batch)
            progress(rows, None)
    application.check()
    return _Outcome(application.rewrite(), tuple(descriptions), tuple(since))


def _reshape(conn: psycopg.Connection[Any], context: TableContext, plan: ColumnPlan) -> None:
    """Records the new versions of the table's schema, within the transaction of the commit.

    Raises `CommitFailed` if another process changed the columns meanwhile.
    """
    before = context.schema.version
    for schema, description in plan.schemas:

        def next_shape(
            table: TableRecord,
            _: object,
            schema: Schema = schema,
            description: str = description,
            before: int = before,
        ) -> NextShape:
            if table.schema.version != before:
                raise CommitFailed(
                    f"the columns of table {table.name!r} were changed by another process; nothing was done: "
                    "try again"
                )
            return NextShape(replace(table, schema=schema), description)

        context.shapes.change_in(conn, next_shape)
        before = schema.version


def checked_changes(changes: Sequence[Change]) -> list[Change]:
    """Returns one or several changes as a list. Raises `InvalidRow` for other values."""
    if isinstance(changes, _KINDS):
        return [changes]
    if isinstance(changes, str | bytes | Mapping) or not isinstance(changes, Iterable):
        raise InvalidRow(f"a change is a list of dm.Insert, dm.Update and others, not {changes!r}"[:200])
    listed = list(changes)
    for change in listed:
        if not isinstance(change, _KINDS):
            names = ", ".join(f"dm.{kind.__name__}" for kind in _KINDS)
            raise InvalidRow(f"a change is a list of {names}, and not of {change!r}"[:400])
    return listed
