"""What a table consists of, what becomes of it, and how far back its history goes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dormouse.context import TableContext
from dormouse.files.last_rounds import LastRound
from dormouse.files.totals import Totals
from dormouse.history.consumers import Consumers, ConsumerStatus
from dormouse.history.ends import oldest
from dormouse.history.retention import Holder, holders
from dormouse.model.keyed import is_keyed


@dataclass(frozen=True, slots=True)
class TableStatus:
    """What a table consists of now, and how its rounds end. Rows of files that a split divided are estimates.

    Rows of pending `deletions` count until compaction has left them out; and of a keyed table older rows and
    marks of deletion: `row_count` then is an upper bound.

    `compaction_jobs` wait or are run, `jobs_running` of them are run; `jobs_given_up` were given up in all.
    `rounds` has one of each kind that there was. The history can be read from `history_since` on, and
    `history_held_by` are the named cuts and consumers that keep it, whatever its retention.
    """

    name: str
    partitions: int
    leaves: int
    files: int
    references: int
    row_count: int
    rows_exact: bool
    byte_count: int
    unreferenced_files: int
    compaction_jobs: int
    jobs_running: int = 0
    jobs_given_up: int = 0
    given_up_reason: str | None = None
    given_up_at: datetime | None = None
    rounds: tuple[LastRound, ...] = ()
    deletions: int = 0
    consumers: tuple[ConsumerStatus, ...] = ()
    history_since: datetime | None = None
    history_held_by: tuple[Holder, ...] = ()


def status_of(context: TableContext, *, read_only: bool) -> TableStatus:
    """The status of now; costs what has changed since it was last counted, which `read_only` keeps not."""
    totals = context.store.totals
    found = totals.read() if read_only else totals.bring_forward()
    jobs, jobs_running = context.jobs.count()
    rounds, given_up = context.last_rounds.read()
    deletions = context.deletions.count_pending()
    return TableStatus(
        name=context.table.name,
        partitions=found.partitions,
        leaves=found.leaves,
        files=found.files,
        references=found.references,
        row_count=found.row_count,
        rows_exact=found.rows_exact and not deletions and not _may_repeat(context, found),
        byte_count=found.byte_count,
        unreferenced_files=found.unreferenced_files,
        compaction_jobs=jobs,
        jobs_running=jobs_running,
        jobs_given_up=given_up.jobs,
        given_up_reason=given_up.reason,
        given_up_at=given_up.at,
        rounds=rounds,
        deletions=deletions,
        consumers=tuple(Consumers(context).statuses()),
        history_since=oldest(context),
        history_held_by=holders(context),
    )


def _may_repeat(context: TableContext, found: Totals) -> bool:
    """Whether a key may have rows in several files, of which one counts."""
    if not is_keyed(context.properties):
        return False
    return found.references > found.leaves or context.store.have_several_files()
