"""The compared systems: writers that add one row a commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import dormouse as dm
from benchmarks.peers.delta import Delta
from benchmarks.peers.ducklake import DuckLake
from benchmarks.peers.iceberg import Iceberg
from benchmarks.peers.own import Dormouse
from benchmarks.peers.peer import Peer, Refused, Steps, refused_on, tiny_rows
from dormouse.errors import CommitFailed
from dormouse.postgres import RETRIES

SCHEMA = dm.Schema([dm.Field("part", dm.LONG), dm.Field("key", dm.LONG)], [], [dm.Field("payload", dm.BYTES)])
TRIES_MAX = 10
INLINED = dm.TableProperties(inline_bytes_max=65_536)
"""The properties of tables that keep small files in PostgreSQL."""


class Ingesting(Dormouse):
    """Dormouse with writers that call `Table.ingest` for each row."""

    label = "Dormouse"

    def create(self, table: str, partitions: int = 1) -> None:
        with self.open() as instance:
            instance.create_table(table, SCHEMA, properties=INLINED)

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        rows = tiny_rows(-1 - writer)
        with self.open() as instance:
            opened = instance.table(table)

            def step(_: int) -> int:
                with refused_on(CommitFailed):
                    opened.ingest(rows)
                return 1

            yield Steps(step, retries=RETRIES.count)

    def count(self, table: str) -> int:
        """Returns the number of rows that a query reads."""
        with self.open() as instance:
            return int(instance.table(table).query().read_all().num_rows)


class Inlining(DuckLake):
    """DuckLake that inlines inserts of up to its default number of rows, into a table without partitions."""

    label = "DuckLake on PostgreSQL, inlining"
    inlined_rows = 10

    def create(self, table: str, partitions: int = 1) -> None:
        with self.attached() as connection:
            connection.execute(f"create table {table} (part bigint, key bigint, payload blob)")


SIDES: tuple[type[Peer], ...] = (Ingesting, Inlining, Delta, Iceberg)


@contextmanager
def warmed(peer: Peer, table: str, writer: int) -> Iterator[Steps]:
    """Opens a writer, and makes one commit that is not timed: the first one of a process takes long."""
    with peer.appender(table, writer) as steps:
        for _ in range(TRIES_MAX):
            with suppress(Refused):
                steps.step(0)
                break
        yield steps
