"""A table, as users hold it: load, query, maintain. One call each; the work is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from dormouse.api.shown import ShownTable
from dormouse.api.table_parts import Changing, Engine, Reading
from dormouse.api.tables import Tables, columns_of, compact_on_spark, ingest_on_spark
from dormouse.data.transform import quoted
from dormouse.errors import InvalidData, InvalidProperties, names_what_is_missing
from dormouse.model.cut import When
from dormouse.model.partition_tree import Partition
from dormouse.model.reshaping import Evolve, check_evolve
from dormouse.model.table import TableProperties, TableRecord, check_kept, check_upsert, unknown_property
from dormouse.model.types import LONG
from dormouse.state.context import TableContext
from dormouse.state.files.garbage import GarbageReport
from dormouse.state.files.store import FileFacts, FileReferenceStore
from dormouse.state.history.changes import span
from dormouse.state.history.consumers import Consumers, ConsumerStatus
from dormouse.state.history.history import TableStatus, status_of
from dormouse.state.history.moments import position_of
from dormouse.state.partitions.store import PartitionStore

if TYPE_CHECKING:
    from dormouse.reading.changes import Consumer
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.state.history.history import History
    from dormouse.state.history.moments import RestoreReport
    from dormouse.state.partitions.store import SmallPair
    from dormouse.writing.compaction import CompactionReport
    from dormouse.writing.ingest import IngestReport
    from dormouse.writing.splitting import MergeReport, SplitReport


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
        from dormouse.writing.splitting import merge

        with self.changing():
            self._wait_for_queue(waiting)
            return merge(self._followed(), rest_seconds=rest_seconds, on_spark=compact_on_spark)

    def mergeable(self) -> Iterator[SmallPair]:
        """The pairs of leaves that `merge` would merge now; streamed. Raises `InvalidProperties`, too."""
        from dormouse.writing.splitting import mergeable

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
        from dormouse.state.history.moments import restore

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
