"""A change of a row table: under its lock files first, then one transaction with all the bookkeeping."""

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

# Upserts by columns: which rows there are already, what of them differs, and what is new.

Locate = Callable[[pa.RecordBatch], pa.Table]
"""For rows of keys `position`, ROW_ID, ROW_VERSION and all columns of the rows that have them."""


def upserts(
    rows: Any, on: Sequence[str], columns: Sequence[Column], locate: Locate
) -> tuple[list[RowBatch], int]:
    """What is to be written, in blocks; and how many rows are as they are wanted already.

    Cells that a row does not bring are left untouched. Raises `InvalidRow`, `InvalidColumn`, and
    `AmbiguousRows` for rows of equal keys, here or there.
    """
    keys = _keys(on, columns)
    if not (listed := checked_rows(as_dicts(rows), "upsert")):
        return [], 0
    for number, row in enumerate(listed):
        if missing := next((name for name in on if name not in row), None):
            raise InvalidRow(f"{row_label(number)}: it has no {missing!r}, by which rows are looked for")
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
        those = slice(start, stop)
        some = {name: array[those] for name, array in cells.items()}
        flags = {name: each[those] for name, each in given.items()}
        found = locate(
            pa.RecordBatch.from_arrays([some[key.name] for key in keys], [key.name for key in keys])
        )
        _check_found(found, keys)
        batch, same = _batch(some, flags, found, stop - start, start)
        unchanged += same
        if len(batch):
            batches.append(batch)
    return batches, unchanged


def _keys(on: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    if isinstance(on, str) or not isinstance(on, Sequence) or not on:
        raise InvalidColumn(f"on is a list of the columns by which rows are looked for, not {on!r}")
    keys = [column_named(columns, name) for name in on]
    if len({key.name for key in keys}) < len(keys):
        raise InvalidColumn(f"on names a column twice: {', '.join(on)}")
    return keys


def _check_once(table: pa.Table, which: str) -> None:
    """Of the rows that are given no two have the same keys."""
    numbered = table.append_column("__row", pa.array(np.arange(table.num_rows)))
    groups = numbered.group_by(table.column_names).aggregate(
        [("__row", "count"), ("__row", "min"), ("__row", "max")]
    )
    twice = groups.filter(pc.greater(groups.column("__row_count"), 1))
    if twice.num_rows:
        first = twice.sort_by("__row_min").slice(0, 1).to_pylist()[0]
        key = _shown({name: first[name] for name in table.column_names})
        named = which.format(first["__row_min"] + 1, first["__row_max"] + 1)
        raise AmbiguousRows(f"{named} of the upsert both have {key}")


def _check_found(found: pa.Table, keys: Sequence[Column]) -> None:
    """No key has two rows of the table."""
    positions = found.column(0).to_numpy()
    again = np.flatnonzero(positions[1:] == positions[:-1])
    if len(again):
        one, other = found.slice(int(again[0]), 2).to_pylist()
        key = _shown({column.name: one[column.name] for column in keys})
        raise AmbiguousRows(
            f"rows of {ROW_ID} {one[ROW_ID]} and {other[ROW_ID]} both have {key}: look by more columns, or "
            "update one by its id"
        )


def _batch(
    cells: Mapping[str, pa.Array], given: Mapping[str, Flags], found: pa.Table, count: int, start: int
) -> tuple[RowBatch, int]:
    """The rows of a block that are new or differ; and how many do not."""
    positions = found.column(0).to_numpy()
    ids, versions = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    ids[positions], versions[positions] = (
        found.column(ROW_ID).to_numpy(),
        found.column(ROW_VERSION).to_numpy(),
    )
    differs = np.zeros(len(positions), np.bool_)
    for name, array in cells.items():
        there = found.column(name).combine_chunks()
        differs |= differ(array.take(pa.array(positions)), there) & given[name][positions]
    kept = ids == 0
    kept[positions] = differs
    at = np.flatnonzero(kept)

    def label(number: int, at: Ints = at) -> str:
        return row_label(start + int(at[number]))

    those = pa.array(at)
    return RowBatch(
        ids[at],
        versions[at],
        {name: array.take(those) for name, array in cells.items()},
        {name: flags[at] for name, flags in given.items()},
        label=label,
    ), int((~differs).sum())


def _shown(key: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value!r}" for name, value in key.items())


# A digest of what a change asks, by which the same change id with another change is noticed.


def digest_of_changes(changes: Sequence[Change]) -> bytes | None:
    """Returns 16 bytes; None where rows come from an iterator, or a file is gone."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for change in changes:
        found.update(type(change).__name__.encode())
        match change:
            case Insert() | Update() | Patch() | Remove():
                is_known = _add_rows(found, change.rows)
            case LoadCsv():
                is_known = _add_file(found, change)
            case AddColumn():
                is_known = _add(found, change.column.to_json())
            case _:
                is_known = _add(found, asdict(change))
        if not is_known:
            return None
    return found.digest()


def digest_of_upsert(rows: Iterable[Row], on: Sequence[str]) -> bytes | None:
    """Returns 16 bytes; None where rows come from an iterator."""
    found, rows = hashlib.blake2b(b"upsert", digest_size=DIGEST_BYTES), as_dicts(rows)
    return found.digest() if _add(found, list(on)) and _add_rows(found, rows) else None


def _add_rows(found: Hash, rows: object) -> bool:
    return isinstance(rows, Sequence) and all(_add(found, row) for row in rows)


def _add(found: Hash, value: object) -> bool:
    """Adds JSON in one form, that in which a client sends it; of other values what Python shows."""
    try:
        text = json.dumps(json_value(value), sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):
        return False
    found.update(text.encode() + b"\0")
    return True


def _add_file(found: Hash, change: LoadCsv) -> bool:
    if not isinstance(change.path, str | PathLike):
        return False
    try:
        add_files(found, [(Path(change.path), ())])
    except OSError:
        return False
    options = asdict(replace(change, path=""))
    if options["encoding"] == UTF_8:  # which earlier versions did not know: the same change is known again
        del options["encoding"]
    return _add(found, options)


# The files of a change: rows by ids and versions, one file for each leaf that they are in.

MEMORY_BYTES = 32 * 1024 * 1024


class RowFiles:
    """Takes blocks; a context manager: what waits on the local disk goes at the end."""

    def __init__(self, context: TableContext, attempt: WriteAttempt, schema: Schema) -> None:
        """`schema` is that of the table when the files are committed."""
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
        """The rows of a block."""
        self._sorter.add(rows, self._lookup.indexes(rows))

    def written(self) -> Sequence[FileWithReferences]:
        """All rows as files, whole and durable."""
        return list(self._writer.write(self._sorter))


LOCK_WAIT_SECONDS = 60.0
Batches = Callable[[Any, Sequence[Column]], Iterator[RowBatch]]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A change whose rows are looked up already."""

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
class Asked:
    """How a change is made: by whom, by which id once, after which wait for the lock.

    `digest` is of what is asked, and is compared when the id comes again.
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
class Found:
    """Changes, and how many rows were found to be as they are wanted already."""

    changes: Sequence[Change | LookedUp]
    unchanged: int = 0


Find = Callable[[HeldLock, tuple[Column, ...]], Found]
"""Says what to change of a table that stands still, with these columns."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The rows written anew, what was done to the columns, and what these are from some versions on."""

    rewritten: int
    said: tuple[str, ...]
    columns: tuple[tuple[int, tuple[Column, ...]], ...]


@dataclass(frozen=True)
class RowChanges:
    """Makes the changes of one row table."""

    context: Callable[[], TableContext]
    store: RowStore
    reader: RowReader
    locks: RowLocks

    def found(self, find: Find, asked: Asked) -> Changed:
        """Makes all of the changes that are found when nobody else changes the table, or none."""
        if asked.change_id is not None:
            check_change_id(asked.change_id)
        with self._still(asked) as held:
            if asked.change_id is not None:
                done = self.store.change_of_id(asked.change_id, asked.digest)
                if done is not None:
                    return changed_of(done)
            columns = self.store.state().columns
            found = find(held, columns)
            if asked.dry_run:
                return self._tried(held, columns, found, asked)
            return self._made(held, columns, found, asked)

    def _still(self, asked: Asked) -> AbstractContextManager[HeldLock]:
        """The table's lock; what is only tried out looks at the version of now."""
        if not asked.dry_run:
            return self.locks.write(asked.wait_seconds)
        state = self.store.state()
        return nullcontext(HeldLock(self.locks.lease(), state.version, state.next_id))

    def _tried(self, held: HeldLock, columns: tuple[Column, ...], found: Found, asked: Asked) -> Changed:
        plan = ColumnPlan(self.context().followed().schema, columns)
        steps = plan.planned(found.changes)
        tried = Application(self.store, self.reader, held, columns, plan, lambda rows: None, found.unchanged)
        outcome = _run(tried, found.changes, steps, columns, asked.progress)
        return changed_of(tried.recorded(outcome.rewritten))

    def _made(self, held: HeldLock, columns: tuple[Column, ...], found: Found, asked: Asked) -> Changed:
        with self.context().writing(loads=True) as (context, attempt):
            plan = ColumnPlan(context.schema, columns)
            steps = plan.planned(found.changes)
            with RowFiles(context, attempt, plan.schema) as files:
                made = Application(self.store, self.reader, held, columns, plan, files.add, found.unchanged)
                outcome = _run(made, found.changes, steps, columns, asked.progress)
                done = made.recorded(outcome.rewritten)
                if made.version == held.version:
                    context.attempts.discard(attempt)
                    if asked.change_id is not None:
                        self.store.record_unchanged(held.lease, done, asked.change_id, asked.digest)
                    return changed_of(done)
                written = files.written()
            gone, come = made.ranges()

            def with_them(conn: psycopg.Connection[Any]) -> None:
                held.lease.fence(conn)
                _reshape(conn, context, plan)
                self.store.replace_ranges(conn, gone, come)
                self.store.record(
                    conn,
                    done,
                    next_id=made.next_id,
                    changed_by=asked.changed_by or this_user(),
                    change_id=asked.change_id,
                    digest=asked.digest,
                    columns_changed=outcome.said,
                    columns=outcome.columns,
                )

            commit_files(context, files.attempt, written, f"rows-{held.token.hex}", with_them=with_them)
            held.given_back = True
        return changed_of(done)


def changed_of(done: Recorded) -> Changed:
    """As it is told."""
    counts = {name: getattr(done, name) for name in ("inserted", "updated", "deleted", "unchanged")}
    versions = list(range(done.first_version, done.last_version + 1))
    return Changed(RowIds(done.first_id, done.inserted), versions, counts)


@cache
def this_user() -> str:
    """Who this process is run by, and where."""
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
    """The changes in their order. `InvalidRow`, `RowConflict`."""
    said: list[str] = []
    since: list[tuple[int, tuple[Column, ...]]] = []
    rows = 0
    for change, step in zip(changes, steps, strict=True):
        if step is not None:
            columns = step.columns
            since.append((application.next_version(), columns))
            said.append(step.said)
            continue
        for batch in _BATCHES[type(change)](change, columns):
            application.rows(batch, columns)
            rows += len(batch)
            progress(rows, None)
    application.check()
    return _Outcome(application.rewrite(), tuple(said), tuple(since))


def _reshape(conn: psycopg.Connection[Any], context: TableContext, plan: ColumnPlan) -> None:
    """Part of the commit: makes the versions of the schema by which the files are written."""
    before = context.schema.version
    for schema, said in plan.schemas:

        def next_shape(
            table: TableRecord, _: object, schema: Schema = schema, said: str = said, before: int = before
        ) -> NextShape:
            if table.schema.version != before:
                raise CommitFailed(
                    f"the columns of table {table.name!r} were changed by others; nothing was done: try again"
                )
            return NextShape(replace(table, schema=schema), said)

        context.shapes.change_in(conn, next_shape)
        before = schema.version


def checked_changes(changes: Sequence[Change]) -> list[Change]:
    """The changes as a list, of one or several; `InvalidRow`."""
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
