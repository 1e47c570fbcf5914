"""Partitions as columns, in which form the database loads them, and trees of any size made of such
columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from dormouse.model.partition_tree import Joined, PartitionColumns, PartitionRow, TreeArrays
from dormouse.model.region import encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG

SCHEMA = Schema([Field("key", LONG)])


def balanced_arrays(leaves: int) -> TreeArrays:
    """Returns a balanced tree of epoch 0, split at the keys 1, 2, …; ids are like p17, except the root's."""
    rows, made = list[PartitionRow](), 0
    todo: list[tuple[str, str | None, bool | None, int, int]] = [("root", None, None, 0, leaves)]
    while todo:
        partition_id, parent_id, is_upper, first, end = todo.pop()
        if end - first == 1:
            rows.append(PartitionRow(partition_id, 0, parent_id, is_upper))
            continue
        middle = (first + end) // 2
        left, right, made = f"p{made}", f"p{made + 1}", made + 2
        rows.append(PartitionRow(partition_id, 0, parent_id, is_upper, 0, 0, encode_value(LONG, middle)))
        todo += [(right, partition_id, True, middle, end), (left, partition_id, False, first, middle)]
    arrays = TreeArrays(SCHEMA)
    arrays.load([columns_of(rows, 0)], 0)
    return arrays


def columns_of(rows: Sequence[PartitionRow], epoch: int) -> PartitionColumns:
    """Returns partition rows as columns, in their state at an epoch."""
    divided = [row.sealed_epoch is not None and row.sealed_epoch <= epoch for row in rows]
    splits = [row if has_split else _NO_SPLIT for row, has_split in zip(rows, divided, strict=True)]
    return PartitionColumns(
        ids=_joined(row.partition_id.encode() for row in rows),
        created_epochs=_packed("q", (row.created_epoch for row in rows)),
        sealed_epochs=_packed("q", (split.sealed_epoch for split in splits)),
        split_keys=_packed("h", (split.split_key for split in splits)),
        split_points=_joined(split.split_point or b"" for split in splits),
        parent_ids=_joined((row.parent_id or "").encode() for row in rows),
        are_upper=bytes(bool(row.is_upper) for row in rows),
    )


_NO_SPLIT = PartitionRow("", 0, None, None, -1, -1, b"")


def _joined(items: Iterable[bytes]) -> Joined:
    items = list(items)
    return Joined(_packed("I", map(len, items)), b"".join(items))


def _packed(typecode: str, numbers: Iterable[int | None]) -> bytes:
    return b"".join(map(struct.Struct(f">{typecode}").pack, numbers))
