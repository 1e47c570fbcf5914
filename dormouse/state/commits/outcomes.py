"""The outcomes of commits: which failures are retried, and how callers learn the state of a commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

import psycopg
from psycopg import errors as pg

from dormouse.errors import (
    CommitOutcomeUnknown,
    CommitQueueError,
    ConnectionsExhausted,
    DormouseError,
    FileNotFound,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    InstanceError,
    InstanceTooNew,
    ObjectNotFound,
    ObjectStoreError,
    TableBusy,
    TooManyRetries,
)
from dormouse.model.text import check_text, narrow_bytes
from dormouse.model.types import is_text
from dormouse.postgres.connection import DURABLY, Supplier
from dormouse.postgres.migrate import lacking
from dormouse.postgres.queries import Query, Uuids, booleans, integers, load
from dormouse.postgres.session import was_open_at
from dormouse.postgres.transaction import rows_of, run_statement
from dormouse.state.commits.queue import Patience
from dormouse.state.files.operations import RefusedPart

logger = logging.getLogger(__name__)

State = Literal["applied", "applied_before", "rejected", "try_later"]

NOT_OUR_SCHEMA = (
    pg.UndefinedColumn,
    pg.UndefinedFunction,
    pg.UndefinedObject,
    pg.UndefinedTable,
    pg.InvalidSchemaName,
)
"""Errors of a statement that names a missing part of the schema: the database has another version."""

NOT_THERE_YET = (FileNotFound, FileReferenceNotFound, FileReferenceNotAssignedToJob)
"""Errors of missing inputs. The queue has no order, so a later request may make them."""

OUT_OF_REACH = (InstanceError, ConnectionsExhausted, CommitQueueError, ObjectStoreError)
"""Errors of a database, queue or object store that cannot be reached: requests wait until it can."""

BUSY = (TooManyRetries, CommitOutcomeUnknown, TableBusy)
"""Errors of conflicts in every attempt, or of an unknown outcome, which the next try finds by commit id."""

TEXT_CHARACTERS_MAX = 2_000
REJECTED_KEPT_SECONDS = 30 * 86_400.0
DURABLE_SECONDS = 360.0
"""The age after which a commit is on disk even if its committer died, in seconds.

A committer's transactions take at most 300 s.
"""
_QUERIES = load(__package__ or "", "outcomes")
TABLE_OF_MESSAGE = _QUERIES["table_of_message"]
_STATUSES = _QUERIES["statuses"].including(table_of_message=TABLE_OF_MESSAGE)
_SETTLE = _QUERIES["settle"].including(durably=DURABLY)
_LIMIT_EXCEEDED = "54"  # class of SQLSTATE: a row or statement too large stays too large


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The answer to one request.

    - `error`: why the request was not applied. With the state `applied` or `applied_before`, it names the
      replacements or splits that were refused.
    - `error_class`: the name of the error's class.
    - `table_id`: None when there is no such table.
    - `waits`: the request is not at fault (a lock, a database out of reach), and is retried without limit.
    """

    commit_id: str
    table: str
    state: State
    error: str | None = None
    error_class: str | None = None
    table_id: int | None = field(default=None, repr=False)
    waits: bool = field(default=False, repr=False)

    @property
    def subject(self) -> str:
        """The request of this outcome, as words for a message."""
        if not self.commit_id:
            return "a message without an id"
        return f"commit {self.commit_id!r}" + (f" of table {self.table!r}" if self.table else "")

    @property
    def waits_for_inputs(self) -> bool:
        """True if the request is tried later because its inputs are missing."""
        return self.state == "try_later" and self.error_class in _NOT_THERE_YET


def is_for_later(error: BaseException) -> bool:
    """Returns True if the same request may succeed when it is tried again."""
    if isinstance(error, psycopg.OperationalError):
        return not (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
    if isinstance(error, ObjectNotFound):
        return False
    kinds = (*NOT_THERE_YET, *OUT_OF_REACH, *BUSY, *NOT_OUR_SCHEMA, psycopg.InterfaceError, MemoryError)
    return isinstance(error, kinds)


def check_schema(supplier: Supplier, error: BaseException) -> None:
    """Raises `InstanceTooNew` if the database has a newer schema, which may have caused the error."""
    cause = error.__cause__ or error
    if isinstance(cause, (*NOT_OUR_SCHEMA, psycopg.IntegrityError)):
        try:
            lacking(supplier)
        except InstanceTooNew:
            raise
        except (DormouseError, psycopg.Error):
            pass  # checked again when the error comes again


def only_waits(error: BaseException) -> bool:
    """Returns True if the request clearly did not cause the error: a lock, a full server, a shutdown.

    Returns False for a server that died without an error, because the request may have killed it.
    """
    if isinstance(error, BUSY):
        cause = error.__cause__
        return isinstance(cause, psycopg.Error) and cause.sqlstate is not None
    return is_for_later(error) and not isinstance(error, NOT_THERE_YET)


def error_class(error: BaseException) -> str:
    """Returns the name of the error's class, or that of its base class in `OUT_OF_REACH`."""
    base = next((kind for kind in OUT_OF_REACH if isinstance(error, kind)), type(error))
    return (base if is_for_later(error) else type(error)).__name__


class PartlyApplied(DormouseError):
    """An error for a commit of which some items were refused."""

    def __init__(self, part: RefusedPart) -> None:
        super().__init__(str(part))


def text_of(error: BaseException) -> str:
    """Returns an error as one line that PostgreSQL can store, of at most `TEXT_CHARACTERS_MAX`."""
    text = " ".join(str(error).replace("\0", "").encode(errors="replace").decode().split())
    if not isinstance(error, DormouseError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"


@dataclass(frozen=True, slots=True)
class CommitStatus:
    """The state of a commit.

    - `applied` with an `error`: a part of it was refused, or a later request with its id was rejected.
    - `unknown`: it was never sent, or it is in a queue that cannot be searched (SQS).
    """

    commit_id: str
    state: Literal["applied", "rejected", "pending", "unknown"]
    error: str | None = None

    @classmethod
    def of(cls, outcome: CommitOutcome) -> CommitStatus:
        """Returns the status of a commit, made from an outcome that is on disk and is not `try_later`."""
        return cls(outcome.commit_id, "rejected" if outcome.state == "rejected" else "applied", outcome.error)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that could not be handled, with the reason. `body` is its first 200 characters."""

    queue: int
    reason: str
    receive_count: int
    sent_at: datetime
    buried_at: datetime
    body: str


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A wait in the database, of at most `seconds`, until the message of one of these commits is deleted."""

    commit_ids: Sequence[str] = ()
    seconds: float = 0.0

    @classmethod
    def any_of(cls, waits: Sequence[Awaiting]) -> Awaiting:
        """Returns one wait for the commits of all `waits`, with the shortest of their times."""
        commit_ids = [commit_id for wait in waits for commit_id in wait.commit_ids]
        return cls(commit_ids, min(wait.seconds for wait in waits))

    def then(
        self, query: Query, values: dict[str, Any], patience: Patience
    ) -> Callable[[psycopg.Connection[Any]], list[Any]]:
        """Returns a function that waits and then runs `query`, in one round trip, and returns the rows."""
        if self.seconds <= 0 or not self.commit_ids:
            return rows_of(query, values)
        keys = Uuids([narrow_bytes(commit_id) for commit_id in self.commit_ids])

        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            wait = {"awaited_keys": keys, "usual": patience.usual, "seconds": self.seconds}
            with conn.pipeline():
                waited = conn.execute(_QUERIES["await"].on(), wait)
                answer = conn.execute(query.on(), values)
            patience.learn(*waited.fetchall()[0])
            return answer.fetchall()

        return work


def commit_statuses(
    supplier: Supplier,
    commit_ids: Sequence[str],
    durable_seconds: float = DURABLE_SECONDS,
    awaiting: Awaiting = Awaiting(),
    patience: Patience | None = None,
    table_ids: Sequence[int | None] = (),
) -> list[CommitStatus]:
    """Returns the state of each commit, in the order of the ids, from one query.

    `table_ids` contains the table of each commit. Without it, several tables may have a commit with the same
    id. Such a commit is pending until all of them have applied it. A commit that was applied less than
    `durable_seconds` ago is pending while it has a message, because a crash may undo it.
    """
    for commit_id in commit_ids:
        check_text("commit_id", commit_id)
    keys = Uuids([narrow_bytes(commit_id) for commit_id in commit_ids])
    values = {
        "commit_keys": keys,
        "table_ids": list(table_ids) or [None] * len(commit_ids),
        "durable_seconds": durable_seconds,
    }
    work = awaiting.then(_STATUSES, values, patience or Patience())
    rows = run_statement(supplier, work, operation="status")
    return [_status(name, *row) for name, row in zip(commit_ids, rows, strict=True)]


def _status(
    commit_id: str, applied: bool, pending: bool, error: str | None, refused: Any, table: str
) -> CommitStatus:
    if applied:
        part = text_of(PartlyApplied(RefusedPart.from_json(refused, table))) if refused else None
        other = f"a later request with this id was rejected: {error}" if error else None
        return CommitStatus(commit_id, "applied", "; ".join(filter(None, (part, other))) or None)
    if pending:
        return CommitStatus(commit_id, "pending", error)
    return CommitStatus(commit_id, "unknown" if error is None else "rejected", error)


def dead_letters(supplier: Supplier, limit: int) -> list[DeadLetter]:
    """Returns the last messages that could not be handled, newest first, at most `limit`."""
    work = rows_of(_QUERIES["dead_letters"], {"limit": limit})
    rows = run_statement(supplier, work, operation="dead letters")
    return [DeadLetter(*row) for row in rows]


def settle(supplier: Supplier, outcomes: Sequence[CommitOutcome], since: float) -> list[CommitOutcome]:
    """Makes outcomes durable, in one statement; returns the resulting outcomes, in the order given.

    Commits are applied by sessions that do not wait for the disk. A crash of the server, or a failover to a
    standby, may undo them before this statement runs.

    `since` is a time of `time.monotonic`, before the first commit was applied. A session that was open then
    proves that no crash happened, as sessions end with their server. In any other session, the statement
    checks whether each applied commit still exists. The outcome of a missing commit becomes `try_later`. If
    any is missing, each refusal becomes `try_later` too, because it may depend on an undone commit.

    A message may be deleted, or its sender answered, only after this call, and only if the returned outcome
    is not `try_later`.
    """
    named = {n: o for n, o in enumerate(outcomes) if o.commit_id and is_text(o.commit_id)}
    refused = {o.commit_id: n for n, o in named.items() if o.state == "rejected"}
    applied = [n for n, o in named.items() if o.state in ("applied", "applied_before")]
    if not refused and not applied:
        return list(outcomes)
    rows = sorted((narrow_bytes(name), name, outcomes[n]) for name, n in refused.items())
    values = {
        "applied_keys": Uuids([narrow_bytes(outcomes[n].commit_id) for n in applied]),
        "applied_table_ids": integers([outcomes[n].table_id for n in applied]),
        "clears": booleans(
            outcomes[n].state == "applied" and outcomes[n].commit_id not in refused for n in applied
        ),
        "commit_keys": Uuids([key for key, _, _ in rows]),
        "commit_ids": [name for _, name, _ in rows],
        "table_ids": [outcome.table_id for _, _, outcome in rows],
        "error_classes": [outcome.error_class for _, _, outcome in rows],
        "errors": [outcome.error for _, _, outcome in rows],
    }

    def work(conn: psycopg.Connection[Any]) -> list[Any]:
        return rows_of(_SETTLE, {**values, "is_same_server": was_open_at(conn, since)})(conn)

    ((lost, *_),) = run_statement(supplier, work, operation="settle commits")
    if not lost:
        return list(outcomes)
    again = {applied[number - 1] for number in lost}
    again |= {n for n, outcome in named.items() if outcome.state == "rejected"}
    logger.warning(
        "a crash or a failover of the database undid %d commits before they were on disk; they are retried",
        len(lost),
    )
    return [_undone(outcome) if n in again else outcome for n, outcome in enumerate(outcomes)]


def _undone(outcome: CommitOutcome) -> CommitOutcome:
    return replace(
        outcome,
        state="try_later",
        error="a crash or a failover of the database undid it before it was on disk; it is applied again",
        error_class=InstanceError.__name__,
        waits=True,
    )


def forget_rejected(supplier: Supplier) -> None:
    """Deletes the records of commits that were refused more than `REJECTED_KEPT_SECONDS` ago."""
    values = {"kept_seconds": REJECTED_KEPT_SECONDS}
    run_statement(supplier, rows_of(_QUERIES["forget_rejected"], values), operation="forget rejected")


_NOT_THERE_YET = frozenset(kind.__name__ for kind in NOT_THERE_YET)
