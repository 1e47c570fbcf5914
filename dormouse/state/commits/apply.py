"""The application of a batch of commit requests: one transaction for each table, one answer for each request.

Edits of several tables come after the other requests, each in a transaction of its own, and wait for locks
only briefly.

The kinds of requests are applied in a fixed order, so that each kind finds the results of the kinds before
it. A request may lack its inputs, such as a file that another request adds. It is retried at once if the pass
applied any request, and later otherwise. When a statement fails as a whole, the batch is halved until the
request that caused the failure is alone. The whole batch is put off if the cause is only a lock or a database
out of reach.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.errors import (
    CommitIdReused,
    DormouseError,
    FileReferenceAssignedToJob,
    FileReferenceNotAssignedToJob,
    InvalidName,
    TableBusy,
    TableNotFound,
    TableOfAnotherTimeline,
)
from dormouse.model.file_reference import CheckAssignmentRequest
from dormouse.model.table import TableRecord, table_of
from dormouse.model.text import narrow_id
from dormouse.model.types import is_text
from dormouse.objects.names import check_file_name
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Call, execute_each, load
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement, run_transaction
from dormouse.state.commits.edit_requests import apply_edit
from dormouse.state.commits.outcomes import (
    BUSY,
    NOT_OUR_SCHEMA,
    OUT_OF_REACH,
    CommitOutcome,
    PartlyApplied,
    State,
    check_schema,
    error_class,
    is_for_later,
    only_waits,
    text_of,
)
from dormouse.state.commits.requests import (
    CommitRequest,
    EditTables,
    Envelope,
    SplitPartition,
    Target,
    attempt_of,
    source_of,
)
from dormouse.state.files.operations import Commit, CommitResult, Kind, RefusedPart
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.files.updates import Whole
from dormouse.state.partitions import PartitionStore

# The tables that commit requests are for: read once a batch, and cached while they do not change.

KEPT_MAX = 10_000

TRUSTED_SECONDS = 5.0
"""How long a cached table is used before its row is read again, in seconds.

So a committer notices a change of a table after this time at the latest.
"""

_INTEGER_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CommitTable:
    """A table, and the stores that apply its requests."""

    record: TableRecord
    store: FileReferenceStore
    partitions: PartitionStore


@dataclass(frozen=True, slots=True)
class _Kept:
    """A cached table, the row that it was made from, and when that row was last read."""

    row: tuple[Any, ...]
    table: CommitTable
    checked_at: float


class Tables:
    """The tables of an instance, as a committer sees them. Threads may share one."""

    def __init__(self, supplier: Supplier) -> None:
        self.supplier = supplier
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}

    def named(
        self, wanted: Iterable[tuple[int | None, str]], *, fresh: bool = False
    ) -> dict[tuple[int | None, str], CommitTable]:
        """Returns the tables that exist, by (id, name).

        An id decides which table is meant, because the table may have been renamed. A name is used only
        without an id. With `fresh`, reads the row of each table again.
        """
        keys = set(wanted)
        known = {} if fresh else self._checked_lately({key for key, _ in keys if key is not None})
        ids = [key for key, _ in keys if key is not None and key not in known and 0 < key <= _INTEGER_MAX]
        names = [name for key, name in keys if key is None and is_text(name)]
        by_name: dict[str, CommitTable] = {}
        if ids or names:
            for table in self._read({"table_ids": ids, "names": names}):
                known[table.record.table_id] = by_name[table.record.name] = table
        found = {key: known.get(key[0]) if key[0] is not None else by_name.get(key[1]) for key in keys}
        return {key: table for key, table in found.items() if table is not None}

    def lacks(
        self, tables: Collection[tuple[str, str | None]]
    ) -> dict[tuple[str, str | None], TableNotFound]:
        """Returns an error for each table that does not exist, by (name, UUID), with at most one query.

        If this database was restored, such a table may be newer than its backup, and the error explains that.
        """
        if all(uuid is None for _, uuid in tables):
            was_adopted = False
        else:
            work = rows_of(_QUERIES["was_adopted"])
            ((was_adopted,),) = run_lookup(self.supplier, work, operation="read adoptions")
        return {(name, uuid): _lacking(name, uuid if was_adopted else None) for name, uuid in tables}

    def _checked_lately(self, ids: set[int]) -> dict[int, CommitTable]:
        """Returns the cached tables that were checked in the last `TRUSTED_SECONDS`, by id.

        These are safe to use: no other table ever gets their ids, and a table's store notices that it was
        dropped.
        """
        since = time.monotonic() - TRUSTED_SECONDS
        with self._lock:
            kept = {key: self._kept[key] for key in ids if key in self._kept}
        return {key: item.table for key, item in kept.items() if item.checked_at > since}

    def _read(self, values: dict[str, Any]) -> list[CommitTable]:
        """Reads the tables with these ids or names.

        Returns the cached object of a table whose row has not changed, and a new object otherwise.
        """
        now = time.monotonic()
        rows = run_statement(
            self.supplier, rows_of(_QUERIES["tables"], values), operation="look up tables of commits"
        )
        tables = []
        with self._lock:
            if len(self._kept) + len(rows) > KEPT_MAX:
                self._kept.clear()
            for row in rows:
                kept = self._kept.get(row[0])
                table = kept.table if kept is not None and kept.row == row else self._table(row)
                self._kept[row[0]] = _Kept(row, table, now)
                tables.append(table)
        return tables

    def _table(self, row: tuple[Any, ...]) -> CommitTable:
        record = table_of(row)
        return CommitTable(
            record, FileReferenceStore(self.supplier, record), PartitionStore(self.supplier, record)
        )


def _lacking(name: str, table_uuid: str | None) -> TableNotFound:
    if table_uuid is None:
        return TableNotFound(f"table {name!r} does not exist", table=name)
    return TableOfAnotherTimeline(
        f"table {name!r} of UUID {table_uuid} does not exist: it was dropped, or this database was restored "
        "to a moment before it",
        table=name,
    )


logger = logging.getLogger(__name__)
PASSES_MAX = 10
_HALVING_IS_NO_USE = (
    *OUT_OF_REACH,
    *BUSY,
    TableNotFound,
    *NOT_OUR_SCHEMA,
    pg.LockNotAvailable,
    psycopg.InterfaceError,
)
_KINDS: tuple[Kind, ...] = (
    "add_files",
    "assign_job_ids",
    "split_file_references",
    "replace_file_references",
    "delete_collected_files",
)
_ITEMS_ALONE = {"split_file_references", "replace_file_references"}
_NEVER_EXPIRE = {"add_files"}
_QUERIES = load(__package__ or "", "apply")

EDIT_LOCK_SECONDS_MAX = 1.0
"""How long the edits of a batch wait for locks, in seconds. After that, each tries once, for a moment."""

Requests = dict[int, CommitRequest]
Edits = dict[int, tuple[EditTables, list[CommitTable]]]
Outcomes = dict[int, CommitOutcome]


def apply(tables: Tables, envelopes: Sequence[Envelope]) -> list[CommitOutcome]:
    """Applies requests; returns the outcome of each, in their order.

    Raises only `InstanceTooNew`. Every other error, of a request or of the database, becomes an outcome.
    """
    try:
        batches, edits, outcomes = _batches(tables, envelopes)
    except Exception as error:
        check_schema(tables.supplier, error)
        return [_answered(e.request, e.table_id, error) for e in envelopes]
    if len(batches) > 1:
        outcomes |= _sent_together(tables.supplier, batches)
    for batch, requests in batches:
        if not requests.keys() <= outcomes.keys():
            outcomes |= batch.apply(requests)
    outcomes |= _edited(tables.supplier, edits)
    return [outcomes[number] for number in range(len(envelopes))]


def apply_whole(tables: Tables, envelopes: Sequence[Envelope]) -> list[CommitOutcome | None]:
    """Applies requests in one round trip; returns the outcome of each, in their order.

    Applies a request only if its table still has the name in the request. The outcome is None for a request
    that was not applied. The caller then uses `apply`, which may use several statements and gives the
    reasons.
    """
    batches, _, refused = _batches(tables, envelopes)
    outcomes = _sent_together(tables.supplier, batches, as_named=True)
    return [outcomes.get(number) if number not in refused else None for number in range(len(envelopes))]


def _batches(
    tables: Tables, envelopes: Sequence[Envelope]
) -> tuple[list[tuple[_TableBatch, Requests]], Edits, Outcomes]:
    """Groups requests by table; returns three things.

    1. A batch for each table, with its requests by their position in `envelopes`.
    2. The edits of several tables, by position, with their tables.
    3. The outcomes of the refused requests, by position. A table is missing, or a file name is not allowed.
    """
    outcomes: Outcomes = {}
    targets = [envelope.targets for envelope in envelopes]
    edited = {t.key for e in envelopes if isinstance(e.request, EditTables) for t in e.targets}
    found = tables.named({t.key for each in targets for t in each} - edited)
    found |= tables.named(edited, fresh=True)  # their deletions must be of the present columns
    missing = tables.lacks({(t.table, t.uuid) for each in targets for t in each if t.key not in found})
    groups: dict[int, tuple[CommitTable, Requests]] = {}
    edits: Edits = {}
    for number, (envelope, each) in enumerate(zip(envelopes, targets, strict=True)):
        request, first = envelope.request, found.get(each[0].key)
        try:
            for target in each:
                if target.key not in found:
                    raise missing[target.table, target.uuid]
                _check(request, target, found[target.key].record)
        except (InvalidName, TableNotFound) as error:
            outcomes[number] = _answered(request, None if first is None else first.record.table_id, error)
            continue
        of = [found[target.key] for target in each]
        if isinstance(request, EditTables):
            edits[number] = request, of
        else:
            groups.setdefault(of[0].record.table_id, (of[0], {}))[1][number] = request
    return [(_TableBatch(tables, table), requests) for table, requests in groups.values()], edits, outcomes


def _sent_together(
    supplier: Supplier, batches: Sequence[tuple[_TableBatch, Requests]], *, as_named: bool = False
) -> Outcomes:
    """Applies the batches that need only one statement each, in one pipeline; returns their outcomes.

    A batch that fails has no outcome. The caller applies such a batch alone, which finds the reason. A lock
    timeout becomes an outcome at once, so that no batch waits twice for a lock.
    """
    sent: list[tuple[_TableBatch, Requests, Whole]] = []

    def calls() -> Iterator[Call]:
        for batch, requests in batches:
            if (whole := batch.whole(requests, as_named=as_named)) is not None:
                sent.append((batch, requests, whole))
                yield whole.statement, whole.values

    outcomes: Outcomes = {}
    try:
        with supplier.connection() as conn:
            answers = execute_each(conn, calls())
    except (DormouseError, psycopg.Error) as error:
        logger.info("%d tables are committed to one after the other: %s", len(batches), text_of(error))
        return outcomes
    for (batch, requests, whole), answer in zip(sent, answers, strict=True):
        if isinstance(answer, pg.LockNotAvailable):
            outcomes |= batch.all_failed(requests, answer)
        elif not isinstance(answer, psycopg.Error):
            outcomes |= batch.outcomes(requests, dict(zip(requests, whole.results, strict=True)))
    return outcomes


class _TableBatch:
    """The requests of one table."""

    def __init__(self, tables: Tables, table: CommitTable) -> None:
        self._supplier = tables.supplier
        self._table = table

    def apply(self, requests: Requests) -> Outcomes:
        outcomes: Outcomes = {}
        for _ in range(PASSES_MAX):
            answers = self._pass(requests)
            outcomes |= answers
            requests = {n: request for n, request in requests.items() if answers[n].waits_for_inputs}
            if not requests or not any(answer.state == "applied" for answer in answers.values()):
                break
        return outcomes

    def _pass(self, requests: Requests) -> Outcomes:
        outcomes: Outcomes = {}
        batch: Requests = {}
        splits: Requests = {}
        for number, request in requests.items():
            (splits if isinstance(request, SplitPartition) else batch)[number] = request
        for wave in _without_repeated_ids(batch):
            outcomes |= self._batch(wave)
        for number, request in splits.items():
            try:
                outcomes[number] = self._outcome(request, self._split_partition(request))
            except Exception as error:
                check_schema(self._supplier, error)
                outcomes[number] = self._failed(request, error)
        return outcomes

    def _batch(self, requests: Requests) -> Outcomes:
        try:
            results = self._in_one_transaction(requests)
        except Exception as error:
            check_schema(self._supplier, error)
            if len(requests) == 1 or _halving_is_no_use(error):
                return self.all_failed(requests, error)
            # shuffled, so that a request that hangs does not block the same requests in every retry
            mixed = random.sample(list(requests.items()), len(requests))
            half, rest = dict(mixed[: len(mixed) // 2]), dict(mixed[len(mixed) // 2 :])
            outcomes = self._batch(half)
            if only_waits(error) and all(outcome.waits for outcome in outcomes.values()):
                return outcomes | self.all_failed(rest, error)  # the batch did not fail for its size
            return outcomes | self._batch(rest)
        return self.outcomes(requests, results)

    def whole(self, requests: Requests, *, as_named: bool) -> Whole | None:
        """Returns one statement that applies all requests, or None if several statements are needed.

        With `as_named`, the statement applies nothing if the table no longer has the name in the requests.
        """
        kinds = {request.kind for request in requests.values()}
        ids = {request.commit_id for request in requests.values()}
        kind = next((kind for kind in _KINDS if kinds == {kind}), None)
        if kind is None or len(ids) < len(requests):
            return None
        names = sorted({request.table for request in requests.values()}) if as_named else ()
        return self._table.store.whole(kind, _commits(kind, requests.values()), names)

    def outcomes(self, requests: Requests, results: dict[int, CommitResult]) -> Outcomes:
        """Returns the outcome of each request, made from the store's result for it."""
        return {n: self._outcome(request, results[n]) for n, request in requests.items()}

    def _in_one_transaction(self, requests: Requests) -> dict[int, CommitResult]:
        by_kind = {
            kind: {n: request for n, request in requests.items() if request.kind == kind} for kind in _KINDS
        }
        by_kind = {kind: some for kind, some in by_kind.items() if some}

        def work(conn: psycopg.Connection[Any] | None) -> dict[int, CommitResult]:
            results: dict[int, CommitResult] = {}
            for kind, some in by_kind.items():
                commits = _commits(kind, some.values())
                results |= zip(some, self._table.store.apply(kind, commits, conn=conn), strict=True)
            return results

        if len(by_kind) == 1:
            return work(None)  # the store's own statement is one round trip
        isolation = Isolation(self._table.record.properties.isolation)
        return run_transaction(self._supplier, work, isolation=isolation, operation="commit batch")

    def _split_partition(self, request: Any) -> CommitResult:
        content = narrow_id(repr((request.kind, request.partition_id, request.point, request.field)))
        values = {
            "table_id": self._table.record.table_id,
            "commit_key": narrow_id(request.commit_id),
            "commit_id": request.commit_id,
            "content": content,
            "kept_seconds": self._table.record.properties.history_retention_seconds,
        }

        def work(conn: psycopg.Connection[Any]) -> CommitResult:
            if conn.execute(_QUERIES["record"].on(), values).fetchone() is None:
                row = conn.execute(_QUERIES["recorded"].on(), values).fetchone()
                if row is not None and row[0]:
                    return CommitResult("applied_before")
                raise CommitIdReused(
                    f"commit id {request.commit_id!r} of table {self._table.record.name!r} was applied "
                    "before, with other content; give each commit an id of its own",
                    commit_id=request.commit_id,
                    table=self._table.record.name,
                )
            partitions = self._table.partitions
            partitions.split(request.partition_id, request.point, request.field, conn=conn)
            return CommitResult("applied")

        return run_transaction(self._supplier, work, operation="commit partition split")

    def _outcome(self, request: CommitRequest, result: CommitResult) -> CommitOutcome:
        answer = partial(_answer, request, self._table.record.table_id)
        if result.state != "refused":
            part = RefusedPart(len(request.items), result.failed) if result.failed else None
            return answer(result.state, PartlyApplied(part) if part else None)
        retryable: list[DormouseError] = []
        final: list[DormouseError] = []
        for _, error in result.failed:
            (retryable if self._is_for_later(error) else final).append(error)
        if result.failed and attempt_of(request) is not None:
            return answer("rejected", (final or retryable)[0])  # its writer waits, and writes again
        # items applied one by one are retried while one may succeed; the others only if all may
        if final and not (retryable and request.kind in _ITEMS_ALONE):
            return answer("rejected", final[0])
        return answer("try_later", retryable[0] if retryable else None)

    def all_failed(self, requests: Requests, error: Exception) -> Outcomes:
        """Returns the outcomes of requests that failed together, with the same error."""
        return {n: self._failed(request, error) for n, request in requests.items()}

    def _failed(self, request: CommitRequest, error: Exception) -> CommitOutcome:
        return _answered(request, self._table.record.table_id, error)

    def _is_for_later(self, error: DormouseError) -> bool:
        if isinstance(error, FileReferenceNotAssignedToJob):
            return not self._is_held_by_another(error)
        return is_for_later(error)

    def _is_held_by_another(self, error: FileReferenceNotAssignedToJob) -> bool:
        """Returns True if the reference is known to be assigned to another job.

        Otherwise, the request that assigns it to this job may still be in the queue.
        """
        if error.job_id is None or error.partition_id is None or error.filename is None:
            return False
        request = CheckAssignmentRequest(
            job_id=error.job_id, partition_id=error.partition_id, filenames=(error.filename,)
        )
        try:
            self._table.store.is_assigned([request])
        except FileReferenceAssignedToJob:
            return True
        except (DormouseError, psycopg.Error):
            pass  # not known now: the request is retried, and this is checked again
        return False


def _commits(kind: Kind, requests: Iterable[CommitRequest]) -> list[Commit]:
    expires = kind not in _NEVER_EXPIRE
    return [
        Commit(each.items, each.commit_id, expires, attempt_id=attempt_of(each), source=source_of(each))
        for each in requests
    ]


def _edited(supplier: Supplier, edits: Edits) -> Outcomes:
    """Applies edits, one after the other; returns their outcomes.

    Puts off the edits of a table for which an earlier one got no lock, so that they do not hold up the batch.
    """
    outcomes: Outcomes = {}
    busy: dict[int, Exception] = {}
    ends = time.monotonic() + EDIT_LOCK_SECONDS_MAX
    for number, (request, of) in edits.items():
        table_ids = [table.record.table_id for table in of]
        try:
            for table_id in busy.keys() & table_ids:
                raise busy[table_id]
            stores = [table.store for table in of]
            is_new = apply_edit(supplier, request, stores, max(0.0, ends - time.monotonic()))
            outcomes[number] = _answer(request, table_ids[0], "applied" if is_new else "applied_before")
        except Exception as error:
            check_schema(supplier, error)
            if isinstance(error, TableBusy):
                alone = [
                    table_id
                    for table_id, part in zip(table_ids, request.parts, strict=True)
                    if part.deletions
                ]
                busy |= dict.fromkeys(alone or table_ids, error)
            outcomes[number] = _answered(request, table_ids[0], error)
    return outcomes


def _without_repeated_ids(requests: Requests) -> list[Requests]:
    """Divides requests into waves that are applied one after another.

    No wave contains a commit id twice. So a repeated request is found to be applied before.
    """
    waves: list[Requests] = []
    seen: dict[str, int] = {}
    for number, request in requests.items():
        wave = seen.get(request.commit_id, 0)
        seen[request.commit_id] = wave + 1
        if wave == len(waves):
            waves.append({})
        waves[wave][number] = request
    return waves


def _halving_is_no_use(error: Exception) -> bool:
    """Returns True if each half of a batch would fail in the same way as the whole batch."""
    # TableBusy stands for a wait for a lock, or for a statement that took too long: a half may be fast enough
    reason = error.__cause__ or error if isinstance(error, TableBusy) else error
    return isinstance(reason, _HALVING_IS_NO_USE)


def _check(request: CommitRequest, target: Target, table: TableRecord) -> None:
    """Raises `InvalidName` for a file of another table, and `TableOfAnotherTimeline` if the UUIDs differ.

    A database that was restored from a backup may give the id of a lost table to a new one.
    """
    if target.uuid not in (None, table.uuid):
        raise TableOfAnotherTimeline(
            f"commit {request.commit_id!r} is for the table {target.table!r} of UUID {target.uuid}, which "
            "this database does not have: it was restored to a moment before it"
        )
    for name in target.new_files:
        check_file_name(name, table.object_prefixes)


def _answered(request: CommitRequest, table_id: int | None, error: Exception) -> CommitOutcome:
    return _answer(request, table_id, "try_later" if is_for_later(error) else "rejected", error)


def _answer(
    request: CommitRequest, table_id: int | None, state: State, error: Exception | None = None
) -> CommitOutcome:
    text, kind = (None, None) if error is None else (text_of(error), error_class(error))
    waits = state == "try_later" and error is not None and only_waits(error)
    return CommitOutcome(request.commit_id, request.table, state, text, kind, table_id, waits)
