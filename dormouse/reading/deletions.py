"""Deletions as readers have them: which rows of which files are gone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from dormouse.errors import InvalidQuery
from dormouse.model.region import encode_value
from dormouse.model.schema import Schema, Shape
from dormouse.model.table import as_now, kept
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.where import Condition, Question, question
from dormouse.reading.where_json import parse_where, where_json
from dormouse.state.files.store import DeletionRows, KeyBounds

CONDITION_BYTES_MAX = 64 * 1024
PARSED_MAX = 16_384
"""Of all tables. A plan asks for a table's pending ones in turn: were these more, none would be found."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """What is gone of the files that came before it: rows in the ranges that meet all conditions.

    A row of which that is not known, as a value is null, is not gone. Rows of an erasure hide no
    older ones: nothing is left of them.
    """

    deletion_id: int
    condition: str
    ranges: KeyRanges = field(compare=False)
    conditions: tuple[Condition, ...] = field(compare=False)
    is_erasure: bool = field(default=False, compare=False)


def deletions_of(schema: Schema, rows: DeletionRows, wanted: KeyRanges | None = None) -> tuple[Deletion, ...]:
    """Those that may be of wanted rows, by their numbers."""
    found = []
    for deletion_id, condition, *is_erasure in sorted(rows):
        asked = _parsed(schema, schema.shape if schema.was_changed else None, condition)
        if not asked.ranges.intersect(wanted or KeyRanges()).is_empty:
            found.append(Deletion(deletion_id, condition, asked.ranges, asked.conditions, any(is_erasure)))
    return tuple(found)


def condition_of(schema: Schema, asked: Question) -> str:
    """What a question asks of rows, as it is kept; `InvalidQuery` when it is too long."""
    text = kept(schema, where_json(asked))
    if len(text) > CONDITION_BYTES_MAX:
        raise InvalidQuery(
            f"the condition has {len(text):,} bytes as JSON, more than {CONDITION_BYTES_MAX:,}: delete by "
            "ranges of keys, or by parts of the list one after the other"
        )
    return text


def key_bounds(schema: Schema, ranges: KeyRanges) -> KeyBounds:
    """What the row keys of all rows in some ranges lie between."""
    hulls = [(key.type, ranges.enclosing(key.name)) for key in schema.row_keys]
    return KeyBounds(
        [None if hull.min is None else encode_value(kind, hull.min) for kind, hull in hulls],
        [None if hull.max is None else encode_value(kind, hull.max) for kind, hull in hulls],
    )


@lru_cache(maxsize=PARSED_MAX)
def _parsed(schema: Schema, shape: Shape | None, condition: str) -> Question:
    # schemas are equal by their fields alone: their shapes tell which columns those were
    asked = question(schema, parse_where(schema, as_now(schema, condition)), None, None)
    # an open range is refused now; where an earlier release recorded one, it deleted nulls, too
    conditions = (replace(one, or_null=one.or_null or one.is_open) for one in asked.conditions)
    return replace(asked, conditions=tuple(conditions))
