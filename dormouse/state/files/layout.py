"""The SQL of each layout, and access to a table's own PostgreSQL tables.

A layout supplies parts of the store's statements, and some whole statements. `OwnTables` runs statements on
the PostgreSQL tables of one table. If the table is converted to another layout, it uses that layout.

Maintenance finds its work by looking at the partitions that have changed (`OwnTables.look`). A look reads:

- the partitions to which references were added by transactions that the snapshot of the last look did not
  see;
- the partitions that are marked.

A look marks the partitions that need work, and records its own snapshot. Once a day, and when the table's
properties have changed, it reads all partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.types.json import Jsonb

from dormouse.errors import InvalidInput, TableNotFound
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.table import TableRecord
from dormouse.model.text import narrow_bytes
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import (
    Queries,
    Query,
    Statement,
    Uuids,
    booleans,
    bytes_,
    integers,
    load,
    texts,
)
from dormouse.postgres.session import PAGED, Isolation
from dormouse.postgres.transaction import allow_scans, bounded, fetched, rows_of, run_lookup, run_transaction

# Conversions of values to arrays for the SQL, and of rows to values.

Parameters = dict[str, Any]
_REFERENCE_FIELDS = tuple(field.name for field in fields(FileReference))
# parts that a layout supplies to the store's statements; all its other queries are whole statements
_PARTS = (
    "live", "track", "is_tracked", "lock_file", "forget_files", "counts_added", "counts_changed",
    "forget_all", "file_facts", "create_files", "attach_files", "lock", "count_unreferenced",
    "mark_referenced",
)  # fmt: skip
# the names differ, so that a writer that missed a conversion cannot write into the wrong tables
_TABLES = {
    "file_table": {"file_reference": "file_reference", "file": "file"},
    "salted_counts": {"file_reference": "salted_reference", "file_count": "file_count"},
    "dummy_reference": {"file_reference": "marked_reference"},
}
_MODULES = (
    "store", "parts", "reads", "compaction_jobs", "layout", "watermarks", "totals", "checks", "moves",
)  # fmt: skip
_STORE, _SHARED_PARTS, _READS, _JOBS, _LAYOUT, _WATERMARKS, _TOTALS, _CHECKS, _MOVES = (
    load(__package__ or "", name) for name in _MODULES
)
LAYOUTS = tuple(_TABLES)
MAY_BE_OF = _SHARED_PARTS["may_be_of"]
T = TypeVar("T")
LOOKUPS_MAX = 20
ATTEMPTS_MAX = 30
"""The number of attempts of a transaction that conflicts with others.

It is enough for hundreds of serializable writers.
"""
logger = logging.getLogger(__name__)
Purpose = Literal["jobs", "splits", "pushes", "merges"]
ITS_PARTITION = _WATERMARKS["its_partition"]
GONE_SINCE = _SHARED_PARTS["gone_since"]
IS_LOGGED = _SHARED_PARTS["is_logged"]
IS_FRESH = _WATERMARKS["is_fresh"]
IS_OPEN = _JOBS["is_open"]
_HOLD = _WATERMARKS["hold"].including(is_fresh=IS_FRESH)


def reference_arrays(
    prefix: str, references: Sequence[FileReference], ids: Mapping[str, bytes] | None = None
) -> Parameters:
    """Returns references as arrays, one for each column, with `prefix` in their names.

    `ids` has the `narrow_bytes` of filenames; without it, they are computed.
    """
    names = [r.filename for r in references]
    columns = {
        "partition_ids": texts([r.partition_id for r in references]),
        "file_ids": Uuids([ids[name] for name in names] if ids else list(map(narrow_bytes, names))),
        "filenames": texts(names),
        "row_counts": integers([r.row_count for r in references]),
        "approximate": booleans([r.count_approximate for r in references]),
        "only": booleans([r.only_contains_data_for_this_partition for r in references]),
    }
    return {f"{prefix}_{name}": values for name, values in columns.items()}


def file_arrays(commits: Sequence[int], files: Sequence[FileWithReferences]) -> Parameters:
    """Returns files and their references as arrays, one for each column.

    `commits` has the number of each file's commit.
    """
    references = [(n, reference) for n, f in zip(commits, files, strict=True) for reference in f.references]
    references.sort(key=lambda pair: pair[1].partition_id)  # inserts neighbours in the index together
    ids = {f.filename: narrow_bytes(f.filename) for f in files}
    return {
        "commits": integers(commits),
        "file_ids": Uuids([ids[f.filename] for f in files]),
        "filenames": texts([f.filename for f in files]),
        "byte_counts": integers([f.byte_count for f in files]),
        "row_counts": integers([f.row_count for f in files]),
        "min_keys": bytes_([f.min_key for f in files]),
        "max_keys": bytes_([f.max_key for f in files]),
        "digests": Uuids([f.digest for f in files]),
        "deletions_till": integers([f.deletions_till for f in files]),
        "referenced": booleans([bool(f.references) for f in files]),
        "file_contents": bytes_([f.content for f in files]),
        "ref_commits": integers([n for n, _ in references]),
        **reference_arrays("ref", [reference for _, reference in references], ids),
    }


def key_arrays(keys: Iterable[tuple[str, str]]) -> Parameters:
    """Returns (partition id, filename) pairs as arrays, one for each column."""
    listed = list(keys)
    return {
        "partition_ids": texts([p for p, _ in listed]),
        "file_ids": Uuids([narrow_bytes(f) for _, f in listed]),
    }


def assign_arrays(commits: Sequence[int], requests: Sequence[AssignJobIdRequest]) -> Parameters:
    return {
        "commits": integers(commits),
        "partition_ids": texts([r.partition_id for r in requests]),
        "job_ids": texts([r.job_id for r in requests]),
        **_input_arrays([r.filenames for r in requests]),
    }


def replace_arrays(commits: Sequence[int], requests: Sequence[ReplaceFileReferencesRequest]) -> Parameters:
    outputs = [(n, r, r.new_reference) for n, r in enumerate(requests, 1) if r.new_reference is not None]
    files = [request.new_file for _, request, _ in outputs]
    return {
        "commits": integers(commits),
        "partition_ids": texts([r.partition_id for r in requests]),
        "job_ids": texts([r.job_id for r in requests]),
        "deletions_till": integers([r.deletions_till for r in requests]),
        **_input_arrays([r.input_filenames for r in requests]),
        "out_requests": integers([n for n, _, _ in outputs]),
        **reference_arrays("out", [reference for _, _, reference in outputs]),
        "out_byte_counts": integers([f.byte_count if f else None for f in files]),
        "out_min_keys": bytes_([f.min_key if f else None for f in files]),
        "out_max_keys": bytes_([f.max_key if f else None for f in files]),
        "out_digests": Uuids([f.digest if f else None for f in files]),
        "out_deletions_till": integers([r.deletions_till for _, r, _ in outputs]),
    }


def split_arrays(commits: Sequence[int], requests: Sequence[SplitFileReferenceRequest]) -> Parameters:
    news = [request.new_references for request in requests]
    return {
        "commits": integers(commits),
        **key_arrays((r.old_reference.partition_id, r.old_reference.filename) for r in requests),
        "filenames": texts([r.old_reference.filename for r in requests]),
        "targets": texts([texts([new.partition_id for new in group]) for group in news]),
        "row_counts": texts([integers([new.row_count for new in group]) for group in news]),
        "approximate": texts([booleans([new.count_approximate for new in group]) for group in news]),
        "only": texts(
            [booleans([new.only_contains_data_for_this_partition for new in group]) for group in news]
        ),
    }


def forget_arrays(commits: Sequence[int], filenames: Sequence[str]) -> Parameters:
    return {
        "commits": integers(commits),
        "file_ids": Uuids(list(map(narrow_bytes, filenames))),
        "filenames": texts(filenames),
    }


def reference_from_row(row: Sequence[Any]) -> FileReference:
    """Returns a row, with the columns of the query `reference_columns`, as a reference."""
    return FileReference(**dict(zip(_REFERENCE_FIELDS, row, strict=True)))


def _input_arrays(groups: Sequence[Sequence[str]]) -> Parameters:
    """Returns the ids of the files of all groups, and the first and last position of each group in them.

    Positions count from 1.
    """
    sizes = list(map(len, groups))
    lasts = list(accumulate(sizes))
    return {
        "inputs": Uuids([narrow_bytes(name) for group in groups for name in group]),
        "firsts": integers([last - size + 1 for last, size in zip(lasts, sizes, strict=True)]),
        "lasts": integers(lasts),
    }


@dataclass(frozen=True)
class Layout:
    """The SQL of one layout.

    For example, `queries["replace"]` is the store's statement `replace` with the layout's parts in it.
    """

    name: str
    own: Queries

    @cached_property
    def queries(self) -> dict[str, Query]:
        return self._queries("found")

    @cached_property
    def older(self) -> dict[str, Query]:
        """The same queries for servers older than `WALKS_ARRAYS`."""
        return self._queries("found_one_by_one")

    @cached_property
    def parts(self) -> dict[str, Query]:
        """The parts that the layout supplies to statements, including those of other modules."""
        return {name: self.own[name] for name in _PARTS}

    def _queries(self, found_part: str) -> dict[str, Query]:
        parts = {**self.parts, **_SHARED_PARTS, "reference_columns": _READS["reference_columns"]}
        parts |= {name: _JOBS[name] for name in ("claim", "claimed", "jobs_claimed", "is_open")}
        parts |= {name: _WATERMARKS[name] for name in ("mark_freed", "remembered")}
        parts["found"] = _SHARED_PARTS[found_part]
        merged = _SHARED_PARTS["merged"]
        parts["merged_of_refs"] = merged.including(named=_SHARED_PARTS["named_by_refs"])
        parts["merged_of_targets"] = merged.including(named=_SHARED_PARTS["named_by_targets"])
        head = {name: _SHARED_PARTS[name] for name in ("deletions_listed", "may_meet")}
        parts["plan_head"] = _READS["plan_head"].including(**head)
        pending = {"deletions_pending": _SHARED_PARTS["deletions_pending"]}
        parts["has_pending"] = _SHARED_PARTS["has_pending"].including(**pending)
        parts["without_deletions"] = _SHARED_PARTS["without_deletions"].including(
            file_facts=self.own["file_facts"], has_pending=parts["has_pending"], **pending
        )
        whole = {**_STORE, **_READS, **_JOBS, **_LAYOUT, **_TOTALS, **_CHECKS, **_MOVES}
        whole |= self.own
        return {name: query.including(**parts) for name, query in whole.items()}

    def tables(self, table_id: int) -> dict[str, str]:
        """Returns the names of one table's PostgreSQL tables, by their identifiers in the SQL files."""
        return {kind: f"{name}_{table_id}" for kind, name in _TABLES[self.name].items()}

    def names(self, table_id: int) -> dict[str, str]:
        """Returns the names of `tables`, and those of the other database objects that belong to them."""
        tables = self.tables(table_id)
        unreferenced = f"{tables['file_reference']}_unreferenced"
        # the content of inlined files is the same in all layouts
        return {**tables, "unreferenced": unreferenced, "file_content": f"file_content_{table_id}"}

    def on(self, name: str, table_id: int) -> sql.Composed:
        """Returns the statement called `name`, for one table's PostgreSQL tables."""
        return composed(self.queries[name], self.names(table_id))

    def statement(self, name: str, table_id: int) -> Statement:
        """Returns the same statement as `on` in a cached form, for statements that run often."""
        return _statement(self.name, name, table_id)

    def create(self, table_id: int) -> sql.Composed:
        """Returns the statements that create one table's PostgreSQL tables."""
        return composed(self.queries["create"].literally(table_id=table_id), self.names(table_id))


def composed(query: Query, names: Mapping[str, str]) -> sql.Composed:
    """Returns a query in which `names` are filled in for the identifiers."""
    return query.on(**{kind: names[kind] for kind in query.identifiers})


@lru_cache
def layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise InvalidInput(f"layout {name!r} is not known; use {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}")
    return Layout(name, load(__package__ or "", name))


@lru_cache(maxsize=10_000)
def _statement(layout_name: str, name: str, table_id: int) -> Statement:
    known = layout(layout_name)
    names = known.names(table_id)
    return Statement(composed(known.queries[name], names), older=composed(known.older[name], names))


@lru_cache(maxsize=10_000)
def _statement_of(layout_name: str, query: Query, table_id: int) -> Statement:
    known = layout(layout_name)
    return Statement(composed(query.including(**known.parts), known.names(table_id)))


class OwnTables:
    """The PostgreSQL tables of one table, named by its layout. Threads may share one object."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self.supplier = supplier
        self.isolation = Isolation(table.properties.isolation)
        self._state = (table, layout(table.layout))
        self._outdated = False

    @property
    def table(self) -> TableRecord:
        """The table, with its layout as this process last saw it."""
        return self._state[0]

    @property
    def layout(self) -> Layout:
        return self._state[1]

    def on(self, query: str | Query) -> sql.Composed:
        """Returns a statement, for the table's PostgreSQL tables.

        `query` is the name of a statement of the layout, or a query into which the layout's parts are
        inserted.
        """
        table, known = self._state
        if isinstance(query, Query):
            return composed(query.including(**known.parts), known.names(table.table_id))
        return known.on(query, table.table_id)

    def statement(self, name: str) -> Statement:
        """Returns a statement of the layout in a cached form, for statements that run often."""
        table, known = self._state
        return known.statement(name, table.table_id)

    def statement_of(self, query: Query) -> Statement:
        """Returns a query, into which the layout's parts are inserted, in a cached form."""
        table, known = self._state
        return _statement_of(known.name, query, table.table_id)

    def following(self, work: Callable[[], T], conn: psycopg.Connection[Any] | None = None) -> T:
        """Runs `work`, and runs it again if the table was converted to another layout meanwhile.

        With `conn`, the connection of the caller's transaction, it raises `SerializationFailure` instead, so
        that the caller's transaction is retried. Raises `TableNotFound` when the table was dropped.
        """
        if conn is not None:
            return self._following_within(conn, work)
        with dropped_tables(self.table):
            for _ in range(LOOKUPS_MAX):
                try:
                    return work()
                except pg.UndefinedTable:
                    # the failed transaction has returned its connection, so this thread holds only one
                    with self.supplier.connection() as other:
                        self._look_up(other)
            return work()

    def run(
        self,
        work: Callable[[psycopg.Connection[Any]], T],
        *,
        operation: str,
        isolation: Isolation = Isolation.READ_COMMITTED,
        read_only: bool = False,
        scans: bool = False,
    ) -> T:
        """Runs `work` in a transaction, and runs it again if the table's layout was converted meanwhile.

        `run_transaction` describes the options.
        """

        def once() -> T:
            return run_transaction(
                self.supplier,
                work,
                isolation=isolation,
                read_only=read_only,
                scans=scans,
                operation=operation,
            )

        return self.following(once)

    def rows(
        self,
        query: str | Query,
        values: Mapping[str, Any] | None = None,
        *,
        operation: str,
        scans: bool = False,
    ) -> list[Any]:
        """Returns the rows of one statement, run in a transaction of its own.

        `query` is as for `on`. `table_id` and `salt_buckets` are added to the values.
        """
        return self.run(lambda conn: self.rows_in(conn, query, values), operation=operation, scans=scans)

    def looked_up(self, query: str | Query, values: Mapping[str, Any], *, operation: str) -> list[Any]:
        """Returns the rows of a query that only looks rows up, in one round trip."""
        return self.following(
            lambda: run_lookup(
                self.supplier, lambda conn: self.rows_in(conn, query, values), operation=operation
            )
        )

    def rows_in(
        self, conn: psycopg.Connection[Any], query: str | Query, values: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Returns the rows of one statement, run in the caller's transaction; otherwise like `rows`."""
        # composed at each try, as a conversion changes the names
        return fetched(conn.execute(self.on(query), self.values(values or {})))

    def following_in(
        self,
        work: Callable[[psycopg.Connection[Any]], T],
        operation: str,
        conn: psycopg.Connection[Any] | None,
        *,
        run: Callable[..., T] = run_transaction,
    ) -> T:
        """Runs `work` in the transaction of `conn`, or else in a new one, which `run` makes.

        A new transaction has the isolation of the table. `work` runs again if the layout was converted
        meanwhile.
        """

        def once() -> T:
            if conn is not None:
                return work(conn)
            return run(
                self.supplier,
                work,
                isolation=self.isolation,
                attempts_max=ATTEMPTS_MAX,
                operation=operation,
            )

        return self.following(once, conn)

    def fetch(
        self,
        name: str,
        values: Mapping[str, Any] | None = None,
        conn: psycopg.Connection[Any] | None = None,
        *,
        operation: str | None = None,
        run: Callable[..., list[Any]] = run_transaction,
    ) -> list[Any]:
        """Returns the rows of one statement of the layout.

        The statement runs in the transaction of `conn`, or else in a new one, which `run` makes. It runs
        again if the layout was converted meanwhile. `operation` names it in messages.
        """

        def work(c: psycopg.Connection[Any]) -> list[Any]:
            return fetched(self.execute(c, name, values or {}))

        return self.following_in(work, operation or name, conn, run=run)

    def stream(self, name: str, values: Parameters, page_rows: int) -> Iterator[Sequence[Any]]:
        """Yields the rows of one statement of the layout, with at most `page_rows` of them in memory."""
        cursor, stack = self.following(lambda: self._open(name, values, page_rows))
        with dropped_tables(self.table), stack:
            yield from cursor

    def _open(
        self, name: str, values: Parameters, page_rows: int
    ) -> tuple[psycopg.ServerCursor[Any], ExitStack]:
        with ExitStack() as stack:
            conn = stack.enter_context(self.supplier.connection())
            stack.enter_context(bounded(conn, PAGED))
            cursor = stack.enter_context(conn.cursor(name=f"dormouse_{name}"))
            cursor.itersize = page_rows
            cursor.execute(self.on(name), self.values(values))
            return cursor, stack.pop_all()

    def execute(
        self, conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]
    ) -> psycopg.Cursor[Any]:
        """Runs a statement of the layout on a connection."""
        return self.statement(name).execute(conn, self.values(values))

    def values(self, values: Mapping[str, Any]) -> Parameters:
        """Returns the values, and adds those that the parts of every layout need."""
        table = self.table
        return {**values, "table_id": table.table_id, "salt_buckets": table.properties.salt_buckets}

    def wait_for_deletions(self, conn: psycopg.Connection[Any]) -> None:
        """Waits for transactions that add deletions, if the table's isolation is serializable.

        Call it at the start of a transaction. A snapshot from before the wait would not see the deletions.
        """
        if self.isolation is Isolation.SERIALIZABLE:
            conn.execute(self.on("wait_for_deletions"))

    def look(
        self,
        purpose: Purpose,
        facts: Mapping[str, Any],
        query: Callable[[], Query],
        values: Mapping[str, Any] | None = None,
    ) -> Any:
        """Looks for work in the partitions that have changed; returns the first value of the statement's row.

        Runs one statement in one transaction. The statement gets two parts: `changed`, the partitions to look
        at, and `remembered`, which records the look. Its values are `facts` and `values`. `facts` are the
        criteria of the look. If they differ from those of the last look, it reads all partitions. Looks with
        the same purpose wait for each other.
        """
        key = {"table_id": self.table.table_id, "purpose": purpose, "facts": Jsonb(facts)}

        def once(conn: psycopg.Connection[Any]) -> Any:
            till, epoch, is_fresh = conn.execute(_HOLD.on(), key).fetchall()[0]
            if not is_fresh:
                allow_scans(conn)
            changed = _WATERMARKS["changed" if is_fresh else "everything"]
            parts = {
                "changed": changed,
                "its_partition": ITS_PARTITION,
                "remembered": _WATERMARKS["remembered"],
            }
            statement = self.on(query().including(**parts))
            given = {**facts, **(values or {}), **key, "till": till, "epoch": epoch, "whole": not is_fresh}
            return rows_of(statement, given)(conn)[0][0]

        return self.run(once, operation=f"look for {purpose}")

    def still(self, conn: psycopg.Connection[Any]) -> None:
        """Locks the layout's tables and the removal log, so that they cannot be converted or dropped.

        Call it at the start of a transaction. Until the end, the transaction's snapshots see all of these
        tables.
        """
        tables = self.layout.tables(self.table.table_id).values()
        names = sql.SQL(", ").join(map(sql.Identifier, tables))
        # a day of the log is dropped only under a lock of the whole log
        conn.execute(sql.SQL("lock table only removal, {} in access share mode").format(names))

    def _following_within(self, conn: psycopg.Connection[Any], work: Callable[[], T]) -> T:
        with dropped_tables(self.table):
            if self._outdated:
                self._look_up(conn)
                self._outdated = False
            try:
                return work()
            except pg.UndefinedTable as error:
                # the transaction is aborted: look the layout up when it is retried
                self._outdated = True
                raise pg.SerializationFailure(
                    f"table {self.table.name!r} was dropped or converted to another layout meanwhile"
                ) from error

    def _look_up(self, conn: psycopg.Connection[Any]) -> None:
        table = self.table
        row = conn.execute(_LAYOUT["layout_of_table"].on(), {"table_id": table.table_id}).fetchone()
        if row is None:
            raise TableNotFound.gone(table.name)
        if row[0] != table.layout:
            logger.info("table %s: its layout is %s now, no longer %s", table.name, row[0], table.layout)
            self._state = (replace(table, layout=row[0]), layout(row[0]))


@contextmanager
def dropped_tables(table: TableRecord) -> Iterator[None]:
    """Turns errors about PostgreSQL tables that no longer exist into `TableNotFound`."""
    try:
        yield
    except (pg.UndefinedTable, pg.ForeignKeyViolation):
        raise TableNotFound.gone(table.name) from None
