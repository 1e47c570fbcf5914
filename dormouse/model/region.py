"""Ranges of one row key, and regions: a range for each row key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from dormouse.errors import InvalidQuery, InvalidRange
from dormouse.model.keys import KeyValue, check_key, min_value
from dormouse.model.schema import Field
from dormouse.model.types import INT, LONG


@dataclass(frozen=True, slots=True)
class Range:
    """The values from `min` to `max` of one column; None is unbounded.

    The minimum is part of the range and the maximum is not, unless said otherwise. No range has null: in a
    query `Range()` means "not null". Deletes and erasures refuse it, as it bounds nothing.
    """

    min: KeyValue | None = None
    max: KeyValue | None = None
    min_inclusive: bool = True
    max_inclusive: bool = False

    def __post_init__(self) -> None:
        # an open end has one form, so that equal ranges compare equal
        if self.min is None:
            object.__setattr__(self, "min_inclusive", True)
        if self.max is None:
            object.__setattr__(self, "max_inclusive", False)

    @staticmethod
    def exactly(value: KeyValue) -> Range:
        return Range(value, value, max_inclusive=True)

    @property
    def is_exact(self) -> bool:
        return self.min is not None and self.min == self.max and self.min_inclusive and self.max_inclusive

    def checked(self, field: Field) -> Range:
        """Itself, when it is a range of the field's type that can hold a value."""
        ends = [None if end is None else check_key(field, end) for end in (self.min, self.max)]
        return replace(self, min=ends[0], max=ends[1]).not_empty(field)

    def not_empty(self, field: Field) -> Range:
        """Itself, when it can hold a value; its ends are of one type."""
        if self._is_empty():
            raise InvalidRange(f"range of {field.name!r} from {self.min!r} to {self.max!r} is empty")
        return self

    def _is_empty(self) -> bool:
        if self.min is None or self.max is None:
            return False
        if self.min == self.max:
            return not (self.min_inclusive and self.max_inclusive)
        return compare(self.min, self.max) > 0

    def contains(self, value: KeyValue) -> bool:
        above = self.min is None or _after(value, self.min, self.min_inclusive)
        return above and (self.max is None or _after(self.max, value, self.max_inclusive))

    def has_one_value(self, field: Field) -> bool:
        """Whether it can hold a single one; of numbers, its ends may be neighbours."""
        if isinstance(self.min, int) and isinstance(self.max, int) and field.type in (INT, LONG):
            return self.max - (not self.max_inclusive) == self.min + (not self.min_inclusive)
        return self.is_exact

    def intersect(self, other: Range) -> Range | None:
        """What both have, or None."""
        lower = max((self, other), key=start_of)
        upper = min((self, other), key=end_of)
        both = Range(lower.min, upper.max, lower.min_inclusive, upper.max_inclusive)
        return None if both._is_empty() else both


def compare(a: Any, b: Any) -> int:
    """Negative, zero or positive, like a - b; strings by code point, bytes unsigned."""
    return int(a > b) - int(a < b)


def _after(value: Any, limit: Any, inclusive: bool) -> bool:
    order = compare(value, limit)
    return order > 0 or (inclusive and order == 0)


def start_of(item: Range) -> tuple[Any, ...]:
    """Where a range begins; sorts like the position it stands for."""
    return (0,) if item.min is None else (1, item.min, not item.min_inclusive)


def end_of(item: Range) -> tuple[Any, ...]:
    """Where a range ends, as `start_of`."""
    return (1,) if item.max is None else (0, item.max, item.max_inclusive)


class Region(Mapping[str, Range]):
    """A range for some of the row keys; the others are unbounded.

    `Region(carrier=Range("AA", "DL"), flight=7)`, or `Region({"carrier": …})`; a value means exactly it.
    """

    __slots__ = ("_ranges",)
    _ranges: dict[str, Range]

    def __init__(self, ranges: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        given = {**(ranges or {}), **named}
        self._ranges = {name: _as_range(name, value) for name, value in given.items()}

    def __getitem__(self, name: str) -> Range:
        return self._ranges[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __hash__(self) -> int:
        return hash(frozenset(self._ranges.items()))

    def __repr__(self) -> str:
        return f"Region({self._ranges!r})"

    def range(self, name: str) -> Range:
        """The range of a row key; unbounded when the region does not name it."""
        return self._ranges.get(name, Range())

    def contains(self, key: Mapping[str, KeyValue]) -> bool:
        """Whether the row keys of `key` lie in the region."""
        return all(item.contains(key[name]) for name, item in self._ranges.items())

    def split(self, field: Field, point: KeyValue) -> tuple[Region, Region]:
        """The region below `point` and the one from it on; `InvalidRange` when one would be empty."""
        whole = self.range(field.name)
        point = check_key(field, point)
        lowest = min_value(field.type) if whole.min is None else whole.min
        if not whole.contains(point) or compare(point, lowest) == 0:
            raise InvalidRange(
                f"split point {point!r} of {field.name!r} does not lie inside {whole.min!r} to {whole.max!r}"
            )
        left = replace(whole, max=point, max_inclusive=False)
        right = replace(whole, min=point, min_inclusive=True)
        return Region({**self._ranges, field.name: left}), Region({**self._ranges, field.name: right})


def _as_range(name: str, value: Any) -> Range:
    if isinstance(value, Range):
        return value
    if isinstance(value, int | str | bytes | date) and not isinstance(value, bool):
        return Range.exactly(value)
    raise InvalidQuery(f"{name!r}: {value!r} is neither a value nor a dm.Range")
