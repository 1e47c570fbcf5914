"""DataFusion's expressions for our columns, ranges and orders; their typed literals are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import and_
from typing import Any, TypeVar

import pyarrow as pa
from datafusion import DataFrame, Expr, col, functions, literal
from datafusion.expr import SortExpr

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.transform import quoted
from dormouse.model.region import Range, Region
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES

T = TypeVar("T")


def column(name: str) -> Expr:
    return col(quoted(name))


def value(field: Field, item: Any) -> Expr:
    """A literal of exactly the field's type."""
    return literal(pa.scalar(item, arrow_type(field.type)))


def among(field: Field, items: Sequence[Any]) -> Expr:
    """Returns whether a column has one of some values, of which there may be many thousands."""
    if field.type == BYTES:
        # its lists are of another type than what DataFusion reads
        return functions.in_list(column(field.name), [value(field, item) for item in items])
    # one literal, which DataFusion plans as it plans IN
    listed = literal(pa.scalar(items, pa.list_(arrow_type(field.type))))
    return functions.array_has(listed, column(field.name))


def between(field: Field, item: Range) -> Expr | None:
    """Whether a value lies in a range; None when every one does."""
    parts = []
    if item.min is not None:
        low = value(field, item.min)
        parts.append(column(field.name) >= low if item.min_inclusive else column(field.name) > low)
    if item.max is not None:
        high = value(field, item.max)
        parts.append(column(field.name) <= high if item.max_inclusive else column(field.name) < high)
    return reduce(and_, parts) if parts else None


def in_region(schema: Schema, region: Region) -> Expr | None:
    """Whether a row lies in a region; None when every row does."""
    parts = [between(field, region.range(field.name)) for field in schema.row_keys]
    bounds = [part for part in parts if part is not None]
    return reduce(and_, bounds) if bounds else None


def key_order(names: Iterable[str], descending: Iterable[str] = ()) -> list[SortExpr]:
    """How a table's files are sorted; rows of equal key have the largest of some columns first."""
    return [
        *(column(name).sort(ascending=True, nulls_first=False) for name in names),
        *(column(name).sort(ascending=False, nulls_first=False) for name in descending),
    ]


def union(frames: Sequence[DataFrame]) -> DataFrame:
    """The rows of all, at least one."""
    return joined(frames, DataFrame.union)


def joined(parts: Sequence[T], join: Callable[[T, T], T]) -> T:
    """All parts, at least one, as a tree whose depth stays small however many there are."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return join(joined(parts[:middle], join), joined(parts[middle:], join))
