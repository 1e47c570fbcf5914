"""Tables as they are when many compactions finish at once, made with COPY and never through the store.

Each leaf has files of as many ingests as one job takes; all claimed by the leaf's job. An ingest wrote a file
for each leaf, or a single one that all leaves refer to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from dormouse.catalog import Catalog
from dormouse.commits.requests import Envelope, ReplaceFileReferences
from dormouse.files.attempts import WriteAttempts
from dormouse.files.layout import layout
from dormouse.files.store import FileReferenceStore
from dormouse.model.file_reference import FileReference, FileWithReferences, ReplaceFileReferencesRequest
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableRecord
from dormouse.model.text import narrow_hex
from dormouse.model.types import LONG
from dormouse.objects import open_store
from dormouse.postgres import ConnectionSupplier, migrate

FILES_PER_JOB = 11
ROWS_PER_FILE = 100_000
BYTES_PER_FILE = 4_000_000
SCHEMA = Schema([Field("key", LONG)], [], [Field("value", LONG)])
_KEY = bytes(range(9))
_CREATED_AT_ONCE = 50
_ADD_TABLE = (
    "insert into tables (name, schema, properties, layout) values (%s, %s, %s, %s) returning table_id"
)
_AUTOVACUUM_ROWS_MIN = 50
"""Smaller tables are never vacuumed or analyzed of themselves."""

_REFERENCES = (
    "copy {table} (table_id, partition_id, file_id, filename, row_count, count_approximate, "
    "only_contains_data_for_this_partition, job_id) from stdin"
)


@dataclass(frozen=True)
class StateTable:
    """A table with a job on each of its leaves; jobs are known by their number."""

    record: TableRecord
    jobs: int
    one_file_per_ingest: bool = False
    files_per_job: int = FILES_PER_JOB

    def partition_id(self, job: int) -> str:
        return f"0-{2 * job + 1}"

    def job_id(self, job: int) -> str:
        return str(self._id("job", job))

    def inputs(self, job: int) -> tuple[str, ...]:
        leaf = "all" if self.one_file_per_ingest else self.partition_id(job)
        return tuple(f"{ingest}/{leaf}.parquet" for ingest in self.ingests())

    def ingests(self) -> list[str]:
        """The prefixes of the names of what each ingest wrote."""
        prefix = self.record.object_prefix
        return [f"{prefix}{self._id('ingest', ingest)}" for ingest in range(self.files_per_job)]

    def keys(self, job: int) -> tuple[bytes, bytes]:
        """The smallest and largest key of the job's files."""
        return _KEY, _KEY

    def request(self, job: int) -> ReplaceFileReferencesRequest:
        """What a compaction sends when it is done."""
        partition, job_id = self.partition_id(job), self.job_id(job)
        name = f"{self.record.object_prefix}{job_id}/{partition}.parquet"
        rows = self.files_per_job * ROWS_PER_FILE
        min_key, max_key = self.keys(job)
        reference = FileReference(filename=name, partition_id=partition, row_count=rows)
        file = FileWithReferences(
            filename=name,
            references=(reference,),
            byte_count=self.files_per_job * BYTES_PER_FILE,
            row_count=rows,
            min_key=min_key,
            max_key=max_key,
        )
        return ReplaceFileReferencesRequest(
            job_id=job_id,
            partition_id=partition,
            input_filenames=self.inputs(job),
            new_reference=reference,
            new_file=file,
        )

    def commit_id(self, job: int) -> str:
        return str(self._id("commit", job))

    def envelope(self, job: int) -> Envelope:
        """The same as a commit request, with a commit id of its own."""
        request = ReplaceFileReferences(
            commit_id=self.commit_id(job), table=self.record.name, requests=(self.request(job),)
        )
        return Envelope(request, self.record.table_id)

    def _id(self, kind: str, number: int) -> UUID:
        text = f"{self.record.table_id} {kind} {number}"
        return UUID(bytes=hashlib.blake2b(text.encode(), digest_size=16).digest())


class Tables:
    """Makes tables in one database."""

    def __init__(self, dsn: str, objects: str) -> None:
        self.dsn = dsn
        self._supplier = ConnectionSupplier(dsn)
        self._catalog = Catalog(self._supplier, WriteAttempts(self._supplier, open_store(objects)))

    def close(self) -> None:
        self._supplier.close()

    def empty(self, name: str, layout: str = "file_table", **properties: Any) -> TableRecord:
        return self._catalog.create(name, SCHEMA, TableProperties(**properties), layout)

    def empties(self, names: Sequence[str], layout: str, properties: Mapping[str, Any]) -> list[TableRecord]:
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

    def with_leaves(self, name: str, jobs: int, layout: str = "file_table", **options: Any) -> StateTable:
        """A table with a leaf, and its files, for each job; options as for `several`."""
        (table,) = self.several([name], jobs, layout, **options)
        return table

    def several(
        self,
        names: Sequence[str],
        jobs: int,
        layout: str = "file_table",
        *,
        assigned: bool = True,
        one_file_per_ingest: bool = False,
        **properties: Any,
    ) -> list[StateTable]:
        """Tables of so many jobs each; `assigned`: the files are the jobs'."""
        records = self.empties(names, layout, properties)
        tables = [StateTable(record, jobs, one_file_per_ingest) for record in records]
        with self._supplier.connection() as conn, conn.transaction():
            for table in tables:
                _fill(conn, table, assigned=assigned)
        if jobs * FILES_PER_JOB >= _AUTOVACUUM_ROWS_MIN:
            self.settle(tables)
        return tables

    def connection(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return self._supplier.connection()

    def drop(self, table: StateTable) -> None:
        self._catalog.drop(table.record.name)

    def settle(self, tables: Sequence[StateTable]) -> None:
        """What autovacuum and the checkpointer would have done by the time the jobs end."""
        names = ["compaction_job", "partition", "applied_commit"]
        for table in tables:
            names += layout(table.record.layout).tables(table.record.table_id).values()
        with self._supplier.connection() as conn:
            conn.execute(f"vacuum analyze {', '.join(names)}")
            conn.execute("checkpoint")

    def count(self, query: str, *values: Any) -> int:
        """The one number that a query gives."""
        with self._supplier.connection() as conn:
            row = conn.execute(query, values).fetchone()
        return int(row[0]) if row else 0

    def applied(self, table: StateTable) -> int:
        """How many commits to it are applied."""
        return self.count("select count(*) from applied_commit where table_id = %s", table.record.table_id)


@contextmanager
def own_database(dsn: str) -> Iterator[str]:
    """A database to measure in; the server need not write it to disk any more when it stops."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create database benchmark")
    mine = make_conninfo(dsn, dbname="benchmark")
    try:
        migrate(mine)
        yield mine
    finally:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("drop database benchmark with (force)")


@contextmanager
def open_tables(dsn: str, objects: str) -> Iterator[Tables]:
    tables = Tables(dsn, objects)
    try:
        yield tables
    finally:
        tables.close()


def _fill(conn: psycopg.Connection[Any], table: StateTable, *, assigned: bool) -> None:
    record, known = table.record, layout(table.record.layout)
    own = known.tables(record.table_id)["file_reference"]
    numbers = list(range(table.jobs))
    with conn.cursor().copy(_REFERENCES.format(table=own)) as copy:
        for job in numbers:
            job_id = table.job_id(job) if assigned else "\\N"
            partition = table.partition_id(job)
            copy.write(
                "".join(
                    f"{record.table_id}\t{partition}\t{narrow_hex(name)}\t{name}\t{ROWS_PER_FILE}\tf\tt\t{job_id}\n"
                    for name in table.inputs(job)
                )
            )
    conn.execute(
        "create temp table fact as select distinct file_id, filename, "
        "%s::bigint as byte_count, %s::bigint as row_count, %s::bytea as min_key, %s::bytea as max_key, "
        "now() as added_at, "
        f"null::timestamptz as unreferenced_at from {own}",
        (BYTES_PER_FILE, ROWS_PER_FILE, _KEY, _KEY),
    )
    values = {"table_id": record.table_id, "salt_buckets": record.properties.salt_buckets}
    conn.execute(known.on("adopt", record.table_id), values)
    conn.execute("drop table fact")
    conn.execute(
        "insert into partition (table_id, partition_id, created_epoch, min_keys, max_keys) "
        "select %s, '0-' || 2 * n + 1, 0, array[''::bytea], array[''::bytea] "
        "from generate_series(0, %s - 1) n",
        (record.table_id, table.jobs),
    )
    if assigned:
        with conn.cursor().copy("copy compaction_job (table_id, job_id, partition_id) from stdin") as copy:
            for job in numbers:
                copy.write(f"{record.table_id}\t{table.job_id(job)}\t{table.partition_id(job)}\n")
