"""Partitions as they are loaded from the database, by column; and a tree of any size made of such."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from dormouse.model.keys import encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.tree_arrays import Joined, PartitionColumns, PartitionRow, TreeArrays
from dormouse.model.types import LONG

SCHEMA = Schema([Field("key", LONG)])


def balanced_arrays(leaves: int) -> TreeArrays:
    """A balanced tree of epoch 0, split at the keys 1, 2, …; all but the root have ids like p17."""
    rows, todo, made = list[PartitionRow](), [("root", 0, leaves)], 0
    while todo:
        partition_id, first, end = todo.pop()
        if end - first == 1:
            rows.append(PartitionRow(partition_id, 0))
            continue
        middle = (first + end) // 2
        left, right, made = f"p{made}", f"p{made + 1}", made + 2
        rows.append(PartitionRow(partition_id, 0, 0, 0, encode_value(LONG, middle), left, right))
        todo += [(right, middle, end), (left, first, middle)]
    arrays = TreeArrays(SCHEMA)
    arrays.load([columns_of(rows, 0)], 0)
    return arrays


def columns_of(rows: Sequence[PartitionRow], epoch: int) -> PartitionColumns:
    """Rows as they were at an epoch."""
    divided = [row.sealed_epoch is not None and row.sealed_epoch <= epoch for row in rows]
    parents = [row for row, has_split in zip(rows, divided, strict=True) if has_split]
    splits = [row if has_split else _NO_SPLIT for row, has_split in zip(rows, divided, strict=True)]
    return PartitionColumns(
        ids=_joined(row.partition_id.encode() for row in rows),
        created_epochs=_packed("q", (row.created_epoch for row in rows)),
        sealed_epochs=_packed("q", (split.sealed_epoch for split in splits)),
        split_keys=_packed("h", (split.split_key for split in splits)),
        split_points=_joined(split.split_point or b"" for split in splits),
        left_ids=_joined((row.left_id or "").encode() for row in parents),
        right_ids=_joined((row.right_id or "").encode() for row in parents),
    )


_NO_SPLIT = PartitionRow("", 0, -1, -1, b"")


def _joined(items: Iterable[bytes]) -> Joined:
    items = list(items)
    return Joined(_packed("I", map(len, items)), b"".join(items))


def _packed(typecode: str, numbers: Iterable[int | None]) -> bytes:
    return b"".join(map(struct.Struct(f">{typecode}").pack, numbers))
