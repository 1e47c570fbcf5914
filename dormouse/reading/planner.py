"""The planner of queries: it determines the files that a query reads, and the wanted rows of each.

It is a pure function of the partition tree, the file references and the query. A row of a file counts if a
partition that contains the row's key refers to the file. Each file is read once for each group of leaves,
restricted to those leaves. A row lies in one leaf, so it is returned once.

A query of many leaves is planned in pages. `first_page` finds the value of the first row key at which the
page ends. The wanted keys below it are planned as a query of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dormouse.errors import MetadataDamaged
from dormouse.model.partition_tree import PartitionTree
from dormouse.model.region import KeyRanges, KeyValue, Range, compare, decode_key, united
from dormouse.model.schema import Field
from dormouse.objects.names import schema_version_of
from dormouse.reading.where import Reach, corners_of, may_hold
from dormouse.state.files.facts import References

if TYPE_CHECKING:
    from dormouse.objects.store import ObjectStore
    from dormouse.reading.gone_rows import GoneRows
    from dormouse.reading.where import Deletion

NO_NODE = -1
"""The value of `home` for a file with rows of several partitions.

For other files, `home` is the only partition that has rows of the file.
"""
NO_BOUNDS = KeyRanges()
_FILENAME = attrgetter("filename")


class PlannedReference(NamedTuple):
    """A reference of a partition to a file, with the known facts of the file.

    `only` is true if the file has rows of this partition alone. Deletions up to the number `deletions_till`
    do not apply to the file, except those in `deletions_left`.
    """

    partition_id: str
    filename: str
    only: bool
    byte_count: int | None = None
    min_key: bytes | None = None
    max_key: bytes | None = None
    deletions_till: int = 0
    deletions_left: Sequence[int] | None = None
    row_count: int | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """A file and its wanted rows: those in any of `slices`, which are disjoint.

    `partition_id` is a partition that refers to the file. `byte_count` is the file's size, None or 0 if not
    known. Rows that match one of `deletions` are left out. Deletions up to the number `deletions_till` are
    known to match rows of this file. The file's smallest and largest keys are `min_key` and `max_key`, if
    known. `row_count` is the number of the file's rows if all of them belong to the table, as they lie in one
    partition and no deletion may match them. Otherwise it is None, and if it is not known. The rows in `gone`
    are left out too; only some readers take such scans (see `row_numbers.Finder`).

    `home` is the region of the partition if all wanted rows lie there; it has no bounds if all rows of the
    file do. It is None if rows of several partitions are wanted.
    """

    filename: str
    slices: tuple[KeyRanges, ...]
    partition_id: str
    byte_count: int | None
    deletions: tuple[Deletion, ...] = ()
    deletions_till: int = field(default=0, compare=False)
    min_key: bytes | None = field(default=None, compare=False, repr=False)
    max_key: bytes | None = field(default=None, compare=False, repr=False)
    gone: GoneRows | None = field(default=None, compare=False, repr=False)
    row_count: int | None = field(default=None, compare=False, repr=False)
    whole: tuple[KeyRanges, ...] | None = field(default=None, compare=False, repr=False)
    """The slices before the scan was limited to a part of its group; None if it was not."""
    home: KeyRanges | None = field(default=None, compare=False, repr=False)

    @property
    def schema_version(self) -> int:
        """The version of the schema that the file was written with."""
        return schema_version_of(self.filename)

    def within(self, ranges: KeyRanges) -> Scan:
        """Returns the scan limited to rows in some ranges."""
        return replace(self, slices=tuple(one.intersect(ranges) for one in self.slices))

    def bound(self, objects: ObjectStore) -> Scan:
        """Returns the scan with the store that reads the rows that deletions list."""
        if not self.deletions:
            return self
        return replace(self, deletions=tuple(one.bound(objects) for one in self.deletions))

    def unsettled(self) -> Scan:
        """Returns the scan with the deletions that match the rows in `gone`, instead of these rows."""
        if self.gone is None:
            return self
        return replace(self, deletions=(*self.deletions, *self.gone.deletions), gone=None)


class Way(NamedTuple):
    """The properties that files must share to be read in one scan; the caller chooses `kind`."""

    slices: tuple[KeyRanges, ...]
    deletions: tuple[Deletion, ...]
    kind: Any


def bytes_of(scans: Iterable[Scan]) -> int:
    """Returns the sum of the known sizes of files. A file with several scans counts in each."""
    return sum(scan.byte_count or 0 for scan in scans)


def ways_of(scans: Iterable[Scan], kind: Callable[[Scan], Any]) -> dict[Way, list[Scan]]:
    """Returns scans grouped by slices, deletions and kind, in order: an engine reads a group together."""
    found: dict[Way, list[Scan]] = defaultdict(list)
    for scan in scans:
        found[Way(scan.slices, scan.deletions, kind(scan))].append(scan)
    return found


def keys_near(first: Field, scans: Sequence[Scan]) -> Range:
    """Returns a range of the first row key that contains the wanted rows of some files."""
    ranges = []
    for scan in scans:
        wanted = united(scan.slices).enclosing(first.name) if scan.slices else Range()
        if scan.min_key and scan.max_key:
            low, high = (decode_key([first], key)[0] for key in (scan.min_key, scan.max_key))
            both = wanted.intersect(Range(low, high, max_inclusive=True))
            ranges += [] if both is None else [both]
        else:
            ranges.append(wanted)
    return KeyRanges({first.name: ranges}).enclosing(first.name)


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The numbers of partitions, files and bytes that a query reads.

    `files_pruned` counts the files that are skipped, because their smallest and largest keys exclude wanted
    rows.
    """

    partitions: int
    partitions_total: int
    files: int
    files_pruned: int
    byte_count: int


class SharedFile(NamedTuple):
    """A file that other pages of the plan may read too; `is_read` is true if this page reads it."""

    is_read: bool
    byte_count: int

    def together(self, other: SharedFile | None) -> SharedFile:
        return self if other is None else SharedFile(self.is_read or other.is_read, self.byte_count)


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The plan of one page: scans in groups. Every row of a group sorts before every row of the next group.

    `shared` has the files that other pages may read too; `summary` includes them. `numbers` are the numbers
    of the groups in the page, where groups without files are left out. `inlined` has the references of the
    page's partitions to inlined files, also those without wanted rows. The scans have those pending deletions
    that may match rows in `ranges`.
    """

    groups: tuple[tuple[Scan, ...], ...]
    summary: PlanSummary
    shared: Mapping[str, SharedFile] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()
    inlined: References = field(default_factory=References)
    ranges: KeyRanges = field(default_factory=KeyRanges)

    @property
    def filenames(self) -> tuple[str, ...]:
        """The files that are read, each once, in the order in which they are first needed."""
        return tuple(dict.fromkeys(scan.filename for group in self.groups for scan in group))


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a query that is planned at once: some leaves and the partitions above them.

    `wanted` has the wanted keys of each partition, and `rest` the wanted keys after the page. With
    `in_key_order` the plan has many groups. Otherwise it has one, so that each file is read once. If the
    reader filters rows again (`filtered_again`), a file with rows of one leaf alone is read whole. With
    `is_only`, the query has no other page.
    """

    tree: PartitionTree
    wanted: Mapping[int, KeyRanges]
    rest: KeyRanges | None = None
    in_key_order: bool = True
    filtered_again: bool = False
    is_only: bool = False

    @property
    def partition_ids(self) -> list[str]:
        """The partitions whose references the plan needs."""
        return [self.tree.node_id(node) for node in self.wanted]


def whole_page(tree: PartitionTree, ranges: KeyRanges, *, in_key_order: bool = True) -> Page:
    """Returns one page that contains the whole query."""
    return Page(tree, {node: wanted for node, wanted, _ in _walk(tree, ranges)}, in_key_order=in_key_order)


def first_page(tree: PartitionTree, ranges: KeyRanges, leaves_max: int, *, descending: bool = False) -> Page:
    """Returns a page of about the first `leaves_max` leaves in key order, or the last ones if `descending`.

    The page ends at a split on the first row key, so its rows sort before all rows of the rest, or after
    them.
    """
    first = tree.schema.row_keys[0].name
    if descending:
        return _last_page(tree, ranges, leaves_max, first)
    # leaves that were split on a later key may begin before the page does
    leaves, reached = 0, ranges.enclosing(first).min
    found: dict[int, KeyRanges] = {}
    for node, wanted, start in _walk(tree, ranges):
        is_further = start is not None and (reached is None or compare(start, reached) > 0)
        if leaves >= leaves_max and is_further:
            page = whole_page(tree, ranges.clipped(first, Range(max=start)))
            return replace(page, rest=ranges.clipped(first, Range(min=start)))
        found[node] = wanted
        if tree.children(node) is None:
            leaves, reached = leaves + 1, start if is_further else reached
    return Page(tree, found)


def _last_page(tree: PartitionTree, ranges: KeyRanges, leaves_max: int, first: str) -> Page:
    leaves = 0
    # a leaf that was split on a later key may begin before leaves that come after it
    reached: KeyValue | None = None
    found: dict[int, KeyRanges] = {}
    for node, wanted, start in _walk(tree, ranges, descending=True):
        is_further = reached is not None and (start is None or compare(start, reached) < 0)
        if leaves >= leaves_max and is_further:
            page = whole_page(tree, ranges.clipped(first, Range(min=reached)))
            return replace(page, rest=ranges.clipped(first, Range(max=reached)))
        found[node] = wanted
        if tree.children(node) is None:
            leaves += 1
            if start is not None and (reached is None or is_further):
                reached = start
    return Page(tree, found)


def plan(page: Page, references: Iterable[Sequence[Any]], deletions: Sequence[Deletion] = ()) -> QueryPlan:
    """Returns the plan of a page.

    `references` are those of the page's partitions, each with the fields of `PlannedReference`. `deletions`
    are the ones that may match wanted rows.
    """
    planner = _Planner(page)
    inside, outside = _parted(page, references)
    reach = Reach(page.tree.schema, deletions)
    scans: dict[int, list[Scan]] = defaultdict(list)
    shared: dict[str, SharedFile] = {}
    files = pruned = byte_count = 0
    # sorted by filename, so that two plans of the same state are equal
    for _, some in groupby(sorted(map(PlannedReference._make, inside), key=_FILENAME), key=_FILENAME):
        found = list(some)
        is_read, file = False, found[0]
        gone = reach.of(file.deletions_till, file.min_key, file.max_key, file.deletions_left)
        for group, scan in planner.scans(found):
            scans[group].append(replace(scan, deletions=gone, row_count=None) if gone else scan)
            is_read = True
        files, pruned = files + is_read, pruned + (not is_read)
        size = file.byte_count or 0
        byte_count += size * is_read
        if planner.reaches_beyond(file):
            shared[file.filename] = SharedFile(is_read, size)
    return QueryPlan(
        groups=tuple(tuple(scans[group]) for group in sorted(scans)),
        summary=PlanSummary(len(planner.group_of), page.tree.leaf_count, files, pruned + outside, byte_count),
        shared=shared,
        numbers=tuple(sorted(scans)),
    )


def _parted(page: Page, references: Iterable[Sequence[Any]]) -> tuple[Iterable[Sequence[Any]], int]:
    """Returns the references that a plan looks at, and the number of other files, whose keys are not wanted.

    A look-up among thousands of small files would otherwise take most of its time to look at each.
    """
    wanted = page.wanted.get(page.tree.root_node)
    if wanted is None or not page.is_only:
        return references, 0
    lowest, highest = corners_of(page.tree.schema, wanted)
    inside: list[Sequence[Any]] = []
    outside: set[str] = set()
    for reference in references:
        _, filename, only, _, low, high, *_ = reference
        if not only or low is None or high is None:
            inside.append(reference)
        elif high < lowest or (low > highest and not low.startswith(highest)):
            outside.add(filename)
        else:
            inside.append(reference)
    return inside, len(outside)


def added_up(plans: Iterable[QueryPlan]) -> PlanSummary:
    """Returns the sum of the summaries of a query's pages; a file that is on several pages counts once."""
    shared: dict[str, SharedFile] = {}
    partitions = total = files = pruned = byte_count = 0
    for one in plans:
        now = one.summary
        partitions, total = partitions + now.partitions, now.partitions_total
        files, pruned, byte_count = files + now.files, pruned + now.files_pruned, byte_count + now.byte_count
        for name, found in one.shared.items():
            before = shared.get(name)
            shared[name] = found.together(before)
            if before is not None:
                # the file was counted on this page and on an earlier one
                files -= found.is_read and before.is_read
                byte_count -= found.byte_count * (found.is_read and before.is_read)
                pruned -= not (found.is_read and before.is_read)
    return PlanSummary(partitions, total, files, pruned, byte_count)


class _Own(NamedTuple):
    """A leaf, its group, and the wanted keys of the files that have rows of this leaf alone."""

    leaf: int
    group: int
    wanted: KeyRanges
    slices: tuple[KeyRanges]


class _Planner:
    def __init__(self, page: Page) -> None:
        self.tree = tree = page.tree
        self.wanted = page.wanted
        self._filtered_again = page.filtered_again
        leaves = [node for node in page.wanted if tree.children(node) is None]
        groups = tree.key_order_groups(leaves) if page.in_key_order and len(leaves) > 1 else [leaves]
        self.group_of = {leaf: number for number, group in enumerate(groups) for leaf in group}
        self._corners: dict[int, tuple[bytes, bytes]] = {}
        self._slices: dict[tuple[int, int], KeyRanges] = {}
        self._owns: dict[str, _Own] = {}
        self._regions: dict[int, KeyRanges] = {}

    @cached_property
    def leaves_below(self) -> Counter[int]:
        """The number of leaves with wanted rows below each partition, and of each leaf itself 1."""
        return Counter(node for leaf in self.group_of for node in _upwards(self.tree, leaf))

    def scans(self, references: Sequence[PlannedReference]) -> list[tuple[int, Scan]]:
        """Returns a file's scans with their group numbers: one for each group in which it has wanted rows.

        `references` are all references to the file.
        """
        file = references[0]
        own = self._own(file.partition_id) if file.only and len(references) == 1 else None
        if own is not None:  # the case of nearly all files
            is_held = not own.wanted or self._may_hold(file, own.leaf)
            whole = _scan(file, own.slices, file.partition_id, NO_BOUNDS, file.row_count)
            return [(own.group, whole)] if is_held else []
        return list(self._scattered(references))

    def reaches_beyond(self, file: PlannedReference) -> bool:
        """Returns whether other pages of the plan may read the file too."""
        own = self._own(file.partition_id) if file.only else None
        return own is None or self.tree.schema.row_keys[0].name in own.wanted

    def _own(self, partition_id: str) -> _Own | None:
        """Returns the wanted keys of files that have rows of this leaf alone; None for another partition."""
        found = self._owns.get(partition_id)
        if found is None:
            node = self.tree.node(partition_id)
            if node is None or node not in self.group_of:
                return None
            wanted = self._cut(node, node)
            kept = self._of_region(node, node) if self._filtered_again else wanted
            found = self._owns[partition_id] = _Own(node, self.group_of[node], wanted, (kept,))
        return found

    def _scattered(self, references: Sequence[PlannedReference]) -> Iterator[tuple[int, Scan]]:
        file = references[0]
        nodes = [node for r in references if (node := self.tree.node(r.partition_id)) is not None]
        home = nodes[0] if nodes and len(references) == 1 and file.only else NO_NODE
        by_group: dict[int, set[int]] = defaultdict(set)
        for node in nodes:
            for leaf in self._leaves_of(node):
                by_group[self.group_of[leaf]].add(leaf)
        for group, leaves in by_group.items():
            slices = [self._slice(node, home) for node in self._cover(leaves) if self._may_hold(file, node)]
            place, region = file.partition_id, None if home == NO_NODE else NO_BOUNDS
            if home == NO_NODE and len(leaves) == 1 and (leaf := next(iter(leaves))) in nodes:
                place, region = self.tree.node_id(leaf), self._region(leaf)
            if slices:
                yield group, _scan(file, tuple(slices), place, region)

    def _leaves_of(self, node: int) -> Iterator[int]:
        """Yields the leaves with wanted rows below a partition, or the partition if it is such a leaf."""
        stack = [node]
        while stack:
            at = stack.pop()
            if at in self.group_of:
                yield at
            elif at in self.wanted:
                stack.extend(self.tree.children(at) or ())

    def _cover(self, leaves: set[int]) -> list[int]:
        """Returns the fewest partitions whose leaves with wanted rows are exactly `leaves`."""
        covered = Counter(node for leaf in leaves for node in _upwards(self.tree, leaf))
        full = {node for node, count in covered.items() if count == self.leaves_below[node]}
        return sorted(node for node in full if self.tree.parent(node) not in full)

    def _slice(self, node: int, home: int) -> KeyRanges:
        found = self._slices.get((node, home))
        if found is None:
            cut = self._of_region if self._filtered_again else self._cut
            found = self._slices[node, home] = cut(node, home)
        return found

    def _of_region(self, node: int, home: int) -> KeyRanges:
        """Returns the region of a partition as ranges; empty if all rows of the file lie in it."""
        if home != NO_NODE and node in _upwards(self.tree, home):
            return NO_BOUNDS
        return self._region(node)

    def _region(self, node: int) -> KeyRanges:
        found = self._regions.get(node)
        if found is None:
            found = self._regions[node] = KeyRanges.of(self.tree.region_of(node))
        return found

    def _cut(self, node: int, home: int) -> KeyRanges:
        wanted = self.wanted[node]
        if home == NO_NODE:
            return wanted
        # all of the file's rows lie at home, so its bounds need no check, unless only a part of it is read
        region = self.tree.region_of(home)
        return wanted.without(
            name
            for name, items in wanted.items()
            if all(item.intersect(region.range(name)) == region.range(name) for item in items)
        )

    def _may_hold(self, file: PlannedReference, node: int) -> bool:
        schema, wanted = self.tree.schema, self.wanted[node]
        corners = self._corners.get(node)
        if corners is None:
            corners = self._corners[node] = corners_of(schema, wanted)
        return may_hold(schema, file.min_key, file.max_key, wanted, corners)


def _scan(
    file: PlannedReference,
    slices: tuple[KeyRanges, ...],
    partition_id: str,
    home: KeyRanges | None,
    row_count: int | None = None,
) -> Scan:
    return Scan(
        file.filename,
        slices,
        partition_id,
        file.byte_count,
        min_key=file.min_key,
        max_key=file.max_key,
        deletions_till=file.deletions_till,
        row_count=row_count,
        home=home,
    )


def _walk(
    tree: PartitionTree, ranges: KeyRanges, *, descending: bool = False
) -> Iterator[tuple[int, KeyRanges, KeyValue | None]]:
    """Yields the partitions that can hold wanted rows: parents before children, left before right.

    With `descending`, right ones come before left ones.

    Each item has the partition, its wanted keys, and the value of the first row key at which it begins. The
    value is None if no split on the first row key bounds the partition below.
    """
    first = tree.schema.row_keys[0].name
    stack: list[tuple[int, KeyRanges, KeyValue | None]] = []
    if not ranges.is_empty:
        stack.append((tree.root_node, ranges, None))
    while stack:
        node, wanted, start = stack.pop()
        if node == NO_NODE:
            raise MetadataDamaged(
                f"the database has lost a partition with rows of {wanted}: run 'dormouse check' to see which"
            )
        yield node, wanted, start
        children = tree.children(node)
        if children is not None:
            split = tree.split_of(node)
            below, above = wanted.parted(split.field, split.point)
            parts = [
                (children[1], above, split.point if split.field == first else start),
                (children[0], below, start),
            ]
            stack += [(child, part, at) for child, part, at in parts[:: -1 if descending else 1] if part]


def _upwards(tree: PartitionTree, node: int) -> Iterator[int]:
    """Yields a partition, its parent, and so on up to the root."""
    while node != NO_NODE:
        yield node
        node = tree.parent(node)
