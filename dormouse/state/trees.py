"""Readers, a cache and checks of a table's partition tree.

A reader gets the whole tree, the changes since an epoch, or the part that some ranges overlap. The database
finds the leaves of an older epoch by an index on intervals of epochs. It then follows their parents up to the
root. The database keeps the bounds of each row key as bytes that sort like the values. Checks only read.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import psycopg

from dormouse.errors import EpochNotFound, MetadataDamaged, TableNotFound
from dormouse.model.partition_tree import (
    ROOT,
    Joined,
    Partition,
    PartitionColumns,
    PartitionRow,
    PartitionTree,
    Split,
    TreeArrays,
)
from dormouse.model.region import KeyValue, Range, Region, decode_value, encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.table import Problem, TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Statement, load
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_transaction

# The trees that a process caches: the least recently used ones are removed when they exceed the limit.

OWN_BYTES_MAX = 64 * 1024 * 1024
"""The largest size, in bytes, of a cache that only one store uses."""
REQUESTED_MAX = 10_000
"""The number of tables for which the cache remembers that their tree was requested."""
Key = int | tuple[int, int]
"""The key of a cached tree: the table id for the newest tree, (table id, epoch) for an older tree."""
PAGE_ROWS = 20_000
CHANGES_MAX = 10_000
"""The most epochs for which a tree is updated. A tree that is further behind is read completely."""
_PARTS = ("columns", "leaves_at", "wanted_halves", "is_forgotten")
_QUERIES = load(__package__ or "", "trees")
_STATEMENTS = {
    name: Statement(query.including(**{part: _QUERIES[part] for part in _PARTS}).on())
    for name, query in _QUERIES.items()
    if name not in _PARTS
}
FOUND_MAX = 1_000
_CHECKS = load(__package__ or "", "tree_checks")


def partition_values(
    table: TableRecord,
    partition: Partition,
    created: int | None,
    sealed: int | None,
    is_upper: bool | None,
) -> dict[str, Any]:
    """Returns a partition as parameters of the queries `add_partitions` and `seal`."""
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
        "split_key": schema.row_key_names.index(split.field) if split else None,
        "split_point": _encoded(schema.field(split.field), split.point) if split else None,
        "left_id": left_id,
        "right_id": right_id,
    }


def partition_from_row(schema: Schema, row: Sequence[Any]) -> Partition:
    """Returns a row, with the columns of the query `partitions_in`, as a partition."""
    partition_id, parent_id, mins, maxs, split_key, split_point, left_id, right_id = row
    split = None
    if split_key is not None:
        field = schema.row_keys[split_key]
        split = Split(field.name, decode_value(field.type, split_point))
    children = () if left_id is None else (left_id, right_id)
    return Partition(partition_id, parent_id, region_from_row(schema, mins, maxs), children, split)


def region_from_row(schema: Schema, mins: Sequence[bytes | None], maxs: Sequence[bytes | None]) -> Region:
    """Returns a region, made from the values of the columns `min_keys` and `max_keys`."""
    bounds = zip(schema.row_keys, mins, maxs, strict=True)
    ranges = {f.name: Range(_decoded(f, low), _decoded(f, high)) for f, low, high in bounds}
    return Region({name: item for name, item in ranges.items() if item != Range()})


def _encoded(field: Field, value: KeyValue | None) -> bytes | None:
    return None if value is None else encode_value(field.type, value)


def _decoded(field: Field, value: bytes | None) -> KeyValue | None:
    return None if value is None else decode_value(field.type, value)


@dataclass(frozen=True, slots=True)
class _Entry:
    arrays: TreeArrays
    byte_size: int


class TreeCache:
    """A cache of trees by table id, which together have at most `bytes_max`.

    Threads may share it. In a forked process, it starts empty.
    """

    def __init__(self, bytes_max: int = OWN_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._byte_size = 0
        self._requested: OrderedDict[int, None] = OrderedDict()
        self._too_large: set[int] = set()
        self._loading: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()

    @property
    def byte_size(self) -> int:
        """The memory that the cached trees take, in bytes. Each tree was measured when it was last cached."""
        return self._byte_size

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> TreeArrays | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.arrays

    def is_requested_again(self, table_id: int) -> bool:
        """Returns True if an uncached tree is worth reading: it was requested before, and would fit.

        Records the request.
        """
        with self._lock:
            if table_id in self._too_large:
                return False
            again = table_id in self._requested
            self._requested[table_id] = None
            while len(self._requested) > REQUESTED_MAX:
                self._requested.popitem(last=False)
            return again

    def put(self, key: Key, arrays: TreeArrays) -> None:
        """Caches a tree, or updates its size. Does not cache a tree that is larger than the cache."""
        with self._lock:
            self._remove(key)
            entry = _Entry(arrays, arrays.byte_size)
            if entry.byte_size > self.bytes_max:
                if isinstance(key, int):
                    self._too_large.add(key)
                return
            self._entries[key] = entry
            self._byte_size += entry.byte_size
            while self._byte_size > self.bytes_max:
                self._remove(next(iter(self._entries)))

    def drop(self, table_id: int) -> None:
        """Removes the newest tree of a table."""
        with self._lock:
            self._remove(table_id)

    def loading(self, table_id: int) -> threading.Lock:
        """Returns the lock that a thread holds while it reads a table's tree, so that only one reads it.

        Take a connection before the lock. Otherwise, a thread with the lock might wait for a connection of a
        thread that waits for the lock.
        """
        with self._lock:
            return self._loading.setdefault(table_id, threading.Lock())

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._byte_size -= entry.byte_size


_caches: WeakSet[TreeCache] = WeakSet()


def _after_fork_in_child() -> None:
    # other threads of the parent may have held a lock, or been in the middle of a change
    for cache in list(_caches):
        cache._begin()


os.register_at_fork(after_in_child=_after_fork_in_child)


class TreeReader:
    """A reader of one table's tree.

    Its methods need no transaction, as the partitions of an epoch never change.
    """

    def __init__(self, table: TableRecord) -> None:
        self._table = table

    def epoch(self, conn: psycopg.Connection[Any]) -> tuple[int, int]:
        """Returns the current epoch and its time, in microseconds since 1970.

        Raises `TableNotFound`, and `MetadataDamaged` when the row of the epoch is lost.
        """
        row = self._execute(conn, "epoch").fetchone()
        if row is None:
            raise TableNotFound.gone(self._table.name)
        if row[1] is None:
            raise MetadataDamaged(
                f"table {self._table.name!r}: the database has lost its row of epoch {row[0]}; "
                f"for details, run 'dormouse check --table {self._table.name}'"
            )
        return int(row[0]), int(row[1])

    def whole(self, conn: psycopg.Connection[Any]) -> TreeArrays:
        """Returns the tree of the current epoch; raises `TableNotFound`."""
        arrays, (epoch, made_at) = TreeArrays(self._table.schema), self.epoch(conn)
        arrays.note(epoch, made_at)
        arrays.load(self._pages(conn, epoch), epoch)
        self.epoch(conn)  # raises if the table was dropped between two pages
        [(last_merge,)] = self._execute(conn, "last_merge").fetchall()
        if last_merge > epoch:  # a merge between two pages may have removed partitions of the epoch
            arrays = self.whole_at(conn, epoch)
            arrays.note(epoch, made_at)
        else:
            arrays.first_epoch = last_merge
        return arrays

    def whole_at(self, conn: psycopg.Connection[Any], epoch: int) -> TreeArrays:
        """Returns the tree of an older epoch, which is valid only for that epoch.

        Raises `TableNotFound`, `EpochNotFound` for a forgotten epoch, and ValueError for a future one.
        """
        rows = self._execute(conn, "columns_at", epoch=epoch, limit=PAGE_ROWS).fetchall()
        if not rows:
            raise self._not_there(conn, epoch)
        arrays = TreeArrays(self._table.schema)
        arrays.load(map(_columns, rows), epoch)
        arrays.first_epoch = epoch
        return arrays

    def changes(
        self, conn: psycopg.Connection[Any], known: TreeArrays, epoch: int
    ) -> list[PartitionRow] | None:
        """Returns the partitions that were added, divided or removed after `known.epoch`, up to `epoch`.

        Returns None if the database was restored and `known` is not part of this table's past, or if some of
        the changes were forgotten. Raises `TableNotFound`.
        """
        rows = self._execute(conn, "changed_partitions", after=known.epoch, epoch=epoch).fetchall()
        if rows and rows[0][-1]:
            return None
        changed = [PartitionRow(*row[:-2]) for row in rows]
        if all(row.created_epoch != epoch for row in changed):
            raise self._not_there(conn, epoch)
        return changed if known.agrees(known.epoch, rows[0][-2]) else None

    def walk(
        self,
        conn: psycopg.Connection[Any],
        ranges: Mapping[str, Range],
        nodes_max: int,
        epoch: int | None = None,
    ) -> PartitionTree | None:
        """Returns the part of the tree that overlaps `ranges`, which has ranges by the names of row keys.

        `epoch` defaults to the current epoch. Returns None when more than `nodes_max` partitions overlap.
        """
        wanted = [(field, ranges.get(field.name, Range())) for field in self._table.schema.row_keys]
        rows = self._execute(
            conn,
            "walk" if epoch is None else "walk_at",
            mins=[_encoded(field, item.min) for field, item in wanted],
            maxs=[_encoded(field, item.max) for field, item in wanted],
            maxs_inclusive=[item.max_inclusive for _, item in wanted],
            limit=nodes_max + 1,
            epoch=epoch,
        ).fetchall()
        if not rows:
            dropped = TableNotFound.gone(self._table.name)
            raise dropped if epoch is None else self._not_there(conn, epoch)
        if len(rows) > nodes_max:
            return None
        arrays, epoch = TreeArrays(self._table.schema), rows[0][-1]
        arrays.extend((PartitionRow(*row[:-1]) for row in rows), epoch)
        return PartitionTree(arrays, epoch)

    def _pages(self, conn: psycopg.Connection[Any], epoch: int) -> Iterator[PartitionColumns]:
        after = ""
        while True:
            cursor = self._execute(conn, "partition_columns", epoch=epoch, after=after, limit=PAGE_ROWS)
            row = cursor.fetchone()
            if row is None or row[0] is None:
                return
            yield _columns(row)
            after = row[0]

    def _not_there(self, conn: psycopg.Connection[Any], epoch: int) -> Exception:
        """Returns the error for an epoch that is not found: it was forgotten, or does not exist yet.

        Raises `TableNotFound`.
        """
        current, _ = self.epoch(conn)
        for (kept,) in self._execute(conn, "forgotten").fetchall():
            if epoch < kept:
                return EpochNotFound(
                    f"table {self._table.name!r} no longer has epoch {epoch}: its history was truncated "
                    "at a later one"
                )
        return ValueError(f"table {self._table.name!r} is at epoch {current}, not yet at {epoch}")

    def _execute(self, conn: psycopg.Connection[Any], name: str, **values: Any) -> psycopg.Cursor[Any]:
        return _STATEMENTS[name].execute(conn, {**values, "table_id": self._table.table_id})


def _columns(row: Sequence[Any]) -> PartitionColumns:
    _, id_lengths, ids, created, sealed, split_keys, *texts, are_upper = row
    points, parents = Joined(*texts[:2]), Joined(*texts[2:])
    return PartitionColumns(Joined(id_lengths, ids), created, sealed, split_keys, points, parents, are_upper)


def tree_problems(supplier: Supplier, table: TableRecord) -> list[Problem]:
    """Returns the gaps, overlaps, lost partitions and lost epochs of a tree, all found in one snapshot.

    Returns an empty list for a table that was dropped.
    """

    def work(conn: psycopg.Connection[Any]) -> list[Problem]:
        values = {"table_id": table.table_id, "root": ROOT, "limit": FOUND_MAX}
        queries = [
            _CHECKS[n].including(forgotten=_CHECKS["forgotten"]) for n in ("check_tree", "check_epochs")
        ]
        return [
            Problem("partitions", table.name, partition_id, None, detail)
            for query in queries
            for partition_id, detail in conn.execute(query.on(), values)
        ]

    return run_transaction(
        supplier,
        work,
        isolation=Isolation.REPEATABLE_READ,
        read_only=True,
        scans=True,
        operation="check partitions",
    )
