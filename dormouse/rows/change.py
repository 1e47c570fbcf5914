"""A change of a row table: under its lock files first, then one transaction with all the bookkeeping."""

from __future__ import annotations

import os
import pwd
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from dormouse.data.leaf_lookup import LeafLookup
from dormouse.errors import CommitFailed, InvalidRow
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.schema import Schema
from dormouse.model.table import TableRecord
from dormouse.rows.applying import Application
from dormouse.rows.batches import RowBatch, inserts, patches, removals, updates
from dormouse.rows.changes import (
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
    RowIds,
    Update,
    check_change_id,
)
from dormouse.rows.columns import Column
from dormouse.rows.csv_loads import loads
from dormouse.rows.locks import HeldLock, RowLocks
from dormouse.rows.reading import RowReader
from dormouse.rows.reshape import ColumnPlan, Reshaped
from dormouse.rows.store import Recorded, RowStore
from dormouse.rows.targets import Targets
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.shapes import NextShape
from dormouse.writing.ingest_commit import commit_files
from dormouse.writing.leaf_files import LeafFiles

if TYPE_CHECKING:
    import psycopg

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
Progress = Callable[[int, int | None], object]
Batches = Callable[[Any, Sequence[Column]], Iterator[RowBatch]]


@dataclass(frozen=True, slots=True)
class Written:
    """A change whose rows are looked up already."""

    batches: Sequence[RowBatch]


_BATCHES: dict[type, Batches] = {
    Written: lambda change, _: iter(change.batches),
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
    progress: Progress = lambda done, total: None


@dataclass(frozen=True, slots=True)
class Found:
    """Changes, and how many rows were found to be as they are wanted already."""

    changes: Sequence[Change | Written]
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
        return nullcontext(HeldLock(uuid.uuid4(), state.version, state.next_id))

    def _tried(self, held: HeldLock, columns: tuple[Column, ...], found: Found, asked: Asked) -> Changed:
        plan = ColumnPlan(self.context().followed().schema, columns)
        steps = plan.planned(found.changes)
        targets = Targets(self.context())
        tried = Application(
            self.store, self.reader, held, columns, plan, targets, lambda rows: None, found.unchanged
        )
        outcome = _run(tried, found.changes, steps, columns, asked.progress)
        return changed_of(tried.recorded(outcome.rewritten))

    def _made(self, held: HeldLock, columns: tuple[Column, ...], found: Found, asked: Asked) -> Changed:
        with self.context().writing(loads=True) as (context, attempt):
            plan = ColumnPlan(context.schema, columns)
            steps = plan.planned(found.changes)
            with RowFiles(context, attempt, plan.schema) as files:
                targets = Targets(context)
                made = Application(
                    self.store, self.reader, held, columns, plan, targets, files.add, found.unchanged
                )
                outcome = _run(made, found.changes, steps, columns, asked.progress)
                done = made.recorded(outcome.rewritten)
                if made.version == held.version:
                    context.attempts.discard(attempt)
                    if asked.change_id is not None:
                        self.store.record_unchanged(held.token, done, asked.change_id, asked.digest)
                    return changed_of(done)
                written = files.written()
            gone, come = made.ranges()

            def with_them(conn: psycopg.Connection[Any]) -> None:
                self.store.fence(conn, held.token)
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
    changes: Sequence[Change | Written],
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
