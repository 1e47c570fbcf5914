"""Queries of row tables, answered by indexes.

If the index is not up to date, a job updates the index, and the query waits. After a time limit, the query
raises an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import (
    DormouseError,
    IndexNotReady,
    InstanceReadOnly,
    InvalidColumn,
    InvalidPage,
    InvalidQuery,
    PageExpired,
    one_line,
)
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.postgres.connection import DAMAGES
from dormouse.rows import pages
from dormouse.rows.builds import TYPES, Build, BuildBusy, SlowColumns, Unsure
from dormouse.rows.cluster import QUERY_SECONDS_MAX, Looked, Source
from dormouse.rows.columns import Column, column_named
from dormouse.rows.emit import column_name
from dormouse.rows.indexing import GONE, INDEXED_ROWS_MIN, UNREACHABLE, Indexing, IndexWorker, cause
from dormouse.rows.pages import Page, Rows, SelectColumn, Wait
from dormouse.rows.statements import (
    BoundQuery,
    Given,
    PageToken,
    bound,
    build_of,
    count_of,
    given,
    page_at_once,
    page_of,
    read_page_token,
)

if TYPE_CHECKING:
    from dormouse.jobs.runs import Progress
    from dormouse.jobs.store import JobStore
    from dormouse.model.types import Parameters
    from dormouse.reading.streams import Interruption

# Look-ups of rows by the values of some columns, for upserts: thousands of keys in one statement.

POSITION = "position"


def located(
    conn: psycopg.Connection[Any],
    build: Build,
    *,
    columns: Sequence[Column],
    on: Sequence[str],
    keys: pa.RecordBatch,
) -> pa.Table:
    """Returns the rows whose columns `on` equal one of the keys. In this comparison, null equals null.

    Each row has the position of its key in `keys`. Raises `InvalidColumn` for a JSON column in `on`.
    """
    wanted = [column_named(columns, name) for name in on]
    for column in wanted:
        if column.type == "JSON":
            raise InvalidColumn(f"column {column.name!r} is JSON: rows cannot be looked up by it")
    arrays = [keys.column(column.name) for column in wanted]
    rows: list[Any] = []
    # one statement for each set of null columns: a join on `=` can use hashes and indexes, and needs no nulls
    for are_null, positions in _by_nulls(arrays).items():
        given = [array for array, is_null in zip(arrays, are_null, strict=True) if not is_null]
        arguments = [positions, *(array.take(pa.array(positions)).to_pylist() for array in given)]
        rows += conn.execute(_text(build, columns, wanted, are_null).encode(), _values(arguments)).fetchall()
    schema = pa.schema(
        [(POSITION, pa.int64()), (ROW_ID, pa.int64()), (ROW_VERSION, pa.int64())]
        + [(column.name, arrow_type(column.stored)) for column in columns]
    )
    cells = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(list(values), field.type) for values, field in zip(cells, schema, strict=True)]
    return pa.table(arrays, schema=schema).sort_by([(POSITION, "ascending"), (ROW_ID, "ascending")])


def _by_nulls(arrays: Sequence[pa.Array]) -> dict[tuple[bool, ...], list[int]]:
    """Returns the positions of keys, grouped by flags of the columns in which the keys are null."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for number, are_null in enumerate(zip(*(pc.is_null(array).to_pylist() for array in arrays), strict=True)):
        groups.setdefault(are_null, []).append(number)
    return groups


def _text(build: Build, columns: Sequence[Column], wanted: Sequence[Column], are_null: Sequence[bool]) -> str:
    given = [column for column, is_null in zip(wanted, are_null, strict=True) if not is_null]
    nulls = [column for column in wanted if column not in given]
    names = ["row_id", "row_version", *(column_name(column.column_id or 0) for column in columns)]
    kinds = ["bigint", *(TYPES[column.stored.name].split()[0] for column in given)]
    unnested = ", ".join(f"%(k{n})s::{kind}[]" for n, kind in enumerate(kinds))
    matches = [f"c.{column_name(column.column_id or 0)} = k.k{n}" for n, column in enumerate(given, start=1)]
    matches += [f"c.{column_name(column.column_id or 0)} is null" for column in nulls]
    return (
        f"select k.k0, {', '.join(f'c.{name}' for name in names)} "
        f"from unnest({unnested}) k ({', '.join(f'k{n}' for n in range(len(kinds)))}) "
        f"join current_{build.build_id:d} c on {' and '.join(matches)}"
    )


def _values(arrays: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {f"k{n}": list(array) for n, array in enumerate(arrays)}


KIND, COLUMNS_KIND = "index_rows", "index_row_columns"
"""The kinds of two jobs: one updates a table's index, the other indexes single columns in it.

Concurrency limits apply to each kind, so a worker whose threads index columns still has threads for updates.
"""
THREADS = 2
REPORT_SECONDS = 10.0
"""The seconds until a process again reports the use of the same index, or starts a job for the same index."""
SLOW_SECONDS = 0.02
"""The seconds from which a query counts as slow.

The columns in conditions of slow queries may get indexes.
"""

logger = logging.getLogger(__name__)


class RowIndexes:
    """The queries of all row tables of an instance, and the worker of this process. Threads may share it."""

    def __init__(self, indexing: Indexing, jobs: JobStore, open_table: Callable[[str], Source]) -> None:
        self.indexing = indexing
        self._placements = indexing.placements
        self._jobs = jobs
        self._open_table = open_table
        self._lock = threading.Lock()
        self._started: dict[tuple[Any, ...], float] = {}
        self._slow = SlowColumns()
        self._seconds: dict[int, tuple[float, float]] = {}
        kinds = (KIND, COLUMNS_KIND)
        self._worker = IndexWorker(lambda: jobs.worker(dict.fromkeys(kinds, self.work), threads=THREADS))

    def query(
        self,
        table: Source,
        text: str | None,
        page_rows: int | None,
        page: str | None,
        parameters: Parameters | None,
        version: int | None,
        wait_seconds: float,
        interruption: Interruption | None = None,
    ) -> Page:
        """Returns a page of an answer.

        The first page shows the given version, or the newest version. All following pages show the version of
        the first page. If the index is not up to date within `wait_seconds`, raises `IndexNotReady`. A job
        then still updates the index, so that a later try succeeds. Also raises `InvalidQuery`, `InvalidPage`
        and `PageExpired`.
        """
        values = given(parameters)
        wait = Wait(wait_seconds, interruption)
        if page is not None:
            return self._following(table, text, page_rows, page, values, version, wait, interruption)
        if text is None:
            raise InvalidQuery("a query is a text of SQL, or the token of a next page")
        if version is not None:
            looked = self._placements.look(table.table_id, version)
            bound_query = bound(table, text, looked, version, page_rows, values)
            return self._older(bound_query, looked, interruption)
        looked = self._placements.look(table.table_id)
        wanted = looked.version
        while True:
            bound_query = bound(table, text, looked, looked.version, page_rows, values)
            try:
                answer = self._answer(bound_query, looked, interruption)
            except IndexNotReady as refusal:
                answer = None
                wait.pause(refusal)
            else:
                if isinstance(answer, Page):
                    return answer
                # no pause if the index is ahead of the version that this process saw
                if answer is None or answer <= looked.version:
                    wait.pause(self._not_ready(table, looked))
            looked = self._placements.look(table.table_id)
            if answer is not None and wanted <= answer < looked.version:
                # the table changes all the time: any version from the start of the query on is a valid answer
                looked = replace(self._placements.look(table.table_id, answer), version=answer)

    def locate(self, table: Source, on: Sequence[str], keys: Any, version: int) -> Any:
        """Returns the rows that have one of the keys in the columns `on`.

        The result has the columns `position` (of the key in `keys`), ROW_ID, ROW_VERSION and all columns of
        the table. First updates the index to `version`, which must be the newest version. The caller must
        hold the table's write lock. Raises `InvalidQuery` if the statement takes too long, and
        `IndexNotReady`.
        """
        looked = self.bring(table)
        if looked.version != version or looked.database is None or looked.build_id is None:
            message = f"table {table.name!r} changed while rows were looked up: try again"
            raise IndexNotReady(message, table=table.name)
        rows = self._read(looked, table, partial(located, columns=looked.columns, on=on, keys=keys))
        if rows is None:
            raise IndexNotReady(f"the index of table {table.name!r} was dropped: try again", table=table.name)
        return rows

    def bring(self, table: Source) -> Looked:
        """Updates the index of a table to the newest version, and returns the table with its index.

        Raises `IndexNotReady` if no index database can be used.
        """
        try:
            return self.indexing.bring(table)
        except UNREACHABLE as error:
            logger.warning("cannot bring the index of table %r up to date: %s", table.name, one_line(error))
            raise IndexNotReady(
                f"the index of table {table.name!r} cannot be brought up to date: {cause(error)}; try again "
                "when this is fixed",
                table=table.name,
            ) from None

    def work(self, request: Any, progress: Progress) -> Any:
        """Runs a job, which updates the index of one table.

        If the upkeep of all indexes is due, also does the upkeep.
        """
        progress.check()
        try:
            looked = self.indexing.bring(
                self._open_table(request["table"]), columns=request.get("columns") or (), waits=False
            )
        except BuildBusy:
            return {"busy": True}
        if self.indexing.upkeep_is_due():
            self.upkeep()
        return {"version": looked.version}

    def upkeep(self) -> None:
        """Drops idle, retired and unknown indexes, and balances the load of the databases."""
        self.indexing.upkeep(self._open_table)

    def close(self) -> None:
        self._worker.close()
        self.indexing.cluster.close()

    def _following(
        self,
        table: Source,
        text: str | None,
        page_rows: int | None,
        page: str,
        values: Given,
        version: int | None,
        wait: Wait,
        interruption: Interruption | None,
    ) -> Page:
        looked = self._placements.look(table.table_id)
        token = read_page_token(page, self._placements.key(), looked.table_uuid)
        if (text is not None and text != token.text) or (values and values != token.values):
            raise InvalidPage("the page token is of another query: begin the query again")
        if version is not None and (version != token.version or token.build_id is not None):
            raise InvalidPage("the page token is of another version: begin the query again")
        if token.incarnation_id not in (None, looked.incarnation_id):
            reason = "the database was restored since the query began: begin it again"
            raise PageExpired.of(table.name, reason)
        if looked.version != token.version:
            looked = self._placements.look(table.table_id, token.version)
        looked = replace(looked, database=token.database, build_id=token.build_id, version=token.version)
        bound_query = bound(
            table, token.text, looked, token.version, page_rows or token.page_rows, token.values
        )
        bound_query = replace(bound_query, place=token.place, given=token.given)
        if token.build_id is None:
            return self._older(bound_query, looked, interruption)
        expired = PageExpired.of(table.name, "the query's index no longer exists: begin the query again")
        while True:
            try:
                answer = self._answer(bound_query, looked, interruption)
            except IndexNotReady as refusal:
                now = self._placements.look(table.table_id)
                if (now.database, now.build_id) != (looked.database, looked.build_id):
                    raise expired from None  # its database could not be used, and another has the index now
                wait.pause(refusal)
                continue
            if not isinstance(answer, Page):
                raise expired
            return answer

    def _older(self, bound_query: BoundQuery, looked: Looked, interruption: Interruption | None) -> Page:
        """Returns a page of an older version, which is read from the table's files."""
        from dormouse.rows.older import OlderRows

        older = OlderRows(
            partial(bound_query.table.current, bound_query.version), bound_query.columns, interruption
        )
        rows = pages.read(
            bound_query.statement, older.ask, older.source, older.dialect,
            rows=pages.rows_max(bound_query.columns, bound_query.page_rows),
            place=bound_query.place, given=bound_query.given,
        )  # fmt: skip
        at = replace(looked, database=None, build_id=None)
        count = partial(pages.count, bound_query.statement, older.ask, older.source, older.dialect)
        return self._page(bound_query, at, rows, count)

    def _answer(
        self, bound_query: BoundQuery, looked: Looked, interruption: Interruption | None
    ) -> Page | int | None:
        """Returns a page from the index.

        If the index has another version, returns this version instead. Returns None if there is no index. In
        both cases, also starts a job that updates the index.
        """
        began = time.monotonic()
        answer: tuple[Rows, Build | None] | int | None = None
        if looked.database is not None and looked.build_id is not None:
            at_once = partial(page_at_once, bound_query)
            answer = self._read(
                looked, bound_query.table, partial(page_of, bound_query), at_once, interruption
            )
        if not isinstance(answer, tuple):
            self._start(looked)
            return answer
        rows, build = answer
        self._note(bound_query, looked, build, time.monotonic() - began)
        return self._page(bound_query, looked, rows, partial(self._count, bound_query, looked, interruption))

    def _read(
        self,
        looked: Looked,
        table: Source,
        work: Callable[..., Any],
        at_once: Callable[..., Any] | None = None,
        interruption: Interruption | None = None,
    ) -> Any:
        """Returns the result of `at_once`. If `at_once` raises `Unsure`, returns the result of `work`.

        Returns None if the index does not exist. Raises `InvalidQuery`, `PageExpired`, and `IndexNotReady` if
        the index's database cannot be used.
        """
        database, build_id = looked.database or "", looked.build_id or 0
        try:
            builds = self.indexing.builds(database)
            if interruption is not None:
                builds = builds.ended_by(interruption)
            if at_once is not None:
                with suppress(Unsure):
                    return at_once(builds, looked, build_id)
            return builds.read(looked, build_id, work)
        except psycopg.errors.NumericValueOutOfRange as error:
            raise InvalidQuery(f"a result does not fit its type: {one_line(error)}") from None
        except psycopg.errors.QueryCanceled:
            raise InvalidQuery(f"the query took longer than {QUERY_SECONDS_MAX} s: ask for less") from None
        except GONE as error:
            self._heal(looked, table, error)
        except (psycopg.DatabaseError, *UNREACHABLE) as error:
            if isinstance(error.__cause__, DAMAGES) or isinstance(error, DAMAGES):
                self._heal(looked, table, error)
            elif isinstance(error, UNREACHABLE):
                self.indexing.cluster.lost(database)
                if self._start(looked):
                    logger.warning("cannot read the index of table %r: %s", table.name, one_line(error))
                raise IndexNotReady(
                    f"the index of table {table.name!r} cannot be read, and is being repaired: "
                    f"{cause(error)}; try again",
                    table=table.name,
                ) from None
            else:
                raise
        return None

    def _heal(self, looked: Looked, table: Source, error: BaseException) -> None:
        logger.warning("the index of table %r is damaged and is rebuilt: %s", table.name, one_line(error))
        self.indexing.heal(looked)

    def _page(self, bound_query: BoundQuery, looked: Looked, rows: Rows, count: Callable[[], int]) -> Page:
        following = None
        if rows.more:
            token = PageToken(
                bound_query.text,
                bound_query.version,
                rows.given,
                bound_query.page_rows,
                rows.place,
                looked.database,
                looked.build_id,
                bound_query.values,
                looked.incarnation_id,
            )
            following = token.written(self._placements.key(), looked.table_uuid)
        columns = tuple(
            SelectColumn(item.name, item.type, item.column_id) for item in bound_query.statement.selected
        )
        rows_max = pages.rows_max(bound_query.columns, bound_query.page_rows)
        return Page(
            rows.rows, columns, rows.row_ids, rows.row_versions, following, rows_max, bound_query.version,
            looked.changed_at, count,
        )  # fmt: skip

    def _count(self, bound_query: BoundQuery, looked: Looked, interruption: Interruption | None) -> int:
        count = self._read(looked, bound_query.table, partial(count_of, bound_query), None, interruption)
        if count is None:
            raise PageExpired.of(bound_query.table.name, "its index was rebuilt: begin the query again")
        return int(count)

    def _not_ready(self, table: Source, looked: Looked) -> IndexNotReady:
        failure = f"; the last attempt failed: {looked.failure}" if looked.failure else ""
        return IndexNotReady(
            f"the index of table {table.name!r} does not have its version {looked.version} yet, and is "
            f"being updated: try again{failure}",
            table=table.name,
        )

    def _note(self, bound_query: BoundQuery, looked: Looked, build: Build | None, seconds: float) -> None:
        """Records the use of an index.

        After a slow query, also counts the columns whose index would help the query.
        """
        if seconds > SLOW_SECONDS and (sought := pages.sought(bound_query.statement)):
            with suppress(
                DormouseError, psycopg.Error
            ):  # the query has its answer: a failure here is harmless
                self._note_sought(bound_query, looked, build, sought)
        with self._lock:
            # the index is up to date: if it falls behind again, a job must start at once
            self._started.pop((looked.table_id, looked.version, ()), None)
            reported, sum_seconds = self._seconds.get(looked.table_id, (0.0, 0.0))
            sum_seconds += seconds
            if time.monotonic() - reported < REPORT_SECONDS:
                self._seconds[looked.table_id] = reported, sum_seconds
                return
            self._seconds[looked.table_id] = time.monotonic(), 0.0
        with suppress(DormouseError, psycopg.Error):  # an instance may be opened read-only
            self._placements.used(looked.table_id, sum_seconds)

    def _note_sought(
        self, bound_query: BoundQuery, looked: Looked, build: Build | None, sought: list[int]
    ) -> None:
        build = build or self._read(looked, bound_query.table, build_of)
        sought = [number for number in sought if build is not None and number not in build.indexed_ids]
        if not build or build.row_count < INDEXED_ROWS_MIN or build.is_retired:
            return
        if wanted := self._slow.wanted(looked.table_id, sought):
            self._start(looked, wanted)

    def _start(self, looked: Looked, columns: Collection[int] = ()) -> bool:
        """Starts a job that updates the index of a table, or that indexes `columns` in it.

        Does nothing and returns False if this process has just started the same job. Also starts this
        process's worker for such jobs. Raises `IndexNotReady` in a read-only instance.
        """
        key = (looked.table_id, looked.version, tuple(columns))
        with self._lock:
            now = time.monotonic()
            if now - self._started.get(key, -REPORT_SECONDS) < REPORT_SECONDS:
                return False
            self._started = {job: at for job, at in self._started.items() if now - at < REPORT_SECONDS}
            self._started[key] = now
        try:
            self._worker.start()
            self._jobs.start(
                COLUMNS_KIND if columns else KIND, {"table": looked.name, "columns": list(columns)}
            )
        except InstanceReadOnly:
            raise IndexNotReady(
                f"the index of table {looked.name!r} is behind, and the instance was opened read-only: open "
                "it for writing, or query it in a process that did",
                table=looked.name,
            ) from None
        except BaseException:
            with self._lock:
                self._started.pop(key, None)
            raise
        return True
