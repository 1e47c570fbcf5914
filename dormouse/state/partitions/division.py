"""What a scale makes of a region: the new partitions, and what is wrong with a request for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dormouse.errors import InvalidKey, InvalidRange
from dormouse.model.partition_tree import Partition, Split, split_partition
from dormouse.model.region import Region, end_of, start_of
from dormouse.model.schema import Schema


@dataclass
class Division:
    """A partition that is divided again and again: the leaves so far, left before right, and the others."""

    leaves: list[Partition]
    inner: list[Partition] = field(default_factory=list)
    uppers: set[str] = field(default_factory=set)

    def divide(self, schema: Schema, split: Split, new_id: Callable[[], str]) -> None:
        """Divides each leaf that the point lies strictly inside of; `InvalidRange` when there is none."""
        leaves, refusal = list[Partition](), None
        for leaf in self.leaves:
            try:
                parent, left, right = _divided(schema, leaf, split, new_id)
            except InvalidRange as error:
                refusal = error
                leaves.append(leaf)
            else:
                self.inner.append(parent)
                self.uppers.add(right.partition_id)
                leaves += [left, right]
        if len(leaves) == len(self.leaves) and refusal is not None:
            raise refusal
        self.leaves = leaves


def _divided(
    schema: Schema, leaf: Partition, split: Split, new_id: Callable[[], str]
) -> tuple[Partition, Partition, Partition]:
    try:
        split_partition(schema, leaf, split, "", "")  # ids are given out only where it can be divided
        return split_partition(schema, leaf, split, new_id(), new_id())
    except InvalidKey as error:
        raise InvalidRange(f"split point: {error}") from None


def checked_ids(partition_ids: Any) -> list[str]:
    """The ids of a request; `InvalidRange` when they are no list, or empty, or one comes twice."""
    if isinstance(partition_ids, str | bytes) or not isinstance(partition_ids, Iterable):
        raise InvalidRange(f"partitions must be a list of ids, not {partition_ids!r}")
    ids = list(partition_ids)
    if not ids:
        raise InvalidRange("there must be partitions to divide or merge; the list is empty")
    for partition_id in ids:
        if not isinstance(partition_id, str):
            raise InvalidRange(f"partitions must be ids, which are text, not {partition_id!r}")
    if len(set(ids)) < len(ids):
        doubled = next(each for each in ids if ids.count(each) > 1)
        raise InvalidRange(f"partition {doubled!r} is named twice")
    return ids


def checked_splits(splits: Any) -> list[Split]:
    """(field, point) pairs as splits; `InvalidRange` for what is none."""
    if isinstance(splits, str | bytes) or not isinstance(splits, Iterable):
        raise InvalidRange(f"splits must be a list of (field, point), not {splits!r}")
    found = []
    for split in splits:
        if isinstance(split, str | bytes) or not isinstance(split, Sequence) or len(split) != 2:
            raise InvalidRange(f"a split must be (field, point), not {split!r}")
        found.append(Split(*split))
    return found


def counts(sealed: Sequence[Partition], created: Sequence[Partition]) -> tuple[int, int]:
    """How many of the sealed overlap several of the created; and the other way round."""
    if len(sealed) == 1 or len(created) == 1:
        return int(len(created) > 1), int(len(sealed) > 1)
    return _overlapping(sealed, created), _overlapping(created, sealed)


def _overlapping(some: Sequence[Partition], others: Sequence[Partition]) -> int:
    return sum(sum(_overlap(one.region, other.region) for other in others) > 1 for one in some)


def _overlap(one: Region, other: Region) -> bool:
    return all(one.range(name).intersect(other.range(name)) is not None for name in {*one, *other})


def lies_in(region: Region, other: Region) -> bool:
    """Whether a region is a part of another."""
    return all(
        start_of(region.range(name)) >= start_of(outer) and end_of(region.range(name)) <= end_of(outer)
        for name, outer in other.items()
    )
