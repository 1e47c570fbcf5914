"""A table, as users hold it: load, query, change, maintain. One call each; rooms below do the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from dormouse.api import shown
from dormouse.api.tables import Tables
from dormouse.errors import names_what_is_missing
from dormouse.model.cut import When
from dormouse.model.loops import Progress, no_progress
from dormouse.model.partition_tree import Partition
from dormouse.model.reshaping import Evolve
from dormouse.model.schema import Schema
from dormouse.model.table import Container, Engine, TableProperties, check_not_edited, check_upsert, is_edited
from dormouse.model.types import DataType, Field
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import RecordedDeletion, erasure_proofs
from dormouse.state.files.garbage import GarbageReport
from dormouse.state.files.shapes import SchemaChange
from dormouse.state.files.store import FileFacts, FileReferenceStore
from dormouse.state.history.changes import span
from dormouse.state.history.consumers import Consumers, ConsumerStatus
from dormouse.state.history.history import TableStatus, status_of
from dormouse.state.history.moments import position_of
from dormouse.state.partitions import PartitionStore

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.durability.erasing import EraseReport
    from dormouse.model.types import Parameters
    from dormouse.reading.changes import Consumer
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.views import LiveFile
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.reading.where import DeleteWhere, Where
    from dormouse.state.history.history import History
    from dormouse.state.history.moments import RestoreReport
    from dormouse.state.partitions import SmallPair
    from dormouse.writing.compaction import CompactionReport
    from dormouse.writing.deleting import DeleteReport
    from dormouse.writing.ingest import IngestReport
    from dormouse.writing.splitting import MergeReport, SplitReport

Waiting = Callable[[str], object] | None
"""What is told why a round waits for the commit queue."""


@names_what_is_missing
class Table(Container):
    """One table of an instance; made by `Instance.create_table` and `Instance.table`.

    A handle follows its table by id: it sees new names and columns, also those that other processes gave.
    """

    def __init__(
        self, context: TableContext, tables: Tables, *, read_only: bool = False, every_version: bool = False
    ) -> None:
        self._known = context
        self._tables = tables
        self._read_only = read_only
        self.every_version = every_version
        """Whether readers of a row table see every version of its rows."""

    def __repr__(self) -> str:
        return shown.table_text(self)

    def _repr_html_(self) -> str:
        return shown.table_html(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Table cannot be pickled: open its instance again in the other process")

    @property
    def name(self) -> str:
        return self._followed().table.name

    @property
    def known_name(self) -> str:
        """As `name`, of when the table was looked up last; of many tables that were just listed."""
        return self.context.table.name

    @property
    def is_row_table(self) -> bool:
        """Whether its rows are edited: `instance.row_table` opens it as such."""
        return is_edited(self.context.properties)

    @property
    def properties(self) -> TableProperties:
        return self.context.properties

    @property
    def layout(self) -> str:
        """How its files are tracked, as far as is known here."""
        return self.files.table.layout

    @property
    def files(self) -> FileReferenceStore:
        """Which files hold the table, and which partitions refer to them."""
        return self.context.store

    @property
    def partitions(self) -> PartitionStore:
        """The partition tree."""
        return self.context.partitions

    @property
    def context(self) -> TableContext:
        """The table's services, as newly as this process knows them."""
        self._known = self._known.newest_known
        return self._known

    @property
    def history(self) -> History:
        """What the table was: its epochs, who became whom."""
        from dormouse.state.history.history import History

        return History(self.context, self._tables.check_writable)

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
        return self.reading.as_of(position_of(self.context, when)).schema

    def schema_changes(self) -> list[SchemaChange]:
        """What was done to the columns since the table was made, in its order."""
        return self.context.shapes.changes()

    def add_column(self, field: Field, default: Any = None) -> Schema:
        """Adds a value column: one row in the database, at once, for every reader; rewrites nothing.

        Rows that are there have the `default`, a value of the field's type as Python has it, or null. So have
        rows of writers that began before and commit later. A column that must not be null needs a default.
        Gives the schema of now, as do all changes of columns.

        Raises `InvalidSchema` for a name that is taken, or a default that does not fit, `TableNotFound`,
        `TableBusy`; then nothing is changed.
        """
        return self._reshaped(lambda to: to.add_column(self.context, field, default))

    def rename_column(self, name: str, new_name: str) -> Schema:
        """Gives a column another name, which may be a key's; properties and deletions follow.

        Raises `InvalidSchema` for an unknown column and a name that is taken, `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.rename_column(self.context, name, new_name))

    def widen_column(self, name: str, to_type: DataType) -> Schema:
        """Gives a value column a wider type: LONG for INT, DOUBLE for FLOAT, a DECIMAL of more digits.

        Raises `InvalidSchema` for an unknown column, a key, and a type that has not all values of the one of
        now; `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.widen_column(self.context, name, to_type))

    def drop_column(self, name: str, *, dry_run: bool = False) -> Schema:
        """Drops a value column. Moments before still have it; one of its name that is added is another.

        Its values stay in the files until these are compacted, and collected. `dry_run` only says whether it
        can be. Raises `InvalidSchema` for an unknown column, a key, and one that properties or pending
        deletions name; `TableNotFound`, `TableBusy`.
        """
        if dry_run:
            from dormouse.reading import schemas

            return schemas.drop_column(self.context, name, dry_run=True).schema
        return self._reshaped(lambda to: to.drop_column(self.context, name))

    def ingest(
        self,
        data: Any,
        *,
        ingest_id: str | None = None,
        engine: Engine = "auto",
        progress: Progress | None = None,
        evolve: Evolve | None = None,
    ) -> IngestReport:
        """Adds rows: all of them, in one commit, or none.

        `data` is a pyarrow Table, RecordBatch or RecordBatchReader, a DataFrame of pandas, Polars or Spark, a
        dict of columns, a list of dicts, or the paths of Parquet, CSV or JSON files; `dm.Files` says how to
        read these. The same `ingest_id` with the same data again adds nothing. `auto` uses Spark for
        DataFrames, for files of 256 MiB and more where Spark has a cluster, and without one for more than
        this machine's memory. `progress` is called with the rows done, and with all rows if known.

        A column that the data lacks has the default that it was added with, or is null if it may be. A column
        that the table lacks is refused; `evolve="add"` adds it first, as a value that may be null. Added
        columns stay if the rows then do not fit.

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
        progress: Progress | None = None,
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
        from dormouse.writing.ingest import ingest

        with self.changing():
            if evolve is not None:
                given = (how["engine"], how.get("deletes"), _columns_on_spark)
                data, self._known = self._tables.evolved(self.context, data, evolve, *given)
            with self._tables.numbered(self.context, data) as (context, numbered):
                return ingest(context, numbered, **how, on_spark=_ingest_on_spark)

    def query(
        self,
        where: Where = None,
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
        """Returns the rows of a region, in key order, streamed.

        The first `offset` of them are left out. `descending` gives the rows of the largest keys first; DuckDB
        sorts them, where `sessions` say, if not in this process.

        `where` maps columns to a value, a `Range` or a list of them; `columns` names what to read. Row keys
        choose the files that are read; NaN is the largest double. `as_of` reads the rows of another moment: a
        cut, a cut's name, or an aware time, and includes what was committed at it. `interruption.set()` in
        another thread ends the reading. Raises `InvalidQuery`, `InvalidRange`, `InvalidCut`, and `CutExpired`
        for a moment that cannot be read any more.

        `verify` reads each file whole before the process first uses it, and compares its digest: a file with
        other bytes than were written raises `ObjectDamaged`, and gives no row. It raises `InvalidQuery` for a
        file that has no digest. The table's property `verify_reads` makes every reader do so.
        """
        reading = self.reading.verifying(verify)
        return self._tables.query(
            reading, where, columns, limit, offset, interruption, as_of, sessions, descending
        )

    def explain(self, where: Where = None, *, as_of: When | None = None) -> PlanSummary:
        """What a query would read: partitions, files, bytes. Raises as `query` does."""
        from dormouse.reading.table_view import explain

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

    def count(self, where: Where = None, *, as_of: When | None = None, verify: bool = False) -> int:
        """Returns how many rows there are, exactly, of those that `where` asks for. Raises as `query` does.

        For all rows, mostly the footers of the files are read, unless `verify`; for the rows that a row table
        has now, only the database.
        """
        return self._tables.count(self.reading, where, as_of, verify)

    def live_files(self, as_of: When | None = None) -> list[LiveFile]:
        """Returns the Parquet files that hold the table's rows, now or at a moment, to read without Dormouse.

        Each has a `path`, and a `condition` in SQL where not all of its rows count. Compacted files are kept
        for `gc_delay_seconds`. Raises `InvalidQuery` where no condition can say it, `InvalidCut` and
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

    def delete(self, where: DeleteWhere, dry_run: bool = False) -> DeleteReport:
        """Deletes the rows that match, at once and for every reader, by one row in the database.

        `where` is as for `query`; `dm.ALL` means all rows. Rows that were committed before are deleted, also
        those that a `filter` hides; rows that are committed later stay, and so do rows at moments before. A
        null matches only where null is asked for. `dry_run` counts what `query` would give. On a keyed table
        a delete is a load: it deletes rows of loads that began before it, whenever these commit. By values,
        it writes a mark for each key whose newest row matches.

        Raises `InvalidQuery` for a condition that does not fit the schema or bounds nothing (a range that is
        open at both ends), and for one on values where the property `aggregate` merges rows; `TableBusy` when
        others change the table all the time.
        """
        from dormouse.writing.deleting import delete

        self._check_not_edited("use dm.Remove")
        with nullcontext() if dry_run else self.changing():
            return delete(self.context, where, dry_run=dry_run)

    def erase(
        self,
        where: DeleteWhere,
        dry_run: bool = False,
        *,
        engine: Engine = "auto",
        wait_seconds: float = 60.0,
        abandon_writers: bool = False,
        backups: Sequence[str] = (),
        progress: Progress = no_progress,
    ) -> EraseReport:
        """Deletes the rows that match for ever, also from the history and the object store.

        First deletes them as `delete` does. Then merges each file that has such rows without them, and
        deletes the old files whatever the history keeps: reading a moment before raises `CutExpired` for
        these keys. If it is interrupted, the same call goes on. It waits, for `wait_seconds` in all, for jobs
        that hold such files, consumers that have not read the deletion, and writers that began before. After
        that, jobs lose the files, consumers get `CutExpired`, and writers are in the report as `open`, or,
        with `abandon_writers`, can commit nothing any more. `backups` are places where backups are searched,
        besides the known ones. `progress` is called with the files searched. Returns the proof, which
        `erasures` keeps. `dry_run` reads the files of the table and its history, reports what it finds, and
        changes nothing.

        Raises `InvalidQuery` as `delete` does; and `JobFailed` for a file that cannot be merged,
        `CheckFailed` while references are lost, `TableBusy` while a backup is taken, `ObjectStoreError`: then
        the rows are deleted, and not erased until the same call succeeds.
        """
        from dormouse.durability.erasing import erase, would_erase

        self._check_not_edited("every version of its rows is kept; drop the table to erase them")
        if dry_run:
            return would_erase(self.context, where, progress)
        with self.changing():
            return erase(
                self.context,
                where,
                engine=engine,
                wait_seconds=wait_seconds,
                abandon_writers=abandon_writers,
                backups=backups,
                progress=progress,
                on_spark=_compact_on_spark,
            )

    def erasures(self) -> list[EraseReport]:
        """The proofs of the table's erasures, the oldest first."""
        from dormouse.durability.erasing import EraseReport

        return [EraseReport.from_json(text) for text in erasure_proofs(self.context.store)]

    def deletions(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """The deletions by their numbers: those that readers apply, or all that the history has."""
        return self.context.deletions.list(pending_only=pending_only)

    def changes(
        self,
        after: When | None,
        till: When | None = None,
        columns: Sequence[str] | None = None,
        *,
        interruption: Interruption | None = None,
    ) -> Answer:
        """Returns the rows that came and went between two moments, each once, streamed; up to now by default.

        A moment is a Cut, a cut's name, or an aware datetime, and includes what was committed at it; `after`
        None is the table's beginning. Rows have the columns asked for and `_change`: "insert" for rows that
        were ingested, "delete" for rows that a deletion took, as they were just before it. Rows are as
        ingested, without the table's filter and aggregation, and have no order between two deletions. Splits,
        merges, compactions and collections neither lose nor repeat a row. A keyed table gives each key once
        whose row is another at the later moment: "upsert" with the row, or "delete" with its row keys and
        nulls.

        Raises `InvalidCut` for an impossible moment, and `CutExpired` before the first row when some rows are
        no longer kept.
        """
        from dormouse.reading.changes import changes
        from dormouse.reading.streams import Answer

        start, end = span(self.context, after, till)
        return Answer(changes(self.context, start, end, columns, interruption=interruption))

    def consumer(self, name: str, from_: When | None = None) -> Consumer:
        """Returns a named position from which changes are read and acknowledged; makes it if there is none.

        A new one begins now, or at the moment `from_`, which an existing one ignores. It keeps the table's
        files from its position on, and expires when it acknowledges nothing for `consumer_expiry_seconds`.
        Raises `InvalidName`, `InvalidCut` and `CutExpired`.
        """
        from dormouse.reading.changes import Consumer

        consumers = Consumers(self.context)
        if consumers.find(name) is None:
            self._tables.check_writable()
            consumers.create(name, None if from_ is None else position_of(self.context, from_))
        return Consumer(self.context, name, self._tables.check_writable)

    def consumers(self) -> list[ConsumerStatus]:
        """All by name, and how far each is behind; costs what was ingested since their positions."""
        return Consumers(self.context).statuses()

    def drop_consumer(self, name: str) -> None:
        """Deletes a consumer, and keeps nothing for it any more. `InvalidInput` when there is none."""
        self._tables.check_writable()
        Consumers(self.context).drop(name)

    def restore(self, to: When, *, dry_run: bool = False) -> RestoreReport:
        """Makes the rows what they were at a moment, in one commit; partitions and columns stay as they are.

        Rows that were ingested since are no longer in the table, and can be restored in turn. Running
        compactions are given up. `dry_run` reports what would change. Raises `InvalidCut`, `CutExpired`,
        `NotWhole` when since a merge the files of the moment cannot be told from others, and `TableBusy`;
        then nothing has changed.
        """
        from dormouse.state.history.moments import restore

        self._check_not_edited("read an older version of its rows, and change them to it")
        with nullcontext() if dry_run else self.changing():
            return restore(self.context, to, dry_run=dry_run)

    def compact(
        self,
        *,
        engine: Engine = "auto",
        full: bool = False,
        progress: Progress | None = None,
        waiting: Waiting = None,
    ) -> CompactionReport:
        """Runs one round of compaction: makes jobs, runs those that are due, and reports what it did.

        `full` makes each leaf one file, whatever the table's strategy: it rewrites all rows of each leaf that
        has several files. `progress` is called with the jobs done and all jobs of the round. Waits first
        while the commit queue is above its high mark, tells `waiting` why, and raises `CommitQueueFull`.
        """
        from dormouse.writing.compaction import compact

        with self._tables.maintaining(self.context, waiting) as context:
            return compact(context, engine=engine, full=full, progress=progress, on_spark=_compact_on_spark)

    def split(self, *, waiting: Waiting = None) -> SplitReport:
        """Splits leaves over the threshold, pushes references down by one level; waits as `compact` does."""
        from dormouse.writing.splitting import split

        with self._tables.maintaining(self.context, waiting):
            return split(self._followed())

    def merge(self, *, rest_seconds: float = 0.0, waiting: Waiting = None) -> MergeReport:
        """One round of merges: two small leaves that are halves of one partition become one.

        By the property `merge_threshold_rows`; files that they share with others are compacted first. Leaves
        that were made less than `rest_seconds` ago are left alone. Waits for the commit queue as `compact`
        does. Raises `InvalidProperties` when the property is not set.
        """
        from dormouse.writing.splitting import merge

        with self._tables.maintaining(self.context, waiting):
            return merge(self._followed(), rest_seconds=rest_seconds, on_spark=_compact_on_spark)

    def mergeable(self) -> Iterator[SmallPair]:
        """The pairs of leaves that `merge` would merge now; streamed. Raises `InvalidProperties`, too."""
        from dormouse.writing.splitting import mergeable

        return mergeable(self.context)

    def collect_garbage(self, *, progress: Progress = no_progress, waiting: Waiting = None) -> GarbageReport:
        """Runs one round of garbage collection: deletes files a while after their last reference.

        Also forgets what the history has from before its truncation, for half a minute at most; `progress`
        gets the number of epochs done and of all. Waits for the commit queue as `compact` does.
        """
        self._tables.check_writable()
        self._tables.commits.wait_for_room(self.context.table.table_id, waiting)
        return self.context.garbage.collect(progress=progress)

    def garbage_ready(self) -> Iterator[str]:
        """The files that `collect_garbage` would delete now, of those that an earlier round saw; streamed."""
        return self.context.garbage.ready()

    def set_properties(self, **changes: Any) -> TableProperties:
        """Changes some properties; None gives one its default back. Raises `InvalidProperties`."""
        self._known = self._tables.change_properties(self.context, changes)
        return self.properties

    def convert_layout(self, layout: str) -> bool:
        """Changes how the files are tracked: `file_table`, `salted_counts` or `dummy_reference`.

        One transaction, which waits until no other uses the table; other processes' tables follow. Returns
        False when they are tracked so already. Raises `InvalidInput` for an unknown layout, `TableBusy`.
        """
        self._tables.check_writable()
        before = self.layout
        self._known = self._tables.convert_layout(self.context.table, layout)
        return self.layout != before

    def partition_page(self, after: str = "", limit: int = 100, *, leaves: bool = False) -> list[Partition]:
        """At most `limit` partitions by id, whose id is greater than `after`; all, or the leaves alone."""
        return self.partitions.page(after, limit, leaves=leaves)

    def file_page(self, after: str | None = None, limit: int = 100) -> list[FileFacts]:
        """At most `limit` files with their facts, after a file's name, in an order that stays."""
        return self.files.page(after, limit)

    def status(self) -> TableStatus:
        """Returns what the table consists of, and how its rounds ended; costs what changed since the last."""
        return status_of(self._reading_of(self._followed()), read_only=self._read_only)

    @property
    def reading(self) -> TableContext:
        """The services that readers have, with the current rows of a row table."""
        return self._reading_of(self.context)

    def _reading_of(self, context: TableContext) -> TableContext:
        return context if self.every_version else context.shown

    def _followed(self) -> TableContext:
        self._known = self._tables.followed(self._known)
        return self._known

    def _reshaped(self, change: Callable[[Any], TableContext]) -> Schema:
        from dormouse.reading import schemas

        self._check_not_edited("use dm.AddColumn, dm.RenameColumn, dm.RetypeColumn or dm.DropColumn")
        with self.changing():
            self._known = change(schemas)
        return self.context.schema

    def changing(self) -> AbstractContextManager[None]:
        """Encloses a change: notes it at the end, also when it raises, as something may have changed."""
        return self._tables.changing()

    def _check_not_edited(self, instead: str) -> None:
        """Raises `NotARowTable` for what rows of a row table do not survive."""
        check_not_edited(self.known_name, self.context.properties, instead)


def _columns_on_spark(data: Any) -> dict[str, DataType] | None:  # Spark is imported when it has work
    from dormouse.spark.ingest import columns_read

    return columns_read(data)


def _ingest_on_spark(*args: Any, **options: Any) -> IngestReport:
    from dormouse.spark.ingest import ingest_with_spark

    return ingest_with_spark(*args, **options)


def _compact_on_spark(context: TableContext, now_ms: int, *, run_id: str | None = None) -> Any:
    from dormouse.spark.tasks import compact_on_spark

    return compact_on_spark(context, now_ms, run_id=run_id)
