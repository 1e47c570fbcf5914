"""Tables, partitions and files as JSON: values of keys as rows have them."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from dormouse.files.pages import FileFacts
from dormouse.model.keys import decode_key
from dormouse.model.partition_tree import Partition
from dormouse.model.region import Range, Region
from dormouse.model.schema import Schema
from dormouse.table import Table


def value(found: Any) -> Any:
    """BYTES as base64, times as ISO 8601."""
    if isinstance(found, bytes):
        return binascii.b2a_base64(found, newline=False).decode("ascii")
    return found.isoformat().replace("+00:00", "Z") if isinstance(found, datetime) else found


def table(found: Table, *, counts: bool) -> dict[str, Any]:
    described = {
        "name": found.name,
        "layout": found.layout,
        "schema": found.schema.to_json(),
        "properties": found.properties.model_dump(),
    }
    return {**described, "counts": asdict(found.status())} if counts else described


def partition(found: Partition) -> dict[str, Any]:
    split = found.split
    return {
        "partition_id": found.partition_id,
        "parent_id": found.parent_id,
        "child_ids": list(found.child_ids),
        "is_leaf": found.is_leaf,
        "region": region(found.region),
        "split": None if split is None else {"field": split.field, "point": value(split.point)},
    }


def region(found: Region) -> dict[str, Any]:
    return {name: _range(item) for name, item in found.items()}


def file(schema: Schema, found: FileFacts) -> dict[str, Any]:
    facts = {name: value(fact) for name, fact in asdict(found).items()}
    return {**facts, "min_key": _key(schema, found.min_key), "max_key": _key(schema, found.max_key)}


def _key(schema: Schema, encoded: bytes | None) -> Mapping[str, Any] | None:
    if encoded is None:
        return None
    decoded = decode_key(schema.row_keys, encoded)
    return {field.name: value(part) for field, part in zip(schema.row_keys, decoded, strict=False)}


def _range(item: Range) -> dict[str, Any]:
    return {
        "min": value(item.min),
        "max": value(item.max),
        "min_inclusive": item.min_inclusive,
        "max_inclusive": item.max_inclusive,
    }
