"""Ranges of row keys: a region has one range for each row key, and a query may have several."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar, cast

from dormouse.errors import InvalidKey, InvalidQuery, InvalidRange
from dormouse.model.schema import Field
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP, DataType, plain

T = TypeVar("T")

# Key values, encoded as bytes that sort, unsigned, in the order of the keys.

KeyValue = int | str | bytes | datetime | date
_INT_LIMITS = {"int": 1 << 31, "long": 1 << 63, "timestamp": 1 << 63, "date": 1 << 31}
_STRUCTS = {name: struct.Struct(">I" if limit == 1 << 31 else ">Q") for name, limit in _INT_LIMITS.items()}
_PYTHON = {INT: int, LONG: int, STRING: str, BYTES: bytes, TIMESTAMP: datetime, DATE: date}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SMALLEST: dict[DataType, KeyValue] = {
    INT: -_INT_LIMITS["int"],
    LONG: -_INT_LIMITS["long"],
    STRING: "",
    BYTES: b"",
    TIMESTAMP: datetime.min.replace(tzinfo=UTC),
    DATE: date.min,
}
_END = b"\x00\x00"


def check_key(field: Field, value: Any) -> KeyValue:
    """Returns the value, with a time converted to UTC.

    Raises `InvalidKey` if the value is not of the field's type or does not fit it.
    """
    expected = _PYTHON[field.type]
    value = plain(value)
    if isinstance(value, bytearray | memoryview) and expected is bytes:
        return bytes(value)
    if getattr(value, "nanosecond", 0):
        raise InvalidKey(f"{field.name!r} is {field.type}, in microseconds; {value} has nanoseconds")
    # a datetime is an instance of date, too
    is_time = expected is date and isinstance(value, datetime)
    if not isinstance(value, expected) or isinstance(value, bool) or is_time:
        raise InvalidKey(f"{field.name!r} is {field.type}, but {value!r} is {type(value).__name__}")
    if isinstance(value, int):
        limit = _INT_LIMITS[field.type.name]
        if not -limit <= value < limit:
            raise InvalidKey(f"{field.name!r} is {field.type}; {value} does not fit")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            said = f"{field.name!r}: {value!r} has a lone surrogate and is not valid Unicode"
            raise InvalidKey(said) from None
    return _in_utc(field, value) if isinstance(value, datetime) else cast(KeyValue, value)


def _in_utc(field: Field, value: datetime) -> datetime:
    """Returns the time in UTC. A time without a zone counts as UTC, as it does in loaded data."""
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise InvalidKey(f"{field.name!r} is {field.type}; {value} is outside the years 1 to 9999") from None


def min_value(data_type: DataType) -> KeyValue:
    """Returns the smallest value of a key type."""
    return _SMALLEST[data_type]


def encode_value(data_type: DataType, value: KeyValue) -> bytes:
    """Returns one value as bytes that sort like the value.

    An int or date takes 4 bytes, a long or timestamp 8. A string is encoded in UTF-8. Bytes stay unchanged.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    return _STRUCTS[data_type.name].pack(number_of_value(value) + _INT_LIMITS[data_type.name])


def decode_value(data_type: DataType, encoded: bytes) -> KeyValue:
    """Returns the value that `encode_value` encoded."""
    return decoder_of(data_type)(encoded)


def decoder_of(data_type: DataType) -> Callable[[bytes], KeyValue]:
    """Returns a function that decodes values of a type, which is faster than `decode_value` for many."""
    return _DECODERS[data_type.name]


def _number_decoder(data_type: DataType) -> Callable[[bytes], KeyValue]:
    unpack, limit = _STRUCTS[data_type.name].unpack, _INT_LIMITS[data_type.name]
    if data_type in (INT, LONG):
        return lambda encoded: int(unpack(encoded)[0]) - limit
    return lambda encoded: value_of_number(data_type, unpack(encoded)[0] - limit)


def value_of_number(data_type: DataType, number: int) -> int | datetime | date:
    """Converts the result of `number_of_value` back to a value of the type."""
    if data_type == TIMESTAMP:
        return _EPOCH + number * _MICROSECOND
    return date.fromordinal(number + _EPOCH.toordinal()) if data_type == DATE else number


_DECODERS: dict[str, Callable[[bytes], KeyValue]] = {
    STRING.name: lambda encoded: encoded.decode(),
    BYTES.name: bytes,
    **{one.name: _number_decoder(one) for one in (INT, LONG, TIMESTAMP, DATE)},
}


def number_of_value(value: int | datetime | date) -> int:
    """Returns an integer unchanged, a time as microseconds since 1970, and a date as days since 1970."""
    if isinstance(value, datetime):
        return (value - _EPOCH) // _MICROSECOND
    return value.toordinal() - _EPOCH.toordinal() if isinstance(value, date) else value


def encode_key(fields: Sequence[Field], values: Sequence[KeyValue]) -> bytes:
    """Returns the values of several fields as bytes that sort like the values.

    The encoding of the first values alone is a prefix of the encoding of all values.
    """
    parts = []
    for field, value in zip(fields, values, strict=False):
        encoded = encode_value(field.type, value)
        parts.append(encoded if field.type.name in _STRUCTS else encoded.replace(b"\x00", b"\x00\xff") + _END)
    return b"".join(parts)


def decode_key(fields: Sequence[Field], encoded: bytes) -> tuple[KeyValue, ...]:
    """Returns the values that `encode_key` encoded. The key may have fewer values than there are fields."""
    values, position = [], 0
    for field in fields:
        if position >= len(encoded):
            break
        raw, position = _next_field(field.type, encoded, position)
        values.append(decode_value(field.type, raw))
    return tuple(values)


def _next_field(data_type: DataType, encoded: bytes, start: int) -> tuple[bytes, int]:
    if data_type.name in _STRUCTS:
        end = start + _STRUCTS[data_type.name].size
        return encoded[start:end], end
    end = start
    while True:
        end = encoded.index(b"\x00", end)
        if encoded[end + 1 : end + 2] == b"\x00":
            return encoded[start:end].replace(b"\x00\xff", b"\x00"), end + 2
        end += 2


@dataclass(frozen=True, slots=True)
class Range:
    """The values from `min` to `max` of one column. None as `min` or `max` means unbounded.

    The minimum is part of the range and the maximum is not, unless the flags change that. No range contains
    null, so in a query `Range()` means "not null". Deletes and erasures refuse `Range()`, because it bounds
    nothing.
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
        """Returns the range with checked ends, and with times converted to UTC.

        Raises `InvalidKey` for an end that is not of the field's type, and `InvalidRange` if no value can lie
        in the range.
        """
        ends = [None if end is None else check_key(field, end) for end in (self.min, self.max)]
        return replace(self, min=ends[0], max=ends[1]).not_empty(field)

    def not_empty(self, field: Field) -> Range:
        """Returns the range unchanged. Raises `InvalidRange` if no value can lie in it.

        Both ends must be of one type.
        """
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
        """Returns whether only a single value can lie in the range.

        For whole numbers, a range such as 7 <= x < 8 also has a single value.
        """
        if isinstance(self.min, int) and isinstance(self.max, int) and field.type in (INT, LONG):
            return self.max - (not self.max_inclusive) == self.min + (not self.min_inclusive)
        return self.is_exact

    def intersect(self, other: Range) -> Range | None:
        """Returns the range of the values that lie in both ranges, or None if there are none."""
        lower = max((self, other), key=start_of)
        upper = min((self, other), key=end_of)
        both = Range(lower.min, upper.max, lower.min_inclusive, upper.max_inclusive)
        return None if both._is_empty() else both


def compare(a: Any, b: Any) -> int:
    """Returns -1 if a is below b, 0 if they are equal, and 1 if a is above b.

    Strings compare by code point.
    """
    return int(a > b) - int(a < b)


def _after(value: Any, limit: Any, inclusive: bool) -> bool:
    order = compare(value, limit)
    return order > 0 or (inclusive and order == 0)


def start_of(item: Range) -> tuple[Any, ...]:
    """Returns a sort key for the point at which a range begins."""
    return (0,) if item.min is None else (1, item.min, not item.min_inclusive)


def end_of(item: Range) -> tuple[Any, ...]:
    """Returns a sort key for the point at which a range ends."""
    return (1,) if item.max is None else (0, item.max, item.max_inclusive)


class _ByKey(Mapping[str, T]):
    """A read-only mapping from names of row keys to their ranges."""

    __slots__ = ("_ranges",)
    _ranges: dict[str, T]

    def __getitem__(self, name: str) -> T:
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
        return f"{type(self).__name__}({self._ranges!r})"


class Region(_ByKey[Range]):
    """A part of the key space: ranges for some of the row keys. The other row keys are unbounded.

    `Region(carrier=Range("AA", "DL"), flight=7)`, or `Region({"carrier": …})`. A plain value means exactly
    that value.
    """

    __slots__ = ()

    def __init__(self, ranges: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        given = {**(ranges or {}), **named}
        self._ranges = {name: _as_range(name, value) for name, value in given.items()}

    def range(self, name: str) -> Range:
        """Returns the range of a row key; unbounded if the region does not name it."""
        return self._ranges.get(name, Range())

    def contains(self, key: Mapping[str, KeyValue]) -> bool:
        """Returns whether the row keys of `key` lie in the region."""
        return all(item.contains(key[name]) for name, item in self._ranges.items())

    def overlaps(self, other: Region) -> bool:
        """Returns whether a key can lie in both regions."""
        return all(item.intersect(other.range(name)) is not None for name, item in self._ranges.items())

    def lies_in(self, other: Region) -> bool:
        """Returns whether this region is a part of another."""
        return all(item.intersect(self.range(name)) == self.range(name) for name, item in other.items())

    def split(self, field: Field, point: KeyValue) -> tuple[Region, Region]:
        """Returns the part of the region below `point`, and the part from `point` on.

        Raises `InvalidRange` if one of the parts would be empty.
        """
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


# Several ranges for each row key, as in a query.

Ranges = tuple[Range, ...]


class KeyRanges(_ByKey[Ranges]):
    """Ranges for some of the row keys, as in a query.

    A row matches if the value of each named key lies in one of that key's ranges. The ranges of a key are
    disjoint and ascend. A key without ranges means that no row matches.
    """

    __slots__ = ()

    def __init__(self, ranges: Mapping[str, Iterable[Range]] | None = None) -> None:
        self._ranges = {name: _disjoint(items) for name, items in (ranges or {}).items()}

    @staticmethod
    def of(region: Mapping[str, Range]) -> KeyRanges:
        """Returns the key ranges of a region, with one range for each row key that the region names."""
        return KeyRanges._known({name: (item,) for name, item in region.items()})

    @property
    def is_empty(self) -> bool:
        """True if no row can match."""
        return any(not items for items in self._ranges.values())

    def enclosing(self, name: str) -> Range:
        """Returns the smallest range that contains all ranges of a key.

        Returns an unbounded range if the key is not named or has no ranges.
        """
        items = self._ranges.get(name)
        return Range() if not items else _hull(items[0], items[-1])

    def clipped(self, name: str, limits: Range) -> KeyRanges:
        """Returns the key ranges with the ranges of one key limited to `limits`."""
        items = self._ranges.get(name)
        return KeyRanges._known(
            {**self._ranges, name: (limits,) if items is None else _within(items, limits)}
        )

    def overlaps(self, name: str, held: Range) -> bool:
        """Returns whether any of the ranges of a named key has a value in common with `held`."""
        return bool(_within(self._ranges[name], held))

    def parted(self, name: str, point: KeyValue) -> tuple[KeyRanges | None, KeyRanges | None]:
        """Returns the part in which one key is below `point`, and the part from `point` on.

        An empty part is None.
        """
        items = self._ranges.get(name)
        if items is not None and len(items) == 1:
            # the usual case on the way down a tree: all of it lies on one side
            low: Any = items[0].min
            high: Any = items[0].max
            if high is not None and (high < point or (high == point and not items[0].max_inclusive)):
                return self, None
            if low is not None and low >= point:
                return None, self
        parts = self.clipped(name, Range(max=point)), self.clipped(name, Range(min=point))
        return tuple(None if part.is_empty else part for part in parts)  # type: ignore[return-value]

    def intersect(self, other: KeyRanges) -> KeyRanges:
        """Returns the key ranges that match exactly the rows that both match."""
        both = dict(self._ranges)
        for name, items in other.items():
            if both.setdefault(name, items) != items:
                both[name] = tuple(_common(both[name], items))
        return KeyRanges._known(both)

    def without(self, names: Iterable[str]) -> KeyRanges:
        """Returns the same key ranges, except that the keys in `names` are unbounded."""
        gone = set(names)
        return KeyRanges._known({name: items for name, items in self.items() if name not in gone})

    @staticmethod
    def _known(ranges: dict[str, Ranges]) -> KeyRanges:
        """Makes key ranges of ranges that are known to be disjoint and ascending."""
        made = KeyRanges()
        made._ranges = ranges
        return made


def united(parts: Sequence[KeyRanges]) -> KeyRanges:
    """Returns key ranges that match all rows that any part matches, and maybe more rows.

    A key stays bounded only if every part that is not empty names it.
    """
    some = [part for part in parts if not part.is_empty]
    if len(some) < 2:  # the usual case, whose ranges may be many
        return some[0] if some else parts[0] if parts else KeyRanges()
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
    """Returns whether two ranges overlap or touch, so that no value lies between them.

    `earlier` must not start after `later`.
    """
    end: Any = earlier.max
    start: Any = later.min
    if end is None or start is None:
        return True
    return bool(start < end or (start == end and (earlier.max_inclusive or later.min_inclusive)))


def _within(items: Ranges, limits: Range) -> Ranges:
    """Returns the parts of disjoint, ascending ranges that lie within `limits`.

    It finds the first and the last range by bisection, because only the outermost ranges can be cut.
    """
    low = 0 if limits.min is None else bisect_left(items, (0, limits.min, False), key=end_of)
    high = len(items)
    if limits.max is not None:
        high = bisect_right(items, (1, limits.max, False), low, key=start_of)
    found = items[low:high]
    # at each end, one range may reach over the limits, and at most one beside it touches them
    outer = found[:2], found[2:][-2:]
    first, last = (tuple(part for one in some if (part := one.intersect(limits))) for some in outer)
    return first + found[2:-2] + last


def _common(left: Ranges, right: Ranges) -> Iterator[Range]:
    if len(left) == 1 or len(right) == 1:
        yield from _within(left, right[0]) if len(right) == 1 else _within(right, left[0])
        return
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
