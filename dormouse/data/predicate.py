"""Regions as SQL predicates for DataFusion."""

from __future__ import annotations

from dormouse.data.transform import quoted
from dormouse.model.keys import KeyValue
from dormouse.model.region import Range, Region
from dormouse.model.schema import Field, Schema
from dormouse.model.types import INT


def region_sql(schema: Schema, region: Region | None) -> str:
    """The rows of a region as an SQL condition; "true" for the whole key space."""
    conditions = [
        condition
        for field in schema.row_keys
        for condition in _range_sql(field, (region or Region()).range(field.name))
    ]
    return " AND ".join(conditions) or "true"


def literal(field: Field, value: KeyValue) -> str:
    """A key's value as an SQL literal of exactly its field's type."""
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    # as text: the smallest number has no positive counterpart that could be negated
    return f"CAST('{value}' AS {'INT' if field.type == INT else 'BIGINT'})"


def _range_sql(field: Field, item: Range) -> list[str]:
    name = quoted(field.name)
    if item.is_exact and item.min is not None:
        return [f"{name} = {literal(field, item.min)}"]
    conditions = []
    if item.min is not None:
        conditions.append(f"{name} {'>=' if item.min_inclusive else '>'} {literal(field, item.min)}")
    if item.max is not None:
        conditions.append(f"{name} {'<=' if item.max_inclusive else '<'} {literal(field, item.max)}")
    return conditions
