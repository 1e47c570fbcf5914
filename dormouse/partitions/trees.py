"""Reading the tree of a table: as a whole, what changed since an epoch, or only where some ranges lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg

from dormouse.errors import MetadataDamaged, TableNotFound
from dormouse.model.keys import KeyValue, encode_value
from dormouse.model.partition_tree import ROOT, PartitionTree
from dormouse.model.region import Range
from dormouse.model.schema import Field
from dormouse.model.table import TableRecord
from dormouse.model.tree_arrays import Joined, PartitionColumns, PartitionRow, TreeArrays
from dormouse.postgres.queries import load
from dormouse.postgres.statements import Statement

PAGE_ROWS = 20_000
CHANGES_MAX = 10_000
"""A tree that is further behind, in epochs, is read anew."""

_STATEMENTS = {name: Statement(query.on()) for name, query in load(__package__ or "", "trees").items()}


class TreeReader:
    """Reads the tree of one table. No method needs a transaction: partitions of an epoch never change."""

    def __init__(self, table: TableRecord) -> None:
        self._table = table

    def epoch(self, conn: psycopg.Connection[Any]) -> tuple[int, int]:
        """The current epoch, and when it was made, in microseconds since 1970; `TableNotFound`."""
        row = self._execute(conn, "epoch").fetchone()
        if row is None:
            raise TableNotFound(f"table {self._table.name!r} does not exist any more")
        if row[1] is None:
            raise MetadataDamaged(
                f"table {self._table.name!r}: the database has lost its row of epoch {row[0]}: "
                f"'dormouse check --table {self._table.name}' tells more"
            )
        return int(row[0]), int(row[1])

    def whole(self, conn: psycopg.Connection[Any]) -> TreeArrays:
        """All partitions that there are; `TableNotFound`."""
        arrays, (epoch, made_at) = TreeArrays(self._table.schema), self.epoch(conn)
        arrays.note(epoch, made_at)
        arrays.load(self._pages(conn, epoch), epoch)
        self.epoch(conn)  # a table that was dropped meanwhile lost its partitions between two pages
        return arrays

    def changes(
        self, conn: psycopg.Connection[Any], known: TreeArrays, epoch: int
    ) -> list[PartitionRow] | None:
        """The partitions that came or were divided since what is known, looked up by keys; `TableNotFound`.

        None when the table has another past than that.
        """
        rows = self._execute(conn, "changed_partitions", after=known.epoch, epoch=epoch).fetchall()
        changed = [PartitionRow(*row[:-1]) for row in rows]
        if epoch not in (row.created_epoch for row in changed):
            raise self._not_there(conn, epoch)
        return changed if known.agrees(known.epoch, rows[0][-1]) else None

    def walk(
        self, conn: psycopg.Connection[Any], ranges: Mapping[str, Range], nodes_max: int
    ) -> PartitionTree | None:
        """The partitions that overlap a range of each row key that is named; None when there are more."""
        wanted = [(field, ranges.get(field.name, Range())) for field in self._table.schema.row_keys]
        rows = self._execute(
            conn,
            "walk",
            root=ROOT,
            mins=[_encoded(field, item.min) for field, item in wanted],
            maxs=[_encoded(field, item.max) for field, item in wanted],
            maxs_inclusive=[item.max_inclusive for _, item in wanted],
            limit=nodes_max + 1,
        ).fetchall()
        if not rows:
            raise TableNotFound(f"table {self._table.name!r} does not exist any more")
        if len(rows) > nodes_max:
            return None
        arrays, epoch = TreeArrays(self._table.schema), rows[0][-1]
        arrays.extend((PartitionRow(*row[:-1]) for row in rows), epoch)
        return PartitionTree(arrays, epoch)

    def _pages(self, conn: psycopg.Connection[Any], epoch: int) -> Iterator[PartitionColumns]:
        after = ""
        while True:
            found = self._execute(conn, "partition_columns", epoch=epoch, after=after, limit=PAGE_ROWS)
            last, *columns = found.fetchone() or (None,)
            if last is None:
                return
            id_lengths, ids, created, sealed, split_keys, *texts = columns
            points, lefts, rights = (Joined(*texts[at : at + 2]) for at in (0, 2, 4))
            yield PartitionColumns(
                Joined(id_lengths, ids), created, sealed, split_keys, points, lefts, rights
            )
            after = last

    def _not_there(self, conn: psycopg.Connection[Any], epoch: int) -> Exception:
        """Why an epoch is not found: `TableNotFound`, or it is still to come."""
        current, _ = self.epoch(conn)
        return ValueError(f"table {self._table.name!r} is at epoch {current}, not yet at {epoch}")

    def _execute(self, conn: psycopg.Connection[Any], name: str, **values: Any) -> psycopg.Cursor[Any]:
        return _STATEMENTS[name].execute(conn, {**values, "table_id": self._table.table_id})


def _encoded(field: Field, value: KeyValue | None) -> bytes | None:
    return None if value is None else encode_value(field.type, value)
