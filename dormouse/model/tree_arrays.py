"""The partitions of a table, of all epochs so far, as arrays: a few dozen bytes each, and no objects.

A node is a row number. Rows are only appended, and a split fills in its partition's row, so that readers at
an older epoch may go on meanwhile: what is newer than that tells so by its epochs, which are written last.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from dormouse.model.keys import KeyValue, decode_value
from dormouse.model.schema import Schema

NONE = -1
"""No parent; no child that is known; never divided."""

_SLOTS_MIN = 16
_MOMENTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition as it is stored; the last five are None together, for one that was never divided."""

    partition_id: str
    created_epoch: int
    sealed_epoch: int | None = None
    split_key: int | None = None
    split_point: bytes | None = None
    left_id: str | None = None
    right_id: str | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Byte strings end to end, and the length of each, as 4 bytes, big-endian."""

    lengths: bytes
    joined: bytes


@dataclass(frozen=True, slots=True)
class PartitionColumns:
    """Many stored partitions, by column; numbers are signed and big-endian.

    Without a split, `sealed_epochs` (8 bytes each) and `split_keys` (2 bytes) are -1, and the point is empty.
    Ids of children are only those of the divided partitions, in their order.
    """

    ids: Joined
    created_epochs: bytes
    sealed_epochs: bytes
    split_keys: bytes
    split_points: Joined
    left_ids: Joined
    right_ids: Joined


class TreeArrays:
    """Every partition that a table has had up to `epoch`. One writer at a time; any number of readers."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.epoch = NONE
        """The newest epoch that is known; NONE when nothing is."""
        self.made_at: dict[int, int] = {}
        """When epochs were made, in microseconds since 1970: of the last that were found to be current."""
        self.root = NONE
        self.parent = array("i")
        self.left = array("i")
        self.right = array("i")
        self.split_key = array("h")
        self.created_epoch = array("q")
        self.sealed_epoch = array("q")
        self._ids, self._id_starts = bytearray(), array("Q", [0])
        self._points, self._point_starts = bytearray(), array("Q")
        self._point_lengths = array("I")
        self._slots = array("i", [NONE]) * _SLOTS_MIN
        # the rows that were loaded by columns are in no order; those after them ascend by epoch
        self._loaded_rows, self._loaded_epoch = 0, NONE
        self._missing = 0
        self._decoders = [partial(decode_value, field.type) for field in schema.row_keys]
        self._lock = threading.Lock()

    @property
    def is_partial(self) -> bool:
        """Whether there are divided partitions whose children are not both there."""
        return self._missing > 0

    @property
    def byte_size(self) -> int:
        """The memory that it takes, in bytes, without the schema's."""
        parts = [part for part in vars(self).values() if isinstance(part, array | bytearray)]
        return sum(map(sys.getsizeof, parts))

    def agrees(self, epoch: int, made_at: int | None) -> bool:
        """Whether an epoch of that moment can be the one that is known.

        A server that lost what was committed last, when it was restored or another took over, makes other
        epochs of the same numbers.
        """
        known = self.made_at.get(epoch)
        return known is None or made_at is None or known == made_at

    def note(self, epoch: int, made_at: int) -> None:
        """Remembers when an epoch was made; one writer at a time."""
        if len(self.made_at) >= _MOMENTS_MAX:
            self.made_at = {}
        self.made_at[epoch] = made_at

    def find(self, partition_id: str) -> int:
        """The node of a partition of any epoch, or NONE."""
        return self._find(partition_id.encode("utf-8", "surrogatepass"))

    def partition_id(self, node: int) -> str:
        return self._ids[self._id_starts[node] : self._id_starts[node + 1]].decode()

    def split_point(self, node: int) -> KeyValue:
        """Where a divided partition was divided: a value of the row key of number `split_key[node]`."""
        start = self._point_starts[node]
        point = self._points[start : start + self._point_lengths[node]]
        return self._decoders[self.split_key[node]](bytes(point))

    def count_at(self, epoch: int) -> int:
        """How many partitions there were at an epoch: leaves, and those that had been divided."""
        if epoch < self._loaded_epoch:
            return sum(created <= epoch for created in self.created_epoch)
        return bisect_right(self.created_epoch, epoch, lo=self._loaded_rows)

    def extend(self, rows: Iterable[PartitionRow], epoch: int) -> None:
        """Brings it forward to an epoch by the partitions that came or were divided since the one known.

        What is known already, or is newer than the epoch, does no harm. A child that is not there is NONE.
        """
        with self._lock:
            old = {row.partition_id: row for row in rows if row.created_epoch <= epoch}
            for row in sorted(old.values(), key=lambda row: row.created_epoch):
                if self.find(row.partition_id) == NONE:
                    self._append(row)
            for row in old.values():
                if row.sealed_epoch is not None and row.sealed_epoch <= epoch:
                    self._seal(row)
            self._know(epoch)

    def load(self, pages: Iterable[PartitionColumns], epoch: int) -> None:
        """Takes in all partitions of an epoch, before anybody reads."""
        with self._lock:
            linked = []
            for page in pages:
                linked.append((self._append_columns(page), page.left_ids, page.right_ids))
            for new, left_ids, right_ids in linked:
                divided = [node for node in new if self.sealed_epoch[node] != NONE]
                self._link(divided, self.left, left_ids)
                self._link(divided, self.right, right_ids)
            self._loaded_rows, self._loaded_epoch = len(self.created_epoch), epoch
            self._know(epoch)

    def _know(self, epoch: int) -> None:
        if self.root == NONE and self.parent:
            self.root = self.parent.index(NONE)
        self.epoch = max(self.epoch, epoch)

    def _append(self, row: PartitionRow) -> None:
        encoded = row.partition_id.encode()
        self._ids += encoded
        self._id_starts.append(len(self._ids))
        for links in (self.parent, self.left, self.right, self.split_key, self.sealed_epoch):
            links.append(NONE)
        self._point_starts.append(0)
        self._point_lengths.append(0)
        self.created_epoch.append(row.created_epoch)
        self._index(len(self.created_epoch) - 1)

    def _seal(self, row: PartitionRow) -> None:
        node = self.find(row.partition_id)
        if self.sealed_epoch[node] != NONE:
            return
        assert row.split_key is not None and row.split_point is not None  # noqa: S101 it was divided
        assert row.left_id is not None and row.right_id is not None  # noqa: S101
        for links, child_id in ((self.left, row.left_id), (self.right, row.right_id)):
            links[node] = child = self.find(child_id)
            if child == NONE:
                self._missing += 1
            else:
                self.parent[child] = node
        self.split_key[node] = row.split_key
        self._point_starts[node] = len(self._points)
        self._point_lengths[node] = len(row.split_point)
        self._points += row.split_point
        # last: from here on, readers at that epoch take it for divided
        self.sealed_epoch[node] = row.sealed_epoch or 0

    def _append_columns(self, page: PartitionColumns) -> range:
        """Gives the new nodes, which know neither parent nor children yet."""
        first = len(self.created_epoch)
        unknown = array("i", [NONE]) * (len(page.ids.lengths) // 4)
        for links in (self.parent, self.left, self.right):
            links.extend(unknown)
        self.split_key.extend(_numbers("h", page.split_keys))
        self.sealed_epoch.extend(_numbers("q", page.sealed_epochs))
        lengths = _numbers("I", page.split_points.lengths)
        self._point_starts.extend(accumulate(lengths[:-1], initial=len(self._points)))
        self._point_lengths.extend(lengths)
        self._points += page.split_points.joined
        self._id_starts.extend(accumulate(_numbers("I", page.ids.lengths), initial=self._id_starts.pop()))
        self._ids += page.ids.joined
        self.created_epoch.extend(_numbers("q", page.created_epochs))
        self._index(first)
        return range(first, len(self.created_epoch))

    def _link(self, nodes: Iterable[int], links: array[int], ids: Joined) -> None:
        """Tells divided nodes one child each, and these their parent."""
        find, parent, joined, start = self._find, self.parent, ids.joined, 0
        for node, length in zip(nodes, _numbers("I", ids.lengths), strict=True):
            end = start + length
            links[node] = child = find(joined[start:end])
            if child == NONE:
                self._missing += 1
            else:
                parent[child] = node
            start = end

    def _index(self, first: int) -> None:
        """Makes the nodes from `first` on known by their ids, which are new."""
        count = len(self.created_epoch)
        slots = self._slots
        if 3 * count > 2 * len(slots):
            slots, first = array("i", [NONE]) * (1 << (3 * count // 2).bit_length()), 0
        ids, starts, mask = self._ids, self._id_starts, len(slots) - 1
        start = starts[first]
        for node in range(first, count):
            end = starts[node + 1]
            slot = hash(bytes(ids[start:end])) & mask
            while slots[slot] != NONE:
                slot = (slot + 1) & mask
            slots[slot], start = node, end
        # as a whole: readers go on in the old one meanwhile
        self._slots = slots

    def _find(self, encoded: bytes) -> int:
        slots, ids, starts = self._slots, self._ids, self._id_starts
        mask = len(slots) - 1
        slot = hash(encoded) & mask
        while (node := slots[slot]) != NONE:
            if ids[starts[node] : starts[node + 1]] == encoded:
                return node
            slot = (slot + 1) & mask
        return NONE


def _numbers(typecode: str, encoded: bytes) -> array[int]:
    numbers = array(typecode, encoded)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
