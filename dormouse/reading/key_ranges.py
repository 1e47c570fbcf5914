"""For some of the row keys, the ranges that a query wants; like a region, but with several ranges a key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dormouse.model.region import KeyValue, Range, end_of, start_of

Ranges = tuple[Range, ...]


class KeyRanges(Mapping[str, Ranges]):
    """A row is in it when each key that it names lies in one of the key's ranges.

    The ranges of a key are disjoint and ascend; no range at all means that no row is in it.
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Mapping[str, Iterable[Range]] | None = None) -> None:
        self._ranges = {name: _disjoint(items) for name, items in (ranges or {}).items()}

    def __getitem__(self, name: str) -> Ranges:
        return self._ranges[name]

    def __contains__(self, name: object) -> bool:
        return name in self._ranges

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __hash__(self) -> int:
        return hash(frozenset(self._ranges.items()))

    def __repr__(self) -> str:
        return f"KeyRanges({self._ranges!r})"

    @property
    def is_empty(self) -> bool:
        """Whether no row can be in it."""
        return any(not items for items in self._ranges.values())

    def enclosing(self, name: str) -> Range:
        """One range around all of the key's ranges; unbounded when it is not named."""
        items = self._ranges.get(name)
        return Range() if not items else _hull(items[0], items[-1])

    def clipped(self, name: str, limits: Range) -> KeyRanges:
        """What lies within a range of one key."""
        items = self._ranges.get(name)
        return KeyRanges._known(
            {**self._ranges, name: (limits,) if items is None else _within(items, limits)}
        )

    def overlaps(self, name: str, held: Range) -> bool:
        """Returns whether any of a key's ranges has a value in common with another range."""
        return bool(_within(self._ranges[name], held))

    def parted(self, name: str, point: KeyValue) -> tuple[KeyRanges | None, KeyRanges | None]:
        """What lies below a value of one key, and what lies from it on; None where nothing does."""
        items = self._ranges.get(name)
        if items is not None and len(items) == 1:
            # nearly always, on the way down a tree: all of it lies on one side
            low: Any = items[0].min
            high: Any = items[0].max
            if high is not None and (high < point or (high == point and not items[0].max_inclusive)):
                return self, None
            if low is not None and low >= point:
                return None, self
        parts = self.clipped(name, Range(max=point)), self.clipped(name, Range(min=point))
        return tuple(None if part.is_empty else part for part in parts)  # type: ignore[return-value]

    def intersect(self, other: KeyRanges) -> KeyRanges:
        """What both have."""
        both = dict(self._ranges)
        for name, items in other.items():
            if both.setdefault(name, items) != items:
                both[name] = tuple(_common(both[name], items))
        return KeyRanges._known(both)

    def without(self, names: Iterable[str]) -> KeyRanges:
        """The same, with some keys unbounded."""
        gone = set(names)
        return KeyRanges._known({name: items for name, items in self.items() if name not in gone})

    @staticmethod
    def _known(ranges: dict[str, Ranges]) -> KeyRanges:
        """Of ranges that are disjoint and ascend already."""
        made = KeyRanges()
        made._ranges = ranges
        return made


def united(parts: Sequence[KeyRanges]) -> KeyRanges:
    """At least what any of the parts has: only keys that all of them name stay bounded."""
    some = [part for part in parts if not part.is_empty]
    if not some:
        return parts[0] if parts else KeyRanges()
    names = set.intersection(*map(set, some))
    return KeyRanges({name: [item for part in some for item in part[name]] for name in names})


def _disjoint(items: Iterable[Range]) -> Ranges:
    merged: list[Range] = []
    for item in sorted(items, key=start_of):
        if merged and _meet(merged[-1], item):
            merged[-1] = _hull(merged[-1], max(merged[-1], item, key=end_of))
        else:
            merged.append(item)
    return tuple(merged)


def _meet(earlier: Range, later: Range) -> bool:
    """Returns whether no value lies between two ranges, which are in the order of where they begin."""
    end: Any = earlier.max
    start: Any = later.min
    if end is None or start is None:
        return True
    return bool(start < end or (start == end and (earlier.max_inclusive or later.min_inclusive)))


def _within(items: Ranges, limits: Range) -> Ranges:
    """Returns what ranges that are disjoint and ascend have within limits; looks at the outermost alone."""
    low = 0 if limits.min is None else bisect_left(items, (0, limits.min, False), key=end_of)
    high = len(items)
    if limits.max is not None:
        high = bisect_right(items, (1, limits.max, False), low, key=start_of)
    found = items[low:high]
    # beside one that reaches over the limits lies at most one that ends there
    outer = found[:2], found[2:][-2:]
    first, last = (tuple(part for one in some if (part := one.intersect(limits))) for some in outer)
    return first + found[2:-2] + last


def _common(left: Ranges, right: Ranges) -> Iterator[Range]:
    i = j = 0
    while i < len(left) and j < len(right):
        both = left[i].intersect(right[j])
        if both is not None:
            yield both
        if end_of(left[i]) < end_of(right[j]):
            i += 1
        else:
            j += 1


def _hull(first: Range, last: Range) -> Range:
    return Range(first.min, last.max, first.min_inclusive, last.max_inclusive)
