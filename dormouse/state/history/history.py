"""The history of a table, as users hold it: `table.history`. One call each; the work is done elsewhere."""

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

# What a table consists of, what becomes of it, and how far back its history goes.


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
    rows = context.store.totals.current_rows() if context.current_rows else None
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


def _may_repeat(context: TableContext, found: Totals) -> bool:
    """Whether a key may have rows in several files, of which one counts."""
    if not is_keyed(context.properties):
        return False
    return found.references > found.leaves or context.store.have_several_files()


class History(Epochs):
    """What a table was, and what became of its partitions.

    Each method is one round trip, whatever the history's length; what is streamed is one a page. A moment
    that is given as a time is looked up before, in two. Times are aware: a naive one is `InvalidCut`.
    """

    def __init__(self, context: TableContext, check_writable: Callable[[], None]) -> None:
        super().__init__(context.supplier, context.table)
        self._context = context
        self._check_writable = check_writable

    def record_cut(self, name: str | None = None) -> Cut:
        """Records the present. With a name it is kept until it is dropped, else as long as the history.

        `InvalidCut` for a name that is taken, or could be taken for a time.
        """
        self._check_writable()
        return record_cut(self._context, name)

    def record_if_due(self, interval_seconds: float = INTERVAL_SECONDS) -> Cut | None:
        """Records a cut when the last is so old and the table has changed since, as maintenance does."""
        self._check_writable()
        return record_if_due(self._context, interval_seconds)

    def cuts(self) -> Iterator[Cut]:
        """All cuts, the oldest first; streamed."""
        return cuts(self._context)

    def cut(self, which: str | int) -> Cut:
        """The cut of a name or id; `InvalidCut`."""
        return cut(self._context, which)

    def drop_cut(self, which: Cut | str | int) -> None:
        """Forgets a cut: what it alone has kept is collected. `InvalidCut`."""
        self._check_writable()
        drop_cut(self._context, which)

    def compare(self, a: When, b: When) -> Literal["before", "equal", "after"]:
        """Where one moment lies, seen from another; `InvalidCut`, `CutExpired`."""
        return compare(self._context, a, b)

    def partitions_between(self, a: When | None = None, b: When | None = None) -> Iterator[Partition]:
        """Every partition that was a leaf at some moment from one to another, both included; streamed.

        `a` None: from where the table was truncated, or its beginning; `b` None: till now. First the leaves
        of then, then those that came, in their order. `InvalidCut`, when b is before a, too; `CutExpired`.
        """
        ends = Ends(
            self._context,
            Known.HEAD if a is None else end_of(self._context, a),
            Known.NOW if b is None else end_of(self._context, b),
        )
        return (life.partition for life in self._lives_between(ends))

    def page(self, first: int | None = None, last: int | None = None) -> str:
        """Some epochs drawn as an HTML page that needs nothing else: who became whom; `EpochNotFound`.

        In memory as a whole: about 100 bytes a partition.
        """
        return page(self._context, first, last)

    def size_between(self, a: When | None = None, b: When | None = None) -> Size:
        """The rows and bytes that were ingested after one moment and up to another, exact; see `sizes`."""
        return size_between(self._context, a, b)

    def files_at(self, when: When) -> Iterator[FileReference]:
        """Exactly the file references of a moment, by partition; streamed. `InvalidCut`, `CutExpired`."""
        return references_at(self._context, when)

    def changed_files(self, after: When | None, till: When | None = None) -> Iterator[ChangedFile]:
        """The files that `Table.changes` reads, and which rows of each; streamed. As it, `CutExpired`."""
        return changes_between(self._context, after, till)

    def truncate(self, cut: Cut | str, *, dry_run: bool = False) -> TruncationReport:
        """Makes what lies wholly before a cut unreadable, for good; its files and epochs are collected.

        The report is false when it is truncated there already. Raises `InvalidCut` when it is truncated
        later, or a named cut or a consumer stands before it.
        """
        if not dry_run:
            self._check_writable()
        return truncate(self._context, cut, dry_run=dry_run)

    def apply_retention(
        self, byte_count: int | None = None, seconds: float | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Lets history go beyond limits: what was ingested last, `byte_count` bytes, and `seconds` of it
        stay.

        Without limits, by `history_retention_seconds`. Named cuts and consumers keep more: the report tells
        which. Raises `InvalidInput`.
        """
        if not dry_run:
            self._check_writable()
        return apply_retention(self._context, byte_count, seconds, dry_run=dry_run)
