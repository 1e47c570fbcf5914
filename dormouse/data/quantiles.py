"""Quantiles of row keys within a range, and where a partition is best divided."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from dormouse.model.keys import KeyValue, decode_value, encode_value
from dormouse.model.region import Range
from dormouse.model.schema import Schema


class WeightedKeys:
    """Encoded key values in order, how many rows each stands for, and the exact smallest and largest."""

    def __init__(self, items: Iterable[tuple[bytes, int]], min_: bytes | None, max_: bytes | None) -> None:
        ordered = sorted(items)
        self.keys = [key for key, _ in ordered]
        self.weights = [weight for _, weight in ordered]
        # reach[i]: the weight of everything before i
        self.reach = [0, *accumulate(self.weights)]
        self.min = min_
        self.max = max_

    @staticmethod
    def pool(parts: Iterable[WeightedKeys]) -> WeightedKeys:
        parts = list(parts)
        items = [pair for part in parts for pair in zip(part.keys, part.weights, strict=True)]
        smallest = min((part.min for part in parts if part.min is not None), default=None)
        largest = max((part.max for part in parts if part.max is not None), default=None)
        return WeightedKeys(items, smallest, largest)


class KeyQuantiles:
    """What is known of the row keys of one or more files; ranks count the rows within a range."""

    def __init__(self, schema: Schema, keys: Mapping[str, WeightedKeys]) -> None:
        self._schema = schema
        self._keys = keys

    def min(self, field: str) -> KeyValue | None:
        """The smallest value of a row key, exactly; None when there are no rows."""
        return self._decoded(field, self._keys[field].min)

    def max(self, field: str) -> KeyValue | None:
        """The largest value of a row key, exactly; None when there are no rows."""
        return self._decoded(field, self._keys[field].max)

    def row_count(self, field: str, within: Range | None = None) -> int:
        """About how many rows have their `field` within the range."""
        keys = self._keys[field]
        start, end = self._span(field, within or Range())
        return keys.reach[end] - keys.reach[start]

    def rank(self, field: str, value: KeyValue, within: Range | None = None) -> float:
        """About which fraction of the rows within the range have a `field` below the value."""
        keys = self._keys[field]
        start, end = self._span(field, within or Range())
        at = min(max(bisect_left(keys.keys, self._encoded(field, value)), start), end)
        return (keys.reach[at] - keys.reach[start]) / max(1, keys.reach[end] - keys.reach[start])

    def split_point(self, field: str, within: Range | None = None) -> KeyValue | None:
        """The value that divides the rows within the range best: some lie below it, some at or above.

        About the median; a value that many rows share goes to the smaller side. None when all rows within
        the range, or none, have the same value.
        """
        keys = self._keys[field]
        start, end = self._span(field, within or Range())
        known = keys.keys[start:end] + [
            bound
            for bound in (keys.min, keys.max)
            if bound is not None and (within or Range()).contains(self._value(field, bound))
        ]
        lowest = min(known, default=b"")
        above = [key for key in self._near_median(field, start, end, known) if key > lowest]
        if not above:
            return None
        half = (keys.reach[start] + keys.reach[end]) / 2
        return self._value(
            field, min(above, key=lambda key: abs(keys.reach[bisect_left(keys.keys, key)] - half))
        )

    def _near_median(self, field: str, start: int, end: int, known: list[bytes]) -> list[bytes]:
        """The median and the next greater value; ends of the range where there is no such sample."""
        if start == end:
            return known
        median = self._keys[field].keys[self._at(field, 0.5, start, end)]
        following = [key for key in known if key > median]
        return [median, min(following)] if following else [median]

    def _at(self, field: str, fraction: float, start: int, end: int) -> int:
        reach = self._keys[field].reach
        target = reach[start] + fraction * (reach[end] - reach[start])
        return min(max(bisect_right(reach, target, start, end + 1) - 1, start), end - 1)

    def _span(self, field: str, within: Range) -> tuple[int, int]:
        """The positions of the samples within the range."""
        keys = self._keys[field].keys
        start, end = 0, len(keys)
        if within.min is not None:
            low = self._encoded(field, within.min)
            start = bisect_left(keys, low) if within.min_inclusive else bisect_right(keys, low)
        if within.max is not None:
            high = self._encoded(field, within.max)
            end = bisect_right(keys, high) if within.max_inclusive else bisect_left(keys, high)
        return start, max(start, end)

    def _encoded(self, field: str, value: KeyValue) -> bytes:
        return encode_value(self._schema.field(field).type, value)

    def _value(self, field: str, encoded: bytes) -> KeyValue:
        return decode_value(self._schema.field(field).type, encoded)

    def _decoded(self, field: str, encoded: bytes | None) -> KeyValue | None:
        return None if encoded is None else self._value(field, encoded)
