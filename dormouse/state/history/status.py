"""What a table consists of, what becomes of it, and how far back its history goes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dormouse.errors import TableNotFound
from dormouse.model.keyed import is_keyed
from dormouse.model.properties import VERSIONS, is_edited
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.state.context import TableContext
from dormouse.state.files.last_rounds import LastRound
from dormouse.state.files.totals import Totals
from dormouse.state.history.consumers import Consumers, ConsumerStatus
from dormouse.state.history.ends import oldest
from dormouse.state.history.retention import Holder, holders

_QUERIES = load(__package__ or "", "status")


@dataclass(frozen=True, slots=True)
class TableStatus:
    """What a table consists of now, and how its rounds end. Rows of files that a split divided are estimates.

    Rows of pending `deletions` count until compaction has left them out; and of a keyed table older rows and
    marks of deletion: `row_count` then is an upper bound.

    Of a row table `row_count` is of the current rows, and `stored_versions` of all versions that its files
    have, marks of deletion among them. It is None of other tables, and of a row table's versions.

    `compaction_jobs` wait or are run, `jobs_running` of them are run; `jobs_given_up` were given up in all.
    `one_key_partitions` are leaves over the threshold that cannot be divided, as all their rows have one key.
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
    stored_versions: int | None = None
    one_key_partitions: tuple[str, ...] = ()


def status_of(context: TableContext, *, read_only: bool) -> TableStatus:
    """Returns the status of now; costs what has changed since it was last counted.

    With `read_only` the new count is not stored.
    """
    totals = context.store.totals
    found = totals.read() if read_only else totals.bring_forward()
    jobs, jobs_running = context.jobs.count()
    rounds, given_up = context.last_rounds.read()
    deletions = context.deletions.count_pending()
    rows = current_row_count(context) if context.current_rows else None
    is_of_versions = is_edited(context.properties) and not context.current_rows
    return TableStatus(
        name=context.table.name + (VERSIONS if is_of_versions else ""),
        partitions=found.partitions,
        leaves=found.leaves,
        files=found.files,
        references=found.references,
        row_count=found.row_count if rows is None else rows,
        rows_exact=rows is not None
        or (found.rows_exact and not deletions and not _may_repeat(context, found)),
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
        stored_versions=None if rows is None else found.row_count,
        one_key_partitions=context.partitions.one_key_leaves(),
    )


def current_row_count(context: TableContext) -> int:
    """Returns how many rows a row table has now, as the database knows it. Raises `TableNotFound`."""
    work = rows_of(_QUERIES["current_rows"], {"table_id": context.table.table_id})
    found = run_lookup(context.supplier, work, operation="count the rows of a row table")
    if not found:
        raise TableNotFound.gone(context.table.name)
    return int(found[0][0])


def _may_repeat(context: TableContext, found: Totals) -> bool:
    """Whether a key may have rows in several files, of which one counts."""
    if not is_keyed(context.properties):
        return False
    return found.references > found.leaves or context.store.have_several_files()
