"""The indexes of row tables in one index database. An index is a copy of a row table's rows.

A copy is called a build. It has the current rows and recently superseded rows. The build with id N is a row
of the table `build`, with the tables current_N, superseded_N and incoming_N. Their columns are named by
column ids. One transaction updates the rows and records their version, so that a process that is killed
leaves no half-updated build.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql

from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.session import LONG, Connection, Isolation
from dormouse.postgres.transaction import rows_of, run_alone, run_lookup, run_statement, run_transaction
from dormouse.rows.cluster import Looked
from dormouse.rows.columns import Column
from dormouse.rows.emit import column_name

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.reading.streams import Interruption

# Indexes of single columns of a build: made while queries and changes go on, and dropped when unused.

INDEXED_BYTES_MAX = 2_600
"""The size of the longest text that an indexed column may have, in bytes.

PostgreSQL refuses index entries of more than 2,704 bytes.
"""

SLOW_QUERIES = 3
"""The number of slow queries with conditions on a column after which the column gets an index.

A single query is not worth an index, because each change of the rows has to update the index.
"""

_ENDED = (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)
logger = logging.getLogger(__name__)


class SlowColumns:
    """A count of this process's slow queries by the columns in their conditions. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[int, int]] = Counter()

    def wanted(self, table_id: int, column_ids: Collection[int]) -> list[int]:
        """Counts a slow query with conditions on columns. Returns the columns that now need an index."""
        keys = [(table_id, column_id) for column_id in column_ids]
        with self._lock:
            self._counts.update(keys)
            wanted = [key for key in keys if self._counts[key] >= SLOW_QUERIES]
            for key in wanted:
                del self._counts[key]
        return [column_id for _, column_id in wanted]


class ColumnIndexes:
    """The PostgreSQL indexes of single columns, in the builds of one database. Threads may share it."""

    def __init__(self, supplier: ConnectionSupplier) -> None:
        self._supplier = supplier

    def add(self, build_id: int, column_id: int) -> None:
        """Creates an index of a column, unless one of the column's texts is too long.

        Queries and changes of rows continue meanwhile. A change of columns cancels the creation, and leaves
        no index.
        """
        name, values = index_name(build_id, column_id), _values(build_id, column_id)
        rows = run_lookup(
            self._supplier, rows_of(_QUERIES["state"], values), operation="read an index of a column"
        )
        if not rows:
            return
        exists, is_valid, is_made = rows[0]
        if is_made and not is_valid:
            return  # another process is making it
        is_needed = run_transaction(
            self._supplier,
            lambda conn: fits(conn, build_id, column_id),
            read_only=True,
            scans=True,
            operation="read the texts of a column",
        )
        if is_needed and not is_valid:
            made = self._create(build_id, column_id, name if exists else None)
            if made is None:
                return
            is_needed = made
        mark = rows_of(_QUERIES["mark"], {**values, "is_needed": is_needed})
        run_statement(self._supplier, mark, operation="record an index of a column")

    def cancel(self, build_id: int) -> None:
        """Cancels statements that create column indexes of a build.

        Must be called before the build's tables change.
        """
        cancel = rows_of(_QUERIES["cancel"], {"current": f"current_{build_id}"})
        run_lookup(self._supplier, cancel, operation="stop indexing columns of rows")

    def drop_texts(self, build_id: int) -> None:
        """Drops the indexes of all text columns of a build, because a new text is too long for an index."""

        def work(conn: psycopg.Connection[Any]) -> None:
            values = {"current": f"current_{build_id}"}
            for (name,) in conn.execute(_QUERIES["of_texts"].on(), values).fetchall():
                conn.execute(f"drop index if exists {name}")

        self.cancel(build_id)
        run_alone(self._supplier, work, operation="drop an index of a column of rows")

    def drop_unused(self, build_id: int, unused_seconds: float) -> None:
        """Drops the column indexes of a build that no statement used for `unused_seconds`."""
        values = {"build_id": build_id, "unused_seconds": unused_seconds}
        run_statement(
            self._supplier, rows_of(_QUERIES["note_use"], values), operation="record uses of indexes"
        )
        unused = run_statement(
            self._supplier, rows_of(_QUERIES["forget_unused"], values), operation="forget unused indexes"
        )
        for (column_id,) in unused:
            logger.info("drop the index of column %d in build %d: it was not used", column_id, build_id)
            self._run(f"drop index concurrently if exists {index_name(build_id, column_id)}")

    def _create(self, build_id: int, column_id: int, left_over: str | None) -> bool | None:
        """Creates the index of a column, and returns True.

        Returns False if a text is too long, and None if another process cancelled the statement.
        """
        name = index_name(build_id, column_id)
        try:
            if left_over is not None:
                self._run(f"drop index concurrently if exists {left_over}")
            self._run(f"create index concurrently if not exists {name} {_on(build_id, column_id)}")
            self._run(f"analyze current_{build_id}")
        except psycopg.errors.ProgramLimitExceeded:
            self._run(f"drop index concurrently if exists {name}")
            return False
        except _ENDED as error:
            logger.info("an index of column %d in build %d was not made: %s", column_id, build_id, error)
            return None
        return True

    def _run(self, statement: str) -> None:
        """Executes a statement that may take long, outside a transaction."""
        with closing(self._supplier.limited(**LONG)) as patient:
            run_statement(
                patient,
                lambda conn: conn.execute(statement.encode(), prepare=False),
                operation="index a column of rows",
            )


def index_name(build_id: int, column_id: int) -> str:
    """Returns the name of the index of a column."""
    return f"current_{build_id:d}_{column_name(column_id)}"


def create_all(conn: psycopg.Connection[Any], build_id: int, column_ids: Collection[int]) -> list[int]:
    """Creates an index of each column, within the transaction that makes the build. Returns `column_ids`.

    Skips columns with texts that are too long. The result also has their ids, so that no job tries them
    again.
    """
    for column_id in column_ids:
        if fits(conn, build_id, column_id):
            conn.execute(
                f"create index {index_name(build_id, column_id)} {_on(build_id, column_id)}".encode()
            )
    return list(column_ids)


def fits(conn: psycopg.Connection[Any], build_id: int, column_id: int) -> bool:
    """Returns whether all values of a column are short enough for an index."""
    text = f"select max(octet_length({column_name(column_id)}::text)) from current_{build_id:d}"
    ((size,),) = conn.execute(text.encode()).fetchall()
    return (size or 0) <= INDEXED_BYTES_MAX


def _on(build_id: int, column_id: int) -> str:
    return f"on current_{build_id:d} ({column_name(column_id)}, row_id)"


def _values(build_id: int, column_id: int) -> dict[str, Any]:
    return {
        "build_id": build_id,
        "column_id": column_id,
        "current": f"current_{build_id:d}",
        "index": index_name(build_id, column_id),
    }


ANALYZED_ROWS_MIN = 5_000
TYPES = {"long": "bigint", "double": "float8", "string": 'text collate "C"', "boolean": "boolean"}
_QUERIES = load(__package__ or "", "builds")
_IS_AT = _QUERIES["is_at"].text.removesuffix(";")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Build:
    """The state of a build.

    `column_ids` are the columns of its tables, and `indexed_ids` those with an index. Queries of versions
    before `purged_version` can no longer read their next pages.
    """

    build_id: int
    version: int
    purged_version: int
    column_ids: Sequence[int]
    indexed_ids: Sequence[int]
    row_count: int
    is_retired: bool


@dataclass(frozen=True, slots=True)
class BuildSize:
    """A build with its size.

    `retired_seconds` is the time since the build was retired, or None if it is in use.
    """

    build_id: int
    table_uuid: UUID
    version: int
    row_count: int
    byte_count: int
    retired_seconds: float | None


class Unsure(Exception):
    """A sign that a single statement cannot answer a query: the caller must check the build first."""


class BuildBusy(Exception):
    """An error: another process is working on the index."""


class _Interruptible:
    """A supplier of connections whose statements another thread can cancel."""

    def __init__(self, supplier: Supplier, interruption: Interruption) -> None:
        self._supplier = supplier
        self._interruption = interruption

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        with self._supplier.connection() as conn:
            try:
                with self._interruption.ending(conn.cancel_safe):
                    yield conn
            except BaseException:
                if self._interruption.is_set:
                    conn.close()  # a late cancel must not hit another statement on this connection
                self._interruption.check()
                raise

    def cut(self, threads: Collection[int]) -> bool:
        return self._supplier.cut(threads)

    def close(self) -> None:
        self._supplier.close()


class Builds:
    """The builds of one database. Threads may share it."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier

    def ended_by(self, interruption: Interruption) -> Builds:
        """Returns an object for the same builds whose statements an interruption can cancel."""
        return Builds(_Interruptible(self._supplier, interruption))

    def read(
        self, looked: Looked, build_id: int, work: Callable[[psycopg.Connection[Any], Build], T]
    ) -> T | None:
        """Calls `work` with a build, in one snapshot of the database, and returns the result.

        Returns None if there is no such build.
        """

        def both(conn: psycopg.Connection[Any]) -> T | None:
            build = _find(conn, looked, build_id)
            return None if build is None else work(conn, build)

        return run_transaction(
            self._supplier, both, isolation=Isolation.REPEATABLE_READ, read_only=True, scans=True,
            operation="ask an index of rows",
        )  # fmt: skip

    def rows_at(
        self, looked: Looked, build_id: int, text: str, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Returns the rows of a query of `current_N`, if the build has the version of `looked`.

        One statement executes the query and checks the version, in one snapshot and one round trip. If it
        returns no rows, a second statement finds out whether the check failed. Raises `Unsure` if the build
        has another version, was retired or does not exist.
        """
        wanted = {
            "at_build_id": build_id,
            "at_version": looked.version,
            "at_table_uuid": looked.table_uuid,
            "at_incarnation_id": looked.incarnation_id,
        }
        # PostgreSQL checks the condition once, before it reads any row: a wrong build costs nothing
        gated = f"select page.* from ({text}) as page where ({_IS_AT})"

        def ask(statement: str) -> list[tuple[Any, ...]]:
            def work(conn: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
                if isinstance(conn, Connection) and conn.is_pooled:
                    raise Unsure  # a pooled session lacks the settings for scans
                return conn.execute(statement.encode(), {**values, **wanted}, binary=True).fetchall()

            return run_lookup(self._supplier, work, operation="ask an index of rows")

        try:
            rows = ask(gated)
            if not rows and ask(f"select ({_IS_AT}) and not exists ({text})") != [(True,)]:
                raise Unsure
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
            raise Unsure from None
        return rows

    def build(
        self,
        looked: Looked,
        columns: Sequence[Column],
        rows: pa.RecordBatchReader,
        indexed_ids: Collection[int] = (),
    ) -> int:
        """Makes a build with `rows`, the rows of the version of `looked`, and returns its id.

        Creates an index of each column whose id is in `indexed_ids`. Raises `BuildBusy`.
        """

        def work(conn: psycopg.Connection[Any]) -> int:
            if conn.execute(_QUERIES["alone"].on(), {"table_uuid": looked.table_uuid}).fetchone() != (True,):
                raise BuildBusy
            conn.execute(_QUERIES["patiently"].on())
            values: dict[str, Any] = {
                "table_uuid": looked.table_uuid,
                "instance_id": looked.instance_id,
                "incarnation_id": looked.incarnation_id,
                "version": looked.version,
                "column_ids": [column.column_id for column in columns],
            }
            build_id = int(conn.execute(_QUERIES["add"].on(), values).fetchall()[0][0])
            _create(conn, build_id, columns)
            names = ["row_id", "row_version", *(column_name(c.column_id or 0) for c in columns)]
            count = _copy(conn, f"current_{build_id}", names, rows, frozen=True)
            conn.execute(f"alter table current_{build_id} add primary key (row_id)")
            indexed = create_all(conn, build_id, [i for i in indexed_ids if i in values["column_ids"]])
            conn.execute(f"analyze current_{build_id}")
            filled = {"build_id": build_id, "row_count": count, "indexed_ids": indexed}
            conn.execute(_QUERIES["filled"].on(), filled)
            conn.execute(_QUERIES["reached"].on(), {"build_id": build_id, "version": looked.version})
            return build_id

        # no retry: a reader yields its rows only once
        return run_transaction(
            self._supplier, work, scans=True, attempts_max=1, operation="build an index of rows"
        )

    def bring(
        self,
        looked: Looked,
        build: Build,
        columns: Sequence[Column],
        added: Sequence[Column],
        changed: pa.RecordBatchReader,
    ) -> bool:
        """Updates a build to the version of `looked`, with the rows that changed since its own version.

        `added` has the columns that the build lacks, with the defaults that older rows get. If another
        process updated or retired the build meanwhile, does nothing and returns False.
        """

        def work(conn: psycopg.Connection[Any]) -> bool:
            held = conn.execute(_QUERIES["hold"].on(), {"build_id": build.build_id}).fetchall()
            if not held or Build(*held[0]).version != build.version or Build(*held[0]).is_retired:
                return False
            conn.execute(_QUERIES["patiently"].on())
            for column in added:
                _add_column(conn, build.build_id, column)
            _bring(conn, looked, build, columns, changed)
            return True

        if added:  # altering the tables waits for their readers
            return run_alone(
                self._supplier,
                work,
                scans=True,
                attempts_max=1,
                operation="bring an index of rows up to date",
            )
        return run_transaction(
            self._supplier, work, scans=True, attempts_max=1, operation="bring an index of rows up to date"
        )

    def purge(self, build_id: int, page_seconds: float) -> None:
        """Deletes rows that were superseded more than `page_seconds` ago."""

        def work(conn: psycopg.Connection[Any]) -> None:
            values = {"build_id": build_id, "page_seconds": page_seconds}
            for (purged,) in conn.execute(_QUERIES["purge"].on(), values).fetchall():
                query = _QUERIES["remove_purged"].on(superseded=f"superseded_{build_id}")
                conn.execute(query, {"purged_version": purged})

        run_transaction(self._supplier, work, scans=True, operation="purge an index of rows")

    def retire(self, build_ids: Sequence[int]) -> None:
        """Marks builds as retired.

        Only queries that have begun continue to read a retired build, until it is dropped.
        """
        run_transaction(
            self._supplier,
            lambda conn: conn.execute(_QUERIES["retire"].on(), {"build_ids": list(build_ids)}),
            operation="retire an index of rows",
        )

    def drop(self, build_id: int, table_uuid: UUID) -> None:
        """Drops the build of a table. Does nothing if the id now belongs to another table's build.

        This can happen after the index database was created again.
        """

        def work(conn: psycopg.Connection[Any]) -> None:
            owners = conn.execute(_QUERIES["whose"].on(), {"build_id": build_id}).fetchall()
            if owners and owners != [(table_uuid,)]:
                return
            names = ", ".join(f"{kind}_{build_id}" for kind in ("current", "superseded", "incoming"))
            conn.execute(f"drop table if exists {names}")
            conn.execute(_QUERIES["forget"].on(), {"build_id": build_id})

        run_alone(self._supplier, work, operation="drop an index of rows")

    def all(self, instance_id: UUID) -> list[BuildSize]:
        """Returns all builds of an instance in this database."""

        def work(conn: psycopg.Connection[Any]) -> list[BuildSize]:
            rows = conn.execute(_QUERIES["all"].on(), {"instance_id": instance_id}).fetchall()
            return [BuildSize(*row) for row in rows]

        return run_transaction(
            self._supplier, work, read_only=True, scans=True, operation="list indexes of rows"
        )


def has_version(conn: psycopg.Connection[Any], build: Build, version: int) -> bool:
    """Returns whether a build has the rows of a version: its present version, or one that it had before."""
    if version in (build.version, build.purged_version):
        return True
    values = {"build_id": build.build_id, "version": version}
    return conn.execute(_QUERIES["was_at"].on(), values).fetchone() is not None


def _find(conn: psycopg.Connection[Any], looked: Looked, build_id: int) -> Build | None:
    values = {
        "build_id": build_id,
        "table_uuid": looked.table_uuid,
        "incarnation_id": looked.incarnation_id,
    }
    row = conn.execute(_QUERIES["find"].on(), values).fetchone()
    return None if row is None else Build(*row)


def _create(conn: psycopg.Connection[Any], build_id: int, columns: Sequence[Column]) -> None:
    cells = ["row_id bigint not null", "row_version bigint not null"]
    cells += [f"{column_name(column.column_id or 0)} {TYPES[column.stored.name]}" for column in columns]
    listed = ", ".join(cells)
    conn.execute(f"create unlogged table current_{build_id} ({listed})")
    conn.execute(f"create unlogged table superseded_{build_id} ({listed}, until_version bigint not null)")
    conn.execute(f"create index on superseded_{build_id} (until_version)")
    conn.execute(f"create unlogged table incoming_{build_id} ({listed}, row_deleted boolean not null)")


def _add_column(conn: psycopg.Connection[Any], build_id: int, column: Column) -> None:
    """Adds a column to the tables of a build. Existing rows get its default."""
    name, kind = column_name(column.column_id or 0), TYPES[column.stored.name]
    default = sql.Literal(column.stored_default).as_string(conn)
    for table in ("current", "superseded", "incoming"):
        conn.execute(f"alter table {table}_{build_id} add column {name} {kind} default {default}".encode())
        conn.execute(f"alter table {table}_{build_id} alter column {name} drop default")


def _bring(
    conn: psycopg.Connection[Any],
    looked: Looked,
    build: Build,
    columns: Sequence[Column],
    changed: pa.RecordBatchReader,
) -> None:
    number = build.build_id
    ids = [column.column_id or 0 for column in columns]
    tables = {name: f"{name}_{number}" for name in ("current", "superseded", "incoming")}

    def run(name: str, *known: str, of: Sequence[int] = ids) -> int:
        """Executes a query on the tables `known` of the build, and returns the number of affected rows."""
        listed = ", ".join(["row_id", "row_version", *map(column_name, of)])
        query = replace(_QUERIES[name], text=_QUERIES[name].text.replace("{columns}", listed))
        return conn.execute(
            query.on(**{kind: tables[kind] for kind in known}), {"version": looked.version}
        ).rowcount

    run("clear", "incoming")
    names = ["row_id", "row_version", "row_deleted", *map(column_name, ids)]
    count = _copy(conn, tables["incoming"], names, changed)
    more = 0
    if count:
        if count >= ANALYZED_ROWS_MIN:
            conn.execute(f"analyze {tables['incoming']}")
        # also the dropped columns, for pages of older versions
        run("supersede", "superseded", "current", "incoming", of=sorted({*build.column_ids, *ids}))
        more -= run("remove", "current", "incoming")
        more += run("put", "current", "incoming")
    values = {"build_id": number, "version": looked.version}
    known = sorted({*build.column_ids, *ids})
    conn.execute(_QUERIES["brought"].on(), {**values, "more": more, "column_ids": known})
    conn.execute(_QUERIES["reached"].on(), values)


def _copy(
    conn: psycopg.Connection[Any],
    table: str,
    names: Sequence[str],
    rows: pa.RecordBatchReader,
    *,
    frozen: bool = False,
) -> int:
    """Writes rows into a database table with COPY, and returns their number."""
    count = 0
    options = "format csv, freeze" if frozen else "format csv"
    with (
        conn.cursor() as cursor,
        cursor.copy(f"copy {table} ({', '.join(names)}) from stdin ({options})") as copy,
    ):
        for batch in rows:
            count += batch.num_rows
            copy.write(_csv(batch))
    return count


def _csv(batch: pa.RecordBatch) -> bytes:
    """Returns rows as CSV for COPY. Texts are in quotes, and a null is an empty field."""
    from pyarrow import csv

    sink = BytesIO()
    csv.write_csv(batch, sink, csv.WriteOptions(include_header=False, quoting_style="needed"))
    return sink.getvalue()
