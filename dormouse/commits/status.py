"""What became of commits, for those who submitted them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dormouse.commits.outcomes import CommitOutcome
from dormouse.model.text import check_text, is_text, narrow_id
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_statement

REJECTED_KEPT_SECONDS = 30 * 86_400.0
_QUERIES = load(__package__ or "", "status")


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
    refused = {o.commit_id: o for o in outcomes if o.error and o.state != "try_later" and _is_id(o.commit_id)}
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


def _is_id(commit_id: str) -> bool:
    return bool(commit_id) and is_text(commit_id)
