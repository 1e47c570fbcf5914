"""What queries ask of columns as DataFusion expressions, which prune row groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

from datafusion import Expr, functions, literal

from dormouse.data.expressions import among, between, column, joined, value
from dormouse.model.keys import KeyValue
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.reading.deletions import Deletion
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.where import Condition, is_nan

Bounds = Sequence[Range]


def in_slices(schema: Schema, slices: Iterable[KeyRanges]) -> Expr | None:
    """Whether a row lies in any of the slices; None when every row does."""
    parts = [_in_slice(schema, ranges) for ranges in slices]
    whole = [part for part in parts if part is not None]
    return joined(whole, or_) if len(whole) == len(parts) else None


def meets(condition: Condition) -> Expr:
    """Whether a row meets a condition."""
    name, found = column(condition.field.name), _in_ranges(condition.field, condition.ranges)
    if found is None:
        return literal(True) if condition.or_null else name.is_not_null()
    return found | name.is_null() if condition.or_null else found


def remains(schema: Schema, deletions: Sequence[Deletion]) -> Expr:
    """Whether a row is none that a deletion is of, of which there is at least one."""
    gone = joined([is_of(schema, deletion) for deletion in deletions], or_)
    return ~functions.coalesce(gone, literal(False))


def is_of(schema: Schema, deletion: Deletion) -> Expr:
    """Whether a deletion is of a row; null where that is not known."""
    inside = in_slices(schema, [deletion.ranges])
    parts = [*([] if inside is None else [inside]), *map(meets, deletion.conditions)]
    return joined(parts, and_) if parts else literal(True)


def from_key(fields: Sequence[Field], key: Sequence[KeyValue], *, inclusive: bool) -> Expr:
    """Whether a row comes after a key in the order of these fields, or has it, if `inclusive`."""
    first, reached = column(fields[0].name), value(fields[0], key[0])
    if len(fields) == 1:
        return first >= reached if inclusive else first > reached
    rest = from_key(fields[1:], key[1:], inclusive=inclusive)
    # said apart, the bound of the first field prunes row groups
    return (first >= reached) & ((first > reached) | rest)


def _in_slice(schema: Schema, ranges: KeyRanges) -> Expr | None:
    fields = [field for field in schema.row_keys if field.name in ranges]
    parts = [part for field in fields if (part := _in_ranges(field, ranges[field.name])) is not None]
    return reduce(and_, parts) if parts else None


def _in_ranges(field: Field, ranges: Bounds) -> Expr | None:
    if not ranges:
        return literal(False)
    exact: list[Any] = [item.min for item in ranges if item.is_exact]
    if len(exact) > 1 and field.type.is_floating and 0.0 in exact:
        # a long list is looked up by its bits, in which one zero is not the other
        exact += [0.0, -0.0]
    others = [_in_range(field, item) for item in ranges if not item.is_exact]
    if len(exact) == 1:
        others.append(column(field.name) == value(field, exact[0]))
    elif exact:
        # bounds beside the list, because a long list alone prunes no row group
        bounds = _in_range(field, Range(min(exact), max(exact), max_inclusive=True))
        listed = among(field, exact)
        others.append(listed if bounds is None else bounds & listed)
    parts = [part for part in others if part is not None]
    return joined(parts, or_) if len(parts) == len(others) else None


def _in_range(field: Field, item: Range) -> Expr | None:
    found = between(field, item)
    if not field.type.is_floating or found is None:
        return found
    # NaN is the largest value, but the statistics that row groups are pruned by do not know of it
    nan = functions.isnan(column(field.name))
    if is_nan(item.min):
        return nan
    return found | nan if item.max is None else found & ~nan
