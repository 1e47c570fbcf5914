"""Rounds of splits and merges of partitions.

A round of splits divides full leaves. Then it pushes references down the partition tree by one level, from
each divided partition to its children. So the references of a leaf that was just divided are on leaves again
when the round ends, and the next compaction can merge their files. A reference stays on a divided partition
while a compaction job holds it. It counts towards the rows of a leaf when a later round has moved it there.

A round of merges replaces two small leaves, which are the halves of one partition, by that partition. Files
that these leaves share with other partitions are compacted first. If the merged leaf is small, too, the next
round merges it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from dormouse.data.sketches import FileSketches, KeyQuantiles, load_sketches, read_sketches
from dormouse.data.sketches import merge as merge_sketches
from dormouse.errors import (
    FileNotFound,
    FileReferenceAssignedToJob,
    FileReferenceNotFound,
    InvalidData,
    InvalidProperties,
    InvalidRange,
    NotWhole,
    ObjectNotFound,
    PartitionNotActive,
    SplitRequestsFailed,
    TableBusy,
)
from dormouse.model.file_reference import FileReference, SplitFileReferenceRequest
from dormouse.model.loops import Progress, no_progress
from dormouse.model.partition_tree import Partition, Split
from dormouse.model.region import KeyValue, Region, encode_value
from dormouse.model.schema import Schema
from dormouse.model.text import plural
from dormouse.objects.store import ObjectStore
from dormouse.state.context import TableContext
from dormouse.state.partitions import SmallPair, rows_to_merge, rows_to_split
from dormouse.writing.compaction import RunsJobs, compact
from dormouse.writing.inlining import forget_leaves

# The rows that the files of a leaf have within its region: how many, and where to divide them.

SMALL_PART = 1 / 16
"""The share of a file's rows below which a leaf's keys are read, since sketches are imprecise there."""
logger = logging.getLogger(__name__)
BATCH_REFERENCES = 1_000
COMPACTED_LEAVES = 1_000


class LeafSketches:
    """The sketches of a leaf's rows in each of its files. Raises `InvalidData` for an unreadable file."""

    def __init__(
        self, store: ObjectStore, schema: Schema, leaf: Partition, references: Sequence[FileReference]
    ) -> None:
        self._schema = schema
        self._leaf = leaf
        self._files = [_LeafFile(store, schema, leaf.region, reference) for reference in references]

    def row_count(self) -> int:
        """Returns the leaf's row count. Sketches estimate the rows of references without an exact count."""
        return sum(file.row_count() for file in self._files)

    def split_point(self) -> Split | None:
        """Returns a row key and about its median, at which to divide the leaf.

        It is the first row key that has two different values. Returns None if all rows have equal keys.
        """
        for name in self._schema.row_key_names:
            within = self._leaf.region.range(name)
            point = self._quantiles(name).split_point(within)
            if point is None:
                for file in self._files:
                    file.read_what_is_cut()
                point = self._quantiles(name).split_point(within)
            if point is not None:
                return Split(name, point)
        return None

    def _quantiles(self, field: str) -> KeyQuantiles:
        parts = [file.about(field) for file in self._files]
        return merge_sketches(self._schema.field(field), [part for part in parts if part is not None])


def left_share(store: ObjectStore, schema: Schema, partition: Partition, reference: FileReference) -> float:
    """Returns the share (0 to 1) of a reference's rows that belong to the left child of its partition."""
    if partition.split is None:
        raise ValueError(f"partition {partition.partition_id!r} is not divided")
    field, within = partition.split.field, partition.region.range(partition.split.field)
    sketches = _LeafFile(store, schema, partition.region, reference).about(field)
    quantiles = merge_sketches(schema.field(field), [] if sketches is None else [sketches])
    return quantiles.rank(partition.split.point, within)


class _LeafFile:
    """A file reference of a leaf or of a divided partition, with the sketches of the file's keys."""

    def __init__(self, store: ObjectStore, schema: Schema, region: Region, reference: FileReference) -> None:
        self._store = store
        self._schema = schema
        self._region = region
        self._reference = reference
        self._must_read = False

    def about(self, field: str) -> FileSketches | None:
        """Returns sketches from which the values of the row key `field` in the leaf can be estimated.

        These are the sketches stored with the file, and the caller limits them to the leaf's range of
        `field`. Reads the keys of the leaf's rows instead if another row key excludes rows of the file from
        the leaf, or if the leaf has few rows of the file. Returns None if there are no rows.
        """
        if self._must_read or self._cuts - {field} or self._is_small(field):
            return self._read
        return self._own

    def read_what_is_cut(self) -> None:
        """Makes `about` read the keys in future, if the file's sketches include rows outside the leaf."""
        self._must_read = self._must_read or bool(self._cuts)

    def row_count(self) -> int:
        if not self._reference.count_approximate:
            return self._reference.row_count
        field = min(self._cuts, default=self._schema.row_key_names[0])
        sketches = self.about(field)
        if sketches is None:
            return 0
        if sketches is not self._own or not self._cuts:
            return sketches.row_count
        return self._rows_inside(sketches, field)

    @cached_property
    def _own(self) -> FileSketches | None:
        name = self._reference.filename
        try:
            return load_sketches(self._store, name, self._schema)
        except (InvalidData, ObjectNotFound) as error:
            logger.warning("the row keys of %s are read instead of its sketches: %s", name, error)
            return self._read

    @cached_property
    def _read(self) -> FileSketches | None:
        return read_sketches(self._store, self._reference.filename, self._schema, self._region)

    @cached_property
    def _cuts(self) -> frozenset[str]:
        """The row keys of which the file has values outside the leaf's range."""
        if self._reference.only_contains_data_for_this_partition or self._own is None:
            return frozenset()
        return frozenset(name for name in self._schema.row_key_names if self._is_cut(self._own, name))

    def _is_cut(self, sketches: FileSketches, name: str) -> bool:
        key, item, type_ = sketches.keys[name], self._region.range(name), self._schema.field(name).type
        below = item.min is not None and key.min < encode_value(type_, item.min)
        return below or (item.max is not None and key.max >= encode_value(type_, item.max))

    def _is_small(self, field: str) -> bool:
        if field not in self._cuts or self._own is None:
            return False
        return self._rows_inside(self._own, field) < SMALL_PART * self._own.row_count

    def _rows_inside(self, sketches: FileSketches, field: str) -> int:
        return merge_sketches(self._schema.field(field), [sketches]).row_count(self._region.range(field))


@dataclass(frozen=True, slots=True)
class DividedPartition:
    """A leaf that was divided: rows whose `field` is below `point` belong to `left`."""

    parent: str
    field: str
    point: KeyValue
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The result of a round of splits. After an empty result, another round has no work, either.

    `errors` has a message for each leaf whose division failed; the next round tries again.
    `one_key_partitions` are full leaves that cannot be divided, because all their rows have one key.
    """

    partitions_split: tuple[DividedPartition, ...]
    references_pushed: int
    errors: tuple[str, ...] = ()
    one_key_partitions: tuple[str, ...] = ()


def split(context: TableContext, *, progress: Progress | None = None) -> SplitReport:
    """Runs one round of splits; calls `progress` with the numbers of examined and of all full leaves.

    Other rounds, ingests and compactions may run at the same time; each leaf is divided only once.
    """
    with context.last_rounds.round("split") as current:
        one_key = list[str]()
        divided = tuple(_divide_full_leaves(context, progress or no_progress, current.errors, one_key))
        pushed = push_down(context)
        current.worked = bool(divided or pushed)
        current.outcome = f"{plural(len(divided), 'partition')} divided, {plural(pushed, 'reference')} moved"
    return SplitReport(divided, pushed, tuple(current.errors), tuple(one_key))


def _divide_full_leaves(
    context: TableContext, progress: Progress, errors: list[str], one_key: list[str]
) -> Iterator[DividedPartition]:
    partitions = context.partitions
    full = partitions.look_for_full_leaves()
    for done, leaf in enumerate(partitions.full_leaves(), 1):
        try:
            divided = _divide(context, leaf.partition_id, one_key)
        except (InvalidData, ObjectNotFound) as error:
            # also raised for a file that was compacted and collected during the round
            logger.warning("partition %s is not divided in this round: %s", leaf.partition_id, error)
            errors.append(f"partition {leaf.partition_id} is not divided: {error}")
        else:
            partitions.note_one_key(leaf.partition_id, is_one_key=leaf.partition_id in one_key[-1:])
            partitions.settle(leaf.marks)
            if divided is not None:
                yield divided
        progress(done, max(done, full))


def _divide(context: TableContext, partition_id: str, one_key: list[str]) -> DividedPartition | None:
    """Divides a leaf if it has enough rows. Adds its id to `one_key` if all rows have the same key.

    Returns None if the leaf is not divided, or if another process divided or merged it.
    """
    found = _split_point(context, partition_id, one_key)
    if found is None:
        return None
    try:
        left, right = context.partitions.split(partition_id, found.point, found.field)
    except PartitionNotActive:
        logger.debug("partition %s was divided or merged by another process", partition_id)
        return None
    forget_leaves(context.table)
    return DividedPartition(partition_id, found.field, found.point, left.partition_id, right.partition_id)


def _split_point(context: TableContext, partition_id: str, one_key: list[str]) -> Split | None:
    leaf = context.partitions.partitions_in([partition_id])[partition_id]
    references = context.store.file_references_in([partition_id])
    sketches = LeafSketches(context.objects, context.schema, leaf, references)
    rows = sketches.row_count()
    if rows < rows_to_split(context.properties):
        logger.debug("partition %s has about %d rows and is not divided", partition_id, rows)
        return None
    found = sketches.split_point()
    if found is None:
        logger.debug("partition %s has %d rows with one key and cannot be divided", partition_id, rows)
        one_key.append(partition_id)
    return found


def push_down(context: TableContext) -> int:
    """Moves references from divided partitions to their children, and returns the number of those moved.

    References that a compaction job holds stay.
    """
    pushed = 0
    requests = context.partitions.references_above_leaves()
    while batch := list(islice(requests, BATCH_REFERENCES)):
        divided = context.partitions.partitions_in({r.old_reference.partition_id for r in batch})
        pushed += len(_apply(context, [_with_shares(context, divided, request) for request in batch]))
    return pushed


def _apply(
    context: TableContext, requests: list[SplitFileReferenceRequest]
) -> tuple[SplitFileReferenceRequest, ...]:
    """Applies the requests, and returns the applied ones.

    Skips requests for references that another process has moved or assigned to a job.
    """
    try:
        context.store.split_file_references(requests)
    except SplitRequestsFailed as error:
        for reason in error.errors:
            if not isinstance(reason, FileReferenceNotFound | FileNotFound | FileReferenceAssignedToJob):
                raise
        return error.succeeded
    return tuple(requests)


def _with_shares(
    context: TableContext, divided: Mapping[str, Partition], request: SplitFileReferenceRequest
) -> SplitFileReferenceRequest:
    """Returns the request with row counts of the two children, estimated from the file's sketches.

    If the sketches cannot be read, each child keeps half of the rows.
    """
    old, (left, right) = request.old_reference, request.new_references
    try:
        share = left_share(context.objects, context.schema, divided[old.partition_id], old)
    except (InvalidData, ObjectNotFound) as error:
        # a damaged file must not block its partition: a compaction reports the file and gives up its job
        logger.warning("rows of %s are halved between two partitions: %s", old.filename, error)
        return request
    rows = round(old.row_count * share)
    shares = (replace(left, row_count=rows), replace(right, row_count=old.row_count - rows))
    return replace(request, new_references=shares)


@dataclass(frozen=True, slots=True)
class MergedPartitions:
    """A partition that replaced two leaves."""

    leaves: tuple[str, str]
    partition: str


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of a round of merges. `errors` has a message for each pair whose merge failed."""

    partitions_merged: tuple[MergedPartitions, ...]
    jobs_run: int
    errors: tuple[str, ...] = ()


def merge(
    context: TableContext, *, rest_seconds: float = 0.0, on_spark: RunsJobs | None = None
) -> MergeReport:
    """Runs one round of merges of leaves that were created at least `rest_seconds` ago.

    Other rounds, ingests, splits and compactions may run at the same time. `on_spark` is the function that
    compacts on Spark. Raises `InvalidProperties` if the table's `merge_threshold_rows` is not set.
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
            # compaction gives the leaves files of their own in place of the shared ones
            context.jobs.create_of_shared([one for pair in some for one in (pair.left_id, pair.right_id)])
            jobs_run += compact(context, create=False, on_spark=on_spark).jobs_run
            for pair in some:
                try:
                    merged += _merge(context, pair, current.errors)
                except NotWhole as error:
                    logger.warning("table %s: %s", context.table.name, error)
                    current.errors.append(str(error))
        current.worked = bool(merged or jobs_run)
        current.outcome = f"{plural(len(merged), 'pair')} of leaves merged, after {plural(jobs_run, 'job')}"
    return MergeReport(tuple(merged), jobs_run, tuple(current.errors))


def mergeable(context: TableContext) -> Iterator[SmallPair]:
    """Yields the pairs of leaves that a round would merge now. Raises `InvalidProperties` as `merge` does."""
    _check_wanted(context)
    return context.partitions.all_small_pairs()


def _check_wanted(context: TableContext) -> None:
    if rows_to_merge(context.properties) is None:
        name = context.table.name
        raise InvalidProperties(
            f"table {name!r} merges no leaves: set the number of rows below which leaves are merged, such as "
            f"'dormouse table set {name} merge_threshold_rows=1000000'"
        )


def _merge(context: TableContext, pair: SmallPair, errors: list[str]) -> list[MergedPartitions]:
    """Merges a pair of leaves, and returns a list with the result.

    Returns an empty list if another process changed the pair, if a compaction job holds its files, or if the
    table is busy. If the table is busy, adds a message to `errors`. Raises `NotWhole` if the leaves share
    files with others.
    """
    try:
        leaf = context.partitions.merge([pair.left_id, pair.right_id])
    except (PartitionNotActive, InvalidRange):
        logger.debug("partition %s: its halves were replaced", pair.partition_id)
        return []
    except FileReferenceAssignedToJob as error:
        logger.debug("partition %s waits for a compaction: %s", pair.partition_id, error)
        return []
    except TableBusy as error:
        errors.append(str(error))
        return []
    forget_leaves(context.table)
    context.partitions.settle(pair.marks)
    return [MergedPartitions((pair.left_id, pair.right_id), leaf.partition_id)]
