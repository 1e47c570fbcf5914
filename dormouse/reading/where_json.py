"""Conditions of a query in JSON, as the service, its client and the command line have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dormouse.errors import InvalidQuery
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import json_value, value_of_json
from dormouse.reading.where import Question, checked_count, is_nan

_ENDS = {"min", "max"}
_INCLUSIVE = {"min_inclusive", "max_inclusive"}


def where_json(question: Question) -> dict[str, Any]:
    """For each column a list: values, ranges as objects, null."""
    keys = {name: _items(ranges) for name, ranges in question.ranges.items()}
    others = {c.field.name: _items(c.ranges) + [None] * c.or_null for c in question.conditions}
    return keys | others


def _items(ranges: Iterable[Range]) -> list[Any]:
    return [json_value(item.min if item.is_exact or is_nan(item.min) else item) for item in ranges]


def parse_where(schema: Schema, where: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `Table.query` takes: columns with a value, values, a range or null.

    Raises `InvalidQuery` for what the column's type cannot be.
    """
    return {
        name: _wanted(schema.field(name), wanted) if name in schema else wanted
        for name, wanted in checked_count(where or {}).items()
    }


def _wanted(field: Field, wanted: Any) -> Any:
    if isinstance(wanted, list):
        return [_range_or_value(field, item) for item in wanted]
    return _range_or_value(field, wanted)


def _range_or_value(field: Field, wanted: Any) -> Any:
    return _range(field, wanted) if isinstance(wanted, dict) else value_of_json(field, wanted)


def _range(field: Field, wanted: dict[str, Any]) -> Range:
    if unknown := sorted(wanted.keys() - _ENDS - _INCLUSIVE):
        raise InvalidQuery(
            f"{field.name!r}: a range has min, max, min_inclusive and max_inclusive, not {unknown[0]!r}"
        )
    if not _ENDS & wanted.keys():
        raise InvalidQuery(f"{field.name!r}: a range has min, max or both")
    for name in sorted(_INCLUSIVE & wanted.keys()):
        if not isinstance(wanted[name], bool):
            raise InvalidQuery(f"{field.name!r}: {name} is true or false, not {wanted[name]!r}")
    low, high = (value_of_json(field, wanted.get(end)) for end in ("min", "max"))
    return Range(low, high, wanted.get("min_inclusive", True), wanted.get("max_inclusive", False))
