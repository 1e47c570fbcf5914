"""Merges of DataFrames into tables: tasks join and write rows, and the driver commits once.

One job stages the rows of the DataFrame. A second job joins them with the rows that the table has at one
moment, and stages the changes: new rows, and the values by which replaced rows are deleted. Further jobs look
for rows that are changed twice, and write the new rows as a bulk ingest does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast, col, count, expr, lit, struct
from pyspark.sql.functions import max as largest
from pyspark.sql.functions import min as smallest
from pyspark.sql.functions import when as case
from pyspark.sql.types import StructType

from dormouse.data.arrow_schema import conform
from dormouse.errors import InvalidData, InvalidInput
from dormouse.model.cut import Position
from dormouse.model.edits import COMPUTED_MAX, SOURCE, TARGET, MergeReport, When
from dormouse.model.loops import Progress, no_progress
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.table import is_keyed
from dormouse.reading.executor import columns_of
from dormouse.spark.clauses import Clauses, Expressions, clauses_of
from dormouse.spark.frames import Tabular, backquoted, rows_of, struct_of
from dormouse.spark.ingest import divide, write_files
from dormouse.spark.merge_steps import (
    BEFORE,
    CLAUSE,
    COUNTS,
    INSERTED,
    NEW,
    OLD,
    REPORT,
    TWICE,
    VALUES,
    ChangeRows,
    LookForTwice,
)
from dormouse.spark.shuffle import stage
from dormouse.spark.staged_rows import ROW, StagedRows, StagingArea, frame_of, staging
from dormouse.spark.tasks import dormouse_error, run_action
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.history.moments import kept
from dormouse.writing.deleting import DELETES
from dormouse.writing.edit_rules import already_there, check_editable
from dormouse.writing.edits import Changed, Computed, Concern, Edit, check_may_edit
from dormouse.writing.ingest import keyed_rows
from dormouse.writing.listed_deletions import deletions_of_rows

R = TypeVar("R")
BROADCAST_BYTES_MAX = 32 * 1024 * 1024
"""The most bytes of a source that each executor gets as a whole."""
VALUES_MAX = 1_000
"""The most values of a key that are looked for one by one; more are looked for as a range."""
CHANGED_ROWS_MAX = 1_000_000
"""The most changed rows of other commits that are compared with the source; more always concern a merge."""


def merge(
    df: DataFrame,
    table: Tabular,
    on: Sequence[str] | str,
    when: Sequence[When] | When,
    *,
    edit_id: str | None = None,
    attempts_max: int = COMPUTED_MAX,
    progress: Progress | None = None,
) -> MergeReport:
    """Updates, deletes and inserts rows of a table by the rows of a DataFrame, in one commit.

    `on` is a list of columns that both have, or a condition. `when` has the clauses; for each pair of
    matching rows, and each row without a match, the first clause whose condition holds is used. Conditions
    and expressions are Spark SQL over the rows `t` of the table and `s` of the DataFrame. For the rest, see
    `Table.merge_into`: a second call with the same `edit_id` changes nothing, and other commits that change
    the same rows make it compute again, at most `attempts_max` times in all. `progress` is called once, with
    the number of written rows. The DataFrame is evaluated once, before the table is read.

    Raises `InvalidInput`, `InvalidQuery` or `InvalidData` for what does not fit the table, `AmbiguousRows` if
    clauses change a row twice, `EditConflict`, `JobFailed`, and the errors of a commit. Then nothing was
    changed, except after `CommitOutcomeUnknown`: repeat it with the same id.
    """
    if not isinstance(df, DataFrame):
        raise InvalidInput(
            f"give a DataFrame of Spark, not {type(df).__name__}; Table.merge_into takes others"
        )
    context, spark = table.context, df.sparkSession
    check_may_edit(context)
    with (
        table.changing(),
        Edit(context.supplier, edit_id, attempts_max=attempts_max, leftovers=True) as edit,
    ):
        counts: Mapping[str, int] = {}
        applied = edit.is_new or not edit.is_applied(context)
        if applied:
            source = Source(spark, df.schema, on, when)
            _run(spark, lambda: source.clauses(context.followed()))  # before rows are read
            with staging(context) as area:
                staged = replace(source, parts=_run(spark, lambda: tuple(area.staged(df))))
                edit.add(context, _Merge(staged, area, progress or no_progress))
                applied = edit.commit()
            counts = edit.counts if applied else {}
    done = {kind: counts.get(kind, 0) for kind in COUNTS.values()}
    return MergeReport(edit.edit_id, **done, attempts=edit.attempts, applied=applied)


def _run(spark: SparkSession, action: Callable[[], R]) -> R:
    try:
        return run_action(spark, action)
    except Exception as failure:
        raise dormouse_error(failure) from failure


# The source, and the rows of the table that may match it.


@dataclass(frozen=True)
class Source:
    """The rows of a DataFrame, which are staged, and how they are merged."""

    spark: SparkSession
    columns: StructType
    on: Any
    when: Any
    parts: tuple[StagedRows, ...] = ()

    def clauses(self, context: TableContext) -> Clauses:
        """Returns the clauses, checked against a version of the table. Runs on a thread of Spark."""
        check_editable(context, f"merge into table {context.table.name!r}")
        made = Expressions(
            self.spark, struct_of(columns_of(context.schema, context.schema.names)), self.columns
        )
        return clauses_of(context, made, self.columns, self.on, self.when)

    @property
    def is_small(self) -> bool:
        return sum(part.byte_count for part in self.parts) <= BROADCAST_BYTES_MAX

    def frame(self) -> DataFrame:
        return frame_of(self.spark, self.parts, self.columns, numbered=True).alias(SOURCE)

    def ranges(self, context: TableContext, clauses: Clauses) -> KeyRanges:
        """Returns ranges with the keys of all rows that may be changed, and in a keyed table inserted."""
        if clauses.reads_all:
            return KeyRanges()
        schema, equated = context.schema, dict(clauses.on.equated)
        inserts = [one for one in clauses.having("not_matched") if one.action == "insert"]
        for one in inserts if is_keyed(context.properties) else ():
            equated = {name: column for name, column in equated.items() if one.values[name].copied == column}
        found = {
            name: self._ranges(schema, name, equated[name])
            for name in schema.row_key_names
            if name in equated
        }
        return KeyRanges({name: ranges for name, ranges in found.items() if ranges is not None})

    def _ranges(self, schema: Schema, name: str, column: str) -> list[Range] | None:
        """Returns the values of a column as ranges of a row key; None if some do not fit its type."""
        values = (
            self.frame().select(col(backquoted(column)).alias(name)).where(col(backquoted(name)).isNotNull())
        )
        found = values.distinct().limit(VALUES_MAX + 1).toArrow()
        is_listed = found.num_rows <= VALUES_MAX
        if not is_listed:
            ends = (smallest(backquoted(name)), largest(backquoted(name)))
            found = values.agg(*(end.alias(str(n)) for n, end in enumerate(ends))).toArrow()
            found = pa.table({name: pa.chunked_array([found.column(n).chunk(0) for n in range(2)])})
        try:
            keys = conform(found, Schema([schema.field(name)])).column(0).to_pylist()
        except InvalidData:
            return None
        if is_listed:
            return [Range.exactly(key) for key in keys]
        return [Range(keys[0], keys[1], max_inclusive=True)]


# The join of the table's rows with those of the source.


def _joined(source: Source, target: DataFrame, clauses: Clauses) -> DataFrame:
    rows, others, how = target.alias(TARGET), source.frame(), clauses.join
    on = expr(clauses.on.text)
    if source.is_small and how == "right":
        # the rows that match, without moving the others
        rows = rows.join(broadcast(others), on, "left_semi").alias(TARGET)
    if source.is_small and how in ("inner", "left"):
        return rows.join(broadcast(others), on, how)
    # Spark knows no sizes of rows that tasks of Dormouse read, and would take both sides for small
    return rows.join(others.hint("merge"), on, how)


def changed_pairs(source: Source, context: TableContext, clauses: Clauses, target: DataFrame) -> DataFrame:
    """Returns a row for each change: the clause's number, the source's row, the row before, and new values.

    The columns with values, one for each clause that has expressions, are null in the rows of other clauses.
    """
    schema = context.schema
    # a condition must not tell -0.0 from 0.0, as a deletion of rows cannot
    floats = {
        one.name
        for one in schema.fields
        if one.type.is_floating and one.name in clauses.columns and not is_keyed(context.properties)
    }
    columns = {name: col(backquoted(name)) for name in schema.names}
    shown = [
        (column + lit(0.0).cast(target.schema[name].dataType)).alias(name) if name in floats else column
        for name, column in columns.items()
    ]
    target = target.select(*shown, struct(*columns.values()).alias(BEFORE))
    is_there = {"matched": (True, True), "not_matched": (False, True), "by_source": (True, False)}
    joined = _joined(source, target, clauses)
    chosen = case(lit(False), lit(None).cast("int"))
    for number, clause in enumerate(clauses.listed):
        has_row, has_source = (
            col(name).isNotNull() if there else col(name).isNull()
            for name, there in zip((BEFORE, ROW), is_there[clause.kind], strict=True)
        )
        value = lit(None if clause.action == "nothing" else number).cast("int")
        chosen = chosen.when(has_row & has_source & expr(clause.condition), value)
    acting = joined.withColumn(CLAUSE, chosen).where(col(CLAUSE).isNotNull())
    values = []
    for number, clause in enumerate(clauses.listed):
        texts = {name: one.expression for name, one in clause.values.items() if one.expression is not None}
        if texts:
            new = struct(*(expr(text).alias(name) for name, text in texts.items()))
            values.append(case(col(CLAUSE) == number, new).alias(f"{VALUES}{number}"))
    return acting.select(CLAUSE, ROW, BEFORE, *values)


# The change of a table, computed at one moment.


@dataclass
class _Merge:
    """A merge as a `Change`. Runs its jobs from the caller's thread."""

    source: Source
    area: StagingArea
    progress: Progress

    @property
    def reads_its_keys(self) -> bool:
        return True

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        if context.as_of(at).schema.version != context.schema.version:
            raise SchemaMoved(f"the columns of table {context.table.name!r} were changed")
        spark, source = self.source.spark, self.source
        context.attempts.confirm(attempt)
        clauses, ranges = _run(spark, lambda: _planned(source, context))
        step = ChangeRows.of(context, clauses, self.area)
        with kept(context, at):
            found = _run(spark, lambda: self._changes(context, clauses, ranges, at, step))
            parts = {
                kind: [self.area.part(row.name, row.rows, row.bytes) for row in found if row.kind == kind]
                for kind in (NEW, OLD)
            }
            gone = _run(spark, lambda: self._distinct(step, parts[OLD]))
            if parts[OLD] and is_keyed(context.properties) and not clauses.are_new(context.schema):
                _run(spark, lambda: self._check_inserted(context, at, step, parts[OLD]))
        keyed = keyed_rows(context, attempt, DELETES)
        if parts[NEW]:
            divide(context, parts[NEW], spark)
            files = write_files(context, attempt, parts[NEW], spark, keyed)
        else:
            files = []
        rows = sum(file.row_count or 0 for file in files)
        self.progress(rows, rows)
        replaced = chain.from_iterable(part.batches() for part in gone)
        deletions = [] if keyed is not None else deletions_of_rows(context, replaced)
        counts = {kind: sum(row[kind] for row in found) for kind in COUNTS.values()}
        written = parts[OLD] if keyed is not None else []
        concern = Concern(ranges, partial(self._is_concerned, clauses, step, written))
        return Computed(files, deletions, concern, counts)

    def _changes(
        self, context: TableContext, clauses: Clauses, ranges: KeyRanges, at: Position, step: ChangeRows
    ) -> list[Any]:
        """Stages the changes in one job. Returns the rows of `REPORT`."""
        where = {name: list(items) for name, items in ranges.items()}
        target = rows_of(self.source.spark, context, where, None, at)
        pairs = changed_pairs(self.source, context, clauses, target)
        return pairs.mapInArrow(stage(step), REPORT).collect()

    def _distinct(self, step: ChangeRows, parts: Sequence[StagedRows]) -> list[StagedRows]:
        """Returns the distinct rows by which replaced rows are deleted; none for a keyed table.

        Raises `AmbiguousRows` if a row is changed twice.
        """
        if not parts:
            return []
        rows = self._staged(step, parts).groupBy(*map(backquoted, step.names))
        # rows of the table that have equal values match the same rows of the source
        twice = (count("*") > 1) if step.is_keyed else (smallest(ROW) != largest(ROW))
        distinct = rows.agg(twice.alias(TWICE))
        look = LookForTwice(step.table, step.schema)
        found = distinct.mapInArrow(stage(look), struct_of(columns_of(step.schema, step.names)))
        if step.is_keyed:
            found.count()
            return []
        return self.area.staged(found)

    def _check_inserted(
        self, context: TableContext, at: Position, step: ChangeRows, parts: Sequence[StagedRows]
    ) -> None:
        """Raises `InvalidInput` if rows are inserted into a keyed table with keys that it has."""
        keys = list(step.names)
        rows = self._staged(step, parts).where(INSERTED).select(*map(backquoted, keys))
        there = rows_of(self.source.spark, context, None, keys, at)
        found = rows.join(there.hint("merge"), keys, "left_semi").limit(1).toArrow()
        if found.num_rows:
            raise already_there(f"merge into table {context.table.name!r}", context.schema, found)

    def _staged(self, step: ChangeRows, parts: Sequence[StagedRows]) -> DataFrame:
        columns = struct_of(columns_of(step.schema, step.names)).add(ROW, "long").add(INSERTED, "boolean")
        return frame_of(self.source.spark, parts, columns)

    def _is_concerned(
        self,
        clauses: Clauses,
        step: ChangeRows,
        written: Sequence[StagedRows],
        context: TableContext,
        changed: Changed,
    ) -> bool:
        """Returns whether rows that other commits changed match the source, or change without a match.

        Also returns True for rows of a keyed table with keys that were written.
        """
        batches = (batch for batch in changed if batch.num_rows)
        if not _shows(context, clauses):
            return next(batches, None) is not None
        held, rows = [], 0
        for batch in batches:
            held.append(batch)
            rows += batch.num_rows
            if rows > CHANGED_ROWS_MAX:
                return True
        if not held:
            return False
        return _run(
            self.source.spark, lambda: self._meet(clauses, step, written, pa.Table.from_batches(held))
        )

    def _meet(
        self, clauses: Clauses, step: ChangeRows, written: Sequence[StagedRows], changed: pa.Table
    ) -> bool:
        names = [name for name in changed.column_names if name in {*clauses.joining, *step.names}]
        rows = self.source.spark.createDataFrame(changed.select(names)).alias(TARGET)
        found = [rows.join(self.source.frame(), expr(clauses.on.text), "left_semi")]
        if written:
            keys = list(step.names)
            others = self._staged(step, written).select(*map(backquoted, keys))
            found.append(rows.join(others, keys, "left_semi"))
        for one in clauses.having("by_source"):
            if one.action != "nothing":
                found.append(rows.where(expr(one.condition)))
        return any(one.limit(1).count() for one in found)


def _planned(source: Source, context: TableContext) -> tuple[Clauses, KeyRanges]:
    clauses = source.clauses(context)
    return clauses, source.ranges(context, clauses)


def _shows(context: TableContext, clauses: Clauses) -> bool:
    """Returns whether rows that other commits added or removed show all that the choice of rows depends on.

    A changed row of a keyed table comes without its earlier values, and one of a table that merges rows of
    equal keys is only a part of the merged row.
    """
    schema, names = context.schema, clauses.joining
    if is_keyed(context.properties):
        known: Iterable[str] = schema.row_key_names
    else:
        known = schema.names if context.properties.aggregate is None else schema.key_names
    return not clauses.tells_time and names.issubset(known)
