"""What became of commits: which failures are worth another try, and what their submitters are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import psycopg

from dormouse.errors import (
    CommitOutcomeUnknown,
    CommitQueueError,
    ConnectionsExhausted,
    DormouseError,
    FileNotFound,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    InstanceError,
    ObjectNotFound,
    ObjectStoreError,
    TooManyRetries,
)
from dormouse.model.text import check_text, is_text, narrow_id
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_statement

State = Literal["applied", "applied_before", "rejected", "try_later"]

NOT_THERE_YET = (FileNotFound, FileReferenceNotFound, FileReferenceNotAssignedToJob)
"""The queue is not ordered: what a request needs may come with a later one."""

OUT_OF_REACH = (InstanceError, ConnectionsExhausted, CommitQueueError, ObjectStoreError)
"""Neither the request's fault nor a try of it: it is tried until what it needs is back."""

BUSY = (TooManyRetries, CommitOutcomeUnknown)
"""Others were faster at every attempt, or the outcome is unknown; the commit id tells at the next try."""

TEXT_CHARACTERS_MAX = 2_000
REJECTED_KEPT_SECONDS = 30 * 86_400.0
_QUERIES = load(__package__ or "", "outcomes")
_LIMIT_EXCEEDED = "54"  # class of SQLSTATE: a row or statement too large stays too large


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The answer to one request.

    `applied` with an `error`: some of its replacements or splits were refused, which the error names.
    `error_class` is the name of the error's class; `table_id` is None when there is no such table.
    """

    commit_id: str
    table: str
    state: State
    error: str | None = None
    error_class: str | None = None
    table_id: int | None = field(default=None, repr=False)

    @property
    def waits_for_inputs(self) -> bool:
        """Whether what it needs is not there yet."""
        return self.state == "try_later" and self.error_class in _NAMES[NOT_THERE_YET]

    @property
    def was_tried(self) -> bool:
        """Whether the database has looked at it; there is a limit to such tries."""
        return not (self.state == "try_later" and self.error_class in _NAMES[OUT_OF_REACH])


def is_for_later(error: BaseException) -> bool:
    """Whether the same request may be applied when it is tried again."""
    if isinstance(error, psycopg.OperationalError):
        return not (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
    if isinstance(error, ObjectNotFound):
        return False
    return isinstance(error, (*NOT_THERE_YET, *OUT_OF_REACH, *BUSY, psycopg.InterfaceError, MemoryError))


def error_class(error: BaseException) -> str:
    """The class by which the error is known; those out of reach go by their base."""
    base = next((kind for kind in OUT_OF_REACH if isinstance(error, kind)), type(error))
    return (base if is_for_later(error) else type(error)).__name__


def text_of(error: BaseException) -> str:
    """An error in one bounded line, which PostgreSQL can hold."""
    said = " ".join(str(error).replace("\0", "").encode(errors="replace").decode().split())
    if not isinstance(error, DormouseError):
        said = f"{type(error).__name__}: {said}"
    return said if len(said) <= TEXT_CHARACTERS_MAX else said[: TEXT_CHARACTERS_MAX - 1] + "…"


@dataclass(frozen=True, slots=True)
class CommitStatus:
    """The state of a commit.

    `applied` with an `error`: a part of it was refused, or another request came with the same id. `unknown`:
    never sent, or in a queue that cannot be asked (SQS).
    """

    commit_id: str
    state: Literal["applied", "rejected", "pending", "unknown"]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that could not be handled, and why; `body` is its beginning."""

    queue: int
    reason: str
    receive_count: int
    sent_at: datetime
    buried_at: datetime
    body: str


def commit_statuses(supplier: Supplier, commit_ids: Sequence[str]) -> list[CommitStatus]:
    """The state of each, in their order; one query."""
    for commit_id in commit_ids:
        check_text("commit_id", commit_id)
    values = {"commit_keys": [narrow_id(commit_id) for commit_id in commit_ids]}
    rows = run_statement(supplier, rows_of(_QUERIES["statuses"], values), operation="status")
    return [_status(name, *row) for name, row in zip(commit_ids, rows, strict=True)]


def _status(commit_id: str, applied: bool, pending: bool, error: str | None) -> CommitStatus:
    if applied:
        return CommitStatus(commit_id, "applied", error)
    if pending:
        return CommitStatus(commit_id, "pending", error)
    return CommitStatus(commit_id, "unknown" if error is None else "rejected", error)


def dead_letters(supplier: Supplier, limit: int) -> list[DeadLetter]:
    """The last of them, newest first."""
    work = rows_of(_QUERIES["dead_letters"], {"limit": limit})
    rows = run_statement(supplier, work, operation="dead letters")
    return [DeadLetter(*row) for row in rows]


def settle(supplier: Supplier, outcomes: Sequence[CommitOutcome]) -> None:
    """Keeps what was refused where the submitter finds it; one statement."""
    named = [o for o in outcomes if o.commit_id and is_text(o.commit_id)]
    refused = {o.commit_id: o for o in named if o.error and o.state != "try_later"}
    applied = [o for o in outcomes if o.state == "applied" and o.commit_id not in refused]
    if not refused and not applied:
        return
    rows = sorted((narrow_id(name), name, outcome) for name, outcome in refused.items())
    values = {
        "applied_keys": [narrow_id(outcome.commit_id) for outcome in applied],
        "applied_table_ids": [outcome.table_id for outcome in applied],
        "commit_keys": [key for key, _, _ in rows],
        "commit_ids": [name for _, name, _ in rows],
        "table_ids": [outcome.table_id for _, _, outcome in rows],
        "error_classes": [outcome.error_class for _, _, outcome in rows],
        "errors": [outcome.error for _, _, outcome in rows],
    }
    run_statement(supplier, rows_of(_QUERIES["settle"], values), operation="settle commits")


def forget_rejected(supplier: Supplier) -> None:
    """Forgets refused commits of long ago."""
    values = {"kept_seconds": REJECTED_KEPT_SECONDS}
    run_statement(supplier, rows_of(_QUERIES["forget_rejected"], values), operation="forget rejected")


_NAMES = {kinds: frozenset(kind.__name__ for kind in kinds) for kinds in (NOT_THERE_YET, OUT_OF_REACH)}
