"""What became of commits: which failures are worth another try, and what their submitters are told."""

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
"""What a statement names is not there: the schema is another, which no request can help."""

NOT_THERE_YET = (FileNotFound, FileReferenceNotFound, FileReferenceNotAssignedToJob)
"""The queue is not ordered: what a request needs may come with a later one."""

OUT_OF_REACH = (InstanceError, ConnectionsExhausted, CommitQueueError, ObjectStoreError)
"""What a request needs is away: it waits until that is back."""

BUSY = (TooManyRetries, CommitOutcomeUnknown, TableBusy)
"""Others were faster at every attempt, or the outcome is unknown; the commit id tells at the next try."""

TEXT_CHARACTERS_MAX = 2_000
REJECTED_KEPT_SECONDS = 30 * 86_400.0
DURABLE_SECONDS = 360.0
"""After which a commit is on disk also when its committer died: a transaction of one takes 300 at most."""
_QUERIES = load(__package__ or "", "outcomes")
TABLE_OF_MESSAGE = _QUERIES["table_of_message"]
_STATUSES = _QUERIES["statuses"].including(table_of_message=TABLE_OF_MESSAGE)
_SETTLE = _QUERIES["settle"].including(durably=DURABLY)
_LIMIT_EXCEEDED = "54"  # class of SQLSTATE: a row or statement too large stays too large


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The answer to one request.

    `applied`, now or before, with an `error`: it names the replacements or splits that were refused.
    `error_class` is the name of the error's class; `table_id` is None when there is no such table. What
    `waits` is tried later through no fault of its own, without limit.
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
        """What it is the answer to, in words."""
        if not self.commit_id:
            return "a message without an id"
        return f"commit {self.commit_id!r}" + (f" of table {self.table!r}" if self.table else "")

    @property
    def waits_for_inputs(self) -> bool:
        """Whether what it needs is not there yet."""
        return self.state == "try_later" and self.error_class in _NOT_THERE_YET


def is_for_later(error: BaseException) -> bool:
    """Whether the same request may be applied when it is tried again."""
    if isinstance(error, psycopg.OperationalError):
        return not (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
    if isinstance(error, ObjectNotFound):
        return False
    kinds = (*NOT_THERE_YET, *OUT_OF_REACH, *BUSY, *NOT_OUR_SCHEMA, psycopg.InterfaceError, MemoryError)
    return isinstance(error, kinds)


def check_schema(supplier: Supplier, error: BaseException) -> None:
    """Raises `InstanceTooNew` when the error may be one of a schema that was migrated since, and it was."""
    cause = error.__cause__ or error
    if isinstance(cause, (*NOT_OUR_SCHEMA, psycopg.IntegrityError)):
        try:
            lacking(supplier)
        except InstanceTooNew:
            raise
        except (DormouseError, psycopg.Error):
            pass  # it is looked at again when the error comes again


def only_waits(error: BaseException) -> bool:
    """Whether the request is not at fault, as far as can be told: a lock, a full server, one that ends.

    A server that dies without a word may have died of the request.
    """
    if isinstance(error, BUSY):
        cause = error.__cause__
        return isinstance(cause, psycopg.Error) and cause.sqlstate is not None
    return is_for_later(error) and not isinstance(error, NOT_THERE_YET)


def error_class(error: BaseException) -> str:
    """The class by which the error is known; those out of reach go by their base."""
    base = next((kind for kind in OUT_OF_REACH if isinstance(error, kind)), type(error))
    return (base if is_for_later(error) else type(error)).__name__


class PartlyApplied(DormouseError):
    """Some items of a commit were refused."""

    def __init__(self, part: RefusedPart) -> None:
        super().__init__(str(part))


def text_of(error: BaseException) -> str:
    """An error in one bounded line, which PostgreSQL can hold."""
    said = " ".join(str(error).replace("\0", "").encode(errors="replace").decode().split())
    if not isinstance(error, DormouseError):
        said = f"{type(error).__name__}: {said}"
    return said if len(said) <= TEXT_CHARACTERS_MAX else said[: TEXT_CHARACTERS_MAX - 1] + "…"


@dataclass(frozen=True, slots=True)
class CommitStatus:
    """The state of a commit.

    `applied` with an `error`: a part of it was refused, or a later request with its id was rejected.
    `unknown`: never sent, or in a queue that cannot be asked (SQS).
    """

    commit_id: str
    state: Literal["applied", "rejected", "pending", "unknown"]
    error: str | None = None

    @classmethod
    def of(cls, outcome: CommitOutcome) -> CommitStatus:
        """Of a commit that was just answered, on disk."""
        return cls(outcome.commit_id, "rejected" if outcome.state == "rejected" else "applied", outcome.error)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that could not be handled, and why; `body` is its beginning."""

    queue: int
    reason: str
    receive_count: int
    sent_at: datetime
    buried_at: datetime
    body: str


@dataclass(frozen=True, slots=True)
class Awaiting:
    """For how many seconds to wait in the database until one of these commits has no message there."""

    commit_ids: Sequence[str] = ()
    seconds: float = 0.0

    @classmethod
    def any_of(cls, them: Sequence[Awaiting]) -> Awaiting:
        """Waits for the first of all; not at all when one of them does not wait."""
        return cls([one for each in them for one in each.commit_ids], min(each.seconds for each in them))

    def then(
        self, query: Query, values: dict[str, Any], patience: Patience
    ) -> Callable[[psycopg.Connection[Any]], list[Any]]:
        """The work of a statement after the wait: gives its rows; both in one round trip."""
        if self.seconds <= 0 or not self.commit_ids:
            return rows_of(query, values)
        keys = Uuids([narrow_bytes(commit_id) for commit_id in self.commit_ids])

        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            how = {"awaited_keys": keys, "usual": patience.usual, "seconds": self.seconds}
            with conn.pipeline():
                waited = conn.execute(_QUERIES["await"].on(), how)
                found = conn.execute(query.on(), values)
            patience.learn(*waited.fetchall()[0])
            return found.fetchall()

        return work


def commit_statuses(
    supplier: Supplier,
    commit_ids: Sequence[str],
    durable_seconds: float = DURABLE_SECONDS,
    awaiting: Awaiting = Awaiting(),
    patience: Patience | None = None,
    table_ids: Sequence[int | None] = (),
) -> list[CommitStatus]:
    """The state of each, in their order, of the table of this id where one is given; one query.

    Of an id that several tables have, and no table is given, it is pending as long as one of them has not
    applied it. What was applied less than `durable_seconds` ago is pending as long as it has a message: a
    crash may undo it.
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
    """The last of them, newest first."""
    work = rows_of(_QUERIES["dead_letters"], {"limit": limit})
    rows = run_statement(supplier, work, operation="dead letters")
    return [DeadLetter(*row) for row in rows]


def settle(supplier: Supplier, outcomes: Sequence[CommitOutcome], since: float) -> list[CommitOutcome]:
    """Has the outcomes on disk, in one statement; returns those that hold, in the order given.

    Commits are applied by sessions that do not wait for the disk. A crash of the server, or a standby that
    takes over, may undo them before this statement, which then reaches the server that runs by now. A session
    that was open at `since` (`time.monotonic`, before the first was applied) proves that there was no crash,
    as sessions end with their server. In any other session the statement looks for each applied commit. One
    that is missing becomes `try_later`, and so does each refusal beside it: it may rest on what was undone.
    Only a message whose outcome is returned as applied or refused may be deleted, and only such an outcome
    may be reported to its sender.
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
        "a crash or a failover of the database undid %d commits before they were on disk; they come again",
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
    """Forgets refused commits of long ago."""
    values = {"kept_seconds": REJECTED_KEPT_SECONDS}
    run_statement(supplier, rows_of(_QUERIES["forget_rejected"], values), operation="forget rejected")


_NOT_THERE_YET = frozenset(kind.__name__ for kind in NOT_THERE_YET)
