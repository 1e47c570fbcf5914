"""Splits and merges of leaves. Each change of a table's leaves is an epoch, written in one transaction.

A merge replaces all leaves below one partition by a new leaf, which takes the place of that partition.
Everything below the partition leaves the tree (docs/decisions/0036). The same epoch may divide the new leaf
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import psycopg

from dormouse.errors import (
    ConcurrentScale,
    FileReferenceAssignedToJob,
    InvalidKey,
    InvalidRange,
    NotWhole,
    PartitionNotActive,
    PartitionNotFound,
    TableNotFound,
)
from dormouse.model.partition_tree import Partition, Split, split_partition
from dormouse.model.schema import Schema
from dormouse.model.text import check_text
from dormouse.model.types import is_text
from dormouse.postgres.queries import load
from dormouse.postgres.session import LONG
from dormouse.postgres.transaction import fetched, run_alone, run_transaction
from dormouse.state.files.layout import OwnTables, dropped_tables
from dormouse.state.trees import partition_from_row, partition_values

# Checks of a request, and the partitions that it makes of a region.


@dataclass
class Division:
    """A partition that is divided repeatedly.

    `leaves` are the current leaves, from left to right. `inner` are the partitions that were divided.
    `uppers` has the ids of the partitions that are right halves.
    """

    leaves: list[Partition]
    inner: list[Partition] = field(default_factory=list)
    uppers: set[str] = field(default_factory=set)

    def divide(self, schema: Schema, split: Split, new_id: Callable[[], str]) -> None:
        """Divides each leaf that has the point strictly inside; raises `InvalidRange` if no leaf has."""
        leaves, refusal = list[Partition](), None
        for leaf in self.leaves:
            try:
                parent, left, right = _divided(schema, leaf, split, new_id)
            except InvalidRange as error:
                refusal = error
                leaves.append(leaf)
            else:
                self.inner.append(parent)
                self.uppers.add(right.partition_id)
                leaves += [left, right]
        if len(leaves) == len(self.leaves) and refusal is not None:
            raise refusal
        self.leaves = leaves


def _divided(
    schema: Schema, leaf: Partition, split: Split, new_id: Callable[[], str]
) -> tuple[Partition, Partition, Partition]:
    try:
        split_partition(schema, leaf, split, "", "")  # raises before any id is used up
        return split_partition(schema, leaf, split, new_id(), new_id())
    except InvalidKey as error:
        raise InvalidRange(f"split point: {error}") from None


def checked_ids(partition_ids: Any) -> list[str]:
    """Returns the partition ids of a request as a list.

    Raises `InvalidRange` if they are no list of texts, are empty, or contain an id twice.
    """
    if isinstance(partition_ids, str | bytes) or not isinstance(partition_ids, Iterable):
        raise InvalidRange(f"partitions must be a list of ids, not {partition_ids!r}")
    ids = list(partition_ids)
    if not ids:
        raise InvalidRange("there must be partitions to divide or merge; the list is empty")
    for partition_id in ids:
        if not isinstance(partition_id, str):
            raise InvalidRange(f"partitions must be ids, which are text, not {partition_id!r}")
    if len(set(ids)) < len(ids):
        doubled = next(each for each in ids if ids.count(each) > 1)
        raise InvalidRange(f"partition {doubled!r} is named twice")
    return ids


def checked_splits(splits: Any) -> list[Split]:
    """Returns (field, point) pairs as splits; raises `InvalidRange` for anything else."""
    if isinstance(splits, str | bytes) or not isinstance(splits, Iterable):
        raise InvalidRange(f"splits must be a list of (field, point), not {splits!r}")
    found = []
    for split in splits:
        if isinstance(split, str | bytes) or not isinstance(split, Sequence) or len(split) != 2:
            raise InvalidRange(f"a split must be (field, point), not {split!r}")
        found.append(Split(*split))
    return found


def counts(sealed: Sequence[Partition], created: Sequence[Partition]) -> tuple[int, int]:
    """Returns two numbers: of splits and of merges.

    A sealed partition that overlaps several created ones was split. A created one that overlaps several
    sealed ones was merged.
    """
    if len(sealed) == 1 or len(created) == 1:
        return int(len(created) > 1), int(len(sealed) > 1)
    return _overlapping(sealed, created), _overlapping(created, sealed)


def _overlapping(some: Sequence[Partition], others: Sequence[Partition]) -> int:
    return sum(sum(each.region.overlaps(other.region) for other in others) > 1 for each in some)


CHUNK_EPOCHS = 1_000
T = TypeVar("T")
_QUERIES = load(__package__ or "", "scaling")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A partition in its current state.

    `is_upper` is True for a right half and None for a root. `sealed_epoch` is None for a leaf.
    """

    partition: Partition
    is_upper: bool | None
    sealed_epoch: int | None


@dataclass(frozen=True, slots=True)
class _Family:
    """The partition `top` whose place a merged leaf takes.

    `inner` are the ids of the divided partitions between it and the leaves.
    """

    top: _Stored
    inner: tuple[str, ...]


class Scaling:
    """The splits and merges of one table's leaves."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def create(self, conn: psycopg.Connection[Any], partitions: Sequence[Partition]) -> None:
        """Writes the tree of epoch 0, in which all leaves are new."""
        uppers = {partition.child_ids[1] for partition in partitions if partition.child_ids}
        self._add(conn, partitions, 0, uppers, None)
        created = [partition.partition_id for partition in partitions if partition.is_leaf]
        self._add_epoch(conn, 0, [], created)

    def scale(
        self,
        sealed_ids: Iterable[str],
        splits: Iterable[tuple[str, Any]],
        request_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> list[Partition]:
        """Splits or merges leaves, as `PartitionStore.scale` describes.

        With `conn`, splits one leaf in the caller's transaction.
        """
        scale = _Scale(self, checked_ids(sealed_ids), checked_splits(splits), request_id)
        if conn is not None:
            work = partial(scale.work, conn)
        elif not scale.merges:
            run = partial(run_transaction, operation="split partition")
            work = partial(run, self._own.supplier, scale.work, limits=LONG)
        else:
            run = partial(run_alone, isolation=self._own.isolation, operation="merge partitions")
            work = partial(run, self._own.supplier, scale.work, limits=LONG)
        return self._own.following(work, conn)

    def keep_writers_out(self, conn: psycopg.Connection[Any]) -> None:
        """Locks out the table's writers until the transaction ends.

        It must be the first statement of a transaction of `run_alone`, because the transaction must not have
        a snapshot before.
        """
        self._own.rows_in(conn, "keep_writers_out")

    def _add(
        self,
        conn: psycopg.Connection[Any],
        partitions: Iterable[Partition],
        epoch: int,
        uppers: set[str],
        top: _Stored | None,
    ) -> None:
        """Adds the partitions of an epoch. If `top` is given, the first one takes the place of `top`."""
        table, rows = self._own.table, []
        for each in partitions:
            is_upper = None if each.parent_id is None else each.partition_id in uppers
            if top is not None and each.parent_id == top.partition.parent_id:
                is_upper = top.is_upper
            rows.append(partition_values(table, each, epoch, None if each.is_leaf else epoch, is_upper))
        with conn.cursor() as cursor, dropped_tables(table):
            cursor.executemany(_QUERIES["add_partitions"].on(), rows)

    def _add_epoch(
        self,
        conn: psycopg.Connection[Any],
        epoch: int,
        sealed: Sequence[str],
        created: Sequence[str],
        sizes: Sequence[tuple[int, int]] = (),
        changes: tuple[int, int] = (0, 0),
        request_id: str | None = None,
    ) -> None:
        self._rows(
            conn,
            "add_epoch",
            epoch=epoch,
            sealed=list(sealed),
            created=list(created),
            splits=changes[0],
            merges=changes[1],
            sealed_rows=_sum(rows for rows, _ in sizes),
            sealed_bytes=_sum(byte_count for _, byte_count in sizes),
            request_id=request_id,
        )
        if epoch and epoch % CHUNK_EPOCHS == 0:
            self._rows(conn, "add_chunk", chunk=epoch // CHUNK_EPOCHS)

    def _stored(self, conn: psycopg.Connection[Any], name: str, **values: Any) -> list[_Stored]:
        schema = self._own.table.schema
        return [
            _Stored(partition_from_row(schema, columns), is_upper, sealed_epoch)
            for *columns, is_upper, sealed_epoch in self._rows(conn, name, **values)
        ]

    def _rows(self, conn: psycopg.Connection[Any], name: str, **values: Any) -> list[Any]:
        query = _QUERIES[name].including(partition_and_state=_QUERIES["partition_and_state"])
        with dropped_tables(self._own.table):
            return fetched(conn.execute(query.on(), {**values, "table_id": self._own.table.table_id}))


class _Scale:
    """One request to split or merge. Its transaction may run several times."""

    def __init__(
        self, scaling: Scaling, sealed_ids: list[str], splits: list[Split], request_id: str | None
    ) -> None:
        if request_id is not None:
            check_text("request_id", request_id)
        if len(sealed_ids) == 1 and not splits:
            raise InvalidRange(
                f"partition {sealed_ids[0]!r} alone cannot be merged: name all leaves below one partition, "
                "or points to divide it at"
            )
        self._scaling = scaling
        self._own = scaling._own
        self._table = scaling._own.table
        self._ids = sealed_ids
        self._splits = splits
        self._request_id = request_id
        self._began: int | None = None
        self.merges = len(sealed_ids) > 1

    def work(self, conn: psycopg.Connection[Any]) -> list[Partition]:
        if self.merges:
            self._scaling.keep_writers_out(conn)
        epoch, began = self._hold(conn)
        self._began = began if self._began is None else self._began
        answer = self._answered(conn)
        if answer is not None:
            return answer
        leaves = self._leaves(conn)
        new_id = _new_ids(epoch + 1)
        family = self._family(conn, leaves) if self.merges else None
        start = leaves[0].partition
        if family is not None:
            start = Partition(new_id(), family.top.partition.parent_id, family.top.partition.region)
        division = self._division(start, new_id)
        self._write(conn, epoch + 1, [leaf.partition for leaf in leaves], start, division, family)
        return division.leaves

    def _division(self, start: Partition, new_id: Callable[[], str]) -> Division:
        division = Division([start])
        for split in self._splits:
            division.divide(self._table.schema, split, new_id)
        return division

    def _write(
        self,
        conn: psycopg.Connection[Any],
        epoch: int,
        sealed: Sequence[Partition],
        start: Partition,
        division: Division,
        family: _Family | None,
    ) -> None:
        rows = self._scaling._rows
        divided = {each.partition_id: each for each in division.inner}.get(start.partition_id, start)
        sizes = self._sizes(conn)
        ended = {
            **partition_values(self._table, start if family else divided, None, epoch, None),
            "epoch": epoch,
            "partition_ids": self._ids,
            "row_counts": [row_count for row_count, _ in sizes],
            "byte_counts": [byte_count for _, byte_count in sizes],
            "merged_epoch": epoch if family else None,
            "merged_id": start.partition_id if family else None,
        }
        del ended["table_id"]
        new = [*division.inner, *division.leaves]
        # a split leaf has a row already, which gets its split here; a merge divides a partition that is new
        rows(conn, "seal", **(ended | _NO_SPLIT if family else ended))
        if family is None:
            new.remove(divided)
        self._scaling._add(conn, new, epoch, division.uppers, family.top if family else None)
        if family is not None:
            self._take_place(conn, ended, family, start)
        created = [leaf.partition_id for leaf in division.leaves]
        changes = counts(sealed, division.leaves)
        self._scaling._add_epoch(conn, epoch, self._ids, created, sizes, changes, self._request_id)

    def _take_place(
        self, conn: psycopg.Connection[Any], ended: dict[str, Any], family: _Family, start: Partition
    ) -> None:
        rows, top = self._scaling._rows, family.top.partition
        rows(conn, "leave", **ended | {"partition_ids": [top.partition_id, *family.inner]})
        if top.parent_id is not None:
            ids = {"before": top.partition_id, "after": start.partition_id}
            rows(conn, "take_place", partition_id=top.parent_id, **ids)
        moved = {"partition_ids": [top.partition_id, *family.inner, *self._ids]}
        self._own.rows_in(conn, "move", {**moved, "place": start.partition_id})

    def _sizes(self, conn: psycopg.Connection[Any]) -> list[tuple[int, int]]:
        """Returns the rows and bytes of each partition that will be sealed, summed over its references."""
        rows = self._own.rows_in(conn, "sealed_sizes", {"partition_ids": self._ids})
        sizes = {partition_id: (row_count, byte_count) for partition_id, row_count, byte_count in rows}
        return [sizes[partition_id] for partition_id in self._ids]

    def _check_movable(
        self, conn: psycopg.Connection[Any], partition_ids: Sequence[str], same_region: str
    ) -> None:
        """Checks that all references of some partitions can be moved to the merged leaf.

        Raises `FileReferenceAssignedToJob`, or `NotWhole` for a file that also has other partitions' rows.
        The partition `same_region` may refer to such files, since the merged leaf has the same region.
        """
        values = {"partition_ids": partition_ids, "same_region": same_region}
        for partition_id, filename, job_id in self._own.rows_in(conn, "first_that_stays", values):
            table = self._table.name
            if job_id is not None:
                raise FileReferenceAssignedToJob(table, filename, partition_id, job_id)
            raise NotWhole(
                f"partition {partition_id!r} of table {table!r} refers to file {filename!r}, which also "
                f"holds other partitions' rows: run 'dormouse compact {table} --full' first"
            )

    def _hold(self, conn: psycopg.Connection[Any]) -> tuple[int, int]:
        rows = self._scaling._rows(conn, "hold")
        if not rows:
            raise TableNotFound.gone(self._table.name)
        return rows[0][0], rows[0][1]

    def _answered(self, conn: psycopg.Connection[Any]) -> list[Partition] | None:
        """Returns the leaves that this request made earlier, as they were then; None if it was not applied.

        Raises `InvalidRange` if another request with the same request id was applied.
        """
        if self._request_id is None:
            return None
        rows = self._scaling._rows(conn, "answered", request_id=self._request_id)
        if not rows:
            return None
        epoch, sealed, created = rows[0]
        if set(sealed) != set(self._ids):
            raise self._another("of " + ", ".join(map(repr, sealed)))
        stored = {each.partition.partition_id: each.partition for each in self._by_id(conn, created)}
        made = [replace(stored[each], child_ids=(), split=None) for each in created]
        new_id = _new_ids(epoch)
        start_id = new_id() if self.merges else self._ids[0]
        [start] = self._by_id(conn, [start_id])
        with suppress(InvalidRange):
            again = self._division(replace(start.partition, child_ids=(), split=None), new_id)
            if [(each.partition_id, each.region) for each in again.leaves] == [
                (each.partition_id, each.region) for each in made
            ]:
                return made
        raise self._another("of the same partitions at other points")

    def _another(self, which: str) -> InvalidRange:
        return InvalidRange(
            f"request id {self._request_id!r} of table {self._table.name!r} was used before for another "
            f"request, {which}: give each request its own id"
        )

    def _by_id(self, conn: psycopg.Connection[Any], ids: Iterable[str]) -> list[_Stored]:
        return self._scaling._stored(conn, "stored", partition_ids=list(filter(is_text, ids)))

    def _leaves(self, conn: psycopg.Connection[Any]) -> list[_Stored]:
        """Returns the partitions that will be sealed.

        Raises `PartitionNotFound` if one is unknown, and `ConcurrentScale` or `PartitionNotActive` if one is
        no longer a leaf.
        """
        stored = {each.partition.partition_id: each for each in self._by_id(conn, self._ids)}
        for partition_id in self._ids:
            if partition_id not in stored:
                message = f"table {self._table.name!r} has no partition {partition_id!r}"
                raise PartitionNotFound(message, table=self._table.name, partition_id=partition_id)
            leaf = stored[partition_id]
            if leaf.sealed_epoch is None:
                continue
            how = "merged" if leaf.partition.is_leaf else "divided"
            about = f"partition {partition_id!r} of table {self._table.name!r} was {how}"
            if self._began is not None and leaf.sealed_epoch > self._began:
                message = f"{about} by another request meanwhile; this one changed nothing"
                raise ConcurrentScale(message, table=self._table.name, partition_id=partition_id)
            message = f"{about} already"
            raise PartitionNotActive(message, table=self._table.name, partition_id=partition_id)
        return [stored[partition_id] for partition_id in self._ids]

    def _family(self, conn: psycopg.Connection[Any], leaves: Sequence[_Stored]) -> _Family:
        """Returns the partition above the leaves, and the partitions between.

        Raises `InvalidRange` if the leaves are not all leaves below one partition, and the errors of
        `_check_movable`.
        """
        stored, wanted = self._scaling._stored, set(self._ids)
        regions = [leaf.partition.region for leaf in leaves]
        above = stored(conn, "above", partition_id=self._ids[0], levels=len(leaves) - 1)
        holding = (node for node in above if all(each.lies_in(node.partition.region) for each in regions))
        top = next(holding, None)
        if top is None:
            raise InvalidRange(
                f"partitions {_named(self._ids)} of table {self._table.name!r} are not all leaves below one "
                "partition: only all leaves below one partition can be merged"
            )
        top_id = top.partition.partition_id
        nodes = stored(conn, "below", partition_id=top_id, limit=2 * len(leaves))
        below = [each.partition for each in nodes]
        others = [each.partition_id for each in below if each.is_leaf and each.partition_id not in wanted]
        if others or len(below) != 2 * len(leaves) - 1:
            missing = f": {others[0]!r} lies there, too" if others else ""
            raise InvalidRange(
                f"partitions {_named(self._ids)} of table {self._table.name!r} are not all leaves below "
                f"{top_id!r}{missing}; only all of them can be merged"
            )
        inner = [each.partition_id for each in below if not each.is_leaf and each.partition_id != top_id]
        self._check_movable(conn, [top_id, *inner, *self._ids], top_id)
        return _Family(top, tuple(inner))


def _new_ids(epoch: int) -> Callable[[], str]:
    """Returns a function that returns a new partition id at each call, for the partitions of an epoch."""
    return (f"{epoch}-{number}" for number in count()).__next__


_NO_SPLIT = {"split_key": None, "split_point": None, "left_id": None, "right_id": None}
_SUM_MAX = (1 << 63) - 1


def _sum(numbers: Iterable[int]) -> int:
    return min(sum(numbers), _SUM_MAX)


def _named(ids: Sequence[str]) -> str:
    shown = ", ".join(map(repr, ids[:3]))
    return shown if len(ids) <= 3 else f"{shown} and {len(ids) - 3:,} more"
