"""SQL statements that read tables by name, all as of one moment.

DuckDB runs each statement and opens only the files that it needs. A statement is planned twice: first over
tables without files, to find the row keys that it wants of each table, then over the files that hold those
keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import pyarrow as pa

from dormouse.data.transform import quoted
from dormouse.model.cut import When
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import SchemaMoved
from dormouse.model.types import Parameters, checked_parameters
from dormouse.reading.checked_files import FileGone, again_if_moved
from dormouse.reading.planner import PlanSummary, Scan
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.explanations import explanation, with_nulls, without_files
from dormouse.reading.sql.firsts import Enough, KnownRows, first_files, has_all_rows, sure_rows
from dormouse.reading.sql.moments import microseconds
from dormouse.reading.sql.named import Named, alone, meant
from dormouse.reading.sql.narrowing import Narrowed
from dormouse.reading.sql.results import BATCH_ROWS, Rows, fitted
from dormouse.reading.sql.subqueries import Reads
from dormouse.reading.sql.table_files import TableFiles, check_size
from dormouse.reading.sql.wanted import Planning, Wanted
from dormouse.reading.streams import Interruption, in_thread, interruptible_call, undisturbed
from dormouse.reading.table_moments import Moments
from dormouse.reading.table_view import PAGE_LEAVES_MAX, summary
from dormouse.reading.where import Question
from dormouse.state.context import TableContext

EXPLAINED_FILES_MAX = 1_000
"""The most files for which EXPLAIN includes DuckDB's own plan, since making that plan looks at each file."""
REPLANS_MAX = 10
ROWS_ENOUGH_MAX = 10_000
FIRST_FILES = 16
MORE_FILES = 8
"""The factor by which the number of files grows when the files so far do not fill the limit."""
FIRST_ROWS = 10_000
"""The number of smallest keys that are read first if the table merges rows of several files."""


def sql(
    sessions: Sessions,
    tables: Named,
    statement: str,
    parameters: Parameters | None = None,
    interruption: Interruption | None = None,
    as_of: When | None = None,
) -> pa.RecordBatchReader:
    """Runs one statement that reads tables by name, and streams its answer.

    All tables are of one instance and are read as of one moment: now, or `as_of`. Columns of the same name
    are numbered. EXPLAIN returns columns `plan_type` and `plan`; its first row names the files and bytes that
    are read of each table. If a file was collected before the first rows arrive, the statement starts again.

    Raises `InvalidQuery`, `InvalidCut` and `CutExpired`. While the answer is read, raises `ObjectNotFound`
    for a file that was collected, `ObjectStoreError` for a damaged file, and `DormouseError` when another
    thread sets `interruption`. Dropping the reader stops the statement.
    """
    values, end = checked_parameters(parameters), interruption or Interruption()
    return again_if_moved(lambda: _Statement(sessions, tables, statement, values, end, as_of).reader())


def sql_of(
    sessions: Sessions,
    context: TableContext,
    question: Question,
    statement: str,
    interruption: Interruption | None = None,
    as_of: When | None = None,
) -> pa.RecordBatchReader:
    """Runs a statement over the rows of one table that a question selects, and streams its answer.

    The question's limit is not applied: the statement has its own. Raises the errors of `sql`,
    `TableNotFound`, and `SchemaMoved` when the table's columns have changed.
    """
    end = interruption or Interruption()
    return _Statement(sessions, alone(context), statement, (), end, as_of, question).reader()


def explain_sql(
    sessions: Sessions,
    tables: Named,
    statement: str,
    parameters: Parameters | None = None,
    interruption: Interruption | None = None,
    as_of: When | None = None,
) -> dict[str, PlanSummary]:
    """Returns the numbers of files and bytes that a statement would read of each table."""
    values, end = checked_parameters(parameters), interruption or Interruption()
    return again_if_moved(lambda: _Statement(sessions, tables, statement, values, end, as_of).summaries())


class _Statement:
    """A statement over the tables as the catalog had them when the object was made."""

    def __init__(
        self,
        sessions: Sessions,
        tables: Named,
        statement: str,
        parameters: Parameters,
        interruption: Interruption,
        as_of: When | None,
        question: Question | None = None,
    ) -> None:
        """Parses the statement; `question` selects the rows of its only table that it may read."""
        self.session = session = sessions(interruption)
        self.parameters = parameters
        self.interruption = interruption
        self.gone: set[str] = set()
        try:
            found = session.parsed(statement)
            self.describes = found.describes
            self.moments = Moments(meant(found, tables), as_of)
            moment = microseconds() if found.tells_time else None
            self.files = TableFiles(session, found, self.moments, moment, interruption, question)
            wanted = session.wanted(Planning(self.files.schemas, found, parameters, moment))
            if question is not None:
                ranges = dict.fromkeys(wanted.ranges, question.ranges)
                wanted = replace(wanted, ranges=ranges, enough=None, ends=None)
            names = {name.lower() for name in found.names}
            self.moments.read(wanted.ranges, [name for name in self.files.contexts if name.lower() in names])
            self.narrowed = Narrowed(self.files, found, parameters, wanted)
            if question is None and wanted.ranges:
                interruptible_call(self.narrowed.narrow, interruption.set)
        except BaseException:
            session.close()
            raise

    @property
    def wanted(self) -> Wanted:
        return self.narrowed.wanted

    def summaries(self) -> dict[str, PlanSummary]:
        """Returns the numbers of files and bytes to read of each table, without keeping a plan in memory."""
        self.session.close()
        return self._summaries(self._known())

    def reader(self) -> pa.RecordBatchReader:
        try:
            rows = interruptible_call(self._opened, self.interruption.set)
        except BaseException:
            self.session.close()
            raise
        self.files.has_begun = True
        return pa.RecordBatchReader.from_batches(rows.schema, undisturbed(self._read(rows)))

    def _read(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yields the batches.

        After a full first batch, a thread makes them, so that Ctrl-C takes effect at once.
        """
        with self.moments.kept():
            found = self._again_if_gone(rows)
            first = interruptible_call(lambda: next(found, None), self.interruption.set)
            if first is None:
                return
            yield first
            yield from found if first.num_rows < BATCH_ROWS else in_thread(found, self.interruption.set)

    def _again_if_gone(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yields the batches. If a file no longer exists and no row was returned, plans and runs again."""
        given, schema = False, rows.schema
        try:
            while True:
                try:
                    for batch in rows.batches:
                        given = True
                        yield fitted(batch, schema)
                    break
                except FileGone as error:
                    if given and not self.moments:
                        raise
                    self._note_gone(error)
                    rows = self._opened()
        finally:
            self.session.close()

    def _opened(self) -> Rows:
        """Returns the answer once its first rows are ready; plans again while a file no longer exists."""
        while True:
            try:
                return self._run()
            except FileGone as error:
                self._note_gone(error)
            except SchemaMoved:
                if not self.files.has_begun:
                    raise
                # the reader already has the answer's columns
                self.files.keep_columns()

    def _note_gone(self, error: FileGone) -> None:
        if self.moments:
            raise self.moments.why_gone(error) from error
        if error.filename in self.gone:
            # this plan was made after the file was found missing, and still refers to it
            raise error.lost() from error
        if len(self.gone) == REPLANS_MAX:
            raise error
        self.gone.add(str(error.filename))

    def _run(self) -> Rows:
        if self.wanted.explains:
            return self._explained()
        if self.wanted.ends is not None and (known := self._known()) is not None:
            rows = self._on(dict.fromkeys(self.wanted.ranges, known.scans), known)
            return known.counted(rows, self.wanted.ends)
        enough = self.wanted.enough
        if enough is None or enough.rows > ROWS_ENOUGH_MAX:
            return self._on(self.narrowed.reads())
        return self._until_enough(enough)

    def _explained(self) -> Rows:
        """Returns the files and bytes that are read of each table, followed by DuckDB's own plan."""
        known = self._known()
        summaries = self._summaries(known)
        files = sum(one.files for one in summaries.values())
        said = explanation(self.narrowed.ranges, summaries)
        if not self.wanted.runs and files > EXPLAINED_FILES_MAX:
            return Rows(said.schema, iter([said]))
        known_reads = None if known is None else dict.fromkeys(self.wanted.ranges, known.scans)
        rows = self._on(self.narrowed.reads()) if known_reads is None else self._on(known_reads, known)

        def batches() -> Iterator[pa.RecordBatch]:
            yield said
            for batch in rows.batches:
                columns = [batch.column(0), without_files(batch.column(1))]
                yield pa.RecordBatch.from_arrays(columns, schema=said.schema)

        return Rows(said.schema, batches())

    def _known(self) -> KnownRows | None:
        """Returns the facts that answer the statement, and the files to read beside them; None for rows.

        For EXPLAIN of a limit, these are the first files, if they have enough rows by their facts.
        """
        wanted, enough = self.wanted, self.wanted.enough
        if (wanted.ends is None and enough is None) or len(wanted.ranges) != 1:
            return None
        [(name, ranges)] = wanted.ranges.items()
        context = self.files.contexts[name]
        if not has_all_rows(context):
            return None
        if wanted.ends is not None:
            return self.files.known_among(
                wanted, {name: chain.from_iterable(self.files.groups(wanted, PAGE_LEAVES_MAX))}
            )
        if enough is None or enough.rows_read is None or enough.rows > ROWS_ENOUGH_MAX:
            return None
        first = first_files(context.schema, ranges, enough.rows_read, self.files.groups(wanted))
        return None if first is None else KnownRows(first)

    def _until_enough(self, enough: Enough) -> Rows:
        """Runs over the first files in key order, then over more of them until the limit is filled."""
        [(name, ranges)] = self.wanted.ranges.items()
        scans: list[Scan] = []
        files = 1 if enough.in_key_order else FIRST_FILES
        context = self.files.contexts[name]
        needed = enough.rows_read if has_all_rows(context) else None
        rows, is_sure = 0, True
        for group in self.files.groups(self.wanted, bundles=True):
            is_filled = needed is not None and rows >= needed
            if scans and (is_filled or (not is_sure and len(scans) + len(group) > files)):
                found = self._first_of(name, scans, enough) or self._filled({name: scans}, enough)
                if found is not None:
                    return found
                files *= MORE_FILES
            sure = [None if needed is None else sure_rows(context.schema, ranges, scan) for scan in group]
            rows, is_sure = rows + sum(filter(None, sure)), is_sure and None not in sure
            scans += group
            check_size({name: scans})
        return self._first_of(name, scans, enough) or self._on({name: scans})

    def _first_of(self, name: str, scans: Sequence[Scan], enough: Enough) -> Rows | None:
        """Returns the answer computed from the smallest keys of some files, in a table that merges rows.

        Returns None if these rows do not fill the limit, or the table does not merge rows. Rows merge only
        with rows of the same key, so rows with larger keys need not be read.
        """
        context = self.files.contexts[name]
        is_first = enough.in_key_order and not enough.descending and not enough.is_value
        if not (is_first and scans and context.properties.aggregate):
            return None
        first = context.schema.row_keys[0].name
        wanted = [scan.within(self.wanted.ranges[name]) for scan in scans]
        statement = f"SELECT {quoted(first)} FROM {quoted(name)} ORDER BY 1 LIMIT 1 OFFSET {FIRST_ROWS}"
        found = self.files.rows(
            {name: wanted},
            {name: self.files.select(name, self.wanted.ranges).unmerged(wanted)},
            statement,
            (),
        )
        last = [key for batch in found.batches for key in batch.column(0).to_pylist()]
        if not last:
            return None
        below = KeyRanges({first: [Range(max=last[0], max_inclusive=True)]})
        return self._filled({name: [scan.within(below) for scan in wanted]}, enough)

    def _filled(self, reads: Reads, enough: Enough) -> Rows | None:
        """Returns the answer over the given files; None if it has fewer rows than the limit."""
        rows = self._on(reads)
        found = list(rows.batches)
        is_enough = sum(batch.num_rows for batch in found) >= enough.rows and not (
            enough.is_value and any(column.null_count for batch in found for column in batch.columns)
        )
        return Rows(rows.schema, iter(found)) if is_enough else None

    def _on(self, reads: Reads, known: KnownRows | None = None) -> Rows:
        """Runs the statement over tables that consist of the given files; a table without files is empty."""
        views = self.files.views(reads, known, self.wanted)
        ranges = self.wanted.ranges if self.wanted.enough is None else None
        rows = self.files.rows(reads, views, self.narrowed.text, self.parameters, ranges)
        if self.describes:
            [context] = self.files.contexts.values()
            rows = with_nulls(rows, context.schema)
        return rows if self.wanted.names is None else rows.named(self.wanted.names)

    def _summaries(self, known: KnownRows | None) -> dict[str, PlanSummary]:
        """Returns the numbers of files and bytes to read; `known` has the files of the only table, if any."""
        found = {
            name: summary(self.files.contexts[name], ranges, self.moments.of(name))
            for name, ranges in self.narrowed.ranges.items()
        }
        return found if known is None else {name: known.summary(one) for name, one in found.items()}
