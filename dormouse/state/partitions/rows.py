"""Partitions as rows of the database: each row key's bounds as bytes that sort like the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dormouse.model.partition_tree import Partition, Split
from dormouse.model.region import KeyValue, Range, Region, decode_value, encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableRecord


def partition_values(
    table: TableRecord,
    partition: Partition,
    created: int | None,
    sealed: int | None,
    is_upper: bool | None,
) -> dict[str, Any]:
    """The parameters of the queries `add_partitions` and `seal`."""
    schema = table.schema
    ranges = [(field, partition.region.range(field.name)) for field in schema.row_keys]
    left_id, right_id = partition.child_ids or (None, None)
    split = partition.split
    return {
        "table_id": table.table_id,
        "created_epoch": created,
        "sealed_epoch": sealed,
        "partition_id": partition.partition_id,
        "parent_id": partition.parent_id,
        "is_upper": is_upper,
        "min_keys": [_encoded(field, item.min) for field, item in ranges],
        "max_keys": [_encoded(field, item.max) for field, item in ranges],
        "split_key": schema.row_key_index(split.field) if split else None,
        "split_point": _encoded(schema.field(split.field), split.point) if split else None,
        "left_id": left_id,
        "right_id": right_id,
    }


def partition_from_row(schema: Schema, row: Sequence[Any]) -> Partition:
    """The columns of the query `partitions`."""
    partition_id, parent_id, mins, maxs, split_key, split_point, left_id, right_id = row
    split = None
    if split_key is not None:
        field = schema.row_keys[split_key]
        split = Split(field.name, decode_value(field.type, split_point))
    children = () if left_id is None else (left_id, right_id)
    return Partition(partition_id, parent_id, region_from_row(schema, mins, maxs), children, split)


def region_from_row(schema: Schema, mins: Sequence[bytes | None], maxs: Sequence[bytes | None]) -> Region:
    """The region of the columns `min_keys` and `max_keys`."""
    bounds = zip(schema.row_keys, mins, maxs, strict=True)
    ranges = {f.name: Range(_decoded(f, low), _decoded(f, high)) for f, low, high in bounds}
    return Region({name: item for name, item in ranges.items() if item != Range()})


def _encoded(field: Field, value: KeyValue | None) -> bytes | None:
    return None if value is None else encode_value(field.type, value)


def _decoded(field: Field, value: bytes | None) -> KeyValue | None:
    return None if value is None else decode_value(field.type, value)
