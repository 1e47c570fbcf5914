"""The services that all tables of an instance share: opening, changing, loading, and SQL over several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Event
from typing import TYPE_CHECKING, Any

from dormouse.errors import (
    InstanceError,
    InvalidData,
    InvalidInput,
    InvalidProperties,
    InvalidQuery,
    InvalidSchema,
    TableAlreadyExists,
    TableNotFound,
)
from dormouse.model.cut import When
from dormouse.model.reshaping import Evolve, check_evolve
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.table import (
    ROWS_MAX,
    VERSIONS,
    TableProperties,
    TableRecord,
    check_kept,
    check_not_edited,
    is_edited,
    named_versions,
    unknown_property,
)
from dormouse.model.types import LONG, DataType
from dormouse.objects.store import ObjectStore, note_if_shared
from dormouse.postgres import ConnectionSupplier
from dormouse.state.catalog import Catalog
from dormouse.state.commits.commit_queues import CommitQueues
from dormouse.state.context import JobCommits, TableContext
from dormouse.state.files.round_reports import RoundReports
from dormouse.state.trees import TreeCache

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from dormouse.model.types import Parameters
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.sql.engine import Engine, Sessions
    from dormouse.reading.sql.named import Named
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.reading.where import Where

REMEMBERED_MAX = 1_000
CURSORS_KEPT = 32
"""The most idle connections to DuckDB, each with the views of an ended statement."""


@dataclass(frozen=True)
class Tables:
    """The services of an instance that its `Table` objects share."""

    dsn: str = field(repr=False)
    supplier: ConnectionSupplier
    objects: ObjectStore
    catalog: Catalog
    trees: TreeCache
    commits: CommitQueues
    job_commits: JobCommits | None
    changed: Callable[[], object] = field(repr=False, compare=False)
    reports: RoundReports = field(repr=False, compare=False)
    check_writable: Callable[[], None] = field(repr=False, compare=False)
    remembered: dict[str, TableContext] = field(default_factory=dict, repr=False, compare=False)
    """The services of tables by name, as transactions last knew them."""
    _closed: Event = field(default_factory=Event, repr=False, compare=False)
    _given_sessions: Sessions | None = field(default=None, repr=False, compare=False)
    _not_read: frozenset[int] = field(default=frozenset(), repr=False, compare=False)
    """The ids of tables that a transaction changed: queries must not read them."""

    def context(self, record: TableRecord) -> TableContext:
        """Returns the services of a table."""
        return TableContext(
            self.dsn, self.supplier, self.objects, record, self.job_commits, self.trees, self.reports
        )

    def followed(self, context: TableContext) -> TableContext:
        """Returns the services of a table with its current name, columns and properties.

        If the instance is closed, the name, columns and properties are the last known ones.
        """
        context = context.newest_known
        if not self.is_closed:
            context.followed()
        return context.newest_known

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Runs a block that changes a table, and records afterwards that a table changed.

        Records this also if the block raises, since it may have changed a part. Raises the error of
        `check_writable`, if any, before the block.
        """
        self.check_writable()
        try:
            yield
        finally:
            self.note_activity()

    @contextmanager
    def maintaining(
        self, context: TableContext, waiting: Callable[[str], object] | None
    ) -> Iterator[TableContext]:
        """Runs a block of maintenance as `changing` does, after waiting for room in the commit queue.

        While it waits, it calls `waiting` with the reason. Yields the table's newest known services.
        """
        with self.changing():
            self.commits.wait_for_room(context.table.table_id, waiting)
            yield context.newest_known

    def change_properties(self, context: TableContext, changes: Mapping[str, Any]) -> TableContext:
        """Changes some properties of a table; None restores a default. Raises `InvalidProperties`."""
        from dormouse.data.transform import Transform

        self.check_writable()
        unknown = set(changes) - set(TableProperties.model_fields)
        if unknown:
            raise InvalidProperties(unknown_property(min(unknown)))

        def change(now: TableProperties) -> TableProperties:
            values = {**now.model_dump(exclude_defaults=True), **changes}
            changed = TableProperties(**{name: value for name, value in values.items() if value is not None})
            check_kept(now, changed)
            if changed.aggregate and not now.aggregate:
                # a delete cannot run at the same time: both take the same lock
                context.deletions.check_mergeable()
            return changed

        def check(changed: TableRecord) -> None:
            Transform.check(changed.schema, changed.properties)

        changed = self.context(self.catalog.change_properties(context.table, change, check))
        self.note_activity()
        return changed

    def convert_layout(self, table: TableRecord, layout: str) -> TableContext:
        return self.context(self.catalog.convert_layout(table, layout))

    def note_activity(self) -> None:
        """Records that a table changed: a note for the schedules of a deployed instance, and a milestone."""
        note_if_shared(self.objects)
        self.changed()

    def evolved(
        self,
        context: TableContext,
        data: Any,
        evolve: Evolve,
        engine: str,
        deletes: str | None,
        on_spark: Callable[[Any], dict[str, DataType] | None],
    ) -> tuple[Any, TableContext]:
        """Adds the columns to the table that the data has and the table lacks.

        Adds none if the load will fail because the data lacks a required column. Returns the data to load
        (reading the columns may begin a stream) and the table's new services.
        """
        from dormouse.reading.schemas import add_missing

        check_evolve(evolve)
        check_not_edited(context.table.name, context.properties, "use dm.AddColumn")
        data, columns = columns_of(data, engine, on_spark)
        context = self.followed(context)
        # a DataFrame may have a column of this name
        schema, given = context.schema, {*columns, getattr(data, "row_number", None)}
        # add no column when the load fails anyway, because a required column is missing
        if all(name in given or schema.is_optional(name) for name in schema.names):
            missing = {name: kind for name, kind in columns.items() if name != deletes}
            context = add_missing(context, missing)
        return data, context

    def remember(self, name: str, context: TableContext) -> None:
        """Remembers the services of a table for later transactions."""
        if len(self.remembered) >= REMEMBERED_MAX:
            self.remembered.clear()
        self.remembered[name] = context

    def partial(
        self,
        context: TableContext,
        data: Any,
        engine: str,
        on_spark: Callable[[Any], dict[str, DataType] | None],
    ) -> tuple[Any, bool]:
        """Returns the data to load, and whether it lacks value columns of the table.

        Reading its columns may begin a stream. Raises `InvalidInput` for such data that Spark would load.
        """
        from dormouse.writing.ingest import is_dataframe

        data, columns = columns_of(data, engine, on_spark)
        values = self.followed(context).schema.values if columns else ()
        missing = [field.name for field in values if field.name not in columns]
        if missing and (engine == "spark" or is_dataframe(data)):
            raise InvalidInput(
                f"upsert into table {context.table.name!r}: the data for Spark lacks column {missing[0]!r}, "
                "and existing rows would lose their values; use dormouse.spark.merge, or add the column"
            )
        return data, bool(missing)

    @contextmanager
    def numbered(self, context: TableContext, data: Any) -> Iterator[tuple[TableContext, Any]]:
        """Yields the services, and the data with its first row number set, for a load that numbers its rows.

        The block runs under a lock, for which other loads with row numbers wait. Yields the arguments for
        data without row numbers.
        """
        from dormouse.sources.data_files import Files
        from dormouse.state.files.attempts import numbering

        if not isinstance(data, Files) or data.row_number is None:
            yield context, data
            return
        with numbering(self.supplier, context.table) as alone:
            context = replace(context, numbering=alone)
            yield context, replace(data, first_row_number=self.next_number(context, data.row_number))

    def next_number(self, context: TableContext, column: str) -> int:
        """Returns the largest number in a column plus one. Includes rows that the table's filter hides."""
        from dormouse.data.transform import quoted
        from dormouse.reading.executor import parts
        from dormouse.reading.sql.views import value
        from dormouse.reading.where import question
        from dormouse.state.history.moments import kept, now

        context = self.followed(context)
        if column not in context.schema or context.schema.field(column).type != LONG:
            raise InvalidData(
                f"table {context.table.name!r} has no column {column!r} of LONG for running numbers"
            )
        if context.properties.filter is None:
            return int(value(self.sessions(), context, f"coalesce(max({quoted(column)}) + 1, 0)"))
        at, unfiltered = now(context), context.properties.model_copy(update={"filter": None})
        shown = replace(context, table=replace(context.table, properties=unfiltered))
        some = parts(shown, question(shown.schema, None, [column], None), at)
        with kept(shown, at):
            numbers = (batch[0].drop_null().to_numpy() for part in some for batch in part.rows(shown))
            return max((int(array.max()) for array in numbers if len(array)), default=-1) + 1

    def query(
        self,
        reading: TableContext,
        where: Where,
        columns: Sequence[str] | None,
        limit: int | None,
        offset: int,
        interruption: Interruption | None,
        as_of: When | None,
        sessions: Sessions | None,
        descending: bool,
    ) -> Answer:
        from dormouse.reading.executor import query
        from dormouse.reading.streams import Answer, without_first
        from dormouse.reading.where import checked_limit, checked_offset

        if descending:
            from dormouse.reading.sql.views import descending as read

            sessions = sessions or self.sessions()
            return Answer(read(sessions, reading, where, columns, limit, offset, interruption, as_of))
        most, offset = checked_limit(limit), checked_offset(offset)
        if most is not None:
            most = min(most + offset, ROWS_MAX)
        rows = query(reading, where, columns, limit=most, interruption=interruption, as_of=as_of)
        return Answer(without_first(rows, offset) if offset else rows)

    def count(self, reading: TableContext, where: Where, as_of: When | None, verify: bool) -> int:
        if where:
            first = [reading.schema.key_names[0]]
            how = (None, 0, None, as_of, None, False)
            rows = self.query(reading.verifying(verify), where, first, *how)
            return sum(batch.num_rows for batch in rows)
        if as_of is None and reading.current_rows and not verify:
            return reading.store.totals.current_rows()
        from dormouse.reading.sql.views import value

        return int(value(self.sessions(), reading.verifying(verify), "count(*)", as_of))

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
        as_of: When | None = None,
        verify: bool = False,
    ) -> Answer:
        from dormouse.reading.sql.statements import sql  # before sessions(): its error names the extra

        sessions = sessions or self.sessions()
        from dormouse.reading.streams import Answer

        return Answer(sql(sessions, self.named(verify), statement, parameters, interruption, as_of))

    def duckdb(self, where: Mapping[str, Where], as_of: When | None, verify: bool) -> DuckDBPyConnection:
        if not isinstance(where, Mapping):
            raise InvalidQuery(f"where must be a dict of tables, like {{'flights': {{…}}}}, not {where!r}")
        from dormouse.reading.sql.views import opened

        while True:
            tables = self.catalog.tables()
            try:
                return opened(self.objects, self._with_versions(tables, verify), where, as_of)
            except SchemaMoved:
                continue  # a table's columns changed since the tables were listed
            except TableNotFound:
                if self.catalog.tables() == tables:
                    raise
                # a table was dropped since the tables were listed

    def explain_sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
        as_of: When | None = None,
    ) -> dict[str, PlanSummary]:
        from dormouse.reading.sql.statements import explain_sql

        sessions = sessions or self.sessions()
        return explain_sql(sessions, self.named(), statement, parameters, interruption, as_of)

    def close(self) -> None:
        """Closes the SQL engine; later statements raise `InstanceError`."""
        self._closed.set()
        self.reports.close()
        if "_engine" in self.__dict__:
            self._engine.close()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def sessions(self) -> Sessions:
        """Returns a function that opens a session for a statement: here, or as `running_in` says."""
        if self._closed.is_set():
            raise InstanceError("the instance is closed")
        return self._given_sessions or self._engine.session

    def running_in(self, sessions: Sessions) -> Tables:
        """Returns these services, but with other sessions for statements."""
        return replace(self, _given_sessions=sessions)

    def without(self, changed: Iterable[int]) -> Tables:
        """Returns these services, but a query over a table with one of these ids raises `InvalidInput`."""
        return replace(self, _given_sessions=self.sessions(), _not_read=frozenset(changed))

    @cached_property
    def _engine(self) -> Engine:
        from dormouse.reading.sql.engine import Engine

        return Engine(self.objects, cursors_kept=CURSORS_KEPT)

    def named(self, verify: bool = False) -> Named:
        """Returns functions that look up the tables that a statement names."""
        from dormouse.reading.sql.named import Named

        def readable(contexts: dict[str, TableContext]) -> dict[str, TableContext]:
            for name, context in contexts.items() if self._not_read else ():
                if context.table.table_id in self._not_read:
                    raise InvalidInput(
                        f"table {name!r}: a query reads it as it was before the transaction, which has "
                        "changed it; give the change with the query before this one, or use two transactions"
                    )
            return contexts

        def like(names: Iterable[str]) -> dict[str, TableContext]:
            listed = list(names)
            tables = self.catalog.tables_like([*listed, *filter(None, map(named_versions, listed))])
            return readable(self._with_versions(tables, verify))

        return Named(
            like=like,
            all=lambda: readable(self._contexts(self.catalog.tables(), verify)),
            names=self.catalog.names,
        )

    def _contexts(self, records: Iterable[TableRecord], verify: bool) -> dict[str, TableContext]:
        return {record.name: self.context(record).shown.verifying(verify) for record in records}

    def _with_versions(self, records: Iterable[TableRecord], verify: bool) -> dict[str, TableContext]:
        """Returns the services of tables by name.

        Each row table appears twice: with its current rows, and with every version (`name$versions`).
        """
        listed = list(records)
        edited = [record for record in listed if is_edited(record.properties)]
        return {
            **self._contexts(listed, verify),
            **{record.name + VERSIONS: self.context(record).verifying(verify) for record in edited},
        }


def checked_schema(
    schema: Schema | None, like: Any, row_keys: Sequence[str], sort_keys: Sequence[str]
) -> Schema:
    """Returns the given schema, or the schema of the data `like` with the named keys.

    Raises `InvalidSchema` if both or none are given.
    """
    if like is not None and schema is None:
        from dormouse.sources.infer import schema_like

        return schema_like(like, row_keys, sort_keys)
    if like is not None or row_keys or sort_keys:
        raise InvalidSchema("give either a schema, or like with row_keys and sort_keys")
    if not isinstance(schema, Schema):
        raise InvalidSchema(f"schema must be dm.Schema(...), not {schema!r}")
    return schema


def checked_properties(name: str, schema: Schema, properties: TableProperties | None) -> TableProperties:
    """Returns the properties, or the defaults, checked against the schema. Raises `InvalidProperties`."""
    from dormouse.data.transform import Transform

    properties = TableProperties() if properties is None else properties
    if not isinstance(properties, TableProperties):
        raise InvalidProperties(f"properties must be dm.TableProperties(...), not {properties!r}")
    check_not_edited(name, properties, "use create_row_table")
    Transform.check(schema, properties)
    return properties


def columns_of(
    data: Any, engine: str, on_spark: Callable[[Any], dict[str, DataType] | None]
) -> tuple[Any, dict[str, DataType]]:
    """Returns the data to read, and the types of all its columns.

    `on_spark` returns the types if Spark loads the data.
    """
    from dormouse.sources import infer
    from dormouse.writing.ingest import is_dataframe

    columns = on_spark(data) if engine == "spark" or is_dataframe(data) else None
    return infer.columns_of(data) if columns is None else (data, columns)


def there_already(catalog: Catalog, name: str, schema: Schema) -> TableRecord:
    """Returns the existing table of this name. Raises `TableAlreadyExists` if its columns differ."""
    record = catalog.get(name)
    if list(record.schema.fields) != list(schema.fields) or record.schema.key_names != schema.key_names:
        raise TableAlreadyExists(
            f"table {name!r} exists already, with other columns: "
            f"{', '.join(f'{field.name} {field.type}' for field in record.schema.fields)}",
            table=name,
        )
    return record
