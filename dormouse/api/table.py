"""A table, as users hold it: load, query, maintain. One call each; the work is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from dormouse.api.tables import Tables, columns_of, compact_on_spark, ingest_on_spark
from dormouse.data.transform import quoted
from dormouse.errors import DormouseError, InvalidData, InvalidProperties, names_what_is_missing
from dormouse.model.container import Container
from dormouse.model.cut import When
from dormouse.model.keyed import check_kept, check_upsert
from dormouse.model.partition_tree import Partition
from dormouse.model.properties import VERSIONS, TableProperties, check_not_edited, is_edited, unknown_property
from dormouse.model.region import Region
from dormouse.model.reshaping import Evolve, check_evolve
from dormouse.model.schema import Schema
from dormouse.model.table import TableRecord
from dormouse.model.text import COLUMNS_SHOWN, plural, shown_list
from dormouse.model.types import LONG, DataType, Field
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import RecordedDeletion
from dormouse.state.files.erasures import proofs
from dormouse.state.files.garbage import GarbageReport
from dormouse.state.files.reads import FileFacts
from dormouse.state.files.shapes import SchemaChange
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.history.changes import span
from dormouse.state.history.consumers import Consumers, ConsumerStatus
from dormouse.state.history.history import TableStatus, status_of
from dormouse.state.history.moments import position_of
from dormouse.state.partitions.store import PartitionStore

if TYPE_CHECKING:
    from types import ModuleType

    import pyarrow as pa

    from dormouse.durability.erasing import EraseReport
    from dormouse.model.values import Parameters
    from dormouse.reading import PlanSummary
    from dormouse.reading.changes import Consumer
    from dormouse.reading.deleting import DeleteReport, DeleteWhere
    from dormouse.reading.interruption import Interruption
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.views import LiveFile
    from dormouse.reading.streams import Answer
    from dormouse.reading.where import Where
    from dormouse.state.history.history import History
    from dormouse.state.history.restore import RestoreReport
    from dormouse.state.partitions.leaves import SmallPair
    from dormouse.writing.compaction import CompactionReport
    from dormouse.writing.ingest_commit import IngestReport
    from dormouse.writing.merging import MergeReport
    from dormouse.writing.splitting import SplitReport

# Tables and instances as a person sees them in Python, and in a notebook.

TABLES_SHOWN = 50


class ShownTable:
    """How a table shows itself: as it is now, or, where that cannot be asked, as it was known."""

    def __repr__(self) -> str:
        schema, rows = _known(self)
        columns = [f"{column} {kind}{part}" for column, kind, part in _columns(schema)]
        about = "" if rows is None else f"; {rows}"
        return f"Table({_name(self)!r}: {shown_list(columns, COLUMNS_SHOWN)}{about})"

    def _repr_html_(self) -> str:
        schema, rows = _known(self)
        about = "" if rows is None else f": {rows}"
        return _html(f"table {_name(self)}{about}", ("column", "type", ""), _columns(schema))


class ShownInstance:
    """How an instance shows itself, with its tables."""

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the tables."""
        return iter([_name(table) for table in _all_tables(self)])

    def __repr__(self) -> str:
        tables = _tables(self)
        names = [_name(table) for table in tables]
        about = f": {shown_list(names, TABLES_SHOWN)}" if names else ""
        return f"Instance({_url(self)!r}, {plural(len(names), 'table')}{about})"

    def _repr_html_(self) -> str:
        rows = [(_name(table), _known(table)[1] or "") for table in _tables(self)[:TABLES_SHOWN]]
        return _html(f"instance {_url(self)}", ("table", "rows"), rows)


def _name(table: Any) -> str:
    return str(table.known_name) + (VERSIONS if table.every_version else "")


def _url(instance: Any) -> str:
    return str(instance.objects.url)


def _all_tables(instance: Any) -> list[Any]:
    return list(instance.tables())


def _tables(instance: Any) -> list[Any]:
    """None where nothing can be asked any more."""
    try:
        return _all_tables(instance)
    except DormouseError:
        return []


def _known(table: Any) -> tuple[Schema, str | None]:
    """The columns, and the rows in words."""
    try:
        found = table.status()
    except DormouseError:
        return table.known_schema, None
    what = "version" if table.every_version else "row"
    rows = f"{'' if found.rows_exact else '~'}{plural(found.row_count, what)}"
    return table.known_schema, rows


def _columns(schema: Schema) -> list[tuple[str, str, str]]:
    parts = ((schema.row_keys, " (key)"), (schema.sort_keys, " (sort key)"), (schema.values, ""))
    return [
        (field.name, f"{field.type}{'?' if field.nullable else ''}", part)
        for fields, part in parts
        for field in fields
    ]


def _html(title: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    shown = f"<caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<table>{shown}</table>"


# A table's name and columns, as users hold them: they are those of now, whoever changed them.


class ShapedTable:
    """What a `Table` is of, by its id: whoever renames it, or changes its columns, open handles follow."""

    def __init__(
        self,
        context: TableContext,
        tables: Tables,
        check_writable: Callable[[], None],
        *,
        every_version: bool = False,
    ) -> None:
        self._known = context
        self.every_version = every_version
        """Whether readers of a row table see every version of its rows."""
        self._tables = tables
        self._check_writable = check_writable

    @property
    def name(self) -> str:
        return self._followed().table.name

    @property
    def known_name(self) -> str:
        """As `name`, of when the table was looked up last; of many tables that were just listed."""
        return self._context.table.name

    @property
    def is_row_table(self) -> bool:
        """Whether its rows are edited: `instance.row_table` opens it as such."""
        return is_edited(self._context.properties)

    @property
    def schema(self) -> Schema:
        """The columns of now; what another process changed is seen at once."""
        return self._reading_of(self._followed()).schema

    @property
    def known_schema(self) -> Schema:
        """As `schema`, of when the table was looked up last."""
        return self.reading.schema

    def schema_at(self, when: When) -> Schema:
        """The columns that it had at a moment: a cut, a cut's name, or an aware time; as `query` raises."""
        return self.reading.as_of(position_of(self._context, when)).schema

    def schema_changes(self) -> list[SchemaChange]:
        """What was done to the columns since the table was made, in its order."""
        return self._context.shapes.changes()

    def add_column(self, field: Field, default: Any = None) -> Schema:
        """Adds a value column: one row in the database, at once, for every reader; rewrites nothing.

        Rows that are there have the `default`, a value of the field's type as Python has it, or null. So have
        rows of writers that began before and commit later. A column that must not be null needs a default.
        Gives the schema of now, as do all changes of columns.

        Raises `InvalidSchema` for a name that is taken, or a default that does not fit, `TableNotFound`,
        `TableBusy`; then nothing is changed.
        """
        return self._reshaped(lambda to: to.add_column(self._context, field, default))

    def rename_column(self, name: str, new_name: str) -> Schema:
        """Gives a column another name, which may be a key's; properties and deletions follow.

        Raises `InvalidSchema` for an unknown column and a name that is taken, `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.rename_column(self._context, name, new_name))

    def widen_column(self, name: str, to_type: DataType) -> Schema:
        """Gives a value column a wider type: LONG for INT, DOUBLE for FLOAT, a DECIMAL of more digits.

        Raises `InvalidSchema` for an unknown column, a key, and a type that has not all values of the one of
        now; `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.widen_column(self._context, name, to_type))

    def drop_column(self, name: str, *, dry_run: bool = False) -> Schema:
        """Drops a value column. Moments before still have it; one of its name that is added is another.

        Its values stay in the files until these are compacted, and collected. `dry_run` only says whether it
        can be. Raises `InvalidSchema` for an unknown column, a key, and one that properties or pending
        deletions name; `TableNotFound`, `TableBusy`.
        """
        if dry_run:
            from dormouse.reading import schemas as reshaping

            return reshaping.drop_column(self._context, name, dry_run=True).schema
        return self._reshaped(lambda to: to.drop_column(self._context, name))

    @property
    def _context(self) -> TableContext:
        """The table's services, as newly as they are known here."""
        self._known = self._known.newest_known
        return self._known

    @_context.setter
    def _context(self, context: TableContext) -> None:
        self._known = context

    @property
    def reading(self) -> TableContext:
        """The services that readers have, with the current rows of a row table."""
        return self._reading_of(self._context)

    def _reading_of(self, context: TableContext) -> TableContext:
        return context if self.every_version else context.shown

    def _followed(self) -> TableContext:
        """The services of the table as it is now; of an instance that is closed, as it was known."""
        if not self._tables.is_closed:
            self._context.followed()
        return self._context

    def _reshaped(self, change: Callable[[ModuleType], Any]) -> Schema:
        from dormouse.reading import schemas as reshaping

        self._check_not_edited("use dm.AddColumn, dm.RenameColumn, dm.RetypeColumn or dm.DropColumn")
        with self.changing():
            self._context = change(reshaping)
        return self._context.schema

    def _check_not_edited(self, instead: str) -> None:
        """`NotARowTable` for what its rows do not survive; no table becomes one, or is one no longer."""
        check_not_edited(self.known_name, self._context.properties, instead)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Of what may have changed something also when it raises."""
        self._check_writable()
        try:
            yield
        finally:
            self._tables.note_activity()


# What takes rows of a table away: deletes and erasures, as a part of `Table`.

Engine = Literal["auto", "local", "spark"]


class Changing(ShapedTable):
    """The methods, over a table's name and columns."""

    def delete(self, where: DeleteWhere, dry_run: bool = False) -> DeleteReport:
        """Deletes the rows that match, at once, for every reader: whatever they are, one row in the database.

        `where` is as for `query`; `dm.ALL` for all rows. Rows that were committed before it are deleted, and
        those that a `filter` hides, too; what is committed later stays. A row whose value is null only goes
        where null is asked for. Moments before still have them. `dry_run` counts what `query` would give.
        On a keyed table it is a load: rows of loads that began before it are gone, whenever they come. By
        values it writes a mark for each key whose newest row matches.

        Raises `InvalidQuery` for a condition that is none, that bounds nothing (a range that is open at both
        ends), or that does not fit the schema, and for one on values where the property `aggregate` merges
        rows; `TableBusy` when others change the table all the time.
        """
        from dormouse.writing.deleting import delete

        self._check_not_edited("use dm.Remove")
        if dry_run:
            return delete(self._context, where, dry_run=True)
        with self.changing():
            return delete(self._context, where)

    def erase(
        self,
        where: DeleteWhere,
        dry_run: bool = False,
        *,
        engine: Engine = "auto",
        wait_seconds: float = 60.0,
        abandon_writers: bool = False,
        backups: Sequence[str] = (),
        progress: Callable[[int, int | None], object] = lambda done, total: None,
    ) -> EraseReport:
        """Deletes the rows that match for ever: also from the history, the store, and its deleted objects.

        They are deleted as by `delete`; then each file that has some is merged without them, and the files
        that had some are deleted, whatever the history keeps, so that moments before raise `CutExpired` for
        their keys. Ended at any time, the same call goes on with it. It waits, all in all for `wait_seconds`,
        for jobs that hold such files, for consumers that did not read the deletion, and for writers that
        began before. Then jobs lose the files, consumers are told `CutExpired`, and writers are named in the
        report as `open`, or, with `abandon_writers`, can commit nothing any more. `backups` are places,
        beside those that are known, in which backups are looked at for the files. `progress` is called with
        the files looked at. Gives the proof, which `erasures` keeps. `dry_run` reads the files of the table
        and its history, tells what it has found, and changes nothing.

        Raises `InvalidQuery` as `delete` does; `JobFailed` for a file that cannot be merged, `CheckFailed`
        while references are lost, `TableBusy` while a backup is taken, and `ObjectStoreError`: then the rows
        are deleted, and not erased, until the same call has ended well.
        """
        from dormouse.durability.erasing import erase, would_erase

        self._check_not_edited("every version of its rows is kept; drop the table to erase them")
        if dry_run:
            return would_erase(self._context, where, progress)
        with self.changing():
            return erase(
                self._context,
                where,
                engine=engine,
                wait_seconds=wait_seconds,
                abandon_writers=abandon_writers,
                backups=backups,
                progress=progress,
                on_spark=compact_on_spark,
            )

    def erasures(self) -> list[EraseReport]:
        """The proofs of the table's erasures, the oldest first."""
        from dormouse.durability.erasing import EraseReport

        return [EraseReport.from_json(text) for text in proofs(self._context.store)]

    def deletions(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """The deletions by their numbers: those that readers apply, or all that the history has."""
        return self._context.deletions.list(pending_only=pending_only)


# How a table's rows are read, as a part of `Table`.


class Reading(ShapedTable, Container):
    """The methods, over a table's name and columns."""

    def query(
        self,
        where: Mapping[str, Any] | Region | None = None,
        columns: Sequence[str] | None = None,
        *,
        limit: int | None = None,
        offset: int = 0,
        descending: bool = False,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
        verify: bool = False,
    ) -> Answer:
        """The rows of a region, in key order, streamed.

        The first `offset` of them are read and left out. `descending` has those of the largest keys first;
        they are sorted by DuckDB, where `sessions` say, if not in this process.

        `where` maps columns to a value, a `Range` or a list of them; `columns` names what to read. Row keys
        choose the files that are read; NaN is the largest double. `as_of` reads the rows of another moment:
        a cut, a cut's name, or an aware time, which means all that was committed at or before it. Another
        thread ends what is read by `interruption.set()`. Raises `InvalidQuery`, `InvalidRange`, `InvalidCut`,
        and `CutExpired` for a moment that cannot be read any more.

        `verify` reads each file whole before the process first uses it, and compares its digest: a file with
        other bytes than were written raises `ObjectDamaged`, and gives no row. It raises `InvalidQuery` for a
        file that has no digest. The table's property `verify_reads` makes every reader do so.
        """
        from dormouse.reading import query
        from dormouse.reading.streams import Answer
        from dormouse.reading.where import LIMIT_MAX, checked_limit, checked_offset

        reading = self.reading.verifying(verify)
        if descending:
            from dormouse.reading.sql.views import descending as read

            sessions = sessions or self._tables.sessions()
            return Answer(read(sessions, reading, where, columns, limit, offset, interruption, as_of))
        most, offset = checked_limit(limit), checked_offset(offset)
        if most is not None:
            most = min(most + offset, LIMIT_MAX)
        found = query(reading, where, columns, limit=most, interruption=interruption, as_of=as_of)
        if not offset:
            return Answer(found)
        from dormouse.reading.streams import without_first

        return Answer(without_first(found, offset))

    def explain(
        self, where: Mapping[str, Any] | Region | None = None, *, as_of: When | None = None
    ) -> PlanSummary:
        """What a query would read: partitions, files, bytes. Raises as `query` does."""
        from dormouse.reading import explain

        return explain(self.reading, where, as_of)

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """The first rows in key order, at most so many. Raises as `query` does."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """The rows of `query` as a DataFrame of pandas. Raises as it does, and `DependencyMissing`."""
        from dormouse.reading.streams import pandas_of

        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """The rows of `query` as a DataFrame of Polars. Raises as it does, and `DependencyMissing`."""
        from dormouse.reading.streams import polars_of

        return polars_of(lambda: self.query(where, columns, **how))

    def count(
        self,
        where: Mapping[str, Any] | Region | None = None,
        *,
        as_of: When | None = None,
        verify: bool = False,
    ) -> int:
        """How many rows there are, exactly, of those that `where` asks for. Raises as `query` does.

        Of all rows mostly the files' footers are read, but for `verify`; of a row table's rows of now, the
        database alone.
        """
        if where:
            first = [self.reading.schema.key_names[0]]
            return sum(batch.num_rows for batch in self.query(where, first, as_of=as_of, verify=verify))
        if as_of is None and self.reading.current_rows and not verify:
            from dormouse.state.history.history import current_row_count

            return current_row_count(self.reading)
        from dormouse.reading.sql.views import value

        return int(value(self._tables.sessions(), self.reading.verifying(verify), "count(*)", as_of))

    def live_files(self, as_of: When | None = None) -> list[LiveFile]:
        """The Parquet files that hold the table's rows, now or at a moment, to be read without Dormouse.

        Each has a `path`, and a `condition` in SQL where not all of its rows count. Files that are compacted
        are kept for `gc_delay_seconds`. Raises `InvalidQuery` where no condition can say it, `InvalidCut` and
        `CutExpired`.
        """
        from dormouse.reading.sql.views import live_files

        return live_files(self.reading, as_of)

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        verify: bool = False,
    ) -> Answer:
        """The answer of a SELECT over this and the instance's other tables, by name; see `Instance.sql`."""
        return self._tables.sql(statement, parameters, interruption, as_of=as_of, verify=verify)


@names_what_is_missing
class Table(ShownTable, Reading, Changing):
    """One table of an instance; made by `Instance.create_table` and `Instance.table`."""

    def __init__(
        self,
        context: TableContext,
        tables: Tables,
        check_writable: Callable[[], None],
        *,
        read_only: bool = False,
        every_version: bool = False,
    ) -> None:
        super().__init__(context, tables, check_writable, every_version=every_version)
        self._read_only = read_only

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Table cannot be pickled: open its instance again in the other process")

    @property
    def properties(self) -> TableProperties:
        return self._context.properties

    @property
    def layout(self) -> str:
        """How its files are tracked, as far as is known here."""
        return self.files.table.layout

    @property
    def files(self) -> FileReferenceStore:
        """Which files hold the table, and which partitions refer to them."""
        return self._context.store

    @property
    def partitions(self) -> PartitionStore:
        """The partition tree."""
        return self._context.partitions

    @property
    def context(self) -> TableContext:
        """Its services, for what runs in other processes."""
        return self._context

    @property
    def history(self) -> History:
        """What the table was: its epochs, who became whom."""
        from dormouse.state.history.history import History

        return History(self._context, self._check_writable)

    def ingest(
        self,
        data: Any,
        *,
        ingest_id: str | None = None,
        engine: Engine = "auto",
        progress: Callable[[int, int | None], None] | None = None,
        evolve: Evolve | None = None,
    ) -> IngestReport:
        """Adds rows: all of them, in one commit, or none.

        `data` is a pyarrow Table, RecordBatch or RecordBatchReader, a DataFrame of pandas, Polars or Spark, a
        dict of columns, a list of dicts, or the paths of Parquet, CSV or JSON files; `dm.Files` says how
        these are to be read. The same `ingest_id` with the same data again adds nothing. `auto` uses Spark
        for DataFrames, for files of 256 MiB and more where Spark has a cluster, and without one for more than
        this machine's memory. `progress` is called with the rows done, and all rows if known.

        A column that the data lacks has the default that it was added with, or is null if it may be. One that
        the table lacks is refused; `evolve="add"` adds it first, as a value that may be null. Columns that
        were added stay if the rows then do not fit.

        Raises `InvalidData` when the data does not fit the schema, `CommitIdReused` for an id that was used
        for other data (streams and Spark's DataFrames are not compared), `JobFailed` and `CommitFailed` when
        nothing was added, `CommitOutcomeUnknown` when it cannot be told yet: then try the same id again.
        """
        return self._load(data, evolve, ingest_id=ingest_id, engine=engine, progress=progress)

    def upsert(
        self,
        data: Any,
        deletes: str | None = None,
        *,
        ingest_id: str | None = None,
        engine: Engine = "auto",
        progress: Callable[[int, int | None], None] | None = None,
        evolve: Evolve | None = None,
    ) -> IngestReport:
        """Brings rows to a table that keeps the newest row of each key, as `ingest` does there, too.

        `deletes` names a boolean column that the data has and the table has not: rows where it is true delete
        their key; of them only the row keys and `newest_by` count. Of rows of equal key one stays: by
        `newest_by` the largest; among equals, and without it, of the load that began last, in which the last.
        Raises as `ingest` does, and `InvalidInput` on a table that keeps every row.
        """
        check_upsert(self.name, self.properties)
        return self._load(
            data, evolve, deletes=deletes, ingest_id=ingest_id, engine=engine, progress=progress
        )

    def _load(self, data: Any, evolve: Evolve | None, **how: Any) -> IngestReport:
        from dormouse.sources.data_files import Files
        from dormouse.state.files.attempts import numbering
        from dormouse.writing.ingest import ingest

        # a DataFrame may have a column of this name
        with self.changing(), ExitStack() as until_committed:
            if evolve is not None:
                data = self._evolved(data, evolve, how["engine"], how.get("deletes"))
            context = self._context
            if isinstance(data, Files) and data.row_number is not None:
                alone = until_committed.enter_context(numbering(self._tables.supplier, context.table))
                context = replace(context, numbering=alone)
                data = replace(data, first_row_number=self._next_number(data.row_number))
            return ingest(context, data, **how, on_spark=ingest_on_spark)

    def _evolved(self, data: Any, evolve: Evolve, engine: str, deletes: str | None) -> Any:
        """Adds the columns that the data has and the table lacks; returns the data to be read then."""
        from dormouse.reading.schemas import add_missing

        check_evolve(evolve)
        self._check_not_edited("use dm.AddColumn")
        data, columns = columns_of(data, engine)
        schema, given = self.schema, {*columns, getattr(data, "row_number", None)}
        # what cannot be loaded for another reason adds nothing
        if all(name in given or schema.is_optional(name) for name in schema.names):
            self._context = add_missing(
                self._context, {name: kind for name, kind in columns.items() if name != deletes}
            )
        return data

    def _next_number(self, column: str) -> int:
        """One more than the largest of a column of running numbers, also of rows that a filter hides."""
        from dormouse.reading.executor import parts
        from dormouse.reading.sql.views import value
        from dormouse.reading.where import question
        from dormouse.state.history.moments import kept, now

        context = self._followed()
        if column not in context.schema or context.schema.field(column).type != LONG:
            raise InvalidData(f"table {self.name!r} has no column {column!r} of LONG for running numbers")
        if context.properties.filter is None:
            return int(value(self._tables.sessions(), context, f"coalesce(max({quoted(column)}) + 1, 0)"))
        at, unfiltered = now(context), context.properties.model_copy(update={"filter": None})
        shown = replace(context, table=replace(context.table, properties=unfiltered))
        some = parts(shown, question(shown.schema, None, [column], None), at)
        with kept(shown, at):
            numbers = (batch[0].drop_null().to_numpy() for part in some for batch in part.rows(shown))
            return max((int(one.max()) for one in numbers if len(one)), default=-1) + 1

    def changes(
        self,
        after: When | None,
        till: When | None = None,
        columns: Sequence[str] | None = None,
        *,
        interruption: Interruption | None = None,
    ) -> Answer:
        """The rows that came and went after a moment and up to another, by default now: each once, streamed.

        A moment is a Cut, a cut's name, or an aware datetime: all that was committed at or before it; `after`
        None: from the table's beginning. The columns asked for, and `_change`: "insert" of rows that were
        ingested, "delete" of those that a deletion is of, as they were just before it. Rows are as they were
        ingested, without the table's filter and aggregation; between two deletions in no order. Whatever was
        split, merged, compacted or collected meanwhile, no row is missed, and none comes twice. Of a keyed
        table each key comes once whose row is another at the later moment: "upsert" with it, or "delete" with
        its row keys, and null else.

        Raises `InvalidCut` for a moment that cannot be, `CutExpired` before the first row when not all can be
        served.
        """
        from dormouse.reading.changes import changes
        from dormouse.reading.streams import Answer

        start, end = span(self._context, after, till)
        return Answer(changes(self._context, start, end, columns, interruption=interruption))

    def consumer(self, name: str, from_: When | None = None) -> Consumer:
        """A named position, from which changes are read and acknowledged; it is made when there is none.

        A new one begins now, or at the moment `from_`, which is of no effect on one that is there. It keeps
        the table's files from its position on, until it acknowledged nothing for `consumer_expiry_seconds`:
        then it is expired, and says so. Raises `InvalidName`, `InvalidCut` and `CutExpired`.
        """
        from dormouse.reading.changes import Consumer

        consumers = Consumers(self._context)
        if consumers.find(name) is None:
            self._check_writable()
            consumers.create(name, None if from_ is None else position_of(self._context, from_))
        return Consumer(self._context, name, self._check_writable)

    def consumers(self) -> list[ConsumerStatus]:
        """All by name, and how far each is behind; costs what was ingested since their positions."""
        return Consumers(self._context).statuses()

    def drop_consumer(self, name: str) -> None:
        """Forgets a consumer, and keeps nothing for it any more. `InvalidInput` when there is none."""
        self._check_writable()
        Consumers(self._context).drop(name)

    def compact(
        self,
        *,
        engine: Engine = "auto",
        full: bool = False,
        progress: Callable[[int, int, int], None] | None = None,
        waiting: Callable[[str], object] | None = None,
    ) -> CompactionReport:
        """One round of compaction: makes jobs and runs what is due; gives what it did.

        `full` makes each leaf one file, whatever the table's strategy: it rewrites all rows of each leaf that
        has several files.
        `progress` is called with the jobs done, all jobs of the round, and the rows merged. First it waits
        while the commit queue is above its high mark, tells `waiting` why, and raises `CommitQueueFull`.
        """
        from dormouse.writing.compaction import compact

        with self.changing():
            self._wait_for_queue(waiting)
            return compact(
                self._context, engine=engine, full=full, progress=progress, on_spark=compact_on_spark
            )

    def split(self, *, waiting: Callable[[str], object] | None = None) -> SplitReport:
        """One round of splits: leaves over the threshold, and references pushed down by one level.

        Waits for the commit queue as `compact` does.
        """
        from dormouse.writing.splitting import split

        with self.changing():
            self._wait_for_queue(waiting)
            return split(self._followed())

    def merge(
        self, *, rest_seconds: float = 0.0, waiting: Callable[[str], object] | None = None
    ) -> MergeReport:
        """One round of merges: two small leaves that are halves of one partition become one.

        By the property `merge_threshold_rows`; files that they share with others are compacted first. Leaves
        that were made less than `rest_seconds` ago are left alone. Waits for the commit queue as `compact`
        does. Raises `InvalidProperties` when the property is not set.
        """
        from dormouse.writing.merging import merge

        with self.changing():
            self._wait_for_queue(waiting)
            return merge(self._followed(), rest_seconds=rest_seconds, on_spark=compact_on_spark)

    def mergeable(self) -> Iterator[SmallPair]:
        """The pairs of leaves that `merge` would merge now; streamed. Raises `InvalidProperties`, too."""
        from dormouse.writing.merging import mergeable

        return mergeable(self._context)

    def collect_garbage(
        self,
        *,
        progress: Callable[[int, int], object] = lambda done, total: None,
        waiting: Callable[[str], object] | None = None,
    ) -> GarbageReport:
        """One round of garbage collection: deletes files a while after their last reference went.

        Also forgets what the history has of before its truncation, for half a minute at most: `progress` is
        told how many epochs are done, and of how many.

        Waits for the commit queue as `compact` does.
        """
        self._check_writable()
        self._wait_for_queue(waiting)
        return self._context.garbage.collect(progress=progress)

    def restore(self, to: When, *, dry_run: bool = False) -> RestoreReport:
        """Makes the rows what they were at a moment, in one commit; partitions and columns stay as they are.

        What was ingested since is gone from the table, and can be restored in turn. Compactions that run are
        given up. `dry_run` says what would change. Raises `InvalidCut`, `CutExpired`, `NotWhole` when files
        of the moment cannot be told from others' rows since a merge, and `TableBusy`; then nothing changed.
        """
        from dormouse.state.history.restore import restore

        self._check_not_edited("read an older version of its rows, and change them to it")
        if dry_run:
            return restore(self._context, to, dry_run=True)
        with self.changing():
            return restore(self._context, to)

    def garbage_ready(self) -> Iterator[str]:
        """The files that `collect_garbage` would delete now, of those that an earlier round saw; streamed."""
        return self._context.garbage.ready()

    def set_properties(self, **changes: Any) -> TableProperties:
        """Changes some properties; None gives one its default back. Raises `InvalidProperties`."""
        from dormouse.data.transform import Transform

        self._check_writable()
        unknown = set(changes) - set(TableProperties.model_fields)
        if unknown:
            raise InvalidProperties(unknown_property(min(unknown)))

        def change(now: TableProperties) -> TableProperties:
            values = {**now.model_dump(exclude_defaults=True), **changes}
            changed = TableProperties(**{name: value for name, value in values.items() if value is not None})
            check_kept(now, changed)
            if changed.aggregate and not now.aggregate:
                # a delete waits for the change, or the change for it
                self._context.deletions.check_mergeable()
            return changed

        def check(changed: TableRecord) -> None:
            Transform.check(changed.schema, changed.properties)

        self._context = self._tables.change_properties(self._context.table, change, check)
        return self.properties

    def convert_layout(self, layout: str) -> bool:
        """Changes how the files are tracked: `file_table`, `salted_counts` or `dummy_reference`.

        One transaction, which waits until no other uses the table, and holds up none meanwhile; other
        processes' tables follow. False when they are tracked so already. Raises `InvalidInput` for an unknown
        layout, `TableBusy` when others used it all the time.
        """
        self._check_writable()
        before = self.layout
        self._context = self._tables.convert_layout(self._context.table, layout)
        return self.layout != before

    def partition_page(self, after: str = "", limit: int = 100, *, leaves: bool = False) -> list[Partition]:
        """At most `limit` partitions by id, whose id is greater than `after`; all, or the leaves alone."""
        return self.partitions.page(after, limit, leaves=leaves)

    def file_page(self, after: str | None = None, limit: int = 100) -> list[FileFacts]:
        """At most `limit` files with their facts, after a file's name, in an order that stays."""
        return self.files.page(after, limit)

    def status(self) -> TableStatus:
        """What the table consists of now, and how its rounds end.

        Costs what has changed since it was last counted, not the table.
        """
        return status_of(self._reading_of(self._followed()), read_only=self._read_only)

    def _wait_for_queue(self, waiting: Callable[[str], object] | None) -> None:
        self._tables.commits.wait_for_room(self._context.table.table_id, waiting)
