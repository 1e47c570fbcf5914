"""Tables of any size as metadata only: a real partition tree, and references to files that do not exist.

The tree is the one that `Catalog.create` makes for the split points 1000, 2000, …: leaf n has the keys from
n * 1000 to n * 1000 + 999. The first leaf also has all smaller keys, and the last one all larger keys. Each
leaf has one file of each ingest. An ingest wrote a file for each leaf, or one file that all leaves refer to.

The tables are made with COPY, not through the store: 132,000 leaves with 10 files each take 20 s.

with own_place() as place, open_tables(place.dsn, place.objects) as tables:
    table = tables.make("big", 132_000, files_per_leaf=50, full_leaves=100, above_leaves=1_000)
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from dormouse.model.file_reference import FileReference, FileWithReferences, ReplaceFileReferencesRequest
from dormouse.model.partition_tree import ROOT
from dormouse.model.region import encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties, TableRecord
from dormouse.model.text import narrow_id
from dormouse.model.types import LONG
from dormouse.objects import open_store
from dormouse.postgres import ConnectionSupplier, load
from dormouse.state.catalog import Catalog
from dormouse.state.commits.requests import Envelope, ReplaceFileReferences
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.layout import layout as known_layout
from dormouse.state.files.store import FileReferenceStore

FILES_PER_JOB = 11
KEYS_PER_LEAF = 1_000
ROWS_PER_FILE = 100_000
BYTES_PER_FILE = 4_000_000
SCHEMA = Schema([Field("key", LONG)], [], [Field("value", LONG)])
_CREATED_AT_ONCE = 50
_LINES_AT_ONCE = 1_000
_AUTOVACUUM_ROWS_MIN = 50
"""The number of rows below which autovacuum never vacuums or analyzes a table."""

_NULL = "\\N"
_SQL = load(__file__, "state_tables")


class Node(NamedTuple):
    """A partition that covers the leaves from number `first` to before number `end`."""

    partition_id: str
    parent_id: str | None
    first: int
    end: int
    children: tuple[str, str] | None

    @property
    def middle(self) -> int:
        """The first leaf of the right half."""
        return (self.first + self.end + 1) // 2


@dataclass(frozen=True)
class StateTable:
    """A table with leaves numbered from 0. A leaf's number determines its partition, job and commit ids."""

    record: TableRecord
    leaves: int
    files_per_leaf: int = FILES_PER_JOB
    one_file_per_ingest: bool = False

    def partition_id(self, leaf: int) -> str:
        return self.path(leaf)[-1]

    def path(self, leaf: int) -> list[str]:
        """Returns the ids of the partitions from the root to a leaf, without building the tree."""
        # ids are numbered in the order of division: `divided` partitions were divided before this one
        first, end, divided, path = 0, self.leaves, 0, [ROOT]
        while end - first > 1:
            middle = (first + end + 1) // 2
            if leaf < middle:
                path.append(f"0-{2 * divided}")
                end, divided = middle, divided + 1
            else:
                path.append(f"0-{2 * divided + 1}")
                first, divided = middle, divided + middle - first
        return path

    def nodes(self) -> Iterator[Node]:
        """Yields every partition, a parent before its children, left before right."""
        divided = 0
        todo: list[tuple[str, str | None, int, int]] = [(ROOT, None, 0, self.leaves)]
        while todo:
            partition_id, parent_id, first, end = todo.pop()
            if end - first == 1:
                yield Node(partition_id, parent_id, first, end, None)
                continue
            left, right = f"0-{2 * divided}", f"0-{2 * divided + 1}"
            divided += 1
            node = Node(partition_id, parent_id, first, end, (left, right))
            yield node
            todo += [(right, partition_id, node.middle, end), (left, partition_id, first, node.middle)]

    def job_id(self, leaf: int) -> str:
        return str(self._id("job", leaf))

    def commit_id(self, leaf: int) -> str:
        return str(self._id("commit", leaf))

    def ingests(self) -> list[str]:
        """Returns, for each ingest, the prefix of the names of its files."""
        prefix = self.record.object_prefix
        return [f"{prefix}{self._id('ingest', ingest)}/" for ingest in range(self.files_per_leaf)]

    def inputs(self, leaf: int) -> tuple[str, ...]:
        """Returns the names of the files that the leaf's job merges."""
        name = "all" if self.one_file_per_ingest else self.partition_id(leaf)
        return tuple(f"{ingest}{name}.parquet" for ingest in self.ingests())

    def request(
        self, leaf: int, job_id: str | None = None, inputs: tuple[str, ...] | None = None
    ) -> ReplaceFileReferencesRequest:
        """Returns the request that commits a compaction: by default, the compaction of the leaf's job."""
        partition, job_id = self.partition_id(leaf), job_id or self.job_id(leaf)
        name = f"{self.record.object_prefix}{job_id}/{partition}.parquet"
        file = new_file(name, partition, keys_between(leaf, leaf + 1), self.files_per_leaf)
        return ReplaceFileReferencesRequest(
            job_id=job_id,
            partition_id=partition,
            input_filenames=inputs or self.inputs(leaf),
            new_reference=file.references[0],
            new_file=file,
        )

    def envelope(self, leaf: int) -> Envelope:
        """Returns the leaf's replacement as a commit request with its commit id."""
        request = ReplaceFileReferences(
            commit_id=self.commit_id(leaf), table=self.record.name, requests=(self.request(leaf),)
        )
        return Envelope(request, self.record.table_id)

    def _id(self, kind: str, number: int) -> UUID:
        text = f"{self.record.table_id} {kind} {number}"
        return UUID(bytes=hashlib.blake2b(text.encode(), digest_size=16).digest())


def new_file(name: str, partition_id: str, keys: tuple[bytes, bytes], inputs: int = 1) -> FileWithReferences:
    """Returns a file of one partition, with as many rows as `inputs` other files."""
    rows = inputs * ROWS_PER_FILE
    return FileWithReferences(
        filename=name,
        references=(FileReference(filename=name, partition_id=partition_id, row_count=rows),),
        byte_count=inputs * BYTES_PER_FILE,
        row_count=rows,
        min_key=keys[0],
        max_key=keys[1],
    )


def key_at(leaf: int) -> bytes:
    """Returns the first key of a leaf, encoded."""
    return encode_value(LONG, leaf * KEYS_PER_LEAF)


def keys_between(first: int, end: int) -> tuple[bytes, bytes]:
    """Returns the smallest and the largest key of the leaves from `first` to before `end`, encoded."""
    return key_at(first), encode_value(LONG, end * KEYS_PER_LEAF - 1)


def spread(whole: int, some: int) -> range:
    """Returns `some` numbers below `whole`, spread evenly."""
    return range(0, whole, max(1, whole // some))[:some] if some else range(0)


class _Wanted(NamedTuple):
    """The leaves that are claimed or full, and the number of divided partitions that have a reference."""

    claimed: range
    full: range
    above: int


class Tables:
    """A maker of tables in one database."""

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
        """Makes a table. The options are the same as in `several`."""
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
        """Makes tables whose leaves have `files_per_leaf` files each, which no job has claimed.

        Some leaves, evenly spread, may differ. One job for each of `claimed_leaves` leaves has claimed its
        files. `full_leaves` leaves have enough rows for a split. In addition, `above_leaves` divided
        partitions have one reference each.
        """
        wanted = _Wanted(spread(leaves, claimed_leaves), spread(leaves, full_leaves), above_leaves)
        tables = [
            StateTable(record, leaves, files_per_leaf, one_file_per_ingest)
            for record in self._empties(names, layout, properties)
        ]
        for first in range(0, len(tables), _CREATED_AT_ONCE):  # a transaction locks all tables that it makes
            with self._supplier.connection() as conn, conn.transaction():
                conn.execute(_SQL["make_stock"].on())
                conn.execute(_SQL["make_shared_facts" if one_file_per_ingest else "make_facts"].on())
                for table in tables[first : first + _CREATED_AT_ONCE]:
                    _fill(conn, table, wanted)
                conn.execute("drop table stock cascade")
        if leaves * files_per_leaf >= _AUTOVACUUM_ROWS_MIN:
            self._settle(tables)
        return tables

    def drop(self, table: StateTable) -> None:
        self._catalog.drop(table.record.name)

    def applied(self, table: StateTable) -> int:
        """Returns the number of applied commits to a table."""
        query = "select count(*) from applied_commit where table_id = %s"
        with self._supplier.connection() as conn:
            row = conn.execute(query, (table.record.table_id,)).fetchone()
        return int(row[0]) if row else 0

    def _empties(self, names: Sequence[str], layout: str, properties: Mapping[str, Any]) -> list[TableRecord]:
        """Makes empty tables without partition trees, many in a transaction, which is faster than `empty`."""
        given = TableProperties(**properties)
        properties_set = Jsonb(given.model_dump(exclude_unset=True))
        values = {"schema": Jsonb(SCHEMA.to_json()), "properties": properties_set, "layout": layout}
        add_table = _SQL["add_table"].on()
        records = []
        with self._supplier.connection() as conn:
            for first in range(0, len(names), _CREATED_AT_ONCE):
                with conn.transaction():
                    for name in names[first : first + _CREATED_AT_ONCE]:
                        row = conn.execute(add_table, {**values, "name": name}).fetchone()
                        assert row is not None  # noqa: S101 it is one row
                        record = TableRecord(row[0], name, SCHEMA, given, layout, uuid=row[1].hex)
                        FileReferenceStore(self._supplier, record).create(conn)
                        records.append(record)
        return records

    def _settle(self, tables: Sequence[StateTable]) -> None:
        """Runs vacuum, analyze and a checkpoint, which could otherwise begin during a measurement."""
        names = ["compaction_job", "partition", "applied_commit"]
        for table in tables:
            names += known_layout(table.record.layout).tables(table.record.table_id).values()
        with self._supplier.connection() as conn:
            conn.execute(f"vacuum analyze {', '.join(names)}")
            conn.execute("checkpoint")


def open_tables(dsn: str, objects: str) -> AbstractContextManager[Tables]:
    return closing(Tables(dsn, objects))


def _fill(conn: psycopg.Connection[Any], table: StateTable, wanted: _Wanted) -> None:
    """Copies a table's partitions, epoch, references, files and jobs into the database."""
    record, layout = table.record, known_layout(table.record.layout)
    nodes = list(table.nodes())
    _copy(conn, "copy_partitions", _partitions(record, nodes))
    created = [node.partition_id for node in nodes if node.children is None]
    values = {"table_id": record.table_id, "salt_buckets": record.properties.salt_buckets, "created": created}
    conn.execute(_SQL["add_epoch"].on(), values)
    conn.execute("truncate stock")
    _copy(conn, "copy_stock", _stock(table, nodes, wanted))
    own = layout.tables(record.table_id)["file_reference"]
    conn.execute(_SQL["add_references"].on(file_reference=own), values)
    conn.execute(layout.on("adopt", record.table_id), values)
    jobs = (f"{record.table_id}\t{table.job_id(n)}\t{table.partition_id(n)}\n" for n in wanted.claimed)
    _copy(conn, "copy_jobs", jobs)


def _partitions(record: TableRecord, nodes: Sequence[Node]) -> Iterator[str]:
    """Yields a line of COPY for each partition."""
    leaves_end = nodes[0].end

    def bound(leaf: int) -> str:
        return "{NULL}" if leaf in (0, leaves_end) else f'{{"\\\\\\\\x{key_at(leaf).hex()}"}}'

    uppers = {node.children[1] for node in nodes if node.children is not None}
    for node in nodes:
        is_upper = _NULL if node.parent_id is None else str(node.partition_id in uppers)
        begin = f"{record.table_id}\t{node.partition_id}\t{node.parent_id or _NULL}\t0"
        bounds = f"{bound(node.first)}\t{bound(node.end)}"
        if node.children is None:
            yield f"{begin}\t{_NULL}\t{bounds}\t{_NULL}\t{_NULL}\t{_NULL}\t{_NULL}\t{is_upper}\n"
        else:
            point = f"\\\\x{key_at(node.middle).hex()}"
            halves = "\t".join(node.children)
            yield f"{begin}\t0\t{bounds}\t0\t{point}\t{halves}\t{is_upper}\n"


def _stock(table: StateTable, nodes: Sequence[Node], wanted: _Wanted) -> Iterator[str]:
    """Yields a line of COPY for each reference, with the facts of its file."""
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
            yield f"{node.partition_id}\t{narrow_id(name).hex}\t{name}\t{facts}"


def _copy(conn: psycopg.Connection[Any], query: str, lines: Iterable[str]) -> None:
    rest = iter(lines)
    with conn.cursor().copy(_SQL[query].on()) as copy:
        while batch := list(islice(rest, _LINES_AT_ONCE)):
            copy.write("".join(batch))
