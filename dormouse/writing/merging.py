"""A round of merges: two small leaves that are the halves of one partition become one, in its place.

Files that they share with others are compacted first. A round merges one level of the tree; what that makes
may be small, too, and is the next round's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dormouse.errors import (
    FileReferenceAssignedToJob,
    InvalidProperties,
    InvalidRange,
    NotWhole,
    PartitionNotActive,
    TableBusy,
)
from dormouse.model.text import plural
from dormouse.state.context import TableContext
from dormouse.state.partitions.store import SmallPair, rows_to_merge
from dormouse.writing.compaction import RunsJobs, compact

logger = logging.getLogger(__name__)

COMPACTED_LEAVES = 1_000


@dataclass(frozen=True, slots=True)
class MergedPartitions:
    """Leaves that became one: `partition`."""

    leaves: tuple[str, str]
    partition: str


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a round did. `errors` tell of leaves that should have been merged, and could not."""

    partitions_merged: tuple[MergedPartitions, ...]
    jobs_run: int
    errors: tuple[str, ...] = ()


def merge(
    context: TableContext, *, rest_seconds: float = 0.0, on_spark: RunsJobs | None = None
) -> MergeReport:
    """One round, of leaves that were made at least so long ago.

    Raises `InvalidProperties` where the table's `merge_threshold_rows` is not set. Several rounds at once, or
    beside ingests, splits and compactions, do not disturb each other.
    """
    _check_wanted(context)
    with context.last_rounds.round("merge") as current:
        partitions = context.partitions
        partitions.look_for_small_pairs()
        merged = list[MergedPartitions]()
        shared = list[SmallPair]()
        for pair in partitions.small_pairs():
            if pair.rested_seconds >= rest_seconds:
                try:
                    merged += _merge(context, pair, current.errors)
                except NotWhole:
                    shared.append(pair)
        jobs_run = 0
        for start in range(0, len(shared), COMPACTED_LEAVES):
            some = shared[start : start + COMPACTED_LEAVES]
            jobs_run += _compact(context, some, on_spark)
            for pair in some:
                try:
                    merged += _merge(context, pair, current.errors)
                except NotWhole as error:
                    logger.warning("table %s: %s", context.table.name, error)
                    current.errors.append(str(error))
        current.worked = bool(merged or jobs_run)
        current.outcome = (
            f"{plural(len(merged), 'partition')} made of others, after {plural(jobs_run, 'job')}"
        )
    return MergeReport(tuple(merged), jobs_run, tuple(current.errors))


def mergeable(context: TableContext) -> Iterator[SmallPair]:
    """The leaves that a round would merge now; streamed. Raises `InvalidProperties` as `merge` does."""
    _check_wanted(context)
    return context.partitions.all_small_pairs()


def _check_wanted(context: TableContext) -> None:
    if rows_to_merge(context.properties) is None:
        name = context.table.name
        raise InvalidProperties(
            f"table {name!r} merges no leaves: set how few rows they have that are merged, such as "
            f"'dormouse table set {name} merge_threshold_rows=1000000'"
        )


def _merge(context: TableContext, pair: SmallPair, errors: list[str]) -> list[MergedPartitions]:
    """What was merged of the pair, if it still is one; raises `NotWhole`."""
    try:
        leaf = context.partitions.merge([pair.left_id, pair.right_id])
    except (PartitionNotActive, InvalidRange):
        logger.debug("partition %s: its halves are other ones by now", pair.partition_id)
        return []
    except FileReferenceAssignedToJob as error:
        logger.debug("partition %s waits for a compaction: %s", pair.partition_id, error)
        return []
    except TableBusy as error:
        errors.append(str(error))
        return []
    context.partitions.settle(pair.marks)
    return [MergedPartitions((pair.left_id, pair.right_id), leaf.partition_id)]


def _compact(context: TableContext, pairs: Sequence[SmallPair], on_spark: RunsJobs | None) -> int:
    """Gives the leaves files of their own instead of those that they share; gives how many jobs that took."""
    leaves = [partition_id for pair in pairs for partition_id in (pair.left_id, pair.right_id)]
    context.jobs.create_of_shared(leaves)
    return compact(context, create=False, on_spark=on_spark).jobs_run
