"""SQL over tables by name: DataFusion reads only the files whose partitions and keys a statement wants.

A statement is planned twice. Once against tables without files, to see which row keys it wants of each; then
against the files that hold them. Names mean what they say, in upper and lower case, quoted or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from datafusion import DataFrame, SessionContext, SQLOptions

from dormouse.context import TableContext
from dormouse.data.datafusion_session import panics_as_errors
from dormouse.data.transform import Transform, quoted
from dormouse.errors import InvalidQuery, ObjectNotFound
from dormouse.objects import ObjectStore
from dormouse.query.explained import explanation
from dormouse.query.interruptible import Interruption, interruptible
from dormouse.query.outline import Wanted, register_outlines, what_is_wanted
from dormouse.query.plain_types import plain
from dormouse.query.planner import PlanSummary, QueryPlan, Scan
from dormouse.query.scan_session import no_rows, rows, session
from dormouse.query.statement_text import check_joins, check_statement, mistake
from dormouse.query.streams import FileGone, check_there, exact, named_failures, one_ahead, one_line
from dormouse.query.table_view import plan_query, plan_tables, summary
from dormouse.query.value_sizes import check_value_sizes

FILES_MAX = 50_000
"""Of one statement: DataFusion keeps about 25 kB of each in memory."""
SCANS_MAX = 2_000
"""Of files of which different keys are wanted, each a scan of its own of some 100 kB and a millisecond."""
EXPLAINED_FILES_MAX = 1_000
"""Beyond it EXPLAIN says what is read, and leaves DataFusion's plan out: that looks at each file."""
CHECKED_FILES = 1_000
"""Looked for between two looks at whether the statement is wanted at all."""
REPLANS_MAX = 10
ROWS_ENOUGH_MAX = 10_000
FIRST_FILES = 16
MORE_FILES = 8
"""A limit that the first files do not fill is tried on so many times as many."""

_READ_ONLY = SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)
Reads = Mapping[str, Sequence[Scan]]


def sql(
    contexts: Mapping[str, TableContext],
    statement: str,
    *,
    known: Callable[[], Iterable[str]] | None = None,
    interruption: Interruption | None = None,
) -> pa.RecordBatchReader:
    """The answer of one SELECT, WITH, VALUES, DESCRIBE or EXPLAIN over tables by name, streamed.

    All tables are of one instance, and are seen as they are at one moment. EXPLAIN gives rows `plan_type` and
    `plan`, of which the first says what is read of each table. A file that is collected before the first rows
    come makes the statement start anew. `known` gives the names of all tables, for hints.

    Raises `InvalidQuery`; while it is read, `ObjectNotFound` for a file that was collected,
    `ObjectStoreError` for one that is damaged; `DormouseError` when another thread sets `interruption`, also
    while it is planned. A reader that is dropped stops. What DataFusion computes ends at the next batch that
    it reads.
    """
    return _Statement(contexts, statement, known, interruption).reader()


def explain_sql(
    contexts: Mapping[str, TableContext],
    statement: str,
    *,
    known: Callable[[], Iterable[str]] | None = None,
) -> dict[str, PlanSummary]:
    """What a statement would read of each table that it reads."""
    return _Statement(contexts, statement, known).summaries()


class _Statement:
    def __init__(
        self,
        contexts: Mapping[str, TableContext],
        statement: str,
        known: Callable[[], Iterable[str]] | None,
        interruption: Interruption | None = None,
    ) -> None:
        self.text = check_statement(statement)
        # of a thousand tables, those that the statement cannot mean need no work
        self.contexts = {name: context for name, context in contexts.items() if name in statement}
        self.known = known or (lambda: contexts)
        self.interruption = interruption or Interruption()
        self.objects: ObjectStore | None = next((c.objects for c in self.contexts.values()), None)
        self.now_ms = time.time_ns() // 1_000_000
        self.wanted, self.schema = self._outlined()

    def plans(self) -> dict[str, QueryPlan]:
        """For each table that the statement reads, which files it reads."""
        asked = [(self.contexts[name], ranges) for name, ranges in self.wanted.ranges.items()]
        return dict(zip(self.wanted.ranges, plan_tables(asked, files_max=FILES_MAX), strict=True))

    def summaries(self) -> dict[str, PlanSummary]:
        """What is read of each table; made without a plan in memory."""
        return {name: summary(self.contexts[name], ranges) for name, ranges in self.wanted.ranges.items()}

    def reader(self) -> pa.RecordBatchReader:
        found = one_ahead(self._again_if_gone(self._planned()), self.interruption.set)
        return pa.RecordBatchReader.from_batches(self.schema, found)

    def _planned(self) -> Callable[[], Iterator[pa.RecordBatch]]:
        """What runs the statement; its mistakes are found now."""
        self.interruption.check()
        enough = self.wanted.rows_enough
        return self._until_enough if enough is not None and enough <= ROWS_ENOUGH_MAX else self._on_all()

    def _again_if_gone(self, run: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Plans and runs anew when a file is gone, as long as no row was handed out."""
        gone: set[str] = set()
        while True:
            given = False
            try:
                for batch in run():
                    given = True
                    yield batch
            except FileGone as error:
                if given or len(gone) == REPLANS_MAX:
                    raise
                if error.filename in gone:
                    # a plan that was made after it was gone refers to it
                    raise ObjectNotFound(
                        f"a table refers to the object {error.filename!r}, which does not exist: it is lost, "
                        "not collected; bring it back with restore-objects, see "
                        "docs/how-to/restore-from-backup.md"
                    ) from error
                gone.add(error.filename)
                run = self._planned()
            else:
                return

    def _on_all(self) -> Callable[[], Iterator[pa.RecordBatch]]:
        """A run over all files that are wanted."""
        said = None
        if self.wanted.explains:
            summaries = self.summaries()
            said = explanation(self.schema, self.wanted, summaries)
            if not self.wanted.runs and sum(s.files for s in summaries.values()) > EXPLAINED_FILES_MAX:
                return lambda: filter(None, [said])
        plans = self.plans().items()
        reads = {name: tuple(scan for group in plan.groups for scan in group) for name, plan in plans}
        _check_size(reads)
        frame = self._prepared(reads)

        def run() -> Iterator[pa.RecordBatch]:
            if said is not None:
                yield said
            yield from self._batches(frame, reads)

        return run

    def _until_enough(self) -> Iterator[pa.RecordBatch]:
        """A run over the first files in key order, and over more of them until the limit is filled."""
        [(name, ranges)] = self.wanted.ranges.items()
        groups = plan_query(self.contexts[name], ranges)
        scans: list[Scan] = []
        files = FIRST_FILES
        for group in groups:
            if len(scans) + len(group) > files and scans:
                found = list(self._batches(self._prepared({name: scans}), {name: scans}))
                if sum(batch.num_rows for batch in found) == self.wanted.rows_enough:
                    yield from found
                    return
                files *= MORE_FILES
            scans += group
            _check_size({name: scans})
        yield from self._batches(self._prepared({name: scans}), {name: scans})

    def _prepared(self, reads: Reads) -> DataFrame:
        """The statement over tables that have these files; what it does not read is empty."""
        ctx = session(self.objects, in_key_order=False)
        for name, context in self.contexts.items():
            self.interruption.check()
            scans = reads.get(name, ())
            transform = Transform.parse(context.schema, context.properties)
            found = (
                rows(ctx, context.objects, transform, scans, self.now_ms, in_key_order=False)
                if scans
                else no_rows(ctx, context.schema)
            )
            ctx.register_view(quoted(name), found)
        return self._parsed(ctx)

    def _batches(self, frame: DataFrame, reads: Reads) -> Iterator[pa.RecordBatch]:
        names = list(dict.fromkeys(scan.filename for scans in reads.values() for scan in scans))
        read = [self.contexts[name] for name in reads]
        transforms = [Transform.parse(context.schema, context.properties) for context in read]
        with named_failures(self.objects, names, *transforms):
            self.interruption.check()
            # planned before the files are looked for: DataFusion takes one that is gone for no rows
            found = interruptible(frame.execute_stream(), self.interruption)
            if self.wanted.runs:
                self._check_there(names)
            self.interruption.check()
            for batch in found:
                yield exact(batch.to_pyarrow(), self.schema)

    def _check_there(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), CHECKED_FILES):
            self.interruption.check()
            check_there(self.objects, names[start : start + CHECKED_FILES])

    def _outlined(self) -> tuple[Wanted, pa.Schema]:
        """What the statement wants, and the columns of its answer."""
        ctx = session(None, in_key_order=False)
        register_outlines(ctx, self.contexts)
        frame = self._parsed(ctx)
        check_joins(frame.logical_plan().display_indent())
        check_value_sizes(frame.logical_plan())
        try:
            with panics_as_errors():
                plan = frame.optimized_logical_plan()
        except Exception as error:
            raise mistake(one_line(error), self.known) from error
        schema = pa.schema([field.with_type(plain(field.type)) for field in frame.schema()])
        return what_is_wanted(plan, self.contexts), schema

    def _parsed(self, ctx: SessionContext) -> DataFrame:
        try:
            with panics_as_errors():
                return ctx.sql_with_options(self.text, _READ_ONLY)
        except Exception as error:
            raise mistake(one_line(error), self.known) from error


def _check_size(reads: Reads) -> None:
    """`InvalidQuery` when DataFusion would have too much to plan."""
    files = sum(map(len, reads.values()))
    scans = sum(len({scan.slices for scan in found}) for found in reads.values())
    if files <= FILES_MAX and scans <= SCANS_MAX:
        return
    name = max(reads, key=lambda table: len(reads[table]))
    why = (
        f"{files:,} files, more than {FILES_MAX:,}"
        if files > FILES_MAX
        else f"parts of files in {scans:,} ways, more than {SCANS_MAX:,}"
    )
    raise InvalidQuery(
        f"the statement would read {why}, most of table {name!r}: narrow its row keys, or compact the table"
    )
