"""The leaves of a table by epoch and by time, and the successors and predecessors of each.

Each question is one statement that uses index look-ups only, whatever the length of the history. The leaves
of an epoch are found by a relational interval tree: Kriegel, Pötke and Seidl, "Managing Intervals Efficiently
in Object-Relational Databases", VLDB 2000. The questions follow PDP-32:
https://github.com/pravega/pravega/wiki/PDP-32-(Improve-Scalability-of-Controller-Metadata)

`page` draws the history as one HTML file, which needs no network. Each partition is a box. The width of a box
is the time during which the partition was a leaf. The height is its part of the key space. The template of
the page is `lineage.html`, beside this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from html import escape
from importlib import resources
from itertools import chain
from typing import Any, TypeVar

from dormouse.errors import (
    EpochNotFound,
    InvalidCut,
    InvalidInput,
    MetadataDamaged,
    PartitionNotFound,
    TableNotFound,
)
from dormouse.model.json_values import shown_value
from dormouse.model.partition_tree import Partition
from dormouse.model.region import Region
from dormouse.model.table import TableRecord
from dormouse.model.types import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Queries, Statement, load
from dormouse.postgres.transaction import run_lookup
from dormouse.state.context import TableContext
from dormouse.state.history.ends import ENDS, NO_ENDS, Ends
from dormouse.state.trees import partition_from_row

T = TypeVar("T")
PAGE_EPOCHS = 10_000
_NO_CHILDREN = (None,) * 4
_LAST = (1 << 63) - 1
Edges = dict[str, tuple[Any, Any]]
"""The lower and upper edge of each partition's box on the page, by partition id.

Only edges on the same page can be compared.
"""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One change of a table's leaves. Epoch 0 is the creation of the table.

    - `created_at`: when the epoch was made, with a time zone.
    - `sealed`: the ids of the leaves that ended.
    - `created`: the ids of the leaves that were made.
    - `splits`, `merges`: the numbers of splits and merges in the epoch.
    - `sealed_rows`, `sealed_bytes`: the rows and bytes of the leaves that ended, as far as they are known.
    """

    epoch: int
    created_at: datetime
    sealed: tuple[str, ...]
    created: tuple[str, ...]
    splits: int
    merges: int
    sealed_rows: int
    sealed_bytes: int


@dataclass(frozen=True, slots=True)
class ScaleMetadata:
    """The changes of the leaves between two times, when the current epochs were `first` and `last`.

    The totals are sums over the epochs after `first`, up to and including `last`. `records` is an iterator
    over the epochs from `first` to `last`.
    """

    first: int
    last: int
    splits: int
    merges: int
    sealed_rows: int
    sealed_bytes: int
    records: Iterator[EpochRecord] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Life:
    """A partition, and the epochs in which it was a leaf: from `created` until before `sealed`.

    `sealed` is None if it is still a leaf. `row_count` and `byte_count` are its rows and bytes when it ended.
    They are None while it is a leaf, and where they are not known.
    """

    partition: Partition
    created: int
    sealed: int | None
    row_count: int | None
    byte_count: int | None


class Epochs:
    """The epochs of one table. Times have a time zone.

    All methods raise `TableNotFound` if the table was dropped.
    """

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table

    def active_partitions(self, epoch: int | None = None) -> tuple[Partition, ...]:
        """Returns the leaves of an epoch, by default of the current one, sorted by their lower bounds.

        Raises `EpochNotFound`.
        """
        rows = self._rows("active", epoch=None if epoch is None else _bounded(epoch))
        if not rows:
            no_table = TableNotFound.gone(self._table.name)
            raise no_table if epoch is None else self._not_there(epoch, *self._ends())
        return tuple(map(self._leaf, rows))

    def epoch_at(self, time: datetime) -> int:
        """Returns the last epoch that was made at or before a time; 0 if the table did not exist then.

        Raises `EpochNotFound` if that epoch is before the truncation.
        """
        [(epoch, head)] = self._rows_there("epoch_at", time=_aware(time))
        self._check_kept(time, epoch, head)
        return int(epoch)

    def partitions_at(self, time: datetime) -> tuple[Partition, ...]:
        """Returns the leaves at a time.

        For a time before the truncation, returns only those that were still leaves at the truncation.
        """
        rows = self._rows_there("active_at", time=_aware(time))
        return tuple(self._leaf(row) for row in rows if row[0] is not None)

    def epochs(self, first: int | None = None, last: int | None = None) -> Iterator[EpochRecord]:
        """Yields the records of the epochs from `first` to `last`, both included.

        The default of `first` is the first epoch that is kept, and the default of `last` is the current one.
        Raises `EpochNotFound` for epochs that do not exist or are before the truncation.
        """
        return _flat(self._record_pages(first, last))

    def scale_metadata(self, from_time: datetime, to_time: datetime) -> ScaleMetadata:
        """Returns the changes of the leaves between two times: totals, and an iterator over the epochs.

        Raises `InvalidCut` if `to_time` is before `from_time`. Raises `EpochNotFound` if `from_time` is
        before the truncation.
        """
        if _aware(to_time) < _aware(from_time):
            raise InvalidCut(f"{to_time.isoformat()} is before {from_time.isoformat()}")
        sums = self._rows("scales", from_time=from_time, to_time=to_time)
        if not sums or sums[0][0] is None:
            raise TableNotFound.gone(self._table.name)
        first, last, splits, merges, rows, sizes, head = map(int, sums[0])
        self._check_kept(from_time, first, head)
        records = chain.from_iterable(self._record_pages(first, last))
        return ScaleMetadata(first, last, splits, merges, rows, sizes, records)

    def successors(self, partition_id: str) -> dict[str, list[str]]:
        """Returns the partitions that took over the keys of a partition when it ended.

        The result maps the id of each of these partitions to the ids of all its predecessors. It is empty for
        a leaf. Raises `PartitionNotFound` if there is no such partition, or if it ended before the
        truncation.
        """
        return _by_id(self._related(partition_id, made_of_it=True))

    def predecessors(self, partition_id: str) -> dict[str, list[str]]:
        """Returns the partitions from which a partition took over its keys.

        The result maps the id of each of these partitions to the ids of all its own predecessors. It is empty
        for a partition that was created with the table. Raises `PartitionNotFound` like `successors`. Raises
        `EpochNotFound` for a partition that was made before the truncation.
        """
        rows = self._related(partition_id, made_of_it=False)
        *_, created, head = rows[0]
        if 0 < created <= head:
            raise EpochNotFound(
                f"the predecessors of partition {partition_id!r} of table {self._table.name!r} are not "
                f"kept: epoch {created} created it, and the history is truncated at epoch {head}"
            )
        return _by_id(rows)

    def first_epoch(self) -> int:
        """Returns the first epoch that is kept: 0, or the epoch of the truncation."""
        return self._ends()[0]

    def lives(self, first: int, last: int) -> Iterator[Life]:
        """Yields every partition that was a leaf in an epoch from `first` to `last`, with its life.

        The leaves of epoch `first` come first. The others follow in the order in which they were made. Raises
        `EpochNotFound`.
        """
        return _flat(self._life_pages(None, first, last))

    def lives_of(self, partition_ids: Sequence[str]) -> dict[str, Life]:
        """Returns the lives of partitions, by partition id. Ids that do not exist are absent."""
        rows = self._rows("lives_of", partition_ids=[each for each in partition_ids if is_text(each)])
        return {row[0]: self._life(row) for row in rows}

    def _record_pages(self, first: int | None, last: int | None) -> Iterator[list[EpochRecord]]:
        wanted = None if first is None else _bounded(first)
        while True:
            values = {
                "first": wanted,
                "last": _LAST if last is None else _bounded(last),
                "limit": PAGE_EPOCHS,
            }
            rows = self._rows("page", **values)
            head, current = self._checked(rows, first, last)
            wanted = head if wanted is None else wanted
            last = current if last is None else last
            page = [
                EpochRecord(number, at, tuple(sealed), tuple(created), *counts)
                for _, _, number, at, sealed, created, *counts in rows
                if number is not None
            ]
            self._check_whole(page, wanted, min(last, wanted + PAGE_EPOCHS - 1))
            yield page
            # the next page raises EpochNotFound if retention has truncated these epochs meanwhile
            first = wanted = wanted + PAGE_EPOCHS
            if wanted > last:
                return

    def _lives_between(self, ends: Ends) -> Iterator[Life]:
        """Yields, like `lives`, the partitions that were leaves between two moments.

        Raises `InvalidCut` and `CutExpired`.
        """
        return _flat(self._life_pages(ends))

    def _life_pages(self, ends: Ends | None, first: int = 0, last: int = 0) -> Iterator[list[Life]]:
        """Yields pages of lives, from epoch `first` to `last` or, if `ends` are given, between two moments.

        The statement of the first page looks up these moments.
        """
        if ends is None:
            after, end = _bounded(first), _bounded(last)
            rows = self._lives(after, end)
        else:
            values = {**ends.values, "after": None, "till": None, "limit": PAGE_EPOCHS}
            rows = self._rows("lives", **values, with_leaves=True)
            first, last = after, end = _epochs_of(ends, rows)
        while True:
            self._checked([row[1:] for row in rows[:1]], first, last)
            yield [self._life(row[3:]) for row in rows if row[3] is not None]
            after += PAGE_EPOCHS
            if after >= end:
                return
            rows = self._lives(after, end, with_leaves=False)

    def _lives(self, after: int, end: int, *, with_leaves: bool = True) -> list[Any]:
        values = {"after": after, "till": min(end, after + PAGE_EPOCHS), "limit": None}
        return self._rows("lives", **NO_ENDS, **values, with_leaves=with_leaves)

    def _checked(self, rows: Sequence[Any], first: int | None, last: int | None) -> tuple[int, int]:
        """Returns the table's first and last epoch, which are the first two values of each row.

        Raises an error unless the table has the epochs from `first` to `last`.
        """
        if not rows:
            raise TableNotFound.gone(self._table.name)
        head, current = map(int, rows[0][:2])
        begin, end = head if first is None else first, current if last is None else last
        for epoch in (begin, end):
            if not head <= epoch <= current:
                raise self._not_there(epoch, head, current)
        if end < begin:
            raise EpochNotFound(f"there are no epochs from {begin} to {end}: the first is the later one")
        return head, current

    def _check_kept(self, time: datetime, epoch: int, head: int) -> None:
        if epoch < head:
            raise EpochNotFound(
                f"the epoch at {time.isoformat()} is not kept: the history of table {self._table.name!r} is "
                f"truncated at epoch {head}, which was made later"
            )

    def _check_whole(self, page: Sequence[EpochRecord], first: int, last: int) -> None:
        numbers = [record.epoch for record in page]
        if numbers != list(range(first, last + 1)):
            lost = min({*range(first, last + 1)} - {*numbers})
            name = self._table.name
            raise MetadataDamaged(
                f"table {name!r}: the database has lost its row of epoch {lost}: "
                f"'dormouse check --table {name}' shows details"
            )

    def _related(self, partition_id: str, *, made_of_it: bool) -> list[Any]:
        known = partition_id if is_text(partition_id) else ""
        rows = self._rows("related", partition_id=known, made_of_it=made_of_it)
        if not rows:
            head, _ = self._ends()
            kept = f"; partitions that ended up to epoch {head}, where its history is truncated, are not kept"
            raise PartitionNotFound(
                f"table {self._table.name!r} has no partition {partition_id!r}{kept if head else ''}"
            )
        return rows

    def _life(self, row: Sequence[Any]) -> Life:
        return Life(self._leaf(row[:4]), *row[4:])

    def _leaf(self, row: Sequence[Any]) -> Partition:
        return partition_from_row(self._table.schema, (*row, *_NO_CHILDREN))

    def _not_there(self, epoch: int, head: int, current: int) -> EpochNotFound:
        why = f": its history is truncated at epoch {head}" if 0 <= epoch < head else ""
        return EpochNotFound(
            f"table {self._table.name!r} has no epoch {epoch}{why}; it has those from {head} to {current}"
        )

    def _ends(self) -> tuple[int, int]:
        """Returns two epochs: the first that is not truncated, and the current one."""
        [(head, current)] = self._rows_there("ends")
        return int(head), int(current)

    def _rows_there(self, name: str, **values: Any) -> list[Any]:
        """Returns the rows of a query that always has rows; raises `TableNotFound` if it has none."""
        if not (rows := self._rows(name, **values)):
            raise TableNotFound.gone(self._table.name)
        return rows

    def _rows(self, name: str, **values: Any) -> list[Any]:
        parameters = {**values, "table_id": self._table.table_id}
        return run_lookup(
            self._supplier,
            lambda conn: _STATEMENTS[name].execute(conn, parameters).fetchall(),
            operation=f"history: {name}",
        )


def _bounded(epoch: int) -> int:
    """Returns an epoch, limited to the range from -1 to the largest 64-bit number, which PostgreSQL accepts.

    Raises `InvalidInput` for a value that is no whole number.
    """
    if isinstance(epoch, bool) or not isinstance(epoch, int):
        raise InvalidInput(
            f"an epoch is a whole number, not {epoch!r}: history.epoch_at(time) returns that of a time"
        )
    return max(-1, min(epoch, _LAST))


def _aware(time: datetime) -> datetime:
    if not isinstance(time, datetime):
        raise InvalidCut(f"give a datetime with a time zone, not {time!r}")
    if time.tzinfo is None or time.utcoffset() is None:
        raise InvalidCut(f"{time.isoformat()} is naive: give a time with its time zone")
    return time


def _by_id(rows: Sequence[Any]) -> dict[str, list[str]]:
    """Returns the predecessors of each partition, by the partition's id.

    Skips rows without a partition.
    """
    return {other: list(predecessors) for other, predecessors, *_ in rows if other is not None}


def _epochs_of(ends: Ends, rows: Sequence[Any]) -> tuple[int, int]:
    first, last = ends.positions(ends.read(rows[0][0] if rows else None))
    if last.at < first.at:
        raise InvalidCut(f"{last.at} is before {first.at}: give the earlier moment first")
    return first.epoch, last.epoch


def _flat(pages: Iterator[list[T]]) -> Iterator[T]:
    """Returns an iterator over the items of pages; reads and checks the first page at once."""
    first = next(pages)
    return chain(first, chain.from_iterable(pages))


def _statements(queries: Queries) -> dict[str, Statement]:
    parts = {name: queries[name] for name in ("overlap", "leaves_then", "epoch_then", "is_kept")}
    parts["ends"] = ENDS
    parts["predecessors_of"] = queries["predecessors_of"].including(overlap=parts["overlap"])
    return {
        name: Statement(query.including(**parts).on())
        for name, query in queries.items()
        if not query.description.startswith("Part of a query:")
    }


_STATEMENTS = _statements(load(__package__ or "", "epochs"))


def page(context: TableContext, first: int | None, last: int | None) -> str:
    """Returns an HTML page that draws the epochs of a table from `first` to `last`."""
    epochs, table = Epochs(context.supplier, context.table), context.table.name
    records = list(epochs.epochs(first, last))
    first = records[0].epoch
    lives = list(epochs.lives(first, records[-1].epoch))
    rows = {leaf.partition_id: leaf.row_count for leaf in context.partitions.leaf_rows()}
    edges = _edges(context, records, lives)
    content = {"table": table, "first": first, **_epochs(records), **_partitions(lives, edges, rows)}
    # "<" is escaped, so that no text of the table can end the script element
    data = json.dumps(content, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    text = resources.files(__package__ or "").joinpath("lineage.html").read_text("utf-8")
    return text.replace("{{title}}", escape(table)).replace("{{data}}", data)


def keys_of(region: Region) -> str:
    """Returns a region as text for a person, such as "1 ≤ id < 5"."""
    parts = []
    for name, item in region.items():
        low, high = (None if end is None else _text(end) for end in (item.min, item.max))
        below = f"{name} < {high}"
        parts.append(below if low is None else f"{name} ≥ {low}" if high is None else f"{low} ≤ {below}")
    return ", ".join(parts) or "all keys"


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, str) else shown_value(value)


def _epochs(records: Sequence[EpochRecord]) -> dict[str, Any]:
    return {
        "times": [round(record.created_at.timestamp() * 1_000) for record in records],
        "splits": [record.splits for record in records],
        "merges": [record.merges for record in records],
    }


def _partitions(lives: Sequence[Life], edges: Edges, rows: Mapping[str, int]) -> dict[str, Any]:
    ranks = {edge: rank for rank, edge in enumerate(sorted({end for ends in edges.values() for end in ends}))}
    columns: dict[str, Callable[[Life], Any]] = {
        "ids": lambda life: life.partition.partition_id,
        "low": lambda life: ranks[edges[life.partition.partition_id][0]],
        "high": lambda life: ranks[edges[life.partition.partition_id][1]],
        "created": lambda life: life.created,
        "sealed": lambda life: life.sealed,
        "rows": lambda life: (
            rows.get(life.partition.partition_id, 0) if life.sealed is None else life.row_count
        ),
        "bytes": lambda life: life.byte_count,
        "keys": lambda life: keys_of(life.partition.region),
    }
    return {name: [column(life) for life in lives] for name, column in columns.items()}


def _edges(context: TableContext, records: Sequence[EpochRecord], lives: Sequence[Life]) -> Edges:
    """Returns the lower and upper edge of each partition's box on the page.

    If all splits used the first row key, the edges are the partition's range of this key. Otherwise,
    `_divided` computes them from the tree.
    """
    first = context.schema.row_keys[0].name
    if all(life.partition.region.keys() <= {first} for life in lives):
        ranges = {life.partition.partition_id: life.partition.region.range(first) for life in lives}
        return {
            name: ((0,) if item.min is None else (1, item.min), (2,) if item.max is None else (1, item.max))
            for name, item in ranges.items()
        }
    tree = context.partitions.at(records[0].epoch)
    return _divided([*map(tree.node_id, tree.leaf_nodes())], records, lives)


def _divided(begun: Sequence[str], records: Sequence[EpochRecord], lives: Sequence[Life]) -> Edges:
    """Returns the lower and upper edge of each partition's box, for splits by several row keys.

    The leaves of the first epoch, `begun`, have the same height. Each later epoch replaces some partitions by
    others. The new partitions share the height of the replaced ones equally.
    """
    edges: Edges = {name: (Fraction(n), Fraction(n + 1)) for n, name in enumerate(begun)}
    order = {life.partition.partition_id: n for n, life in enumerate(lives)}
    regions = {life.partition.partition_id: life.partition.region for life in lives}
    for record in records[1:]:
        for name in sorted(record.created, key=order.__getitem__):
            above = [p for p in record.sealed if regions[p].overlaps(regions[name])]
            low, high = min(edges[p][0] for p in above), max(edges[p][1] for p in above)
            beside = [p for p in record.created if any(regions[p].overlaps(regions[a]) for a in above)]
            part, at = (high - low) / len(beside), sorted(beside, key=order.__getitem__).index(name)
            edges[name] = (low + at * part, low + (at + 1) * part)
    return edges
