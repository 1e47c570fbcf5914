"""A tree of any size, made as it is loaded from the database: without an object for each partition."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from dormouse.model.keys import encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.tree_arrays import Joined, PartitionColumns, TreeArrays
from dormouse.model.types import LONG

SCHEMA = Schema([Field("key", LONG)])


def balanced_arrays(leaves: int) -> TreeArrays:
    """A balanced tree of epoch 0, split at the keys 1, 2, …; all but the root have ids like p17."""
    ids, points, children = [], [], []
    todo, made = [("root", 0, leaves)], 0
    while todo:
        partition_id, first, end = todo.pop()
        middle = (first + end) // 2
        ids.append(partition_id.encode())
        points.append(encode_value(LONG, middle) if end - first > 1 else b"")
        if end - first > 1:
            left, right, made = f"p{made}", f"p{made + 1}", made + 2
            children.append((left.encode(), right.encode()))
            todo += [(right, middle, end), (left, first, middle)]
    arrays = TreeArrays(SCHEMA)
    arrays.load([_columns(ids, points, children)], 0)
    return arrays


def _columns(ids: list[bytes], points: list[bytes], children: list[tuple[bytes, bytes]]) -> PartitionColumns:
    sealed = [0 if point else -1 for point in points]
    lefts, rights = zip(*children, strict=True) if children else ((), ())
    return PartitionColumns(
        ids=_joined(ids),
        created_epochs=bytes(8 * len(ids)),
        sealed_epochs=struct.pack(f">{len(ids)}q", *sealed),
        split_keys=struct.pack(f">{len(ids)}h", *sealed),
        split_points=_joined(points),
        left_ids=_joined(lefts),
        right_ids=_joined(rights),
    )


def _joined(items: Iterable[bytes]) -> Joined:
    items = list(items)
    return Joined(struct.pack(f">{len(items)}I", *map(len, items)), b"".join(items))
