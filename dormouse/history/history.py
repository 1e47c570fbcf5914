"""The history of a table, as users hold it: `table.history`. One call each; the work is done elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from dormouse.context import TableContext
from dormouse.history.epochs import EpochRecord, Epochs, Life, ScaleMetadata
from dormouse.model.partition_tree import Partition


class History:
    """What a table was, and what became of its partitions.

    Each method is one round trip, whatever the history's length; what is streamed is one a page. Times are
    aware: a naive one is `InvalidCut`.
    """

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self._epochs = Epochs(context.supplier, context.table)

    def active_partitions(self, epoch: int | None = None) -> tuple[Partition, ...]:
        """The leaves of an epoch, or of now, by their lower bounds, as leaves; `EpochNotFound`."""
        return self._epochs.active_partitions(epoch)

    def epoch_at(self, time: datetime) -> int:
        """The last epoch that was made by a time: before the table's first it is 0."""
        return self._epochs.epoch_at(time)

    def partitions_at(self, time: datetime) -> tuple[Partition, ...]:
        """The leaves at a time, less those that were truncated."""
        return self._epochs.partitions_at(time)

    def epochs(self, first: int = 0, last: int | None = None) -> Iterator[EpochRecord]:
        """The records of the epochs from one to another, or to now; streamed. `EpochNotFound`."""
        return self._epochs.epochs(first, last)

    def scale_metadata(self, from_time: datetime, to_time: datetime) -> ScaleMetadata:
        """How the leaves changed between two times: totals, and the records, streamed; `InvalidCut`."""
        return self._epochs.scale_metadata(from_time, to_time)

    def successors(self, partition_id: str) -> dict[str, list[str]]:
        """Which partitions were made of one when it ended, each with all it was made of; none of a leaf.

        {partition id: [ids of its predecessors]}. `PartitionNotFound`.
        """
        return self._epochs.successors(partition_id)

    def predecessors(self, partition_id: str) -> dict[str, list[str]]:
        """Which partitions one was made of, each with all that that one was made of; `PartitionNotFound`.

        {partition id: [ids of its predecessors]}.
        """
        return self._epochs.predecessors(partition_id)

    def lives_of(self, partition_ids: Sequence[str]) -> dict[str, Life]:
        """While which epochs some partitions were leaves, by id; without ids that there are none of."""
        return self._epochs.lives_of(partition_ids)

    def page(self, first: int = 0, last: int | None = None) -> str:
        """Some epochs drawn as an HTML page that needs nothing else: who became whom; `EpochNotFound`.

        In memory as a whole: about 100 bytes a partition.
        """
        from dormouse.history.lineage import page

        return page(self._context, first, last)
