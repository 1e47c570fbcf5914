"""Conditions of a query as the service's JSON has them."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from dormouse.model.region import Range
from dormouse.query.where import Question, is_nan


def where_json(question: Question) -> dict[str, Any]:
    """For each column a list: values, ranges as objects, null.

    Bytes are base64, timestamps ISO 8601, doubles that JSON does not have "NaN", "Infinity", "-Infinity".
    """
    keys = {name: _items(ranges) for name, ranges in question.ranges.items()}
    others = {c.field.name: _items(c.ranges) + [None] * c.or_null for c in question.conditions}
    return keys | others


def _items(ranges: Iterable[Range]) -> list[Any]:
    return [_item(item) for item in ranges]


def _item(item: Range) -> Any:
    if item.is_exact or is_nan(item.min):
        return _value(item.min)
    return {
        "min": _value(item.min),
        "max": _value(item.max),
        "min_inclusive": item.min_inclusive,
        "max_inclusive": item.max_inclusive,
    }


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if is_nan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
