"""SQL statements that read tables by name, all as of one moment.

DuckDB runs each statement and opens only the files that it needs. A statement is planned twice: first over
tables without files, to find the row keys that it wants of each table, then over the files that hold those
keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice

import pyarrow as pa

from dormouse.data.transform import Transform, quoted
from dormouse.errors import InvalidQuery
from dormouse.model.cut import When
from dormouse.model.region import KeyRanges, Range, united
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.types import Parameters, checked_parameters
from dormouse.reading.checked_files import (
    FileGone,
    again_if_moved,
    checked_sizes,
    keeping_columns,
)
from dormouse.reading.planner import PlanSummary, Scan, bytes_of
from dormouse.reading.sql.damage import check_after
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.explanations import explanation, with_nulls, without_files
from dormouse.reading.sql.firsts import Enough, KnownRows, first_files, has_all_rows, known_rows, sure_rows
from dormouse.reading.sql.joined import FILES_LEAST, VALUES_MAX, Joined, Source, is_large, smallest_source
from dormouse.reading.sql.moments import microseconds
from dormouse.reading.sql.named import Named, alone, meant
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.results import BATCH_ROWS, ReadFailed, Rows, fitted
from dormouse.reading.sql.selects import Select, may_hide_index
from dormouse.reading.sql.subqueries import BYTES_MAX as SUBQUERY_BYTES_MAX
from dormouse.reading.sql.subqueries import FILES_MAX as SUBQUERY_FILES_MAX
from dormouse.reading.sql.subqueries import (
    SUBQUERIES_MAX,
    TRIED,
    Evaluated,
    Reads,
    Subquery,
    stands_alone,
    subqueries,
    with_values,
)
from dormouse.reading.sql.wanted import Wanted
from dormouse.reading.streams import Interruption, in_thread, interruptible_call, undisturbed
from dormouse.reading.table_moments import Moments
from dormouse.reading.table_view import (
    PAGE_LEAVES_MAX,
    plan_query,
    plan_tables,
    summary,
)
from dormouse.reading.where import Condition, Question, question
from dormouse.state.context import TableContext

FILES_MAX = 50_000
"""The most files that one statement may read: DuckDB looks up each before it reads the first."""
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
        self.question = question
        self.parameters = parameters
        self.interruption = interruption
        self.gone: set[str] = set()
        self.is_open = False
        try:
            found = session.parsed(statement)
            self.text = found.run
            self.compares_null, self.joins_outer = found.compares_null, found.joins_outer
            self.moments = Moments(meant(found, tables), as_of)
            self.contexts = self.moments.contexts
            self.describes = found.describes
            schemas = {name: context.schema for name, context in self.contexts.items()}
            self.moment = microseconds() if found.tells_time else None
            self.wanted = session.wanted(schemas, found, parameters, self.moment)
            if question is not None:
                ranges = dict.fromkeys(self.wanted.ranges, question.ranges)
                self.wanted = replace(self.wanted, ranges=ranges, enough=None, ends=None)
            names = {name.lower() for name in found.names}
            self.moments.read(self.wanted.ranges, [name for name in self.contexts if name.lower() in names])
            self.evaluated: list[Evaluated] = []
            self.whole = self.wanted, self.text
            self.planned: Reads | None = None
            if question is None and self.wanted.ranges:
                interruptible_call(lambda: self._narrow(found, schemas), interruption.set)
        except BaseException:
            session.close()
            raise

    def _narrow(self, statement: Parsed, schemas: Mapping[str, Schema]) -> None:
        """Evaluates small parts of the statement first, if their values restrict row keys."""
        if statement.has_subqueries:
            self._evaluate(statement, schemas)
        if self.wanted.joined is not None:
            self._follow(schemas, self.wanted.joined)

    def _evaluate(self, statement: Parsed, schemas: Mapping[str, Schema]) -> None:
        """Replaces subqueries by their values, if these may restrict row keys."""
        some = list(islice(subqueries(statement), SUBQUERIES_MAX))
        if not some or not self._may_pay(self._may_restrict(statement, some, schemas)):
            return
        with self.moments.kept():
            values = [(one, self._value(statement, one, schemas)) for one in some]
        self.evaluated = [value for _, value in values if value is not None]
        if self.evaluated:
            written = [(one, value.values) for one, value in values if value is not None]
            try:
                wanted, self.text = self._with_values(statement, written, schemas)
                # all files are planned together, with those of the subqueries
                self.wanted = replace(wanted, enough=None, ends=None)
            except InvalidQuery:
                self.evaluated = []

    def _may_restrict(
        self, statement: Parsed, some: Sequence[Subquery], schemas: Mapping[str, Schema]
    ) -> set[str]:
        """Returns the tables whose needed ranges change if constants take the place of the subqueries."""
        found = set[str]()
        for constant in TRIED:
            try:
                wanted, _ = self._with_values(statement, [(one, constant) for one in some], schemas)
            except InvalidQuery:
                return set(self.wanted.ranges)
            found |= {name for name, ranges in wanted.ranges.items() if self.wanted.ranges.get(name) != ranges}
        return found

    def _may_pay(self, names: Collection[str]) -> bool:
        """Returns whether one of the tables has so many files or bytes that some should be left out."""
        trees = [self.contexts[name].partitions.cached() for name in names]
        if any(tree is None or tree.leaf_count >= FILES_LEAST for tree in trees) or not names:
            return bool(names)
        with suppress(InvalidQuery, FileGone), self.moments.kept():
            [reads] = self._planned([self.wanted.ranges], FILES_MAX)
            if not any(is_large(reads.get(name, ())) for name in names):
                self.planned = reads
                return False
        return True

    def _with_values(
        self, statement: Parsed, values: Sequence[tuple[Subquery, str]], schemas: Mapping[str, Schema]
    ) -> tuple[Wanted, str]:
        """Returns the needs and the text of a statement with values in place of subqueries."""
        changed = self.session.parsed(with_values(statement.text, values))
        # under the original text, for the names of the answer's columns
        changed = replace(changed, text=statement.text)
        return self.session.wanted(schemas, changed, self.parameters, self.moment), changed.run

    def _value(
        self, statement: Parsed, subquery: Subquery, schemas: Mapping[str, Schema]
    ) -> Evaluated | None:
        """Evaluates a subquery; returns None if it cannot stand alone, or reads or returns too much."""
        with suppress(InvalidQuery, FileGone):
            parsed = self.session.parsed(subquery.statement)
            if not stands_alone(parsed, statement):
                return None
            wanted = self.session.wanted(schemas, parsed, (), self.moment)
            files_max = SUBQUERY_FILES_MAX if wanted.ends is None else FILES_MAX
            [reads] = self._planned([wanted.ranges], files_max)
            known = self._known_among(wanted, reads)
            read = reads if known is None else dict.fromkeys(reads, known.scans)
            scans = [scan for some in read.values() for scan in some]
            if len(scans) > SUBQUERY_FILES_MAX or bytes_of(scans) > SUBQUERY_BYTES_MAX:
                return None
            rows = self._rows(read, self._views(read, known, wanted), parsed.run, ())
            if known is not None and wanted.ends is not None:
                rows = known.counted(rows, wanted.ends)
            values = subquery.values(pa.Table.from_batches(rows.batches, rows.schema))
            return None if values is None else Evaluated(values, wanted, reads, known)
        return None

    def _follow(self, schemas: Mapping[str, Schema], joined: Joined) -> None:
        """Evaluates columns of small tables, if their values may restrict the keys of a larger one."""
        before, tried = self.wanted, set[str]()
        whole: dict[str, KeyRanges] = {}
        with suppress(InvalidQuery, FileGone), self.moments.kept():
            reads, self.planned = self.planned, None
            if reads is None:
                [reads] = self._planned([before.ranges], FILES_MAX)
            while len(tried) < SUBQUERIES_MAX and any(map(is_large, reads.values())):
                source = smallest_source(joined, schemas, reads, tried)
                if source is None:
                    break
                tried.add(source.name)
                values = self._values(source)
                if values is not None:
                    joined = joined.given(source.name, values).spread(schemas)
                    needed = replace(before, ranges={source.table: before.ranges[source.table]})
                    # not its own ranges: only deletions that meet them are applied, and its values do not
                    # exclude deleted rows
                    whole |= needed.ranges
                    self.wanted = replace(before, ranges={**joined.by_table(schemas), **whole})
                    self.evaluated.append(Evaluated("", needed, {source.table: reads[source.table]}, None))
            self.planned = None if self.evaluated else reads

    def _values(self, source: Source) -> list[Range] | None:
        """Returns the values of a column; None if there are too many."""
        table, column = quoted(source.table), quoted(source.column)
        statement = f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL LIMIT {VALUES_MAX + 1}"
        views = {source.table: self._select(source.table, self.wanted.ranges, source.ranges).of(source.scans)}
        rows = self._rows({source.table: source.scans}, views, statement, ())
        try:
            values = [value for batch in rows.batches for value in batch.column(0).to_pylist()]
        except (ValueError, OverflowError):  # a time that no key can have
            return None
        return None if len(values) > VALUES_MAX else [Range.exactly(value) for value in values]

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
        self.is_open = True
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
                if not self.is_open:
                    raise
                # the reader already has the answer's columns
                self.contexts = {name: keeping_columns(one) for name, one in self.contexts.items()}

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
            return self._on_all()
        return self._until_enough(enough)

    def _explained(self) -> Rows:
        """Returns the files and bytes that are read of each table, followed by DuckDB's own plan."""
        known = self._known()
        summaries = self._summaries(known)
        files = sum(one.files for one in summaries.values())
        said = explanation(self._ranges, summaries)
        if not self.wanted.runs and files > EXPLAINED_FILES_MAX:
            return Rows(said.schema, iter([said]))
        known_reads = None if known is None else dict.fromkeys(self.wanted.ranges, known.scans)
        rows = self._on_all() if known_reads is None else self._on(known_reads, known)

        def batches() -> Iterator[pa.RecordBatch]:
            yield said
            for batch in rows.batches:
                columns = [batch.column(0), without_files(batch.column(1))]
                yield pa.RecordBatch.from_arrays(columns, schema=said.schema)

        return Rows(said.schema, batches())

    def _on_all(self) -> Rows:
        if self.planned is not None:
            planned, self.planned = self.planned, None
            return self._on(planned)
        reads, *again = self._planned(
            [self.wanted.ranges, *(one.wanted.ranges for one in self.evaluated)], FILES_MAX
        )
        if not all(self._holds(one, now) for one, now in zip(self.evaluated, again, strict=True)):
            # a table of a subquery has changed since the subquery was evaluated
            (self.wanted, self.text), self.evaluated = self.whole, []
            return self._on_all()
        return self._on(reads)

    def _holds(self, evaluated: Evaluated, reads: Reads) -> bool:
        """Returns whether a subquery would be evaluated to the same values over the files that it has now."""
        if evaluated.known is None:
            return reads == evaluated.reads
        return self._known_among(evaluated.wanted, reads) == evaluated.known

    def _known(self) -> KnownRows | None:
        """Returns the facts that answer the statement, and the files to read beside them; None for rows.

        For EXPLAIN of a limit, these are the first files, if they have enough rows by their facts.
        """
        wanted, enough = self.wanted, self.wanted.enough
        if (wanted.ends is None and enough is None) or len(wanted.ranges) != 1:
            return None
        [(name, ranges)] = wanted.ranges.items()
        context = self.contexts[name]
        if not has_all_rows(context):
            return None
        if wanted.ends is not None:
            return self._known_among(wanted, {name: chain.from_iterable(self._groups(PAGE_LEAVES_MAX))})
        if enough is None or enough.rows_read is None or enough.rows > ROWS_ENOUGH_MAX:
            return None
        first = first_files(context.schema, ranges, enough.rows_read, self._groups())
        return None if first is None else KnownRows(first)

    def _known_among(self, wanted: Wanted, files: Mapping[str, Iterable[Scan]]) -> KnownRows | None:
        if wanted.ends is None:
            return None
        [(name, ranges)] = wanted.ranges.items()
        return known_rows(self.contexts[name], ranges, wanted.ends, wanted.enough, files[name])

    def _groups(self, leaves_max: int | None = None, *, bundles: bool = False) -> Iterator[Sequence[Scan]]:
        """Yields the files of the only table that is read, in groups, those that are needed first before."""
        [(name, ranges)] = self.wanted.ranges.items()
        return plan_query(
            self.contexts[name],
            ranges,
            filtered_again=True,
            begun=self.is_open,
            at=self.moments.of(name),
            descending=self.wanted.enough is not None and self.wanted.enough.descending,
            leaves_max=leaves_max,
            bundles=bundles,
        )

    def _planned(self, several: Sequence[Mapping[str, KeyRanges]], files_max: int) -> list[Reads]:
        """Returns the files that have rows in ranges of tables, for several such ranges, at one moment."""
        named = [(name, ranges) for one in several for name, ranges in one.items()]
        plans = iter(
            plan_tables(
                [(self.contexts[name], ranges) for name, ranges in named],
                files_max=files_max,
                filtered_again=self._filters_again,
                begun=self.is_open,
                at=self.moments.all([name for name, _ in named]),
                bundles=True,
            )
        )
        return [{name: list(chain(*next(plans).groups)) for name in one} for one in several]

    def _until_enough(self, enough: Enough) -> Rows:
        """Runs over the first files in key order, then over more of them until the limit is filled."""
        [(name, ranges)] = self.wanted.ranges.items()
        scans: list[Scan] = []
        files = 1 if enough.in_key_order else FIRST_FILES
        context = self.contexts[name]
        needed = enough.rows_read if has_all_rows(context) else None
        rows, is_sure = 0, True
        for group in self._groups(bundles=True):
            is_filled = needed is not None and rows >= needed
            if scans and (is_filled or (not is_sure and len(scans) + len(group) > files)):
                found = self._first_of(name, scans, enough) or self._filled({name: scans}, enough)
                if found is not None:
                    return found
                files *= MORE_FILES
            sure = [None if needed is None else sure_rows(context.schema, ranges, scan) for scan in group]
            rows, is_sure = rows + sum(filter(None, sure)), is_sure and None not in sure
            scans += group
            _check_size({name: scans})
        return self._first_of(name, scans, enough) or self._on({name: scans})

    def _first_of(self, name: str, scans: Sequence[Scan], enough: Enough) -> Rows | None:
        """Returns the answer computed from the smallest keys of some files, in a table that merges rows.

        Returns None if these rows do not fill the limit, or the table does not merge rows. Rows merge only
        with rows of the same key, so rows with larger keys need not be read.
        """
        context = self.contexts[name]
        is_first = enough.in_key_order and not enough.descending and not enough.is_value
        if not (is_first and scans and context.properties.aggregate):
            return None
        first = context.schema.row_keys[0].name
        wanted = [scan.within(self.wanted.ranges[name]) for scan in scans]
        statement = f"SELECT {quoted(first)} FROM {quoted(name)} ORDER BY 1 LIMIT 1 OFFSET {FIRST_ROWS}"
        found = self._rows(
            {name: wanted}, {name: self._select(name, self.wanted.ranges).unmerged(wanted)}, statement, ()
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
        rows = self._rows(reads, self._views(reads, known, self.wanted), self.text, self.parameters)
        if self.describes:
            [context] = self.contexts.values()
            rows = with_nulls(rows, context.schema)
        return rows if self.wanted.names is None else rows.named(self.wanted.names)

    def _views(self, reads: Reads, known: KnownRows | None, wanted: Wanted) -> dict[str, str]:
        """Returns the SELECT of each table over its files; known rows are those of the only table read."""
        views = {name: self._select(name, wanted.ranges).of(reads.get(name, ())) for name in self.contexts}
        for name in reads if known is not None else ():
            more = known.select(self.contexts[name].schema) if known else None
            views[name] += f" UNION ALL {more}" if more else ""
        return views

    def _rows(self, reads: Reads, views: Mapping[str, str], statement: str, parameters: Parameters) -> Rows:
        _check_size(reads)
        self.interruption.check()
        with self._naming_files(reads), ExitStack() as checks:
            for name, scans in reads.items():
                checks.enter_context(checked_sizes(self.contexts[name], scans, self.interruption))
            rows = self.session.rows(views, statement, parameters, self.moment)

        def batches() -> Iterator[pa.RecordBatch]:
            with self._naming_files(reads):
                yield from rows.batches

        return Rows(rows.schema, batches())

    def _select(self, name: str, needed: Mapping[str, KeyRanges], ranges: KeyRanges | None = None) -> Select:
        """Returns the maker of a table's SELECT, for a statement that needs rows in `needed`.

        With `ranges`, it selects only rows in these ranges of its columns.
        """
        context = self.contexts[name]
        wanted = self.question or question(context.schema, None, None, None)
        if self._filters_again:
            keys = (Condition(context.schema.field(key), ranges) for key, ranges in wanted.ranges.items())
            wanted = replace(wanted, conditions=(*keys, *wanted.conditions))
        if ranges is not None:
            some = (Condition(context.schema.field(column), items) for column, items in ranges.items())
            wanted = replace(wanted, conditions=(*some, *wanted.conditions))
        now_ms = self.moments.milliseconds(name)
        return Select(
            context,
            wanted,
            now_ms,
            ranges=needed.get(name, KeyRanges()),
            interruption=self.interruption,
            compares_null=self.compares_null,
            joins_outer=self.joins_outer,
        )

    @property
    def _filters_again(self) -> bool:
        """Returns whether the wanted keys are one condition on all rows, instead of one for each leaf.

        With a question they are one condition for each leaf, unless DuckDB would then need one scan for each
        leaf.
        """
        return self.question is None or any(may_hide_index(one.schema) for one in self.contexts.values())

    def _summaries(self, known: KnownRows | None) -> dict[str, PlanSummary]:
        """Returns the numbers of files and bytes to read; `known` has the files of the only table, if any."""
        found = {
            name: summary(self.contexts[name], ranges, self.moments.of(name))
            for name, ranges in self._ranges.items()
        }
        return found if known is None else {name: known.summary(one) for name, one in found.items()}

    @property
    def _ranges(self) -> dict[str, KeyRanges]:
        """The ranges of each table that the statement or an evaluated subquery needs."""
        several = [self.wanted.ranges, *(one.wanted.ranges for one in self.evaluated if one.reads_files)]
        names = dict.fromkeys(name for one in several for name in one)
        return {name: united([one[name] for one in several if name in one]) for name in names}

    @contextmanager
    def _naming_files(self, reads: Reads) -> Iterator[None]:
        """Replaces DuckDB's error in the block by one that names the bad file, or the sum that overflowed."""
        try:
            yield
        except InvalidQuery as error:
            for name, scans in reads.items():
                context = self.contexts[name]
                if too_large := Transform.parse(context.schema, context.properties).overflow(str(error)):
                    raise too_large from error
                if isinstance(error, ReadFailed):
                    check_after(context, scans, error)
            raise InvalidQuery(str(error)) from error


def _check_size(reads: Reads) -> None:
    """Raises `InvalidQuery` when the statement would read more than `FILES_MAX` files."""
    files = sum(map(len, reads.values()))
    if files > FILES_MAX:
        name = max(reads, key=lambda table: len(reads[table]))
        raise InvalidQuery(
            f"the statement would read {files:,} files, more than {FILES_MAX:,}, most of table {name!r}: "
            "narrow its row keys, or compact the table"
        )
