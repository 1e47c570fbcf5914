"""Makes tables with COPY and never through the store: 132,000 leaves with 10 files each take 20 s.

with own_place() as place, open_tables(place.dsn, place.objects) as tables:
    table = tables.make("big", 132_000, files_per_leaf=50, full_leaves=100, above_leaves=1_000)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import islice
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.state_tables import (
    BYTES_PER_FILE,
    FILES_PER_JOB,
    ROWS_PER_FILE,
    Node,
    StateTable,
    key_at,
    keys_between,
    spread,
)
from dormouse.catalog import Catalog
from dormouse.files.attempts import WriteAttempts
from dormouse.files.layout import layout as known_layout
from dormouse.files.store import FileReferenceStore
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableRecord
from dormouse.model.text import narrow_hex
from dormouse.model.types import LONG
from dormouse.objects import open_store
from dormouse.postgres import ConnectionSupplier

SCHEMA = Schema([Field("key", LONG)], [], [Field("value", LONG)])
_CREATED_AT_ONCE = 50
_LINES_AT_ONCE = 1_000
_AUTOVACUUM_ROWS_MIN = 50
"""Smaller tables are never vacuumed or analyzed of themselves."""

_NULL = "\\N"
_ADD_TABLE = (
    "insert into tables (name, schema, properties, layout) values (%s, %s, %s, %s) returning table_id"
)
_COPY_PARTITIONS = (
    "copy partition (table_id, partition_id, parent_id, created_epoch, sealed_epoch, min_keys, max_keys, "
    "split_key, split_point, left_id, right_id) from stdin"
)
_ADD_EPOCH = (
    "insert into epoch (table_id, epoch, created_at, sealed, created) "
    "values (%s, 0, clock_timestamp(), %s, %s)"
)
_MAKE_STOCK = (
    "create temp table stock (partition_id text, file_id uuid, filename text, byte_count bigint, "
    "row_count bigint, min_key bytea, max_key bytea, job_id text)"
)
_COPY_STOCK = "copy stock from stdin"
_ADD_REFERENCES = (
    "insert into {table} (table_id, partition_id, file_id, filename, row_count, count_approximate, "
    "only_contains_data_for_this_partition, job_id) "
    "select %s, partition_id, file_id, filename, row_count, false, true, job_id from stock "
    'order by partition_id collate "C"'
)
_FACTS = (
    "create temp view fact as select {distinct} file_id, filename, byte_count, row_count, min_key, max_key, "
    "now() as added_at, null::timestamptz as unreferenced_at from stock"
)
_COPY_JOBS = "copy compaction_job (table_id, job_id, partition_id) from stdin"


class _Wanted(NamedTuple):
    claimed: range
    full: range
    above: int


class Tables:
    """Makes tables in one database."""

    def __init__(self, dsn: str, objects: str) -> None:
        self.dsn = dsn
        self.objects = objects
        self._supplier = ConnectionSupplier(dsn)
        self._catalog = Catalog(self._supplier, WriteAttempts(self._supplier, open_store(objects)))

    def close(self) -> None:
        self._supplier.close()

    def empty(self, name: str, layout: str = "file_table", **properties: Any) -> TableRecord:
        return self._catalog.create(name, SCHEMA, TableProperties(**properties), layout)

    def make(self, name: str, leaves: int, layout: str = "file_table", **options: Any) -> StateTable:
        """A table; options as for `several`."""
        [table] = self.several([name], leaves, layout, **options)
        return table

    def several(
        self,
        names: Sequence[str],
        leaves: int,
        layout: str = "file_table",
        *,
        files_per_leaf: int = FILES_PER_JOB,
        one_file_per_ingest: bool = False,
        claimed_leaves: int = 0,
        full_leaves: int = 0,
        above_leaves: int = 0,
        **properties: Any,
    ) -> list[StateTable]:
        """Tables whose leaves have so many files each, which no job has claimed.

        Some leaves, evenly spread, may differ: the files of `claimed_leaves` are their jobs', and
        `full_leaves` have rows enough to be split. `above_leaves` partitions that were divided have one
        reference each, too.
        """
        wanted = _Wanted(spread(leaves, claimed_leaves), spread(leaves, full_leaves), above_leaves)
        tables = [
            StateTable(record, leaves, files_per_leaf, one_file_per_ingest)
            for record in self._empties(names, layout, properties)
        ]
        with self._supplier.connection() as conn, conn.transaction():
            for table in tables:
                _fill(conn, table, wanted)
        if leaves * files_per_leaf >= _AUTOVACUUM_ROWS_MIN:
            self._settle(tables)
        return tables

    def drop(self, table: StateTable) -> None:
        self._catalog.drop(table.record.name)

    def applied(self, table: StateTable) -> int:
        """How many commits to it are applied."""
        query = "select count(*) from applied_commit where table_id = %s"
        with self._supplier.connection() as conn:
            row = conn.execute(query, (table.record.table_id,)).fetchone()
        return int(row[0]) if row else 0

    def _empties(self, names: Sequence[str], layout: str, properties: Mapping[str, Any]) -> list[TableRecord]:
        """As `empty`, many in a transaction: quicker, and without a tree of partitions."""
        given = TableProperties(**properties)
        schema, set_properties = Jsonb(SCHEMA.to_json()), Jsonb(given.model_dump(exclude_unset=True))
        records = []
        with self._supplier.connection() as conn:
            for first in range(0, len(names), _CREATED_AT_ONCE):
                with conn.transaction():
                    for name in names[first : first + _CREATED_AT_ONCE]:
                        row = conn.execute(_ADD_TABLE, (name, schema, set_properties, layout)).fetchone()
                        record = TableRecord(row[0] if row else 0, name, SCHEMA, given, layout)
                        FileReferenceStore(self._supplier, record).create(conn)
                        records.append(record)
        return records

    def _settle(self, tables: Sequence[StateTable]) -> None:
        """What autovacuum and the checkpointer would have done by the time the jobs end."""
        names = ["compaction_job", "partition", "applied_commit"]
        for table in tables:
            names += known_layout(table.record.layout).tables(table.record.table_id).values()
        with self._supplier.connection() as conn:
            conn.execute(f"vacuum analyze {', '.join(names)}")
            conn.execute("checkpoint")


def open_tables(dsn: str, objects: str) -> AbstractContextManager[Tables]:
    return closing(Tables(dsn, objects))


def _fill(conn: psycopg.Connection[Any], table: StateTable, wanted: _Wanted) -> None:
    record, layout = table.record, known_layout(table.record.layout)
    nodes = list(table.nodes())
    _copy(conn, _COPY_PARTITIONS, _partitions(record, nodes))
    created = [node.partition_id for node in nodes if node.children is None]
    conn.execute(_ADD_EPOCH, (record.table_id, [], created))
    conn.execute(_MAKE_STOCK)
    _copy(conn, _COPY_STOCK, _stock(table, nodes, wanted))
    own = layout.tables(record.table_id)["file_reference"]
    conn.execute(_ADD_REFERENCES.format(table=own), (record.table_id,))
    conn.execute(_FACTS.format(distinct="distinct" if table.one_file_per_ingest else ""))
    values = {"table_id": record.table_id, "salt_buckets": record.properties.salt_buckets}
    conn.execute(layout.on("adopt", record.table_id), values)
    conn.execute("drop table stock cascade")
    jobs = (f"{record.table_id}\t{table.job_id(n)}\t{table.partition_id(n)}\n" for n in wanted.claimed)
    _copy(conn, _COPY_JOBS, jobs)


def _partitions(record: TableRecord, nodes: Sequence[Node]) -> Iterator[str]:
    """A line for each partition."""
    leaves_end = nodes[0].end

    def bound(leaf: int) -> str:
        return "{NULL}" if leaf in (0, leaves_end) else f'{{"\\\\\\\\x{key_at(leaf).hex()}"}}'

    for node in nodes:
        begin = f"{record.table_id}\t{node.partition_id}\t{node.parent_id or _NULL}\t0"
        bounds = f"{bound(node.first)}\t{bound(node.end)}"
        if node.children is None:
            yield f"{begin}\t{_NULL}\t{bounds}\t{_NULL}\t{_NULL}\t{_NULL}\t{_NULL}\n"
        else:
            point = f"\\\\x{key_at(node.middle).hex()}"
            yield f"{begin}\t0\t{bounds}\t0\t{point}\t{node.children[0]}\t{node.children[1]}\n"


def _stock(table: StateTable, nodes: Sequence[Node], wanted: _Wanted) -> Iterator[str]:
    """A line for each reference, with its file's facts."""
    full_rows = table.record.properties.split_threshold_rows // max(1, table.files_per_leaf) + 1
    above = [node for node in nodes if node.children is not None]
    above = [above[n] for n in spread(len(above), wanted.above)]
    leaves = (node for node in nodes if node.children is None)
    ingests = table.ingests()
    for node in heapq.merge(leaves, above, key=lambda node: node.first):
        n, is_leaf = node.first, node.children is None
        job = table.job_id(n) if is_leaf and n in wanted.claimed else _NULL
        rows = full_rows if is_leaf and n in wanted.full else ROWS_PER_FILE
        shared = table.one_file_per_ingest
        low, high = keys_between(0, table.leaves) if shared else keys_between(n, node.end)
        facts = f"{BYTES_PER_FILE}\t{rows}\t\\\\x{low.hex()}\t\\\\x{high.hex()}\t{job}\n"
        for prefix in ingests if is_leaf else ingests[:1]:
            name = f"{prefix}{'all' if shared else node.partition_id}.parquet"
            yield f"{node.partition_id}\t{narrow_hex(name)}\t{name}\t{facts}"


def _copy(conn: psycopg.Connection[Any], statement: str, lines: Iterable[str]) -> None:
    rest = iter(lines)
    with conn.cursor().copy(statement) as copy:
        while held := list(islice(rest, _LINES_AT_ONCE)):
            copy.write("".join(held))
