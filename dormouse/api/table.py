"""A table, as users see it: loads, queries, changes and maintenance. Its methods only delegate."""

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
"""Called with the reason why a round waits for the commit queue."""


@names_what_is_missing
class Table(Container):
    """One table of an instance; made by `Instance.create_table` and `Instance.table`.

    A handle follows its table by id: it sees new names and columns, also those that other processes set.
    """

    def __init__(
        self, context: TableContext, tables: Tables, *, read_only: bool = False, every_version: bool = False
    ) -> None:
        self._known = context
        self._tables = tables
        self._read_only = read_only
        self.every_version = every_version
        """True if readers of a row table see every version of its rows."""

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
        """The name when the table was last looked up; reads nothing from the database."""
        return self.context.table.name

    @property
    def is_row_table(self) -> bool:
        """True if the table's rows are edited: then open it with `instance.row_table`."""
        return is_edited(self.context.properties)

    @property
    def properties(self) -> TableProperties:
        return self.context.properties

    @property
    def layout(self) -> str:
        """The layout that tracks the table's files, as last known to this process."""
        return self.files.table.layout

    @property
    def files(self) -> FileReferenceStore:
        """The files that hold the table's rows, and the partitions' references to them."""
        return self.context.store

    @property
    def partitions(self) -> PartitionStore:
        """The partition tree."""
        return self.context.partitions

    @property
    def context(self) -> TableContext:
        """The table's services, in the newest version that this process knows."""
        self._known = self._known.newest_known
        return self._known

    @property
    def history(self) -> History:
        """The table's past: its epochs, and the lineage of its partitions."""
        from dormouse.state.history.history import History

        return History(self.context, self._tables.check_writable)

    @property
    def schema(self) -> Schema:
        """The current columns, including changes by other processes."""
        return self._reading_of(self._followed()).schema

    @property
    def known_schema(self) -> Schema:
        """The columns when the table was last looked up; reads nothing from the database."""
        return self.reading.schema

    def schema_at(self, when: When) -> Schema:
        """Returns the columns at a moment: a cut, a cut's name, an aware datetime. Raises as `query` does."""
        return self.reading.as_of(position_of(self.context, when)).schema

    def schema_changes(self) -> list[SchemaChange]:
        """Returns all changes of the columns since the table was created, the oldest first."""
        return self.context.shapes.changes()

    def add_column(self, field: Field, default: Any = None) -> Schema:
        """Adds a value column for every reader at once, as one row in the database; rewrites no file.

        Existing rows get `default`, a Python value of the field's type, or null. So do rows of writers that
        began before and commit later. A column that must not be null needs a default. Returns the new schema,
        as do all changes of columns.

        Raises `InvalidSchema` for a name that is taken or a default that does not fit, `TableNotFound`, and
        `TableBusy`; then nothing has changed.
        """
        return self._reshaped(lambda to: to.add_column(self.context, field, default))

    def rename_column(self, name: str, new_name: str) -> Schema:
        """Renames a column, which may be a key; properties and deletions follow.

        Raises `InvalidSchema` for an unknown column and a name that is taken, `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.rename_column(self.context, name, new_name))

    def widen_column(self, name: str, to_type: DataType) -> Schema:
        """Gives a value column a wider type: LONG for INT, DOUBLE for FLOAT, a DECIMAL of more digits.

        Raises `InvalidSchema` for an unknown column, a key, and a type that lacks values of the old one;
        `TableNotFound`, `TableBusy`.
        """
        return self._reshaped(lambda to: to.widen_column(self.context, name, to_type))

    def drop_column(self, name: str, *, dry_run: bool = False) -> Schema:
        """Drops a value column. Earlier moments still have it; a later column of the same name is a new one.

        Its values stay in the files until these are compacted and collected. `dry_run` only checks that it
        can be dropped. Raises `InvalidSchema` for an unknown column, a key, and a column that properties or
        pending deletions name; `TableNotFound`, `TableBusy`.
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
        dict of columns, a list of dicts, or paths of Parquet, CSV or JSON files; `dm.Files` sets how files
        are read. The same `ingest_id` with the same data again adds nothing. `auto` uses Spark for
        DataFrames, for files of 256 MiB and more if Spark has a cluster, else for more than this machine's
        memory. `progress` is called with the number of rows done, and of all rows if known.

        A column that the data lacks gets the default it was added with, or null if allowed. A column that the
        table lacks is refused; `evolve="add"` adds it first, as a nullable value, and keeps it even if the
        load fails.

        Raises `InvalidData` when the data does not fit the schema, and `CommitIdReused` for an id that was
        used with other data (streams and Spark's DataFrames are not compared). `JobFailed` and `CommitFailed`
        mean that nothing was added; `CommitOutcomeUnknown`, that this is unknown yet: try the same id again.
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
        """Loads rows into a table that keeps the newest row of each key; `ingest` does the same there.

        `deletes` names a boolean column of the data that the table lacks: a row with true deletes its key;
        only its row keys and `newest_by` matter. Of rows with equal keys, the largest by `newest_by` stays.
        Among equals, or without `newest_by`, the load that began last wins, and its last row. Raises as
        `ingest` does, and `InvalidInput` on a table that keeps every row.
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

        `where` maps columns to a value, a `Range` or a list of them; `columns` are the columns to read.
        Conditions on row keys choose the files that are read. NaN is the largest double. The first `offset`
        rows are skipped. `descending` returns the largest keys first: DuckDB sorts them, in `sessions`, by
        default in this process.

        `as_of` reads the rows of another moment, including what was committed at it: a cut, a cut's name, or
        an aware datetime. `interruption.set()` in another thread ends the reading. Raises `InvalidQuery`,
        `InvalidRange`, `InvalidCut`, and `CutExpired` for a moment whose files are no longer kept.

        `verify` reads each file whole before its first use by this process, and compares its digest. A file
        with other bytes raises `ObjectDamaged` and returns no row; a file without a digest raises
        `InvalidQuery`. The table's property `verify_reads` turns this on for every reader.
        """
        reading = self.reading.verifying(verify)
        return self._tables.query(
            reading, where, columns, limit, offset, interruption, as_of, sessions, descending
        )

    def explain(self, where: Where = None, *, as_of: When | None = None) -> PlanSummary:
        """Returns which partitions, files and bytes a query would read. Raises as `query` does."""
        from dormouse.reading.table_view import explain

        return explain(self.reading, where, as_of)

    def head(
        self, rows: int = 10, columns: Sequence[str] | None = None, *, as_of: When | None = None
    ) -> pa.Table:
        """Returns the first `rows` rows in key order. Raises as `query` does."""
        return self.query(columns=columns, limit=rows, as_of=as_of).read_all()

    def to_pandas(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """Returns the rows of `query` as a pandas DataFrame. Raises as it does, and `DependencyMissing`."""
        from dormouse.reading.streams import pandas_of

        return pandas_of(lambda: self.query(where, columns, **how))

    def to_polars(self, where: Where = None, columns: Sequence[str] | None = None, **how: Any) -> Any:
        """Returns the rows of `query` as a Polars DataFrame. Raises as it does, and `DependencyMissing`."""
        from dormouse.reading.streams import polars_of

        return polars_of(lambda: self.query(where, columns, **how))

    def count(self, where: Where = None, *, as_of: When | None = None, verify: bool = False) -> int:
        """Returns the exact number of rows that match `where`. Raises as `query` does.

        Counting all rows reads mostly the files' footers, unless `verify`; counting the current rows of a row
        table reads only the database.
        """
        return self._tables.count(self.reading, where, as_of, verify)

    def live_files(self, as_of: When | None = None) -> list[LiveFile]:
        """Returns the Parquet files that hold the table's rows, now or at a moment, to read without Dormouse.

        Each has a `path`, and a `condition` in SQL if some of its rows do not count. Compacted files are kept
        for `gc_delay_seconds`. Raises `InvalidQuery` where no SQL condition can express this, `InvalidCut`
        and `CutExpired`.
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
        """Runs a SELECT over this and the instance's other tables, by name; see `Instance.sql`."""
        return self._tables.sql(statement, parameters, interruption, as_of=as_of, verify=verify)

    def delete(self, where: DeleteWhere, dry_run: bool = False) -> DeleteReport:
        """Deletes the matching rows at once and for every reader, by one row in the database.

        `where` is as for `query`; `dm.ALL` means all rows. Deletes rows that were committed before, also
        those that a `filter` hides. Later rows stay, and so do rows read as of earlier moments. A null
        matches only a condition on null. `dry_run` counts the rows that `query` would return. On a keyed
        table a delete is a load: it deletes rows of loads that began before it, even if they commit later.
        With conditions on values, it writes a mark for each key whose newest row matches.

        Raises `InvalidQuery` for a condition that does not fit the schema or bounds nothing (a range that is
        open at both ends), or is on values that the property `aggregate` merges; `TableBusy` while other
        changes of the table keep overtaking it.
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
        """Deletes the matching rows permanently, also from the history and the object store.

        First deletes them as `delete` does. Then rewrites each file that has such rows without them, and
        deletes the old files, even if the history keeps them: reading these keys as of an earlier moment
        raises `CutExpired`. To resume after an interruption, repeat the call. It waits at most `wait_seconds`
        in all for jobs that hold such files, consumers that have not read the deletion, and writers that
        began before. Then jobs lose the files, consumers get `CutExpired`, and the report lists writers as
        `open`; with `abandon_writers` these can no longer commit. `backups` are further places to search for
        backups. `progress` is called with the number of files searched. Returns the proof, which `erasures`
        keeps. `dry_run` reads the files of the table and its history, reports what matches, and changes
        nothing.

        Raises `InvalidQuery` as `delete` does. Raises `JobFailed` for a file that cannot be merged,
        `CheckFailed` while references are lost, `TableBusy` during a backup, and `ObjectStoreError`: then the
        rows are deleted, but not erased until the same call succeeds.
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
        """Returns the proofs of the table's erasures, the oldest first."""
        from dormouse.durability.erasing import EraseReport

        return [EraseReport.from_json(text) for text in erasure_proofs(self.context.store)]

    def deletions(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """Returns the deletions by number: those that readers must apply, or all in the history."""
        return self.context.deletions.list(pending_only=pending_only)

    def changes(
        self,
        after: When | None,
        till: When | None = None,
        columns: Sequence[str] | None = None,
        *,
        interruption: Interruption | None = None,
    ) -> Answer:
        """Returns the rows that came and went between two moments, each once, streamed; until now by default.

        A moment is a Cut, a cut's name, or an aware datetime, and includes what was committed at it; `after`
        None is the table's beginning. Rows have the wanted `columns` and `_change`: "insert" for ingested
        rows, "delete" for rows that a deletion removed, as they were just before it. The table's filter and
        aggregation do not apply, and rows between two deletions have no order. Splits, merges, compactions
        and collections neither lose nor repeat a row. A keyed table returns each key whose row differs at the
        later moment, once: "upsert" with the row, or "delete" with its row keys and nulls.

        Raises `InvalidCut` for an impossible moment, and `CutExpired` before the first row when some rows are
        no longer kept.
        """
        from dormouse.reading.changes import changes
        from dormouse.reading.streams import Answer

        start, end = span(self.context, after, till)
        return Answer(changes(self.context, start, end, columns, interruption=interruption))

    def consumer(self, name: str, from_: When | None = None) -> Consumer:
        """Returns a consumer, a named position in the table's changes; creates it if needed.

        A new one begins now, or at the moment `from_`, which is ignored if the consumer exists. It keeps the
        table's files from its position on, and expires after `consumer_expiry_seconds` without an
        acknowledgement. Raises `InvalidName`, `InvalidCut` and `CutExpired`.
        """
        from dormouse.reading.changes import Consumer

        consumers = Consumers(self.context)
        if consumers.find(name) is None:
            self._tables.check_writable()
            consumers.create(name, None if from_ is None else position_of(self.context, from_))
        return Consumer(self.context, name, self._tables.check_writable)

    def consumers(self) -> list[ConsumerStatus]:
        """Returns the consumers by name, and how far each is behind; reads what they have not read."""
        return Consumers(self.context).statuses()

    def drop_consumer(self, name: str) -> None:
        """Deletes a consumer, so that no files are kept for it. Raises `InvalidInput` when there is none."""
        self._tables.check_writable()
        Consumers(self.context).drop(name)

    def restore(self, to: When, *, dry_run: bool = False) -> RestoreReport:
        """Makes the rows what they were at a moment, in one commit; partitions and columns stay as they are.

        Rows that were ingested since leave the table, and can be restored in turn. Running compactions are
        given up. `dry_run` reports what would change. Raises `InvalidCut`, `CutExpired`, `TableBusy`, and
        `NotWhole` when a later merge mixed the files of the moment with others; then nothing has changed.
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

        `full` makes each leaf one file, whatever the table's strategy: it rewrites all rows of each leaf with
        several files. `progress` is called with the number of jobs done and of all jobs. First waits while
        the commit queue is above its high mark: calls `waiting` with the reason, and at last raises
        `CommitQueueFull`.
        """
        from dormouse.writing.compaction import compact

        with self._tables.maintaining(self.context, waiting) as context:
            return compact(context, engine=engine, full=full, progress=progress, on_spark=_compact_on_spark)

    def split(self, *, waiting: Waiting = None) -> SplitReport:
        """Splits leaves over the threshold and pushes references down one level; waits as `compact` does."""
        from dormouse.writing.splitting import split

        with self._tables.maintaining(self.context, waiting):
            return split(self._followed())

    def merge(self, *, rest_seconds: float = 0.0, waiting: Waiting = None) -> MergeReport:
        """Runs one round of merges: two small leaves that are halves of one partition become one.

        The property `merge_threshold_rows` defines small. Files that the leaves share with others are
        compacted first. Leaves made less than `rest_seconds` ago are skipped. Waits for the commit queue as
        `compact` does. Raises `InvalidProperties` when the property is not set.
        """
        from dormouse.writing.splitting import merge

        with self._tables.maintaining(self.context, waiting):
            return merge(self._followed(), rest_seconds=rest_seconds, on_spark=_compact_on_spark)

    def mergeable(self) -> Iterator[SmallPair]:
        """Yields the pairs of leaves that `merge` would merge now. Raises `InvalidProperties` as it does."""
        from dormouse.writing.splitting import mergeable

        return mergeable(self.context)

    def collect_garbage(self, *, progress: Progress = no_progress, waiting: Waiting = None) -> GarbageReport:
        """Runs one round of garbage collection: deletes files some time after their last reference.

        Also deletes history from before its truncation, for half a minute at most; `progress` is called with
        the number of epochs done and of all. Waits for the commit queue as `compact` does.
        """
        self._tables.check_writable()
        self._tables.commits.wait_for_room(self.context.table.table_id, waiting)
        return self.context.garbage.collect(progress=progress)

    def garbage_ready(self) -> Iterator[str]:
        """Yields the files that `collect_garbage` would delete now, of those that an earlier round listed."""
        return self.context.garbage.ready()

    def set_properties(self, **changes: Any) -> TableProperties:
        """Changes some properties; None restores a default. Raises `InvalidProperties`."""
        self._known = self._tables.change_properties(self.context, changes)
        return self.properties

    def convert_layout(self, layout: str) -> bool:
        """Changes how the files are tracked: `file_table`, `salted_counts` or `dummy_reference`.

        It is one transaction, which waits until no other uses the table; tables open elsewhere follow.
        Returns False when the layout was this one already. Raises `InvalidInput` for an unknown layout,
        `TableBusy`.
        """
        self._tables.check_writable()
        before = self.layout
        self._known = self._tables.convert_layout(self.context.table, layout)
        return self.layout != before

    def partition_page(self, after: str = "", limit: int = 100, *, leaves: bool = False) -> list[Partition]:
        """Returns at most `limit` partitions with ids above `after`, by id: all, or only the leaves."""
        return self.partitions.page(after, limit, leaves=leaves)

    def file_page(self, after: str | None = None, limit: int = 100) -> list[FileFacts]:
        """Returns at most `limit` files with their facts, after the file named `after`, in a stable order."""
        return self.files.page(after, limit)

    def status(self) -> TableStatus:
        """Returns counts of the table's parts, and the results of its rounds.

        Reads only what changed since the last call.
        """
        return status_of(self._reading_of(self._followed()), read_only=self._read_only)

    @property
    def reading(self) -> TableContext:
        """The services that readers use; for a row table they see only current rows."""
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
        """Runs a change as a context manager; records it at the end, also when it raises."""
        return self._tables.changing()

    def _check_not_edited(self, instead: str) -> None:
        """Raises `NotARowTable` if this is a row table, whose rows would not survive the operation."""
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
