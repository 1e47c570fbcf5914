"""Which files can have rows of some ranges of keys, and of which files deletions may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from dormouse.model.region import KeyValue, Range, decode_key, encode_key
from dormouse.model.schema import Schema
from dormouse.reading.key_ranges import KeyRanges

if TYPE_CHECKING:
    from dormouse.reading.deletions import Deletion


class Reach:
    """Of which files each of some deletions may be."""

    def __init__(self, schema: Schema, deletions: Sequence[Deletion]) -> None:
        self._schema = schema
        self._known = [(one, corners_of(schema, one.ranges)) for one in deletions]

    def of(
        self,
        till: int,
        min_key: bytes | None,
        max_key: bytes | None,
        left: Sequence[int] | None = None,
    ) -> tuple[Deletion, ...]:
        """Those that are to be applied to a file whose keys lie between these.

        Of those up to the number `till` none but the ones that it has rows `left` of.
        """
        return tuple(
            one
            for one, corners in self._known
            if (one.deletion_id > till or one.deletion_id in (left or ()))
            and may_hold(self._schema, min_key, max_key, one.ranges, corners)
        )


def may_hold(
    schema: Schema,
    min_key: bytes | None,
    max_key: bytes | None,
    ranges: KeyRanges,
    corners: tuple[bytes, bytes] | None = None,
) -> bool:
    """Whether a file whose keys lie from `min_key` to `max_key` can have rows in the ranges."""
    if ranges.is_empty:
        return False
    if min_key is None or max_key is None:
        return True
    lowest, highest = corners or corners_of(schema, ranges)
    if max_key < lowest or (min_key > highest and not min_key.startswith(highest)):
        return False
    if _is_one_range_of(schema.row_keys[0].name, ranges) and not (
        max_key.startswith(lowest) or min_key.startswith(highest)
    ):
        return True  # away from the corners, which may not be wanted themselves, there is nothing to decode
    for name, low, high in _spans(schema, min_key, max_key):
        held = Range(low, high, max_inclusive=True)
        if name in ranges and not ranges.overlaps(name, held):
            return False
    return True


def _is_one_range_of(name: str, ranges: KeyRanges) -> bool:
    return len(ranges) == 1 and name in ranges and len(ranges[name]) == 1


def corners_of(schema: Schema, ranges: KeyRanges) -> tuple[bytes, bytes]:
    """The keys, or beginnings of keys, that no wanted key is below, or above."""
    enclosing = [ranges.enclosing(field.name) for field in schema.row_keys]
    return tuple(  # type: ignore[return-value]
        encode_key(schema.row_keys, list(takewhile(_is_known, (getattr(item, end) for item in enclosing))))
        for end in ("min", "max")
    )


def _is_known(value: KeyValue | None) -> bool:
    return value is not None


def _spans(schema: Schema, min_key: bytes, max_key: bytes) -> Iterator[tuple[str, KeyValue, KeyValue]]:
    """The smallest and largest value of the leading row keys, as far as the whole keys tell them."""
    lows, highs = decode_key(schema.row_keys, min_key), decode_key(schema.row_keys, max_key)
    for key, low, high in zip(schema.row_keys, lows, highs, strict=False):
        yield key.name, low, high
        if low != high:
            return
