"""Histories of any length, written by COPY in the form that splits and merges would have written.

The table begins with a hundred leaves. Each epoch, one second after the last, divides one of them at random
or merges its halves again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from benchmarks.harness.command import Tell
from benchmarks.state_tables import KEYS_PER_LEAF, Node, StateTable, Tables
from dormouse.model.region import encode_value
from dormouse.model.types import LONG
from dormouse.postgres import ConnectionSupplier, load

LEAVES = 100
BEGAN = datetime(2025, 1, 1, tzinfo=UTC)
ROWS, BYTES = 1_000_000, 40_000_000
"""The rows and bytes of a leaf when it is sealed."""
CHUNK_EPOCHS = 1_000
"""The number of epochs from one running total to the next."""
CUTS_MIN, CUT_EPOCHS = 3_000, 1_800
"""The least number of cuts, so that each truncation has one, and the epochs per cut of a long history."""
AWAY = 10
"""The number of epochs between two cuts that an operation compares."""
_AT_ONCE = 100_000
_NULL = "\\N"
_SQL = load(__file__, "build")


@dataclass
class _Slot:
    """One of the first leaves, with the partition that has taken its place: `now`, made at epoch `since`."""

    node: Node
    is_upper: bool
    now: str
    since: int = 0
    divided: int | None = None
    """The epoch that divided the present partition, or None if it is a leaf."""


class _Writer:
    """The writer of the lines that COPY reads, epoch by epoch."""

    def __init__(self, table: StateTable) -> None:
        self._table_id = table.record.table_id
        upper = {node.children[1] for node in table.nodes() if node.children}
        leaves = [node for node in table.nodes() if node.children is None]
        self.slots = [_Slot(leaf, leaf.partition_id in upper, leaf.partition_id) for leaf in leaves]
        self._edges = [
            [_key(leaf.first * KEYS_PER_LEAF + part * KEYS_PER_LEAF // 2) for part in range(3)]
            for leaf in leaves
        ]
        # the ends of the key space are open
        self._edges[0][0] = self._edges[-1][2] = "NULL"
        self._days = [(BEGAN + timedelta(days=n)).strftime("%Y-%m-%d") for n in range(400)]
        self._chosen = random.Random(26)
        self.partitions: list[str] = []
        self.epochs: list[str] = []
        self.chunks: list[str] = []
        self._totals = [0, 0, 0, 0]

    def add(self, epoch: int) -> None:
        """Adds an epoch that divides the leaf of a random slot, or merges its halves if it was divided."""
        number = self._chosen.randrange(len(self.slots))
        slot = self.slots[number]
        is_merge = slot.divided is not None
        sealed = f"{slot.divided}-0,{slot.divided}-1" if is_merge else slot.now
        created = f"{epoch}-0" if is_merge else f"{epoch}-0,{epoch}-1"
        day, second = divmod(epoch, 86_400)
        time = f"{self._days[day]} {second // 3_600}:{second // 60 % 60}:{second % 60}+00"
        ended = 2 if is_merge else 1
        counts = (int(not is_merge), int(is_merge), ended * ROWS, ended * BYTES)
        self.epochs.append(
            f"{self._table_id}\t{epoch}\t{time}\t{{{sealed}}}\t{{{created}}}\t{counts[0]}\t{counts[1]}"
            f"\t{counts[2]}\t{counts[3]}\t3\n"
        )
        self._totals = [a + b for a, b in zip(self._totals, counts, strict=True)]
        if epoch % CHUNK_EPOCHS == 0:
            chunk = "\t".join(map(str, (self._table_id, epoch // CHUNK_EPOCHS, *self._totals)))
            self.chunks.append(f"{chunk}\n")
        if is_merge:
            self._place(number, merged=epoch)
            slot.now, slot.since, slot.divided = f"{epoch}-0", epoch, None
        else:
            slot.divided = epoch

    def finish(self) -> None:
        """Adds the partitions that are in the tree at the end."""
        for number in range(len(self.slots)):
            self._place(number, merged=None)

    def _place(self, number: int, merged: int | None) -> None:
        """Adds the present partition of a slot and, if it is divided, its two halves.

        `merged` is the epoch that merges the halves, or None if they are still leaves.
        """
        slot, (low, middle, high) = self.slots[number], self._edges[number]
        end = _NULL if merged is None else str(merged)
        by = _NULL if merged is None else f"{merged}-0"
        whole = f"{self._table_id}\t{slot.now}\t{slot.node.parent_id}\t{slot.since}"
        bounds, is_upper = f"{{{low}}}\t{{{high}}}", "t" if slot.is_upper else "f"
        at = slot.divided
        if at is None:
            nothing = "\t".join([_NULL] * 4)
            self.partitions.append(
                f"{whole}\t{_NULL}\t{bounds}\t{nothing}\t{is_upper}\t{_NULL}\t{_NULL}\t{_NULL}\t{_NULL}\n"
            )
            return
        size = f"{ROWS}\t{BYTES}"
        split = f"0\t{_plain(middle)}\t{at}-0\t{at}-1"
        self.partitions.append(f"{whole}\t{at}\t{bounds}\t{split}\t{is_upper}\t{end}\t{by}\t{size}\n")
        ended = f"{_NULL}\t{_NULL}" if merged is None else size
        for half, (first, last) in enumerate(((low, middle), (middle, high))):
            self.partitions.append(
                f"{self._table_id}\t{at}-{half}\t{slot.now}\t{at}\t{end}\t{{{first}}}\t{{{last}}}"
                f"\t{_NULL}\t{_NULL}\t{_NULL}\t{_NULL}\t{'ft'[half]}\t{end}\t{by}\t{ended}\n"
            )


def _key(value: int) -> str:
    """Returns a key as an element of a bytea array in COPY's format."""
    return f'"\\\\\\\\x{encode_value(LONG, value).hex()}"'


def _plain(key: str) -> str:
    """Converts an element of `_key` to a plain bytea column in COPY's format."""
    return key.strip('"').replace("\\\\\\\\", "\\\\")


def build(tables: Tables, epochs: int, tell: Tell) -> StateTable:
    """Builds a table with `epochs` epochs, the only one in its database."""
    table = tables.make("history", LEAVES, files_per_leaf=1)
    table_id = table.record.table_id
    writer = _Writer(table)
    with ConnectionSupplier(tables.dsn, connections_max=1).connection() as conn:
        conn.execute(_SQL["begin_load"].on())
        indexes = conn.execute(_SQL["indexes"].on()).fetchall()
        conn.execute(_SQL["begin_history"].on(), {"table_id": table_id, "time": BEGAN})
        for index, of, key, _ in indexes:
            conn.execute(f"drop index {index}" if key is None else f"alter table {of} drop constraint {key}")
        for first in range(1, epochs + 1, _AT_ONCE):
            tell(f"{first:,} of {epochs:,} epochs")
            for epoch in range(first, min(epochs, first + _AT_ONCE - 1) + 1):
                writer.add(epoch)
            _flush(conn, writer)
        writer.finish()
        _flush(conn, writer)
        tell(f"{epochs:,} epochs: their indexes")
        for *_, definition in indexes:
            conn.execute(definition)
        before, now = zip(*((slot.node.partition_id, slot.now) for slot in writer.slots), strict=True)
        conn.execute(_SQL["link"].on(), {"table_id": table_id, "before": list(before), "now": list(now)})
        conn.execute(_SQL["end_history"].on(), {"table_id": table_id, "epoch": epochs, "time": BEGAN})
        cuts = max(CUTS_MIN, epochs // CUT_EPOCHS)
        values = {"table_id": table_id, "pairs": cuts // 2, "epochs": epochs, "away": AWAY, "time": BEGAN}
        conn.execute(_SQL["add_cuts"].on(), values)
        tell(f"{epochs:,} epochs: vacuum")
        _into_memory(conn)
        conn.execute("checkpoint")
    return table


def _into_memory(conn: psycopg.Connection[Any]) -> None:
    """Loads every page of the tables and their indexes into the server's memory, as far as it has room."""
    # the default limit would use a small ring of buffers, and the pages would not stay in memory
    conn.execute(
        "vacuum (analyze, disable_page_skipping, buffer_usage_limit 0) partition, epoch, history_chunk, cut"
    )
    conn.execute(_SQL["by_indexes_alone"].on())
    for (walk,) in conn.execute(_SQL["walks"].on()).fetchall():
        conn.execute(walk)


def bytes_on_disk(conn: psycopg.Connection[Any]) -> int:
    """Returns the bytes of a database's epochs and partitions, with their indexes."""
    row = conn.execute(_SQL["size"].on()).fetchone()
    return int(row[0]) if row else 0


def _flush(conn: psycopg.Connection[Any], writer: _Writer) -> None:
    for name, lines in (
        ("copy_partitions", writer.partitions),
        ("copy_epochs", writer.epochs),
        ("copy_chunks", writer.chunks),
    ):
        with conn.cursor() as cursor, cursor.copy(_SQL[name].on()) as copy:
            for some in _joined(lines):
                copy.write(some)
        lines.clear()


def _joined(lines: Sequence[str]) -> Iterable[str]:
    return ("".join(lines[n : n + 5_000]) for n in range(0, len(lines), 5_000))
