"""The indexes in one database: each a copy of a table's current rows, and of those superseded lately.

A build is a row of `build` with the tables current_N, superseded_N and incoming_N; columns are called by
their ids. It is brought from one version to another in one transaction, which also says so: a process that is
killed has done all of it, or nothing.
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

# The indexes of single columns of a build: made beside readers and changes, and dropped without use.

INDEXED_BYTES_MAX = 2_600
"""PostgreSQL refuses an entry of more than 2,704 bytes, with the row's id, that it cannot compress."""

SLOW_QUERIES = 3
"""After so many slow queries, a column that they look for rows in gets an index.

A query that is asked once is not worth an index, which each change of the rows pays for.
"""

_ENDED = (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)
logger = logging.getLogger(__name__)


class SlowColumns:
    """The columns that slow queries of this process looked for rows in. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[int, int]] = Counter()

    def wanted(self, table_id: int, column_ids: Collection[int]) -> list[int]:
        """Counts one slow query of these columns; returns those of them that are to get an index now."""
        keys = [(table_id, one) for one in column_ids]
        with self._lock:
            self._counts.update(keys)
            wanted = [key for key in keys if self._counts[key] >= SLOW_QUERIES]
            for key in wanted:
                del self._counts[key]
        return [column_id for _, column_id in wanted]


class ColumnIndexes:
    """The column indexes of the builds of one database. Threads may share it."""

    def __init__(self, supplier: ConnectionSupplier) -> None:
        self._supplier = supplier

    def add(self, build_id: int, column_id: int) -> None:
        """Gives a column an index, unless a text of it is too long for one.

        Queries and changes go on meanwhile. A change of columns ends it: the column then has no index.
        """
        name, values = index_name(build_id, column_id), _values(build_id, column_id)
        found = run_lookup(
            self._supplier, rows_of(_QUERIES["state"], values), operation="look at an index of a column"
        )
        if not found:
            return
        is_there, is_valid, is_made = found[0]
        if is_made and not is_valid:
            return  # by another process
        is_needed = run_transaction(
            self._supplier,
            lambda conn: fits(conn, build_id, column_id),
            read_only=True,
            scans=True,
            operation="look at the texts of a column",
        )
        if is_needed and not is_valid:
            made = self._create(build_id, column_id, name if is_there else None)
            if made is None:
                return
            is_needed = made
        mark = rows_of(_QUERIES["mark"], {**values, "is_needed": is_needed})
        run_statement(self._supplier, mark, operation="record an index of a column")

    def cancel(self, build_id: int) -> None:
        """Ends the work on column indexes of a build, whose tables are about to be changed."""
        cancel = rows_of(_QUERIES["cancel"], {"current": f"current_{build_id}"})
        run_lookup(self._supplier, cancel, operation="stop indexing columns of rows")

    def drop_texts(self, build_id: int) -> None:
        """Drops the indexes of columns of text for good: a text came that is too long for one."""

        def work(conn: psycopg.Connection[Any]) -> None:
            values = {"current": f"current_{build_id}"}
            for (name,) in conn.execute(_QUERIES["of_texts"].on(), values).fetchall():
                conn.execute(f"drop index if exists {name}")

        self.cancel(build_id)
        run_alone(self._supplier, work, operation="drop an index of a column of rows")

    def drop_unused(self, build_id: int, unused_seconds: float) -> None:
        """Drops the indexes that no statement used for so long."""
        values = {"build_id": build_id, "unused_seconds": unused_seconds}
        run_statement(self._supplier, rows_of(_QUERIES["note_use"], values), operation="note uses of indexes")
        unused = run_statement(
            self._supplier, rows_of(_QUERIES["forget_unused"], values), operation="forget unused indexes"
        )
        for (column_id,) in unused:
            logger.info("an index of column %d in build %d was not used, and is dropped", column_id, build_id)
            self._run(f"drop index concurrently if exists {index_name(build_id, column_id)}")

    def _create(self, build_id: int, column_id: int, left_over: str | None) -> bool | None:
        """Returns whether the index was made; False: a text is too long for it; None: it was ended."""
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
        """Executes a statement that no transaction may hold, and that may take long."""
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
    """Gives columns an index each, within the transaction that makes their build; returns `column_ids`."""
    for one in column_ids:
        if fits(conn, build_id, one):
            conn.execute(f"create index {index_name(build_id, one)} {_on(build_id, one)}".encode())
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
    """An index as it is; pages of versions before `purged_version` have expired."""

    build_id: int
    version: int
    purged_version: int
    column_ids: Sequence[int]
    indexed_ids: Sequence[int]
    row_count: int
    is_retired: bool


@dataclass(frozen=True, slots=True)
class BuildSize:
    """A build among all of its database; `retired_seconds` since another took its place, if one has."""

    build_id: int
    table_uuid: UUID
    version: int
    row_count: int
    byte_count: int
    retired_seconds: float | None


class Unsure(Exception):
    """A look at the build itself has to tell."""


class BuildBusy(Exception):
    """Another process works on it."""


class _Interruptible:
    """A supplier whose connections' statements another thread ends."""

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
                    conn.close()  # a cancel may be on its way, and is for nobody else's statement
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
        """The same, whose statements end when it is set."""
        return Builds(_Interruptible(self._supplier, interruption))

    def read(
        self, looked: Looked, build_id: int, work: Callable[[psycopg.Connection[Any], Build], T]
    ) -> T | None:
        """What work finds out of a build at one moment; None when there is no such build of the table."""

        def both(conn: psycopg.Connection[Any]) -> T | None:
            found = _find(conn, looked, build_id)
            return None if found is None else work(conn, found)

        return run_transaction(
            self._supplier, both, isolation=Isolation.REPEATABLE_READ, read_only=True, scans=True,
            operation="ask an index of rows",
        )  # fmt: skip

    def rows_at(
        self, looked: Looked, build_id: int, text: str, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """The rows of a query of `current_N`, if the build is of the version that was looked at.

        It is one statement, so of one moment, and one round trip; without rows there is another, which tells
        that there are none. `Unsure`: the build is of another version, retired or gone.
        """
        wanted = {
            "at_build_id": build_id,
            "at_version": looked.version,
            "at_table_uuid": looked.table_uuid,
            "at_incarnation_id": looked.incarnation_id,
        }
        # planned as a gate: nothing is read when it is shut
        gated = f"select page.* from ({text}) as page where ({_IS_AT})"

        def ask(statement: str) -> list[tuple[Any, ...]]:
            def work(conn: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
                if isinstance(conn, Connection) and conn.is_pooled:
                    raise Unsure  # its sessions do not scan
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
        """Makes a build of the rows of the version that was looked at; returns its id.

        Those of its columns that are among `indexed_ids` have an index each. Raises `BuildBusy`.
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
            found = conn.execute(_QUERIES["add"].on(), values).fetchall()
            build_id = int(found[0][0])
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

        # a reader gives its rows once
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
        """Brings a build to the version that was looked at, by what changed since its own; once.

        `added` are the columns that it does not have, as they were when they were added. False when another
        was faster: nothing is done then.
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

        if added:  # the tables change, which waits for those that read them
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
        """Removes rows that were superseded so long ago."""

        def work(conn: psycopg.Connection[Any]) -> None:
            values = {"build_id": build_id, "page_seconds": page_seconds}
            for (purged,) in conn.execute(_QUERIES["purge"].on(), values).fetchall():
                query = _QUERIES["remove_purged"].on(superseded=f"superseded_{build_id}")
                conn.execute(query, {"purged_version": purged})

        run_transaction(self._supplier, work, scans=True, operation="purge an index of rows")

    def retire(self, build_ids: Sequence[int]) -> None:
        """They serve pages that have begun, for a while, and nothing else."""
        run_transaction(
            self._supplier,
            lambda conn: conn.execute(_QUERIES["retire"].on(), {"build_ids": list(build_ids)}),
            operation="retire an index of rows",
        )

    def drop(self, build_id: int, table_uuid: UUID) -> None:
        """Removes all of a build, unless it is another table's: the id may be of an older database."""

        def work(conn: psycopg.Connection[Any]) -> None:
            found = conn.execute(_QUERIES["whose"].on(), {"build_id": build_id}).fetchall()
            if found and found != [(table_uuid,)]:
                return
            names = ", ".join(f"{kind}_{build_id}" for kind in ("current", "superseded", "incoming"))
            conn.execute(f"drop table if exists {names}")
            conn.execute(_QUERIES["forget"].on(), {"build_id": build_id})

        run_alone(self._supplier, work, operation="drop an index of rows")

    def all(self, instance_id: UUID) -> list[BuildSize]:
        """Those of an instance."""

        def work(conn: psycopg.Connection[Any]) -> list[BuildSize]:
            rows = conn.execute(_QUERIES["all"].on(), {"instance_id": instance_id}).fetchall()
            return [BuildSize(*row) for row in rows]

        return run_transaction(
            self._supplier, work, read_only=True, scans=True, operation="list indexes of rows"
        )


def has_version(conn: psycopg.Connection[Any], build: Build, version: int) -> bool:
    """Whether a build has the rows of a version: it is, or was, brought to just that."""
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
    """Rows that are there have its default."""
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
        """Executes a query of ours on these tables of the build."""
        listed = ", ".join(["row_id", "row_version", *map(column_name, of)])
        query = replace(_QUERIES[name], text=_QUERIES[name].text.replace("{columns}", listed))
        return conn.execute(
            query.on(**{one: tables[one] for one in known}), {"version": looked.version}
        ).rowcount

    run("clear", "incoming")
    names = ["row_id", "row_version", "row_deleted", *map(column_name, ids)]
    count = _copy(conn, tables["incoming"], names, changed)
    more = 0
    if count:
        if count >= ANALYZED_ROWS_MIN:
            conn.execute(f"analyze {tables['incoming']}")
        # those that were dropped since, too
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
    """Copies rows into a table by COPY; gives how many."""
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
    """Rows as COPY reads them: text in quotes, and nothing where there is no value."""
    from pyarrow import csv

    sink = BytesIO()
    csv.write_csv(batch, sink, csv.WriteOptions(include_header=False, quoting_style="needed"))
    return sink.getvalue()
