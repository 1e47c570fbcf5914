"""Spans of keys that hold all rows of a condition, by which edits and commits are compared."""

from __future__ import annotations

from itertools import product
from math import prod

from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Schema
from dormouse.reading.where import corners_of
from dormouse.state.files.deletions import NewDeletion, encoded_beginning
from dormouse.state.files.edits import Span

SPANS_MAX = 256
"""The most spans of keys in which other commits are looked for; more are joined to one."""


def meet(left: Span, right: Span) -> bool:
    """Returns whether two spans may have a key in common."""
    return not (_is_above(left[0], right[1]) or _is_above(right[0], left[1]))


def span_of(schema: Schema, deletion: NewDeletion) -> Span:
    """Returns the smallest and the largest possible key of the rows of a deletion."""
    bounds = deletion.bounds
    return encoded_beginning(schema, bounds.min_keys), encoded_beginning(schema, bounds.max_keys)


def spans_of(schema: Schema, ranges: KeyRanges) -> tuple[list[Span], bool]:
    """Returns spans that contain all keys in some ranges, and whether each is one whole key.

    Returns one span if there would be more than `SPANS_MAX`.
    """
    if ranges.is_empty:
        return [], True
    names = schema.row_key_names
    first = names[0]
    listed = [ranges.get(name, (Range(),)) for name in names]
    are_keys = all(item.is_exact for items in listed for item in items)
    if are_keys and prod(map(len, listed)) <= SPANS_MAX:
        parts = [
            KeyRanges(dict(zip(names, ([item] for item in items), strict=True))) for items in product(*listed)
        ]
        return [corners_of(schema, part) for part in parts], True
    if len(listed[0]) <= SPANS_MAX:
        return [corners_of(schema, ranges.clipped(first, item)) for item in listed[0]], False
    return [corners_of(schema, ranges)], False


def _is_above(key: bytes, beginning: bytes) -> bool:
    """Returns whether a key sorts after every key with a beginning."""
    return key[: len(beginning)] > beginning
