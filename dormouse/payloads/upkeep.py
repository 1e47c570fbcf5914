"""What is due of payloads: on a schedule, or while an instance is maintained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from dormouse.errors import PayloadRoundFailed, one_line
from dormouse.payloads import cooling
from dormouse.payloads.cooling import expire
from dormouse.payloads.offload import Tools
from dormouse.payloads.rebuilding import recover_pointers, was_adopted_lately
from dormouse.payloads.rows import DAYS
from dormouse.payloads.status import cools_at, status
from dormouse.postgres.days import days_ahead

KIND = "payloads"
"""Of the rounds of an instance."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PayloadRound:
    """What a round did. `days_left` have not failed, and can be gone on with at once.

    `backlog_days` are not offloaded yet; at `cools_at` there is another to be offloaded.
    """

    days_expired: int
    days_done: int
    days_left: int
    payloads: int
    objects_deleted: int
    backlog_days: int
    cools_at: datetime | None
    orphaned_bytes: int
    errors: tuple[str, ...]

    def check(self) -> None:
        """Raises `PayloadRoundFailed` when something failed."""
        if self.errors:
            more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
            raise PayloadRoundFailed(f"{self.errors[0]}{more}")


def run(tools: Tools, retention_days: int | None) -> PayloadRound:
    """One round, within the slice that the tools have."""
    errors: list[str] = []

    def tried(what: str, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception as error:
            logger.warning("payloads: %s failed: %s", what, error)
            errors.append(one_line(error))
            return None

    today = DAYS.today(tools.supplier)
    tried("making days", lambda: _make_ahead(tools))
    expired = 0
    if not DAYS.may_roll(tools.supplier):
        return _round(tools, 0, (), 0, errors)
    if retention_days is not None:
        before = today - timedelta(days=retention_days)
        gone = tried("expiry", lambda: expire(tools.supplier, before))
        expired = len(gone[0]) if isinstance(gone, tuple) else 0
    reports = []
    if was_adopted_lately(tools.supplier):
        tried("recovery", lambda: recover_pointers(tools))
    for what, work in (
        ("offload", lambda: cooling.offload(tools, None, dry_run=False)),
        ("fold", lambda: cooling.fold(tools, None)),
    ):
        if isinstance(done := tried(what, work), cooling.OffloadReport):
            reports.append(done)
            errors += done.errors
    collected = tried("collection", tools.known.collect)
    deleted = getattr(collected, "deleted", 0)
    return _round(tools, expired, tuple(reports), deleted, errors)


def _make_ahead(tools: Tools) -> None:
    have = set(DAYS.days(tools.supplier))
    DAYS.make(tools.supplier, sorted(days_ahead(DAYS.today(tools.supplier)) - have))


def _round(
    tools: Tools, expired: int, reports: tuple[cooling.OffloadReport, ...], deleted: int, errors: list[str]
) -> PayloadRound:
    may_look = DAYS.may_roll(tools.supplier)  # into days of any owner
    days = tools.days()
    now = status(days, tools.known)
    return PayloadRound(
        days_expired=expired,
        days_done=sum(one.finished for report in reports for one in report.days),
        days_left=sum(report.days_left - len(report.errors) for report in reports),
        payloads=sum(report.payloads for report in reports),
        objects_deleted=deleted,
        backlog_days=now.backlog_days,
        cools_at=cools_at(tools.supplier, days, tools.options.hot_seconds) if may_look else None,
        orphaned_bytes=now.orphaned_bytes,
        errors=tuple(errors),
    )
