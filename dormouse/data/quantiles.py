"""Quantiles of a row key within a range, and where a partition is best divided."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

from dormouse.model.keys import KeyValue, decode_value, encode_value
from dormouse.model.region import Range
from dormouse.model.types import DataType


class KeyQuantiles:
    """What is known of one row key of some files; ranks count the rows within a range.

    `items` are encoded values, each with how many rows it stands for; `ends` has the exact smallest and
    largest of each file, encoded.
    """

    def __init__(
        self, type_: DataType, items: Iterable[tuple[bytes, int]], ends: Iterable[tuple[bytes, bytes]]
    ) -> None:
        ordered = sorted(items)
        self._type = type_
        self._keys = [key for key, _ in ordered]
        # reach[i]: the rows of everything before i
        self._reach = [0, *accumulate(weight for _, weight in ordered)]
        lows, highs = zip(*ends, strict=True) if (ends := list(ends)) else ((), ())
        self._ends = [min(lows), max(highs)] if lows else []

    def row_count(self, within: Range) -> int:
        """About how many rows have their key within the range."""
        start, end = self._span(within)
        return self._reach[end] - self._reach[start]

    def rank(self, value: KeyValue, within: Range) -> float:
        """About which fraction of the rows within the range have a key below the value."""
        start, end = self._span(within)
        at = min(max(bisect_left(self._keys, encode_value(self._type, value)), start), end)
        return (self._reach[at] - self._reach[start]) / max(1, self._reach[end] - self._reach[start])

    def split_point(self, within: Range) -> KeyValue | None:
        """The value that divides the rows within the range best: some lie below it, some at or above.

        About the median; a value that many rows share goes to the smaller side. None when all rows within
        the range, or none, have the same value.
        """
        start, end = self._span(within)
        ends = [key for key in self._ends if within.contains(decode_value(self._type, key))]
        known = self._keys[start:end] + ends
        lowest = min(known, default=b"")
        above = [key for key in self._near_median(start, end, known) if key > lowest]
        if not above:
            return None
        half = (self._reach[start] + self._reach[end]) / 2
        best = min(above, key=lambda key: abs(self._reach[bisect_left(self._keys, key)] - half))
        return decode_value(self._type, best)

    def _near_median(self, start: int, end: int, known: list[bytes]) -> list[bytes]:
        """The median and the next greater value; ends of the range where there is no such sample."""
        if start == end:
            return known
        median = self._keys[self._at(0.5, start, end)]
        following = [key for key in known if key > median]
        return [median, min(following)] if following else [median]

    def _at(self, fraction: float, start: int, end: int) -> int:
        target = self._reach[start] + fraction * (self._reach[end] - self._reach[start])
        return min(max(bisect_right(self._reach, target, start, end + 1) - 1, start), end - 1)

    def _span(self, within: Range) -> tuple[int, int]:
        """The positions of the keys within a range."""
        start, end = 0, len(self._keys)
        if within.min is not None:
            low = encode_value(self._type, within.min)
            start = (bisect_left if within.min_inclusive else bisect_right)(self._keys, low)
        if within.max is not None:
            high = encode_value(self._type, within.max)
            end = (bisect_right if within.max_inclusive else bisect_left)(self._keys, high)
        return start, max(start, end)
