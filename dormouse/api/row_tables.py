"""The payloads, the jobs and the row tables of an instance, loaded where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING

from dormouse.api.table import Table
from dormouse.api.tables import Tables
from dormouse.errors import (
    InstanceForbidden,
    NotARowTable,
)
from dormouse.model.schema import Schema
from dormouse.model.table import (
    ROW_DELETED,
    ROW_ID,
    ROW_VERSION,
    TableProperties,
    TableRecord,
    check_keyed,
    is_edited,
)
from dormouse.model.types import BOOLEAN, LONG, Field
from dormouse.objects import ObjectStore
from dormouse.postgres import ConnectionSupplier
from dormouse.rows.columns import Column, check_columns, check_new
from dormouse.settings import Settings
from dormouse.state.catalog import Catalog

if TYPE_CHECKING:
    from dormouse.api.row_table import RowTable
    from dormouse.api.table import Table
    from dormouse.api.tables import Tables
    from dormouse.durability.maintaining import Number
    from dormouse.jobs import JobStore
    from dormouse.model.table import TableRecord
    from dormouse.objects import ObjectStore
    from dormouse.payloads import PayloadStore
    from dormouse.rows.indexes import RowIndexes
    from dormouse.settings import Settings
    from dormouse.state.catalog import Catalog


class OwnWork:
    """What an instance has of them, made once."""

    _supplier: ConnectionSupplier
    _objects: ObjectStore
    _settings: Settings

    def __init__(self) -> None:
        self._making = Lock()
        self._payloads: PayloadStore | None = None
        self._jobs: JobStore | None = None

    def _check_writable(self) -> None:
        raise NotImplementedError

    @property
    def payloads(self) -> PayloadStore:
        """JSON documents, hot in PostgreSQL for a day, and cold in the object store after it."""
        with self._making:
            if self._payloads is None:
                from dormouse.payloads import PayloadStore
                from dormouse.payloads.copying import PayloadOptions

                self._payloads = PayloadStore(
                    self._supplier,
                    self._objects,
                    self._check_writable,
                    PayloadOptions(hot_seconds=self._settings.payloads_hot_seconds),
                )
            return self._payloads

    @property
    def jobs(self) -> JobStore:
        """Jobs, which workers run sooner or later, and what rounds did."""
        payloads = self.payloads
        with self._making:
            if self._jobs is None:
                from dormouse.jobs import JobStore

                self._jobs = JobStore(self._supplier, self._objects, payloads, self._check_writable)
            return self._jobs

    def _roll_jobs(self) -> None:
        """Makes the days that jobs will end on."""
        from dormouse.jobs.claims import roll

        roll(self._supplier)

    def _close_jobs(self) -> None:
        if self._jobs is not None:
            self._jobs.close()


# The row tables of an instance, as a part of it.

_KEYS = (Field(ROW_ID, LONG), Field(ROW_VERSION, LONG), Field(ROW_DELETED, BOOLEAN))


class RowTables(OwnWork):
    """The methods, of an instance."""

    _catalog: Catalog
    _tables: Tables
    _settings: Settings

    @cached_property
    def row_indexes(self) -> RowIndexes:
        """The indexes of all row tables, which answer their queries."""
        from dormouse.rows.cluster import IndexCluster, Placements
        from dormouse.rows.indexes import RowIndexes
        from dormouse.rows.indexing import Indexing

        given = self._settings
        cluster = IndexCluster(self._tables.dsn, given.row_indexes)
        seconds = given.row_page_seconds, given.row_index_idle_seconds
        indexing = Indexing(Placements(self._supplier), cluster, *seconds)
        return RowIndexes(indexing, self.jobs, self.row_table)

    @property
    def row_page_seconds(self) -> float:
        """For so long a page's `next_page` can be asked for."""
        return self._settings.row_page_seconds

    def _make_row_page_key(self) -> None:
        """Has what signs the tokens of pages be there for those who only read."""
        from dormouse.rows.cluster import Placements

        with suppress(InstanceForbidden):  # of a role that writes other tables
            Placements(self._supplier).make_key()

    def _keep_row_indexes(self) -> None:
        """Drops indexes that are idle, and what is left of others, if there are any."""
        from dormouse.rows.cluster import Placements

        if Placements(self._supplier).all() or "row_indexes" in self.__dict__:
            self.row_indexes.upkeep()

    def _numbers(self) -> Iterator[Number]:
        """Yields the numbers of jobs and indexes, for Prometheus."""
        from dormouse.durability.maintaining import Number
        from dormouse.rows.cluster import Placements

        for one in self.jobs.kinds():
            of = {"kind": one.kind}
            yield Number("jobs_waiting", "Jobs that wait; at most 10,000 are counted.", one.waiting, of)
            yield Number("jobs_running", "Jobs that run.", one.running, of)
            yield Number("job_workers", "Workers that take jobs of a kind.", one.workers, of)
            what = "For how long the oldest job that waits has waited; 0: none waits."
            yield Number("job_oldest_waiting_seconds", what, one.oldest_waiting_seconds or 0, of)
            what = "Jobs that ended within a day, by state; at most 10,000 are counted."
            for state, count in one.ended.items():
                yield Number("jobs_ended", what, count, {**of, "state": state})
        if Placements(self._supplier).all():  # else no database of indexes is looked for
            what = "Versions of a row table that its index lacks; +Inf: the index cannot be asked."
            for table, behind in self.row_indexes.indexing.lags():
                yield Number("row_index_versions_behind", what, behind, {"table": table})

    def _close_rows(self) -> None:
        if "row_indexes" in self.__dict__:
            self.row_indexes.close()

    def _table(self, record: TableRecord, every_version: bool = False) -> Table:
        raise NotImplementedError

    def _check_writable(self) -> None:
        raise NotImplementedError

    def create_row_table(
        self, name: str, columns: Sequence[Column], *, properties: TableProperties | None = None
    ) -> RowTable:
        """Makes a table whose rows have ids and versions, and are edited by many; `drop_table` drops it.

        Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`.
        """
        from dormouse.rows import store

        self._check_writable()
        listed = [
            replace(check_new(column), column_id=n)
            for n, column in enumerate(check_columns(columns), len(_KEYS) + 1)
        ]
        schema = Schema(
            _KEYS[:1], _KEYS[1:2], [_KEYS[2], *(Field(c.name, c.stored, nullable=True) for c in listed)]
        )
        given = (properties or TableProperties()).model_dump(exclude_defaults=True)
        edited = TableProperties(**{**given, "rows": "edited"})
        check_keyed(schema, edited)
        made = self._catalog.create(name, schema, edited, with_it=partial(store.create, columns=listed))
        self._tables.note_activity()
        return self._row_table(made)

    def row_table(self, name: str) -> RowTable:
        """The row table of this name. `TableNotFound`, `NotARowTable`."""
        found = self._catalog.get(name)
        if not is_edited(found.properties):
            raise NotARowTable(
                f"table {name!r} is no row table: its rows have no ids and versions", table=name
            )
        return self._row_table(found)

    def row_tables(self) -> list[RowTable]:
        """All row tables, by name."""
        return [self._row_table(one) for one in self._catalog.tables() if is_edited(one.properties)]

    def _row_table(self, record: TableRecord) -> RowTable:
        # lambdas open instances, too, and have no numpy
        from dormouse.api.row_table import RowTable

        return RowTable(self._table(record, every_version=True), lambda: self.row_indexes)
