"""Updates: new values for the rows that meet a condition, computed from the rows of one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.transform import quoted
from dormouse.errors import InvalidQuery
from dormouse.model.cut import Position
from dormouse.model.edits import TARGET, Sql
from dormouse.model.loops import Progress, no_progress
from dormouse.model.region import KeyRanges
from dormouse.model.stored_conditions import CONDITION_BYTES_MAX
from dormouse.model.table import SEQUENCE, is_keyed
from dormouse.reading.executor import rows_of
from dormouse.reading.row_filter import every, in_slices, meets, rendered
from dormouse.reading.sql.conditions import type_name
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.evaluating import stepped
from dormouse.reading.sql.moments import microseconds
from dormouse.reading.sql.scalars import Scalar, columns_text, reference
from dormouse.reading.sql.table_rows import TableRows
from dormouse.reading.streams import Interruption
from dormouse.reading.table_view import Foreseen
from dormouse.reading.where import Condition, DeleteWhere, Question
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.deletions import NewDeletion
from dormouse.writing.deleting import asked_rows, deletion_of
from dormouse.writing.edit_rules import (
    check_editable,
    check_newest,
    check_not_key,
    checked_columns,
    checked_constant,
    identity,
    without_filter,
)
from dormouse.writing.edited_rows import (
    KEYS,
    OF_TARGET,
    Comparison,
    Edited,
    Outcome,
    checked_scalar,
    naming,
    new_rows,
    relation,
    target_text,
)
from dormouse.writing.edits import Begun, Computed, Concern
from dormouse.writing.listed_deletions import deletions_of_rows


@dataclass(frozen=True)
class Update:
    """A change that gives the rows that meet a condition new values; see `Table.update`.

    If `values` is None, it deletes them. It does so even if the table's filter hides them. `verb` begins its
    errors.
    """

    sessions: Sessions
    where: DeleteWhere | Sql
    values: Mapping[str, Any] | None
    progress: Progress = no_progress
    verb: str = "update of"

    @property
    def reads_its_keys(self) -> bool:
        return True

    def compute(
        self, context: TableContext, attempt: WriteAttempt, at: Position, begun: Begun | None = None
    ) -> Computed:
        """Computes the update from the rows that the table has now; see `Change.compute`.

        Raises `InvalidQuery`, `InvalidInput`, `InvalidData` for a value that a column cannot have, and the
        errors of reading a query. `SchemaMoved` and `QueryOvertaken` mean that it must be computed again.
        """
        if begun is None:
            return _Computation(self, context).run(attempt)
        computation: _Computation = begun.computation
        return computation.run(attempt, begun.query)

    def begun(self, context: TableContext) -> Begun | None:
        computation = _Computation(self, context)
        return None if computation.tells_time else Begun(computation, computation.query())

    def dry_run(self, context: TableContext) -> Mapping[str, int]:
        """Returns the number of rows that would be "updated" or "deleted"; writes nothing."""
        return _Computation(self, context).run(None).counts


@dataclass(frozen=True)
class _Chosen:
    """The rows that an update changes.

    Either they meet `sql`, over columns of the rows `TARGET`, or `question` is the same as a query, and
    `conditions` are all of its conditions. `columns` are the named ones. `deletion` deletes the replaced
    rows, if one condition can.
    """

    columns: frozenset[str]
    sql: str = ""
    question: Question | None = None
    conditions: Sequence[Condition] = ()
    deletion: NewDeletion | None = None

    @cached_property
    def condition(self) -> str:
        """The SQL over columns of the rows `TARGET`, which an update by keys seldom needs."""
        return self.sql or rendered(every(map(meets, self.conditions)), OF_TARGET)

    @property
    def is_by_query(self) -> bool:
        """True if a query reads the rows: it reads ranges of keys faster, and DuckDB searches values."""
        if self.question is None:
            return False
        return not self.question.conditions or len(self.condition) > CONDITION_BYTES_MAX


class _Computation:
    """One computation of an update."""

    def __init__(self, update: Update, context: TableContext) -> None:
        self._update = update
        self._context = context
        self._schema = context.schema
        self._deletes = update.values is None
        self._what = f"{update.verb} table {context.table.name!r}"
        if self._deletes:
            context = without_filter(context)
        check_editable(context, self._what)
        self._relations = relation(TARGET, self._schema.fields)
        self._constants: dict[str, pa.Scalar] = {}
        self._scalars: dict[str, Scalar] = {}
        self._take_values()
        used = list(self._scalars.values())
        if isinstance(update.where, Sql):
            condition = checked_scalar(
                update.sessions, f"{self._what}: where", update.where, self._relations, repeats=True
            )
            used.append(condition)
            self._chosen = _Chosen(frozenset(name for _, name in condition.columns), condition.text)
        else:
            self._chosen = self._by_columns(update.where)
        self._gone = identity(context, self._chosen.columns)
        moment = microseconds() if any(one.tells_time for one in used) else None
        self._rows = TableRows(update.sessions, context.placed, moment, searches=True)

    def _take_values(self) -> None:
        given = self._update.values
        if given is None:
            return
        if not isinstance(given, Mapping) or not given:
            raise InvalidQuery(f"{self._what}: give new values as a dict by column, not {given!r}")
        for field in checked_columns(self._what, self._schema, given):
            check_not_key(self._what, self._context, field.name)
            value = given[field.name]
            if isinstance(value, Sql):
                what = f"{self._what}: column {field.name!r}"
                self._scalars[field.name] = checked_scalar(
                    self._update.sessions, what, value, self._relations
                )
            else:
                found = checked_constant(self._what, field, value)
                self._constants[field.name] = pa.scalar(found, arrow_type(field.type))

    def _by_columns(self, where: DeleteWhere) -> _Chosen:
        rows, deletion = asked_rows(self._context, where, self._what), None
        if not is_keyed(self._context.properties):
            # a condition of too many values is not recorded: the rows are deleted by their own instead
            with suppress(InvalidQuery):
                deletion = deletion_of(self._context, rows)
        if self._context.properties.aggregate is not None and deletion is not None and deletion.by_values:
            deletion = None
        keys = (Condition(self._schema.field(name), ranges) for name, ranges in rows.ranges.items())
        conditions = [*keys, *rows.conditions]
        columns = frozenset(one.field.name for one in conditions)
        return _Chosen(columns, question=rows, conditions=conditions, deletion=deletion)

    @property
    def tells_time(self) -> bool:
        return self._rows.moment is not None

    def query(self) -> Foreseen | None:
        """Returns the query from which the update is computed, if there is one."""
        question = self._chosen.question
        if question is None or question.is_empty or not self._chosen.is_by_query:
            return None
        return Foreseen.of(self._rows.context, question.ranges)

    def run(self, attempt: WriteAttempt | None, ahead: Foreseen | None = None) -> Computed:
        """Computes the update; without an attempt, only counts its rows."""
        context, chosen = self._context, self._chosen
        kind = "deleted" if self._deletes else "updated"
        outcome = Outcome.of(context, self._gone, kind)
        if chosen.question is None:
            rows = columns_text(TARGET, self._schema.names, quoted(TARGET))
            ranges = self._rows.ranges(f"SELECT 1 FROM ({rows}) WHERE {chosen.condition}")
        else:
            ranges = chosen.question.ranges
        parts = self._by_query(ahead) if chosen.is_by_query else self._by_sql(ranges)
        files = outcome.write(attempt, self._counted(outcome, kind, parts), self._update.progress)
        has_rows = any(outcome.counts.values())
        deletions = [chosen.deletion] if has_rows and chosen.deletion is not None else []
        if attempt is not None and chosen.deletion is None and not is_keyed(context.properties):
            deletions = deletions_of_rows(context, outcome.gone.batches())
        return Computed(files, deletions, self._concern(ranges, outcome), outcome.counts)

    def _counted(self, outcome: Outcome, kind: str, parts: Iterator[Edited]) -> Iterator[Edited]:
        for part in parts:
            outcome.count(kind, part.rows.num_rows)
            is_mark = is_keyed(self._context.properties)
            yield replace(part, rows=part.rows[:0]) if self._deletes and not is_mark else part

    def _by_query(self, ahead: Foreseen | None) -> Iterator[Edited]:
        """Yields the new rows, computed batch by batch from the rows of a query."""
        assert self._chosen.question is not None  # noqa: S101 the condition is not SQL
        context = self._rows.context
        read = rows_of(context, replace(self._chosen.question, columns=context.schema.names), ahead)
        if not self._scalars:
            yield from (self._edited(batch.columns[: len(self._schema.names)], batch) for batch in read)
            return
        names = {name for one in self._scalars.values() for _, name in one.columns}
        used = [one for one in self._schema.fields if one.name in names]
        texts = {self._schema.field(name): self._value(name) for name in self._scalars}
        # without columns, DuckDB would not know the number of rows
        sent = [one.name for one in used] or [self._schema.names[0]]
        with closing(self._update.sessions(Interruption())) as session:
            for batch in filter(attrgetter("num_rows"), read):
                new = {
                    one.name: value
                    for one in texts
                    if (value := stepped(batch, self._scalars[one.name].step, one.type)) is not None
                }
                if len(new) < len(texts):
                    with self._naming():
                        found = session.evaluated(batch.select(sent), texts, used, self._rows.moment)
                        values = pa.Table.from_batches(found.batches, found.schema)
                    listed = zip(texts, values.columns, strict=True)
                    new = {one.name: column.combine_chunks() for one, column in listed}
                columns = (new.get(name, batch.column(name)) for name in self._schema.names)
                yield self._edited(list(columns), batch)

    def _by_sql(self, ranges: KeyRanges) -> Iterator[Edited]:
        """Yields the new rows, computed by one statement over the table."""
        names, by = self._schema.names, self._context.properties.newest_by
        place = [SEQUENCE] if is_keyed(self._context.properties) else []
        old = list(dict.fromkeys([*self._gone, *([] if by is None else [by]), *place]))
        values, replaced = [*map(self._value, names)], [reference(TARGET, name) for name in old]
        # DuckDB returns each column once, though most are also new values
        texts = [*values, *(text for text in replaced if text not in values)]
        numbers = [texts.index(text) for text in replaced]
        # numbered, since the name of a column may be that of a reference
        listed = ", ".join(f"{text} AS c{number}" for number, text in enumerate(texts))
        rows = columns_text(TARGET, [*names, *place], quoted(TARGET))
        statement = f"SELECT {listed} FROM ({rows}) WHERE {self._chosen.condition}"
        found = self._rows.read(statement, ranges)
        while True:
            with self._naming():
                batch = next(found, None)
            if batch is None:
                return
            before = pa.RecordBatch.from_arrays([batch.column(number) for number in numbers], names=old)
            yield self._edited(batch.columns[: len(names)], before)

    def _value(self, name: str) -> str:
        """Returns the SQL of a column's new value, or of its old one, which a constant then replaces."""
        if name not in self._scalars:
            return reference(TARGET, name)
        return f"CAST({self._scalars[name].text} AS {type_name(self._schema.field(name).type)})"

    def _edited(self, columns: Sequence[pa.Array], before: pa.RecordBatch) -> Edited:
        """Returns new rows that have the given columns, except for constants.

        `before` has columns of the replaced rows: those of `identity`, and of a keyed table that of
        `newest_by` and the place.
        """
        values = [
            pa.repeat(self._constants[name], before.num_rows) if name in self._constants else column
            for name, column in zip(self._schema.names, columns, strict=True)
        ]
        is_place = SEQUENCE in before.schema.names and is_keyed(self._context.properties)
        places = before.column(SEQUENCE) if is_place else None
        marks = pa.repeat(pa.scalar(True), before.num_rows) if self._deletes else None
        rows = new_rows(self._context, values, marks, places)
        by = self._context.properties.newest_by
        if by in self._constants or by in self._scalars:
            check_newest(self._what, self._schema, self._context.properties, rows, before.column(str(by)))
        is_listed = self._chosen.deletion is None
        return Edited(rows, before.select(list(self._gone)) if is_listed else None)

    def _naming(self) -> AbstractContextManager[None]:
        return naming(self._what, self._scalars, has_conditions=self._chosen.question is None)

    def _concern(self, ranges: KeyRanges, outcome: Outcome) -> Concern:
        """Returns the concern for rows that meet the condition, or have a key that was written."""
        return Concern(
            ranges, lambda context, changed: self._comparison(ranges, outcome).finds(context, changed)
        )

    def _comparison(self, ranges: KeyRanges, outcome: Outcome) -> Comparison:
        context, chosen = self._context, self._chosen
        condition = chosen.condition
        if context.properties.aggregate is not None and not chosen.columns <= set(self._schema.key_names):
            # a changed row is one of those that are merged into the row of its key
            condition = rendered(in_slices(self._schema, [ranges]), OF_TARGET)
        statements = [f"SELECT 1 FROM ({target_text(context)}) WHERE {condition} LIMIT 1"]
        staged = {}
        if is_keyed(context.properties) and outcome.gone.row_count:
            statements.append(Comparison.by_keys(context))
            staged[KEYS] = outcome.gone
        return Comparison(self._rows, tuple(statements), staged)
