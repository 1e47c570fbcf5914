"""The history of a table, as users hold it: `table.history`. One call each; the work is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Literal

from dormouse.model.cut import Cut, When
from dormouse.model.file_reference import FileReference
from dormouse.model.partition_tree import Partition
from dormouse.state.context import TableContext
from dormouse.state.history.changes import ChangedFile, changes_between, references_at
from dormouse.state.history.cuts import (
    INTERVAL_SECONDS,
    compare,
    cut,
    cuts,
    drop_cut,
    record_cut,
    record_if_due,
)
from dormouse.state.history.ends import Ends, Known
from dormouse.state.history.epochs import EpochRecord, Epochs, Life, ScaleMetadata
from dormouse.state.history.moments import end_of
from dormouse.state.history.retention import (
    RetentionReport,
    TruncationReport,
    apply_retention,
    truncate,
)
from dormouse.state.history.sizes import Size, size_between


class History:
    """What a table was, and what became of its partitions.

    Each method is one round trip, whatever the history's length; what is streamed is one a page. A moment
    that is given as a time is looked up before, in two. Times are aware: a naive one is `InvalidCut`.
    """

    def __init__(self, context: TableContext, check_writable: Callable[[], None]) -> None:
        self._context = context
        self._check_writable = check_writable
        self._epochs = Epochs(context.supplier, context.table)

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

    def active_partitions(self, epoch: int | None = None) -> tuple[Partition, ...]:
        """The leaves of an epoch, or of now, by their lower bounds, as leaves; `EpochNotFound`."""
        return self._epochs.active_partitions(epoch)

    def first_epoch(self) -> int:
        """The first that is kept: 0, or that of the truncation."""
        return self._epochs.head()

    def epoch_at(self, time: datetime) -> int:
        """The last epoch that was made by a time: before the table's first it is 0.

        `EpochNotFound` when that was before the truncation.
        """
        return self._epochs.epoch_at(time)

    def partitions_at(self, time: datetime) -> tuple[Partition, ...]:
        """The leaves at a time, less those that were truncated: of before, those that still were there."""
        return self._epochs.partitions_at(time)

    def epochs(self, first: int | None = None, last: int | None = None) -> Iterator[EpochRecord]:
        """The records of the epochs from one, or the first that is kept, to another, or to now; streamed.

        `EpochNotFound`, also of those before the truncation.
        """
        return self._epochs.epochs(first, last)

    def scale_metadata(self, from_time: datetime, to_time: datetime) -> ScaleMetadata:
        """How the leaves changed between two times: totals, and the records, streamed.

        `InvalidCut`; `EpochNotFound` when the first was before the truncation.
        """
        return self._epochs.scale_metadata(from_time, to_time)

    def successors(self, partition_id: str) -> dict[str, list[str]]:
        """Which partitions were made of one when it ended, each with all it was made of; none of a leaf.

        {partition id: [ids of its predecessors]}. `PartitionNotFound`, also of one that ended before the
        truncation.
        """
        return self._epochs.successors(partition_id)

    def predecessors(self, partition_id: str) -> dict[str, list[str]]:
        """Which partitions one was made of, each with all that that one was made of.

        {partition id: [ids of its predecessors]}. `PartitionNotFound` as `successors`; `EpochNotFound` of one
        that was made before the truncation.
        """
        return self._epochs.predecessors(partition_id)

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
        return (life.partition for life in self._epochs.lives_between(ends))

    def lives_of(self, partition_ids: Sequence[str]) -> dict[str, Life]:
        """While which epochs some partitions were leaves, by id; without ids that there are none of."""
        return self._epochs.lives_of(partition_ids)

    def page(self, first: int | None = None, last: int | None = None) -> str:
        """Some epochs drawn as an HTML page that needs nothing else: who became whom; `EpochNotFound`.

        In memory as a whole: about 100 bytes a partition.
        """
        from dormouse.state.history.lineage import page

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
