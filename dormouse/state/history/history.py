"""The public object for a table's history, `table.history`, and the status of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dormouse.model.cut import Cut, When
from dormouse.model.file_reference import FileReference
from dormouse.model.partition_tree import Partition
from dormouse.model.table import VERSIONS, is_edited, is_keyed
from dormouse.state.context import TableContext
from dormouse.state.files.round_reports import LastRound
from dormouse.state.files.totals import Totals
from dormouse.state.history.changes import ChangedFile, Size, changes_between, references_at, size_between
from dormouse.state.history.consumers import Consumers, ConsumerStatus
from dormouse.state.history.ends import Ends, Known, oldest
from dormouse.state.history.epochs import Epochs, page
from dormouse.state.history.moments import (
    INTERVAL_SECONDS,
    compare,
    cut,
    cuts,
    drop_cut,
    end_of,
    record_cut,
    record_if_due,
)
from dormouse.state.history.retention import (
    Holder,
    RetentionReport,
    TruncationReport,
    apply_retention,
    holders,
    truncate,
)


@dataclass(frozen=True, slots=True)
class TableStatus:
    """The state of a table now: its sizes, jobs, last rounds, consumers and history.

    - `row_count`: an upper bound unless `rows_exact`. Rows of files that a split divided are estimates. Rows
      of pending `deletions` count until compaction has removed them. In a keyed table, older rows of a key
      and marks of deletion count, too. For a row table it is the exact number of current rows.
    - `stored_versions`: for a row table, the number of all versions in its files, including marks of
      deletion. None for other tables, and for the table that shows a row table's versions.
    - `compaction_jobs`: the number of jobs that wait or run; `jobs_running` of them are running.
    - `jobs_given_up`: the number of jobs given up since the table was created.
    - `inlined_files`: the number of files in PostgreSQL, also of those that only history needs. They have
      `inlined_bytes` bytes, which `inline_total_bytes_max` limits.
    - `one_key_partitions`: leaves above the split threshold that cannot be split, as all rows have one key.
    - `rounds`: the last round of each kind.
    - `history_since`: the oldest moment that can be read.
    - `history_held_by`: the named cuts and consumers that keep history, whatever the retention.
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
    inlined_files: int = 0
    inlined_bytes: int = 0


def status_of(context: TableContext, *, read_only: bool) -> TableStatus:
    """Returns the status of a table now. The cost grows with the changes since the last count.

    With `read_only`, the new count is not stored.
    """
    totals = context.store.totals
    counted = totals.read() if read_only else totals.bring_forward()
    jobs, jobs_running = context.jobs.count()
    rounds, given_up = context.last_rounds.read()
    deletions = context.deletions.count_pending()
    inlined_files, inlined_bytes = context.store.inlined.total()
    rows = context.store.totals.current_rows() if context.current_rows else None
    is_of_versions = is_edited(context.properties) and not context.current_rows
    return TableStatus(
        name=context.table.name + (VERSIONS if is_of_versions else ""),
        partitions=counted.partitions,
        leaves=counted.leaves,
        files=counted.files,
        references=counted.references,
        row_count=counted.row_count if rows is None else rows,
        rows_exact=rows is not None
        or (counted.rows_exact and not deletions and not _may_repeat(context, counted)),
        byte_count=counted.byte_count,
        unreferenced_files=counted.unreferenced_files,
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
        stored_versions=None if rows is None else counted.row_count,
        one_key_partitions=context.partitions.one_key_leaves(),
        inlined_files=inlined_files,
        inlined_bytes=inlined_bytes,
    )


def _may_repeat(context: TableContext, totals: Totals) -> bool:
    """Returns True if several files may have rows with the same key, of which only one is current."""
    if not is_keyed(context.properties):
        return False
    return totals.references > totals.leaves or context.store.have_several_files()


class History(Epochs):
    """The history of a table: its cuts, its content at past moments, and the changes of its partitions.

    Each method takes one round trip, whatever the length of the history. A streamed answer takes one for each
    page. A moment given as a time takes two more. Times must have a time zone; a naive time raises
    `InvalidCut`.
    """

    def __init__(self, context: TableContext, check_writable: Callable[[], None]) -> None:
        super().__init__(context.supplier, context.table)
        self._context = context
        self._check_writable = check_writable

    def record_cut(self, name: str | None = None) -> Cut:
        """Records the present as a cut; returns the cut.

        A cut with a name is kept until it is dropped. A cut without a name is kept as long as the history.
        Raises `InvalidCut` for a name that is taken, or that looks like a time.
        """
        self._check_writable()
        return record_cut(self._context, name)

    def record_if_due(self, interval_seconds: float = INTERVAL_SECONDS) -> Cut | None:
        """Records a cut if the last cut is old enough and the table has changed since.

        Returns the cut, or None. `interval_seconds` is the smallest time between two such cuts. Maintenance
        calls this regularly.
        """
        self._check_writable()
        return record_if_due(self._context, interval_seconds)

    def cuts(self) -> Iterator[Cut]:
        """Yields all cuts, the oldest first."""
        return cuts(self._context)

    def cut(self, which: str | int) -> Cut:
        """Returns the cut with a name or id. Raises `InvalidCut` if there is none."""
        return cut(self._context, which)

    def drop_cut(self, which: Cut | str | int) -> None:
        """Deletes a cut. The files that only this cut kept are then collected. Raises `InvalidCut`."""
        self._check_writable()
        drop_cut(self._context, which)

    def compare(self, a: When, b: When) -> Literal["before", "equal", "after"]:
        """Returns "before", "equal" or "after", for moment `a` relative to moment `b`.

        Raises `InvalidCut` and `CutExpired`.
        """
        return compare(self._context, a, b)

    def partitions_between(self, a: When | None = None, b: When | None = None) -> Iterator[Partition]:
        """Yields every partition that was a leaf at some moment from `a` to `b`, both included.

        `a` None is the beginning of the table, or the truncation of its history; `b` None is now. The leaves
        at `a` come first. The others follow in the order in which they were made. Raises `InvalidCut`, for
        example if `b` is before `a`, and `CutExpired`.
        """
        ends = Ends(
            self._context,
            Known.HEAD if a is None else end_of(self._context, a),
            Known.NOW if b is None else end_of(self._context, b),
        )
        return (life.partition for life in self._lives_between(ends))

    def page(self, first: int | None = None, last: int | None = None) -> str:
        """Returns an HTML page that draws the partitions of the epochs, and how they were split and merged.

        The page needs no other file and no network. It is made in memory, with about 100 bytes for each
        partition. Raises `EpochNotFound`.
        """
        return page(self._context, first, last)

    def size_between(self, a: When | None = None, b: When | None = None) -> Size:
        """Returns the exact rows and bytes that were ingested after moment `a` and up to moment `b`.

        `a` None is the table's beginning; `b` None is now. Raises `InvalidCut` and `CutExpired`.
        """
        return size_between(self._context, a, b)

    def files_at(self, when: When) -> Iterator[FileReference]:
        """Yields exactly the file references of a moment, sorted by partition.

        Raises `InvalidCut` and `CutExpired`.
        """
        return references_at(self._context, when)

    def changed_files(self, after: When | None, till: When | None = None) -> Iterator[ChangedFile]:
        """Yields the files that `Table.changes` reads, each with the region of the changed rows in it.

        Raises the errors of `Table.changes`, for example `CutExpired`.
        """
        return changes_between(self._context, after, till)

    def truncate(self, cut: Cut | str, *, dry_run: bool = False) -> TruncationReport:
        """Makes all history before a cut unreadable, permanently; its files and epochs are collected.

        The report counts as false if the history is already truncated at this cut. Raises `InvalidCut` if it
        is truncated at a later cut, or if a named cut or a consumer is before this cut.
        """
        if not dry_run:
            self._check_writable()
        return truncate(self._context, cut, dry_run=dry_run)

    def apply_retention(
        self, byte_count: int | None = None, seconds: float | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Truncates the history at the newest cut that keeps all limits.

        The history since that cut then contains the last `byte_count` bytes ingested, and the last `seconds`.
        Without limits, the table's `history_retention_seconds` is used. Named cuts and consumers can keep
        more; the report lists them. Raises `InvalidInput`.
        """
        if not dry_run:
            self._check_writable()
        return apply_retention(self._context, byte_count, seconds, dry_run=dry_run)
