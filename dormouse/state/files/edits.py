"""The commit of an edit: deletions and files of one or more tables, in one transaction, unless rows changed.

The transaction first makes other edits of the same rows wait. It then looks for commits since the edit read
its rows. Without one that may concern the edit, it records the deletions and adds the files, which come after
the deletions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.errors import DormouseError
from dormouse.model.cut import Position
from dormouse.model.file_reference import FileWithReferences
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Call, Statement, bytes_, execute_together, load
from dormouse.postgres.session import COMMIT
from dormouse.postgres.transaction import run_alone, run_statement, run_transaction
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.deletions import Deletions, NewDeletion
from dormouse.state.files.layout import IS_LOGGED
from dormouse.state.files.operations import Commit
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.files.updates import NOT_WHOLE

NAMES_MAX = 10_000
KEYS_MAX = 64
"""The most keys of an edit that other edits of the table need not wait for."""
EDITS_WAIT_MS, WRITERS_WAIT_MS = 60_000, 50
"""How long a try waits for other edits, which queue, and for all writers, as later ones wait behind it."""
_QUERIES = load(__package__ or "", "edits")
_PARTS = {name: _QUERIES[name].including(is_logged=IS_LOGGED) for name in ("added", "near", "events")}
_DISTURBED, _CHECK = (_QUERIES[name].including(**_PARTS) for name in ("disturbed", "check_undisturbed"))
_LOCK_TABLE, _LOCK_KEYS = (Statement(_QUERIES[name].on()) for name in ("lock_table", "lock_keys"))
_WAIT_AT_MOST, _WAIT_AS_BEFORE = (
    Statement(_QUERIES[name].on()) for name in ("wait_at_most", "wait_as_before")
)
_IN_THE_WAY = (pg.UniqueViolation, pg.UndefinedTable, pg.InvalidSqlStatementName, pg.LockNotAvailable)
Span = tuple[bytes, bytes]
"""The smallest and the largest possible key of some rows; the ends may be only beginnings of keys."""


@dataclass(frozen=True, slots=True)
class Read:
    """The rows that an edit read: those with keys in some spans, at the moment of a snapshot or later.

    `are_keys` means that each span is one whole key.
    """

    snapshot: str
    spans: Sequence[Span]
    are_keys: bool = False

    @property
    def values(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot,
            "min_keys": bytes_([low for low, _ in self.spans]),
            "max_keys": bytes_([high for _, high in self.spans]),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """The changes of one table by an edit; `attempts` are the ids of the write attempts that they end.

    For `leftovers`, see `WriteAttempts.finish`.
    """

    store: FileReferenceStore
    files: Sequence[FileWithReferences] = ()
    deletions: Sequence[NewDeletion] = ()
    reads: Sequence[Read] = ()
    attempts: Sequence[str] = ()
    leftovers: bool = False

    @property
    def table_id(self) -> int:
        return self.store.table.table_id


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Commits that may have changed rows of a read since: files that they added, deletions and restores.

    `files` are the names of those with keys in its spans, or None if they are too many, or some of them were
    collected. There are no others up to the moment `till`.
    """

    part: Part
    read: Read
    files: frozenset[str] | None
    till: Position


class Disturbed(Exception):
    """Nothing was committed, because of some disturbances."""

    def __init__(self, disturbances: Sequence[Disturbance]) -> None:
        super().__init__(disturbances)
        self.disturbances = disturbances


class _AppliedBefore(Exception):
    pass


def commit(
    supplier: Supplier,
    parts: Sequence[Part],
    commit_id: str,
    *,
    along: Callable[[psycopg.Connection[Any]], object] = lambda conn: None,
    choose: Callable[[Sequence[Disturbance]], Sequence[Disturbance]] | None = None,
    lock_seconds_max: float | None = None,
) -> bool:
    """Commits the parts, at most one of each table; returns False if the commit was applied before.

    Calls `along` in the transaction. Raises `Disturbed`, and commits nothing, if other commits may have
    changed rows that were read. With `choose`, raises it only for those of the disturbances that this
    function returns. It is called while other writers wait.

    With `lock_seconds_max`, it has the limits of a committer and tries to get locks for so long, in short
    tries. Raises `AttemptAbandoned`, `SchemaMoved`, and the errors of `run_alone`.
    """
    ordered = sorted(parts, key=attrgetter("table_id"))
    is_impatient = lock_seconds_max is not None

    def work(conn: psycopg.Connection[Any]) -> None:
        for part in ordered:
            part.store.own.following(partial(_lock, conn, part, is_impatient=is_impatient), conn)
        if parts and parts[0].store.is_applied(commit_id, conn):
            raise _AppliedBefore
        found = [one for part in ordered for one in _disturbances(conn, part)]
        if found and (choose is None or (found := list(choose(found)))):
            raise Disturbed(found)
        for part in ordered:
            _apply(conn, part, commit_id)
        along(conn)

    try:
        # at read committed, whatever the tables' isolation: the looks must be later than the locks
        run: Callable[..., None] = run_transaction
        if lock_seconds_max is not None:
            run = partial(run_alone, seconds_max=lock_seconds_max, limits=COMMIT)
        elif any(part.deletions for part in parts):
            run = run_alone
        run(supplier, work, operation="edit rows")
    except _AppliedBefore:
        return False
    return True


def disturbances(supplier: Supplier, parts: Sequence[Part]) -> list[Disturbance]:
    """Returns the commits up to now that may have changed rows that the parts read."""

    def work(conn: psycopg.Connection[Any]) -> list[Disturbance]:
        found = []
        for part in parts:
            found += part.store.own.following(partial(_disturbances, conn, part), conn)
        return found

    return run_transaction(supplier, work, operation="look for other commits")


def is_committed_at_once(supplier: Supplier, parts: Sequence[Part], commit_id: str) -> bool:
    """Commits parts without leftovers like `commit`, in one round trip, unless anything is in the way.

    Then returns False, also if they were applied before, and commits nothing. `commit` finds what it is.
    """
    wholes = []
    for part in sorted(parts, key=attrgetter("table_id")):
        add = Commit(part.files, commit_id, expires=False, same_content=False)
        whole = None if part.leftovers else part.store.whole("add_files", [add], ending=part.attempts)
        if whole is None:
            return False
        wholes.append((part, whole))

    def work(conn: psycopg.Connection[Any]) -> bool:
        calls: list[Call] = [lock for part, _ in wholes for lock in _locks(part, at_once=True)]
        for part, _ in wholes:
            own = part.store.own
            calls += [(own.statement_of(_CHECK), own.values(read.values)) for read in part.reads]
        for part, whole in wholes:
            calls += [Deletions(part.store).record_whole(deletion) for deletion in part.deletions]
            calls.append((whole.statement, whole.values))
        error = execute_together(conn, calls)
        if error is None or error.sqlstate == NOT_WHOLE or isinstance(error, _IN_THE_WAY):
            return error is None
        raise error

    return run_statement(supplier, work, operation="edit rows")


def _locks(part: Part, *, at_once: bool = False, is_impatient: bool = False) -> list[Call]:
    """Returns the calls that wait for edits that may change the same rows, and for deletions.

    If the part records a deletion, they wait for all writers, `at_once` only briefly, as writers that come
    later wait behind it. If `is_impatient`, the transaction limits all waits. Without these locks, a deletion
    could come after the check and before the new files, and not apply to these.
    """
    locks: list[Call] = []
    spans = [span for read in part.reads for span in read.spans]
    if spans or part.deletions:
        are_keys = not part.deletions and all(read.are_keys for read in part.reads) and len(spans) <= KEYS_MAX
        values = {"table_id": part.table_id, "min_keys": bytes_([low for low, _ in spans])}
        # edits wait for each other in a queue, as long as it takes
        locks.append((_LOCK_KEYS if are_keys else _LOCK_TABLE, values))
    own = part.store.own
    if not part.deletions:
        return [*locks, (own.statement("wait_for_deletions"), {})]
    keep_out: Call = (own.statement("keep_writers_out"), {})
    if is_impatient:
        return [*locks, keep_out]
    if at_once:
        return [*locks, *_waiting(WRITERS_WAIT_MS, keep_out)]
    return [*_waiting(EDITS_WAIT_MS, *locks), keep_out]


def _waiting(wait_ms: int, *locks: Call) -> list[Call]:
    return [(_WAIT_AT_MOST, {"wait_ms": wait_ms}), *locks, (_WAIT_AS_BEFORE, {})]


def _lock(conn: psycopg.Connection[Any], part: Part, *, is_impatient: bool) -> None:
    for statement, values in _locks(part, is_impatient=is_impatient):
        statement.execute(conn, values)


def _disturbances(conn: psycopg.Connection[Any], part: Part) -> list[Disturbance]:
    found = []
    for read in part.reads:
        values = {**read.values, "limit": NAMES_MAX}
        for names, by_event, *till in part.store.own.rows_in(conn, _DISTURBED, values):
            files = None if len(names) == NAMES_MAX or None in names else frozenset(names)
            if names or by_event:
                found.append(Disturbance(part, read, files, Position(*till)))
    return found


def _apply(conn: psycopg.Connection[Any], part: Part, commit_id: str) -> None:
    deletions = Deletions(part.store)
    for deletion in part.deletions:
        deletions.record_in(conn, deletion)
    commit = Commit(tuple(part.files), commit_id, expires=False, same_content=False)
    [result] = part.store.apply("add_files", [commit], conn=conn)
    if result.state == "applied_before":
        raise _AppliedBefore
    if result.error is not None:
        error: DormouseError = result.error
        raise error
    if part.attempts:
        WriteAttempts.finish(conn, part.table_id, list(part.attempts), leftovers=part.leftovers)
