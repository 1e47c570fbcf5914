"""Tables, partitions and files as JSON: values of keys as rows have them."""

from __future__ import annotations

from typing import Any

from dormouse.api.table import Table
from dormouse.model.keys import decode_key
from dormouse.model.partition_tree import Partition
from dormouse.model.schema import Schema
from dormouse.model.values import json_value
from dormouse.state.files.reads import FileFacts
from dormouse.state.history.status import TableStatus


def table(found: Table, schema: Schema, status: TableStatus | None) -> dict[str, Any]:
    described = {
        "name": found.name,
        "layout": found.layout,
        "schema": schema.to_json(),
        "schema_id": schema_id(found, schema),
        "properties": found.properties.model_dump(),
    }
    return described if status is None else {**described, "counts": json_value(status)}


def schema_id(found: Table, schema: Schema) -> str:
    """Which columns of which table these are: another once either is another."""
    return f"{found.context.table.uuid}.{schema.version}"


def partition(found: Partition) -> dict[str, Any]:
    return {**json_value(found), "is_leaf": found.is_leaf}


def file(schema: Schema, found: FileFacts) -> dict[str, Any]:
    keys = {"min_key": _key(schema, found.min_key), "max_key": _key(schema, found.max_key)}
    return {**json_value(found), **keys}


def _key(schema: Schema, encoded: bytes | None) -> Any:
    if encoded is None:
        return None
    decoded = decode_key(schema.row_keys, encoded)
    return json_value(dict(zip(schema.row_key_names, decoded, strict=False)))
