"""What queries ask of columns, as Spark's expressions. Its order of values is ours: NaN is the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import and_, or_
from typing import Any

from pyspark.sql import Column
from pyspark.sql.functions import coalesce, col, date_from_unix_date, lit, timestamp_micros, unhex

from dormouse.data.expressions import joined
from dormouse.model.keys import number_of_value
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, DATE, TIMESTAMP
from dormouse.reading.deletions import Deletion
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.where import Condition


def in_slices(schema: Schema, slices: Iterable[KeyRanges]) -> Column | None:
    """Whether a row lies in any of the slices; None when every row does."""
    return _any([_in_slice(schema, ranges) for ranges in slices])


def meets(condition: Condition) -> Column | None:
    """Returns whether a row meets a condition; None when every row does."""
    column, found = _column(condition.field), _in_ranges(condition.field, condition.ranges)
    if found is None:
        return None if condition.or_null else column.isNotNull()
    return found | column.isNull() if condition.or_null else found


def remains(schema: Schema, deletions: Iterable[Deletion]) -> Column | None:
    """Whether a row is none that a deletion is of; None without deletions."""
    gone = [_is_of(schema, one) for one in deletions]
    return ~coalesce(joined(gone, or_), lit(False)) if gone else None


def _is_of(schema: Schema, deletion: Deletion) -> Column:
    found = _all([in_slices(schema, [deletion.ranges]), *map(meets, deletion.conditions)])
    return lit(True) if found is None else found


def _in_slice(schema: Schema, ranges: KeyRanges) -> Column | None:
    return _all(_in_ranges(field, ranges[field.name]) for field in schema.row_keys if field.name in ranges)


def _in_ranges(field: Field, ranges: Sequence[Range]) -> Column | None:
    exact = [_literal(field, item.min) for item in ranges if item.is_exact]
    listed = [_column(field).isin(*exact)] if exact else []
    return _any([*listed, *(_in_range(field, one) for one in ranges if not one.is_exact)])


def _in_range(field: Field, item: Range) -> Column | None:
    column, above, below = _column(field), None, None
    if item.min is not None:
        low = _literal(field, item.min)
        above = column >= low if item.min_inclusive else column > low
    if item.max is not None:
        high = _literal(field, item.max)
        below = column <= high if item.max_inclusive else column < high
    return _all([above, below])


def _literal(field: Field, value: Any) -> Column:
    """Days and instants as numbers: what Python's become in Java depends on a calendar."""
    if field.type == BYTES:
        return unhex(lit(value.hex()))
    if field.type == TIMESTAMP:
        return timestamp_micros(lit(number_of_value(value)))
    if field.type == DATE:
        return date_from_unix_date(lit(number_of_value(value)))
    return lit(value)


def backquoted(name: str) -> str:
    """A column's name in Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def _column(field: Field) -> Column:
    return col(backquoted(field.name))


def _all(parts: Iterable[Column | None]) -> Column | None:
    found = [part for part in parts if part is not None]
    return joined(found, and_) if found else None


def _any(parts: Sequence[Column | None]) -> Column | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return joined(found, or_) if found else lit(False)
