"""A table, as users see it: loads, edits, changes of columns, and maintenance. Its methods only delegate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from dormouse.api.table_reads import TableReads
from dormouse.errors import DormouseError, names_what_is_missing
from dormouse.model import edits
from dormouse.model.cut import When
from dormouse.model.loops import Progress, no_progress
from dormouse.model.reshaping import Evolve
from dormouse.model.schema import Schema
from dormouse.model.table import Engine, TableProperties, check_not_edited, check_upsert
from dormouse.model.types import DataType, Field
from dormouse.state.context import TableContext
from dormouse.state.files.garbage import GarbageReport
from dormouse.state.history.consumers import Consumers
from dormouse.state.history.moments import position_of

if TYPE_CHECKING:
    from dormouse.durability.erasing import EraseReport
    from dormouse.model.edits import Sql
    from dormouse.model.edits import When as Clause
    from dormouse.reading.changes import Consumer
    from dormouse.reading.where import DeleteWhere
    from dormouse.state.history.moments import RestoreReport
    from dormouse.state.partitions import SmallPair
    from dormouse.writing.compaction import CompactionReport
    from dormouse.writing.deleting import DeleteReport
    from dormouse.writing.edits import CountedChange, Done
    from dormouse.writing.ingest import IngestReport
    from dormouse.writing.splitting import MergeReport, SplitReport

Waiting = Callable[[str], object] | None
"""A function that a round calls with the reason why it waits for the commit queue."""


@names_what_is_missing
class Table(TableReads):
    """One table of an instance; made by `Instance.create_table` and `Instance.table`.

    A handle follows its table by id: it sees new names and columns, also those that other processes set.
    """

    def add_column(self, field: Field, default: Any = None) -> Schema:
        """Adds a value column, at once and for every reader, and rewrites no file. Returns the new schema.

        Existing rows get `default`, a Python value of the field's type, or null. Rows of writers that began
        before and commit later get it, too. A column that must not be null needs a default.

        Raises `InvalidSchema` for a name that is taken or a default that does not fit, `TableNotFound`, and
        `TableBusy`; then nothing has changed.
        """
        return self._reshaped(lambda to: to.add_column(self.context, field, default))

    def rename_column(self, name: str, new_name: str) -> Schema:
        """Renames a column or key, also in the properties and deletions that name it.

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
        """Drops a value column. Queries as of earlier moments still return it.

        Files contain its values until they are compacted and collected, but a later column of the same name
        does not show them. `dry_run` only checks that the column can be dropped. Raises `InvalidSchema` for
        an unknown column, a key, or a column of properties or pending deletions. Raises `TableNotFound`,
        `TableBusy`.
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
        are read. A second load with the same `ingest_id` and data adds nothing. The engine `auto` uses Spark
        for Spark's DataFrames, and for large files: with a cluster from 256 MiB on, else above this machine's
        memory. `progress` is called with the number of rows done, and of all rows if known.

        A column that the data lacks gets the default it was added with, or null if allowed. A column that the
        table lacks is refused. With `evolve="add"`, it is added first, as a nullable value column, and stays
        even if the load fails.

        Raises `InvalidData` if the data does not fit the schema, and `CommitIdReused` for an id that was used
        with other data (streams and Spark's DataFrames are not compared). After `JobFailed` or `CommitFailed`
        nothing was added. After `CommitOutcomeUnknown` this is unknown: try the same id again.
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
        """Loads rows into a keyed table, which keeps the newest row of each key; see `ingest` for options.

        If the data lacks columns of the table, existing rows keep their values of these. New rows get the
        default or null. Such a load reads the existing rows; if others change them meanwhile, it is computed
        again, and may raise `EditConflict`. Spark refuses such data: use `dormouse.spark.merge`.

        `deletes` names a boolean column of the data that the table lacks. A row with true deletes its key; of
        it only the row keys and `newest_by` are used. The newest row is the one with the largest `newest_by`.
        Among equals, or without `newest_by`, it is the last row of the load that began last. Raises the
        errors of `ingest`, and `InvalidInput` on a table that keeps every row.
        """
        check_upsert(self.name, self.properties)
        data, is_partial = self._tables.partial(self.context, data, engine, _columns_on_spark)
        if not is_partial:
            how: dict[str, Any] = {"ingest_id": ingest_id, "engine": engine, "progress": progress}
            return self._load(data, evolve, deletes=deletes, **how)
        from dormouse.writing.merging import PartialUpsert
        from dormouse.writing.plain_changes import loaded

        with self.changing():
            if evolve is not None:
                given = engine, deletes, _columns_on_spark
                data, self._known = self._tables.evolved(self.context, data, evolve, *given)
            sessions = self._tables.sessions()
            how = {"deletes": deletes, "progress": progress or no_progress}
            with closing(PartialUpsert(sessions, data, **how)) as change:
                return loaded(self.context, change, ingest_id, "ingest")

    def _edited(
        self,
        change: CountedChange,
        edit_id: str | None,
        attempts_max: int,
        *,
        dry_run: bool,
        kind: str = "edit",
    ) -> Done:
        from dormouse.writing.edits import counted, edited_alone

        if dry_run:
            return counted(self.context, change)
        with self.changing():
            return edited_alone(self.context, change, edit_id, attempts_max, kind)

    def _load(self, data: Any, evolve: Evolve | None, **how: Any) -> IngestReport:
        from dormouse.writing.ingest import ingest

        with self.changing():
            if evolve is not None:
                given = (how["engine"], how.get("deletes"), _columns_on_spark)
                data, self._known = self._tables.evolved(self.context, data, evolve, *given)
            with self._tables.numbered(self.context, data) as (context, numbered):
                return ingest(context, numbered, **how, on_spark=_ingest_on_spark)

    def delete(self, where: DeleteWhere | Sql, dry_run: bool = False) -> DeleteReport:
        """Deletes the matching rows, at once and for every reader, by one row in the database.

        `where` is that of `query`, `dm.ALL` for all rows, or `dm.sql("a condition")`. Deletes matching rows
        of earlier commits, also those that a `filter` hides. Rows of later commits stay, and earlier moments
        keep their rows. A null matches only a condition on null. `dry_run` counts the rows. On a keyed
        table, deletes rows of loads that began before the delete, even if these loads commit later. With
        conditions on values, it writes a mark of deletion for each key whose newest row matches, and such
        loads keep their rows. This, and a deletion by `dm.sql`, is an edit: see `update`.

        Raises `InvalidQuery` for a condition that does not fit the schema or limits nothing (a range that is
        open at both ends). Also raises it for a condition on values that the property `aggregate` merges.
        Raises `EditConflict` if other changes of matching rows overtake each of its tries.
        """
        from dormouse.state.history.moments import now
        from dormouse.writing.deleting import DeleteReport, delete
        from dormouse.writing.plain_changes import Replace, is_read

        self._check_not_edited("use dm.Remove")
        if not isinstance(where, edits.Sql) and (dry_run or not is_read(self.context, where)):
            with nullcontext() if dry_run else self.changing():
                return delete(self.context, where, dry_run=dry_run)
        change = Replace(self._tables.sessions(), where)
        done, at = self._edited(change, None, edits.COMPUTED_MAX, dry_run=dry_run), None
        with suppress(DormouseError):  # the rows are deleted, whatever happens to the database now
            at = None if dry_run else now(self.context).at
        return DeleteReport(None, at, done.counts["deleted"])

    def replace(
        self,
        where: DeleteWhere | Sql,
        data: Any,
        *,
        ingest_id: str | None = None,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> edits.ReplaceReport:
        """Deletes the rows that meet a condition and adds others, in one commit: readers see both or neither.

        `where` is that of `delete`, and `data` that of `ingest`; its rows need not meet the condition. A
        second call with the same `ingest_id` changes nothing. `dry_run` counts the rows. Raises the errors of
        `delete` and `ingest`.
        """
        from dormouse.writing.plain_changes import Given, Replace

        change = Replace(self._tables.sessions(), where, Given(data), progress)
        done = self._edited(change, ingest_id, edits.COMPUTED_MAX, dry_run=dry_run, kind="replace")
        inserted, deleted = done.counts.get("inserted", 0), done.counts.get("deleted")
        return edits.ReplaceReport(done.edit_id, inserted, deleted, done.attempts, done.applied)

    def update(
        self,
        where: DeleteWhere | Sql,
        values: Mapping[str, Any],
        *,
        edit_id: str | None = None,
        dry_run: bool = False,
        attempts_max: int = edits.COMPUTED_MAX,
        progress: Progress = no_progress,
    ) -> edits.UpdateReport:
        """Gives the rows that meet a condition new values, in one commit: readers see all of them or none.

        `where` is that of `delete`, or `dm.sql("a condition")`. `values` maps columns to constants, or to
        `dm.sql("an expression")` over the columns of the row as it was. Row keys may change in tables that
        keep every row. If other commits change rows that concern the update before it commits, it is computed
        again, `attempts_max` times in all. Other commits, and compactions, do not matter. A second call with
        the same `edit_id` changes nothing. `dry_run` counts the rows. `progress` is called with the number of
        rows done.

        Raises `InvalidQuery` for columns, conditions and expressions that do not fit, `InvalidData` for a
        value that a column cannot have, and `InvalidInput` for a table whose `filter` hides rows. After
        `EditConflict` and `CommitFailed` nothing was changed. After `CommitOutcomeUnknown` this is unknown:
        try the same `edit_id` again.
        """
        from dormouse.writing.updating import Update

        change = Update(self._tables.sessions(), where, values, progress)
        done = self._edited(change, edit_id, attempts_max, dry_run=dry_run)
        return edits.UpdateReport(done.edit_id, done.counts.get("updated", 0), done.attempts, done.applied)

    def merge_into(
        self,
        source: Any,
        on: Sequence[str] | Sql,
        when: Sequence[Clause],
        *,
        edit_id: str | None = None,
        dry_run: bool = False,
        attempts_max: int = edits.COMPUTED_MAX,
        progress: Progress = no_progress,
    ) -> edits.MergeReport:
        """Merges the rows of a source into the table, in one commit, as SQL's MERGE does.

        `source` is anything that `ingest` takes, or `dm.sql("select …")` over tables of the instance. `on`
        names columns that both have, or is `dm.sql("a condition")` over rows `t` of the table and `s` of the
        source. `when` are clauses: `dm.WhenMatched`, `dm.WhenNotMatched`, `dm.WhenNotMatchedBySource`. The
        first that holds for a pair of rows, or for a row without a partner, says what becomes of it. The
        other options, and the errors, are those of `update`. Raises `AmbiguousRows` if several rows of the
        source would change one row, or insert one key of a keyed table.
        """
        from dormouse.writing.merging import Merge

        sessions, tables = self._tables.sessions(), self._tables.named()
        with closing(Merge(sessions, source, on, when, tables=tables, progress=progress)) as change:
            done = self._edited(change, edit_id, attempts_max, dry_run=dry_run)
        return edits.MergeReport.of(done.counts, done.edit_id, done.attempts, applied=done.applied)

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
        deletes the old files, even if the history keeps them. Reading these keys as of an earlier moment then
        raises `CutExpired`. To resume after an interruption, repeat the call. It waits at most `wait_seconds`
        in all for jobs that hold such files, consumers that have not read the deletion, and writers that
        began before it. Then it takes the files from the jobs, consumers get `CutExpired`, and the report
        lists the writers as `open`. With `abandon_writers`, these writers can no longer commit. `backups` are
        more places to search for backups. `progress` is called with the number of files searched. Returns the
        proof, which `erasures` also returns later. `dry_run` reports matching rows in files of the table and
        its history, and changes nothing.

        Raises `InvalidQuery` as `delete` does. Raises `JobFailed` for a file that cannot be merged,
        `CheckFailed` while references are lost, `TableBusy` during a backup, and `ObjectStoreError`. After
        these four, the rows are deleted, but not erased; repeat the call until it succeeds.
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

    def consumer(self, name: str, from_: When | None = None) -> Consumer:
        """Returns a consumer, a named position in the table's changes. Creates it if it does not exist.

        A new one begins now, or at the moment `from_`, which an existing one ignores. It keeps the files with
        changes after its position. It expires after `consumer_expiry_seconds` without an acknowledgement.
        Raises `InvalidName`, `InvalidCut` and `CutExpired`.
        """
        from dormouse.reading.changes import Consumer

        consumers = Consumers(self.context)
        if consumers.find(name) is None:
            self._tables.check_writable()
            consumers.create(name, None if from_ is None else position_of(self.context, from_))
        return Consumer(self.context, name, self._tables.check_writable)

    def drop_consumer(self, name: str) -> None:
        """Deletes a consumer, so that no files are kept for it. Raises `InvalidInput` when there is none."""
        self._tables.check_writable()
        Consumers(self.context).drop(name)

    def restore(self, to: When, *, dry_run: bool = False) -> RestoreReport:
        """Gives the table the rows that it had at a moment, in one commit. Partitions and columns stay.

        Later rows leave the table, but another restore can bring them back. Running compactions are given up.
        `dry_run` reports the changes. Raises `InvalidCut`, `CutExpired`, `TableBusy`, and `NotWhole` if a
        later merge of partitions mixed the files of the moment with others; then nothing has changed.
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

        `full` makes each leaf one file without replaced or deleted rows, whatever the table's strategy.
        `progress` is called with the number of jobs done and of all jobs. While the commit queue is above its
        high mark, it first waits, and calls `waiting` with the reason. Raises `CommitQueueFull` if that takes
        too long.
        """
        from dormouse.writing.compaction import compact
        from dormouse.writing.splitting import push_down

        with self._tables.maintaining(self.context, waiting) as context:
            while full and push_down(context):
                pass  # each call moves references down one level
            return compact(context, engine=engine, full=full, progress=progress, on_spark=_compact_on_spark)

    def split(self, *, waiting: Waiting = None) -> SplitReport:
        """Divides full leaves, and pushes references down one level. Waits for room as `compact` does."""
        from dormouse.writing.splitting import split

        with self._tables.maintaining(self.context, waiting):
            return split(self._followed())

    def merge(self, *, rest_seconds: float = 0.0, waiting: Waiting = None) -> MergeReport:
        """Runs one round of merges: two small leaves that are halves of one partition become one.

        Two leaves are small up to `merge_threshold_rows`, a property of the table. Files that they share with
        other leaves are compacted first. Leaves made less than `rest_seconds` ago are skipped. Waits for the
        commit queue as `compact` does. Raises `InvalidProperties` if the property is not set.
        """
        from dormouse.writing.splitting import merge

        with self._tables.maintaining(self.context, waiting):
            return merge(self._followed(), rest_seconds=rest_seconds, on_spark=_compact_on_spark)

    def mergeable(self) -> Iterator[SmallPair]:
        """Yields the pairs of leaves that `merge` would merge now. Raises the errors of `merge`."""
        from dormouse.writing.splitting import mergeable

        return mergeable(self.context)

    def collect_garbage(self, *, progress: Progress = no_progress, waiting: Waiting = None) -> GarbageReport:
        """Runs one round of garbage collection: deletes files that had no reference for some time.

        Then deletes metadata of truncated history, for at most half a minute; calls `progress` with the
        number of epochs done and of all. Waits for the commit queue as `compact` does.
        """
        self._tables.check_writable()
        self._tables.commits.wait_for_room(self.context.table.table_id, waiting)
        return self.context.garbage.collect(progress=progress)

    def garbage_ready(self) -> Iterator[str]:
        """Yields the unreferenced files, known from earlier rounds, that a round would delete now."""
        return self.context.garbage.ready()

    def set_properties(self, **changes: Any) -> TableProperties:
        """Changes some properties; None restores a default. Raises `InvalidProperties`."""
        self._known = self._tables.change_properties(self.context, changes)
        return self.properties

    def convert_layout(self, layout: str) -> bool:
        """Changes how the files are tracked: `file_table`, `salted_counts` or `dummy_reference`.

        Runs one transaction, which waits until no other transaction uses the table. Processes that have the
        table open adopt the layout. Returns False if the table had this layout already. Raises `InvalidInput`
        for an unknown layout, and `TableBusy`.
        """
        self._tables.check_writable()
        before = self.layout
        self._known = self._tables.convert_layout(self.context.table, layout)
        return self.layout != before

    def _reshaped(self, change: Callable[[Any], TableContext]) -> Schema:
        from dormouse.reading import schemas

        self._check_not_edited("use dm.AddColumn, dm.RenameColumn, dm.RetypeColumn or dm.DropColumn")
        with self.changing():
            self._known = change(schemas)
        return self.context.schema

    def changing(self) -> AbstractContextManager[None]:
        """Returns a context manager that records at its end that the table changed, even after an error."""
        return self._tables.changing()

    def _check_not_edited(self, instead: str) -> None:
        """Raises `NotARowTable` if this is a row table, as the operation would break its rows."""
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
