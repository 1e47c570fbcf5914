"""Queries of row tables: answered by indexes that are up to date; else refused, and the work is begun."""

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
    Asked,
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

# Rows of an index by the values of some of their columns, for upserts: thousands of keys at once.

POSITION = "position"


def located(
    conn: psycopg.Connection[Any],
    build: Build,
    *,
    columns: Sequence[Column],
    on: Sequence[str],
    keys: pa.RecordBatch,
) -> pa.Table:
    """The rows whose columns equal the keys (nulls, too), with the number of the key that each has."""
    wanted = [column_named(columns, name) for name in on]
    for column in wanted:
        if column.type == "JSON":
            raise InvalidColumn(f"column {column.name!r} is JSON: rows cannot be looked for by it")
    arrays = [keys.column(column.name) for column in wanted]
    rows: list[Any] = []
    # values that equal each other are hashed, or looked up; nulls equal each other in no index
    for are_null, positions in _by_nulls(arrays).items():
        given = [array for array, is_null in zip(arrays, are_null, strict=True) if not is_null]
        some = [positions, *(array.take(pa.array(positions)).to_pylist() for array in given)]
        rows += conn.execute(_text(build, columns, wanted, are_null).encode(), _values(some)).fetchall()
    schema = pa.schema(
        [(POSITION, pa.int64()), (ROW_ID, pa.int64()), (ROW_VERSION, pa.int64())]
        + [(column.name, arrow_type(column.stored)) for column in columns]
    )
    cells = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(list(some), field.type) for some, field in zip(cells, schema, strict=True)]
    return pa.table(arrays, schema=schema).sort_by([(POSITION, "ascending"), (ROW_ID, "ascending")])


def _by_nulls(arrays: Sequence[pa.Array]) -> dict[tuple[bool, ...], list[int]]:
    """The numbers of the keys, by which of their values are null."""
    found: dict[tuple[bool, ...], list[int]] = {}
    for number, are_null in enumerate(zip(*(pc.is_null(array).to_pylist() for array in arrays), strict=True)):
        found.setdefault(are_null, []).append(number)
    return found


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
"""The kinds of the jobs that bring indexes up to date, and that give columns indexes of their own.

They are two, so that a worker whose threads index columns still has threads for the former.
"""
THREADS = 2
TOLD_SECONDS = 10.0
"""So seldom a process tells how much an index is asked, and starts a job for it again."""
SLOW_SECONDS = 0.02
"""A query that takes longer is slow: the columns that it looks for rows in may need an index."""

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
        """A page of an answer: of a version, of the newest, or of that on which its first page began.

        Raises `InvalidQuery`, `InvalidPage`, `PageExpired`; and `IndexNotReady` when the index was not up to
        date within `wait_seconds`: the work on it has begun, ask again.
        """
        values = given(parameters)
        wait = Wait(wait_seconds, interruption)
        if page is not None:
            return self._following(table, text, page_rows, page, values, version, wait, interruption)
        if text is None:
            raise InvalidQuery("a query is a text of SQL, or the token of a next page")
        if version is not None:
            looked = self._placements.look(table.table_id, version)
            asked = bound(table, text, looked, version, page_rows, values)
            return self._older(asked, looked, interruption)
        looked = self._placements.look(table.table_id)
        wanted = looked.version
        while True:
            asked = bound(table, text, looked, looked.version, page_rows, values)
            try:
                found = self._asked(asked, looked, interruption)
            except IndexNotReady as refusal:
                found = None
                wait.pause(refusal)
            else:
                if isinstance(found, Page):
                    return found
                if found is None or found <= looked.version:  # else it was brought further meanwhile
                    wait.pause(self._not_ready(table, looked))
            looked = self._placements.look(table.table_id)
            if found is not None and wanted <= found < looked.version:
                # others change it all the time: as it was, or later, when it was asked
                looked = replace(self._placements.look(table.table_id, found), version=found)

    def locate(self, table: Source, on: Sequence[str], keys: Any, version: int) -> Any:
        """The rows of a version that have the keys: `position` in these, ROW_ID, ROW_VERSION, all columns.

        The version is the newest, and stays so: the caller holds the table's write lock. Brings the index to
        it first. `InvalidQuery` when it takes longer than a query may.
        """

        looked = self.bring(table)
        if looked.version != version or looked.database is None or looked.build_id is None:
            said = f"table {table.name!r} changed while rows were looked for: try again"
            raise IndexNotReady(said, table=table.name)
        found = self._read(looked, table, partial(located, columns=looked.columns, on=on, keys=keys))
        if found is None:
            raise IndexNotReady(f"the index of table {table.name!r} is gone: try again", table=table.name)
        return found

    def bring(self, table: Source) -> Looked:
        """Brings the index of a table up to date, and returns what it then was.

        Raises `IndexNotReady` when no database of indexes can be used.
        """
        try:
            return self.indexing.bring(table)
        except UNREACHABLE as error:
            logger.warning("cannot bring the index of table %r up to date: %s", table.name, one_line(error))
            raise IndexNotReady(
                f"the index of table {table.name!r} cannot be brought up to date: {cause(error)}; try again "
                "when that is mended",
                table=table.name,
            ) from None

    def work(self, request: Any, progress: Progress) -> Any:
        """The function of jobs: brings one index up to date."""
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
        """Drops what is idle, retired or unknown, and balances the loads of the databases."""
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
            why = "the database was restored since the query began: begin it again"
            raise PageExpired.of(table.name, why)
        if looked.version != token.version:
            looked = self._placements.look(table.table_id, token.version)
        looked = replace(looked, database=token.database, build_id=token.build_id, version=token.version)
        asked = bound(table, token.text, looked, token.version, page_rows or token.page_rows, token.values)
        asked = replace(asked, place=token.place, given=token.given)
        if token.build_id is None:
            return self._older(asked, looked, interruption)
        gone = PageExpired.of(table.name, "the index that the page began on is gone: begin the query again")
        while True:
            try:
                found = self._asked(asked, looked, interruption)
            except IndexNotReady as refusal:
                now = self._placements.look(table.table_id)
                if (now.database, now.build_id) != (looked.database, looked.build_id):
                    raise gone from None  # another was made, since its database is away
                wait.pause(refusal)
                continue
            if not isinstance(found, Page):
                raise gone
            return found

    def _older(self, asked: Asked, looked: Looked, interruption: Interruption | None) -> Page:
        """A page of a version that is read from the files."""
        from dormouse.rows.older import OlderRows

        older = OlderRows(partial(asked.table.current, asked.version), asked.columns, interruption)
        rows = pages.read(
            asked.statement, older.ask, older.source, older.dialect,
            rows=pages.rows_max(asked.columns, asked.page_rows), place=asked.place, given=asked.given,
        )  # fmt: skip
        at = replace(looked, database=None, build_id=None)
        count = partial(pages.count, asked.statement, older.ask, older.source, older.dialect)
        return self._page(asked, at, rows, count)

    def _asked(self, asked: Asked, looked: Looked, interruption: Interruption | None) -> Page | int | None:
        """A page; the version that the index has, when that is older; None when there is no index.

        Then the work has begun.
        """
        began = time.monotonic()
        found: tuple[Rows, Build | None] | int | None = None
        if looked.database is not None and looked.build_id is not None:
            at_once = partial(page_at_once, asked)
            found = self._read(looked, asked.table, partial(page_of, asked), at_once, interruption)
        if not isinstance(found, tuple):
            self._start(looked)
            return found
        rows, build = found
        self._note(asked, looked, build, time.monotonic() - began)
        return self._page(asked, looked, rows, partial(self._count, asked, looked, interruption))

    def _read(
        self,
        looked: Looked,
        table: Source,
        work: Callable[..., Any],
        at_once: Callable[..., Any] | None = None,
        interruption: Interruption | None = None,
    ) -> Any:
        """Returns what the index says, `at_once` if that can; None when there is no such index.

        Raises `InvalidQuery`, `PageExpired`; and `IndexNotReady` when its database is away.
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
                    logger.warning("cannot ask the index of table %r: %s", table.name, one_line(error))
                raise IndexNotReady(
                    f"the index of table {table.name!r} cannot be asked, and is worked on: {cause(error)}; "
                    "ask again",
                    table=table.name,
                ) from None
            else:
                raise
        return None

    def _heal(self, looked: Looked, table: Source, error: BaseException) -> None:
        logger.warning("the index of table %r is damaged, and made anew: %s", table.name, one_line(error))
        self.indexing.heal(looked)

    def _page(self, asked: Asked, looked: Looked, rows: Rows, count: Callable[[], int]) -> Page:
        following = None
        if rows.more:
            token = PageToken(
                asked.text,
                asked.version,
                rows.given,
                asked.page_rows,
                rows.place,
                looked.database,
                looked.build_id,
                asked.values,
                looked.incarnation_id,
            )
            following = token.written(self._placements.key(), looked.table_uuid)
        columns = tuple(SelectColumn(one.name, one.type, one.column_id) for one in asked.statement.selected)
        rows_max = pages.rows_max(asked.columns, asked.page_rows)
        return Page(
            rows.rows, columns, rows.row_ids, rows.row_versions, following, rows_max, asked.version,
            looked.changed_at, count,
        )  # fmt: skip

    def _count(self, asked: Asked, looked: Looked, interruption: Interruption | None) -> int:
        found = self._read(looked, asked.table, partial(count_of, asked), None, interruption)
        if found is None:
            raise PageExpired.of(asked.table.name, "its index was made anew: begin the query again")
        return int(found)

    def _not_ready(self, table: Source, looked: Looked) -> IndexNotReady:
        why = f"; the last attempt failed: {looked.failure}" if looked.failure else ""
        return IndexNotReady(
            f"the index of table {table.name!r} does not have its version {looked.version} yet, and is "
            f"worked on: ask again{why}",
            table=table.name,
        )

    def _note(self, asked: Asked, looked: Looked, build: Build | None, seconds: float) -> None:
        """How much an index is asked; and the columns that queries look for rows in."""
        if seconds > SLOW_SECONDS and (sought := pages.sought(asked.statement)):
            with suppress(DormouseError, psycopg.Error):  # the answer is there, and others can do the work
                self._note_sought(asked, looked, build, sought)
        with self._lock:
            # what comes to be behind from here on is worked on at once
            self._started.pop((looked.table_id, looked.version, ()), None)
            told, sum_seconds = self._seconds.get(looked.table_id, (0.0, 0.0))
            sum_seconds += seconds
            if time.monotonic() - told < TOLD_SECONDS:
                self._seconds[looked.table_id] = told, sum_seconds
                return
            self._seconds[looked.table_id] = time.monotonic(), 0.0
        with suppress(DormouseError, psycopg.Error):  # an instance may be opened read-only
            self._placements.used(looked.table_id, sum_seconds)

    def _note_sought(self, asked: Asked, looked: Looked, build: Build | None, sought: list[int]) -> None:
        build = build or self._read(looked, asked.table, build_of)
        sought = [one for one in sought if build is not None and one not in build.indexed_ids]
        if not build or build.row_count < INDEXED_ROWS_MIN or build.is_retired:
            return
        if wanted := self._slow.wanted(looked.table_id, sought):
            self._start(looked, wanted)

    def _start(self, looked: Looked, columns: Collection[int] = ()) -> bool:
        """Starts a job that works on the index, unless one was started lately; returns whether it did.

        A worker of this process runs such jobs, too.
        """
        key = (looked.table_id, looked.version, tuple(columns))
        with self._lock:
            now = time.monotonic()
            if now - self._started.get(key, -TOLD_SECONDS) < TOLD_SECONDS:
                return False
            self._started = {one: at for one, at in self._started.items() if now - at < TOLD_SECONDS}
            self._started[key] = now
        try:
            self._worker.start()
            self._jobs.start(
                COLUMNS_KIND if columns else KIND, {"table": looked.name, "columns": list(columns)}
            )
        except InstanceReadOnly:
            raise IndexNotReady(
                f"the index of table {looked.name!r} is behind, and the instance was opened read-only: open "
                "it to write, or ask a process that did",
                table=looked.name,
            ) from None
        except BaseException:
            with self._lock:
                self._started.pop(key, None)
            raise
        return True
