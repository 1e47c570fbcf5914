"""Which files a query reads, and which rows of each: a pure function of tree, references and query.

A row of a file counts where the file has a reference: in the leaves of its references' partitions. So each
file is read, once a group of leaves, restricted to those leaves; a row is in one leaf, so it comes once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dormouse.model.file_reference import FileWithReferences
from dormouse.model.keys import KeyValue, decode_key, encode_key
from dormouse.model.partition_tree import Partition, PartitionTree
from dormouse.model.region import Range
from dormouse.model.schema import Schema
from dormouse.query.key_ranges import KeyRanges


@dataclass(frozen=True, slots=True)
class Scan:
    """A file, and the rows of it that are wanted: those in any of `slices`, which are disjoint."""

    filename: str
    slices: tuple[KeyRanges, ...]

    @property
    def is_whole(self) -> bool:
        return not all(self.slices)


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a query reads: `files_pruned` hold no wanted row, as their smallest and largest keys tell."""

    partitions: int
    partitions_total: int
    files: int
    files_pruned: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """Scans in groups: every row of a group sorts before every row of the next."""

    groups: tuple[tuple[Scan, ...], ...]
    summary: PlanSummary

    @property
    def filenames(self) -> tuple[str, ...]:
        """The files that are read, each once, in the order in which they are first needed."""
        return tuple(dict.fromkeys(scan.filename for group in self.groups for scan in group))


def partitions_in(tree: PartitionTree, ranges: KeyRanges) -> list[str]:
    """The partitions, leaves and above, that can hold wanted rows."""
    return [partition.partition_id for partition, _ in _walk(tree, ranges)]


def plan(
    tree: PartitionTree, files: Iterable[FileWithReferences], ranges: KeyRanges, *, in_key_order: bool = True
) -> QueryPlan:
    """Plans a query; `files` have their references on the partitions of `partitions_in`.

    Without `in_key_order` all is one group, so that each file is read once.
    """
    planner = _Planner(tree, ranges, in_key_order)
    considered = 0
    read: dict[str, int] = {}
    scans: dict[int, list[Scan]] = defaultdict(list)
    for file in files:
        considered += 1
        for group, scan in planner.scans(file):
            scans[group].append(scan)
            read[file.filename] = file.byte_count or 0
    return QueryPlan(
        groups=tuple(tuple(scans[group]) for group in sorted(scans)),
        summary=PlanSummary(
            partitions=len(planner.group_of),
            partitions_total=len(tree.leaves),
            files=len(read),
            files_pruned=considered - len(read),
            byte_count=sum(read.values()),
        ),
    )


class _Planner:
    def __init__(self, tree: PartitionTree, ranges: KeyRanges, in_key_order: bool) -> None:
        self.tree = tree
        self.ranges = ranges
        walked = {p.partition_id: clipped for p, clipped in _walk(tree, ranges)}
        leaves = [tree[partition_id] for partition_id in walked if tree[partition_id].is_leaf]
        groups = tree.key_order_groups(leaves) if in_key_order else [leaves]
        self.wanted = walked
        self.group_of = {leaf.partition_id: n for n, group in enumerate(groups) for leaf in group}
        self.leaves_below = Counter(p for leaf in leaves for p in _upwards(tree, leaf.partition_id))

    def scans(self, file: FileWithReferences) -> Iterator[tuple[int, Scan]]:
        """How a file is read: for each group in which it has wanted rows, its scan."""
        by_group: dict[int, set[str]] = defaultdict(set)
        for reference in file.references:
            for leaf in self._leaves_of(reference.partition_id):
                by_group[self.group_of[leaf]].add(leaf)
        alone = len(file.references) == 1 and file.references[0].only_contains_data_for_this_partition
        home = file.references[0].partition_id if alone else None
        for group, leaves in by_group.items():
            cover = self._cover(leaves)
            slices = [self._slice(p, home) for p in cover if self._may_hold(file, p)]
            if slices:
                yield group, Scan(file.filename, tuple(slices))

    def _leaves_of(self, partition_id: str) -> Iterator[str]:
        """The leaves with wanted rows at or below a partition."""
        stack = [partition_id]
        while stack:
            at = stack.pop()
            if at in self.group_of:
                yield at
            elif at in self.wanted:
                stack.extend(self.tree[at].child_ids)

    def _cover(self, leaves: set[str]) -> list[str]:
        """As few partitions as can be, whose leaves with wanted rows are exactly these."""
        covered = Counter(p for leaf in leaves for p in _upwards(self.tree, leaf))
        full = {p for p, count in covered.items() if count == self.leaves_below[p]}
        return sorted(p for p in full if self.tree[p].parent_id not in full)

    def _slice(self, partition_id: str, home: str | None) -> KeyRanges:
        wanted = self.wanted[partition_id]
        if home is None:
            return wanted
        # All of the file's rows lie at home: its bounds need no check, unless only a part of it is read.
        region = self.tree[home].region
        return wanted.without(
            name for name, items in wanted.items() if all(_covers(item, region.range(name)) for item in items)
        )

    def _may_hold(self, file: FileWithReferences, partition_id: str) -> bool:
        return may_hold(self.tree.schema, file.min_key, file.max_key, self.wanted[partition_id])


def may_hold(schema: Schema, min_key: bytes | None, max_key: bytes | None, ranges: KeyRanges) -> bool:
    """Whether a file whose keys lie from `min_key` to `max_key` can have rows in the ranges."""
    if ranges.is_empty:
        return False
    if min_key is None or max_key is None:
        return True
    lowest, highest = _corners(schema, ranges)
    if max_key < lowest or (min_key > highest and not min_key.startswith(highest)):
        return False
    for name, low, high in _spans(schema, min_key, max_key):
        held = Range(low, high, max_inclusive=True)
        if name in ranges and not any(held.intersect(item) for item in ranges[name]):
            return False
    return True


def _corners(schema: Schema, ranges: KeyRanges) -> tuple[bytes, bytes]:
    """The keys, or beginnings of keys, that no wanted key is below, or above."""
    enclosing = [ranges.enclosing(field.name) for field in schema.row_keys]
    return tuple(  # type: ignore[return-value]
        encode_key(schema.row_keys, _until_none([getattr(item, end) for item in enclosing]))
        for end in ("min", "max")
    )


def _spans(schema: Schema, min_key: bytes, max_key: bytes) -> Iterator[tuple[str, KeyValue, KeyValue]]:
    """The smallest and largest value of the leading row keys, as far as the whole keys tell them."""
    lows, highs = decode_key(schema.row_keys, min_key), decode_key(schema.row_keys, max_key)
    for field, low, high in zip(schema.row_keys, lows, highs, strict=False):
        yield field.name, low, high
        if low != high:
            return


def _until_none(values: Sequence[KeyValue | None]) -> list[KeyValue]:
    found: list[KeyValue] = []
    for value in values:
        if value is None:
            break
        found.append(value)
    return found


def _walk(tree: PartitionTree, ranges: KeyRanges) -> Iterator[tuple[Partition, KeyRanges]]:
    """The partitions that can hold wanted rows, parents first, each with what is wanted of it."""
    stack = [(tree.root, ranges)]
    while stack:
        partition, wanted = stack.pop()
        if wanted.is_empty:
            continue
        yield partition, wanted
        if partition.split is not None:
            field, point = partition.split.field, partition.split.point
            halves = (Range(max=point), Range(min=point))
            children = zip(partition.child_ids, halves, strict=True)
            stack += [(tree[child], wanted.clipped(field, half)) for child, half in children]


def _covers(item: Range, region: Range) -> bool:
    return item.intersect(region) == region


def _upwards(tree: PartitionTree, partition_id: str) -> Iterator[str]:
    """A partition, its parent, … up to the root."""
    yield partition_id
    yield from (partition.partition_id for partition in tree.ancestors(partition_id))
