"""Merges: rows of a source that update, delete and insert rows of a table, computed at one moment.

The source is staged first. One statement then joins its rows with those of the table, and finds the first
clause that holds for each pair, and for each row without a partner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_schema, check_names
from dormouse.data.transform import quoted
from dormouse.errors import AmbiguousRows, InvalidData, InvalidInput
from dormouse.model.cut import Position
from dormouse.model.edits import SOURCE, TARGET, Sql
from dormouse.model.loops import Progress, no_progress
from dormouse.model.region import KeyRanges, united
from dormouse.model.schema import Schema
from dormouse.model.table import SEQUENCE, check_upsert, given_schema, is_keyed, unchecked
from dormouse.model.text import check_cases, did_you_mean
from dormouse.model.types import INT, LONG, DataType, Field
from dormouse.reading.executor import rows_of
from dormouse.reading.key_lists import KEYS_MAX
from dormouse.reading.row_filter import in_slices, rendered
from dormouse.reading.sql.conditions import type_name
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.moments import microseconds
from dormouse.reading.sql.named import Named
from dormouse.reading.sql.scalars import columns_text, reference
from dormouse.reading.sql.staged import Staged
from dormouse.reading.sql.statements import sql
from dormouse.reading.sql.table_rows import TableRows
from dormouse.reading.where import Question
from dormouse.sources.infer import columns_of
from dormouse.sources.source import open_source, unkeyed
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.edit_rules import already_there, check_editable, check_newest, identity, key_text
from dormouse.writing.edited_rows import (
    KEYS,
    OF_TARGET,
    Comparison,
    Edited,
    Outcome,
    naming,
    new_rows,
    ranges_of,
    target_text,
)
from dormouse.writing.edits import Computed, Concern
from dormouse.writing.listed_deletions import deletions_of_rows
from dormouse.writing.merge_clauses import Clauses

_ROW = "__row"
"""The column with the number of each row of the source."""
APART_LEAST = 1_000
"""The least distance, on average, of looked-up values of a row key. A scan finds nearer ones as fast."""


@dataclass(frozen=True)
class _Given:
    """The staged rows of a merge's source, and the types of its columns."""

    rows: Staged
    columns: Mapping[str, DataType]


class Merge:
    """A change that merges the rows of a source into a table; see `Table.merge_into`.

    The source is what `ingest` takes, or an `Sql` that selects rows of the tables in `tables`. Data is read
    once, when the merge is first computed. A query is run each time.
    """

    verb = "merge into"

    @property
    def reads_its_keys(self) -> bool:
        return True

    def __init__(
        self,
        sessions: Sessions,
        source: Any,
        on: Sequence[str] | Sql | str,
        when: object,
        *,
        tables: Named | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.sessions = sessions
        self.progress = progress
        self._source = source
        self._on = on
        self._when = when
        self._tables = tables
        self._given: _Given | None = None

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        """Computes the merge from the rows that the table has now; see `Change.compute`.

        Raises, besides the errors of `Update.compute`:

        - `AmbiguousRows` if several rows of the source would change one row, or insert one key,
        - `InvalidInput` for clauses that do not fit, and for an inserted key that a keyed table has.
        """
        return self._computation(context).run(attempt)

    def dry_run(self, context: TableContext) -> Mapping[str, int]:
        """Returns the numbers of rows that would be "inserted", "updated" and "deleted"; writes nothing."""
        return self._computation(context).run(None).counts

    def close(self) -> None:
        """Deletes the staged source."""
        if self._given is not None:
            self._given.rows.close()

    def _computation(self, context: TableContext) -> _Computation:
        what = f"{self.verb} table {context.table.name!r}"
        check_editable(context, what)
        if self._given is None or isinstance(self._source, Sql):
            self.close()
            try:
                self._given = self._staged(what, context)
            except InvalidData as error:
                raise type(error).from_message(f"{what}: {error}", error.data) from None
        check_cases(f"{what}: the table's columns", context.schema.names)
        check_cases(f"{what}: the source's columns", self._given.columns)
        return _Computation(
            self, what, context, self._given, self.clauses(what, context, self._given.columns)
        )

    def clauses(self, what: str, context: TableContext, columns: Mapping[str, DataType]) -> Clauses:
        """Returns the checked clauses for a source with these columns."""
        found = Clauses(self.sessions, what, context, columns, self._on)
        found.add(self._when)
        return found

    def clause_text(self, number: int) -> str:
        """Returns the name of a clause, counted from 0, to follow the table's in an error."""
        return f": clause {number + 1}"

    def fields(self, context: TableContext, columns: Mapping[str, DataType]) -> list[Field]:
        """Returns the columns of the staged source. Those that the table has, too, get its types.

        Scalars of a query keep their types, unless they have the name of a key: clauses cast them.
        """
        schema, kinds = context.schema, dict(columns)
        for name, kind in columns.items():
            if name in schema:
                own = schema.field(name).type
                is_cast = isinstance(self._source, Sql) and name not in schema.key_names
                kinds[name] = kind if is_cast and not (own.is_nested or kind.is_nested) else own
        return [Field(name, kind, nullable=True) for name, kind in kinds.items()]

    def _staged(self, what: str, context: TableContext) -> _Given:
        data = self._source
        if isinstance(data, Sql):
            if self._tables is None:
                raise InvalidInput(f"{what}: this source is a query, which cannot be run here")
            data = sql(self.sessions, self._tables, data.text)
        data, found = columns_of(data)
        if not found:  # no row tells of columns
            found = {one.name: one.type for one in context.schema.fields}
        fields = self.fields(context, found)
        whole = arrow_schema(unkeyed(fields)).append(pa.field(_ROW, pa.int64(), nullable=False))
        rows = Staged(context.objects, whole)
        for batch in open_source(data, unkeyed(fields)).batches:
            numbers = pa.array(np.arange(rows.row_count, rows.row_count + batch.num_rows, dtype=np.int64))
            rows.add(pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=whole))
        return _Given(rows, {one.name: one.type for one in fields})


class PartialUpsert(Merge):
    """An upsert of data that lacks columns: existing rows keep these, new rows have null or the default."""

    verb = "upsert into"

    def __init__(
        self,
        sessions: Sessions,
        data: Any,
        *,
        deletes: str | None = None,
        progress: Progress = no_progress,
    ) -> None:
        super().__init__(sessions, data, (), (), progress=progress)
        self._deletes = deletes

    def clauses(self, what: str, context: TableContext, columns: Mapping[str, DataType]) -> Clauses:
        found = Clauses(self.sessions, what, context, columns, context.schema.row_key_names)
        found.add_upsert(self._deletes)
        return found

    def clause_text(self, number: int) -> str:
        return ""  # they are not the user's

    def fields(self, context: TableContext, columns: Mapping[str, DataType]) -> list[Field]:
        """Returns the columns of the staged data. Raises the errors of `upsert`."""
        check_upsert(context.table.name, context.properties)
        known = given_schema(context.schema, context.properties, self._deletes)
        for name in [*context.schema.row_key_names, *([self._deletes] if self._deletes else [])]:
            if name not in columns:
                raise InvalidData(
                    f"column {name!r} ({known.field(name).type}) is missing from the data"
                    f"{did_you_mean(name, columns)}",
                    columns=[name],
                )
        check_names([*columns, *(name for name in known.names if name not in columns)], known)
        return [Field(name, known.field(name).type, nullable=name != self._deletes) for name in columns]


def _are_sparse(ranges: KeyRanges, schema: Schema) -> bool:
    """Returns whether ranges are a few values of the first row key that lie far apart."""
    first = schema.row_keys[0]
    items = ranges.get(first.name, ())
    if first.type not in (INT, LONG) or not 0 < len(items) <= KEYS_MAX:
        return False
    low: Any = items[0].min
    high: Any = items[-1].max
    is_listed = all(item.is_exact for name in ranges for item in ranges[name])
    return is_listed and high - low >= APART_LEAST * len(items)


class _Computation:
    """One computation of a merge."""

    def __init__(
        self, merge: Merge, what: str, context: TableContext, given: _Given, clauses: Clauses
    ) -> None:
        self._merge = merge
        self._what = what
        self._context = context
        self._schema = context.schema
        self._given = given
        self._clauses = clauses
        self._acting = clauses.acting
        moment = microseconds() if clauses.tells_time else None
        self._rows = TableRows(merge.sessions, context.placed, moment)
        self._gone = identity(context, clauses.columns)
        self._is_keyed = is_keyed(context.properties)
        by = context.properties.newest_by
        self._before = (SEQUENCE, *([] if by is None else [by])) if self._is_keyed else self._gone
        self._inserts = Outcome.of(context, self._gone)
        """The keys of the rows that are inserted into a keyed table."""

    def run(self, attempt: WriteAttempt | None) -> Computed:
        """Computes the merge; without an attempt, only counts its rows."""
        context = self._context
        outcome = Outcome.of(context, self._gone, "inserted", "updated", "deleted")
        ranges = self._ranges()
        files = outcome.write(attempt, self._parts(ranges, outcome), self._merge.progress)
        self._check_inserted()
        deletions = []
        if attempt is not None and not self._is_keyed:
            deletions = deletions_of_rows(context, outcome.gone.batches())
        return Computed(files, deletions, self._concern(ranges, outcome), outcome.counts)

    # The statement.

    def _of_source(self) -> str:
        return columns_text(SOURCE, [_ROW, *self._given.columns], quoted(SOURCE))

    def _case(self, *kinds: str) -> str:
        """Returns the SQL of the number of the first clause that holds; -1 if it does not act."""
        whens = [
            f"WHEN {one.condition} THEN {-1 if one.action == 'nothing' else number}"
            for number, one in enumerate(self._acting)
            if one.kind in kinds
        ]
        return f"CASE {' '.join(whens)} ELSE -1 END" if whens else "-1"

    def _acts(self, kind: str) -> bool:
        return any(one.kind == kind and one.action != "nothing" for one in self._acting)

    def _statement(self, *, checks_twice: bool) -> str:
        """Returns the statement, whose columns are numbered, as a column may have the name of a reference.

        They are: the number of the clause; with `checks_twice`, whether another row of the source changes the
        same row; the new row; and columns of the replaced row.
        """
        key, row = reference(TARGET, self._schema.row_key_names[0]), reference(SOURCE, _ROW)
        join = {
            (False, False): "JOIN",
            (False, True): "RIGHT JOIN",
            (True, False): "LEFT JOIN",
            (True, True): "FULL JOIN",
        }[self._acts("by_source"), self._acts("not_matched")]
        target = columns_text(TARGET, self._read, quoted(TARGET))
        joined = f"({target}) {join} ({self._of_source()}) ON ({self._clauses.on.text})"
        clause = (
            f"CASE WHEN {key} IS NULL THEN {self._case('not_matched')} "
            f"WHEN {row} IS NULL THEN {self._case('by_source')} ELSE {self._case('matched')} END"
        )
        texts = ["clause"]
        if checks_twice:
            matched = f"CASE WHEN {key} IS NOT NULL THEN {row} END"
            # each inserted row is a partition of its own
            alone = f"CASE WHEN {key} IS NULL THEN {row} END"
            keys = self._schema.row_key_names if self._is_keyed else self._gone
            parts = ", ".join([*map(self._compared, keys), alone])
            over = f"OVER (PARTITION BY {parts})"
            texts.append(f"min({matched}) {over} <> max({matched}) {over}")
        texts += [self._value(name) for name in self._schema.names]
        texts += [reference(TARGET, name) for name in self._before]
        listed = ", ".join(f"{text} AS c{number}" for number, text in enumerate(texts))
        return f"SELECT {listed} FROM (SELECT *, {clause} AS clause FROM {joined}) WHERE clause >= 0"

    def _compared(self, name: str) -> str:
        """Returns the SQL by which rows with equal values of a column are found."""
        column = reference(TARGET, name)
        # DuckDB gives all rows of a partition 0.0, if it is divided by a column that also has -0.0
        return f"({column} + 0)" if self._schema.field(name).type.is_floating else column

    def _value(self, name: str) -> str:
        """Returns the SQL of a column's new value, which depends on the clause."""
        whens = [
            f"WHEN {number} THEN {one.values[name]}"
            for number, one in enumerate(self._acting)
            if name in one.values
        ]
        column = self._schema.field(name)
        old = reference(TARGET, name) if self._keeps(column) else f"CAST(NULL AS {type_name(column.type)})"
        return f"CASE clause {' '.join(whens)} ELSE {old} END" if whens else old

    def _keeps(self, column: Field) -> bool:
        """Returns whether a new row may have the value that the replaced row has in a column.

        Marks of deletion have the keys of the replaced row, and its value of `newest_by`.
        """
        kept = [one for one in self._acting if column.name not in one.values]
        if any(one.action == "update" for one in kept):
            return True
        is_of_mark = column.name in self._schema.key_names or column.name in self._before
        return self._is_keyed and is_of_mark and any(one.action == "delete" for one in kept)

    @cached_property
    def _read(self) -> list[str]:
        """The columns of the table that the statement needs."""
        kept = [column.name for column in self._schema.fields if self._keeps(column)]
        keys, used = self._schema.row_key_names, self._clauses.read
        return list(dict.fromkeys([*keys, *self._before, *kept, *sorted(used)]))

    # The answer of the statement.

    def _parts(self, ranges: KeyRanges, outcome: Outcome) -> Iterator[Edited]:
        if not self._acts("by_source") and not self._given.rows.row_count:
            return
        # different values of another type may be equal to one of the table's, as '1' and '01' are to 1
        equated = self._clauses.equated().items()
        matches_one = self._is_unique([name for key, name in equated if self._clauses.is_exact(key, name)])
        checks_twice = self._acts("matched") and not matches_one
        statement = self._statement(checks_twice=checks_twice)
        staged = {SOURCE: self._given.rows}
        if _are_sparse(ranges, self._schema):
            staged[TARGET] = self._looked_up(ranges)
        found = self._rows.read(statement, ranges, staged)
        while True:
            with self._naming():
                batch = next(found, None)
            if batch is None:
                return
            columns = batch.columns
            clauses, columns = columns[0].to_numpy(zero_copy_only=False), columns[1:]
            twice = columns.pop(0) if checks_twice else None
            new = pa.RecordBatch.from_arrays(
                columns[: len(self._schema.names)], names=list(self._schema.names)
            )
            before = pa.RecordBatch.from_arrays(columns[len(new.columns) :], names=list(self._before))
            if twice is not None and (at := pc.index(twice, True).as_py()) >= 0:
                keys = key_text(self._schema, new if self._is_keyed else before, at)
                raise AmbiguousRows(
                    f"{self._what}: several rows of the source match the row with {keys}; make them one, or "
                    "let a clause do nothing for the others",
                    table=self._context.table.name,
                )
            yield self._edited(clauses, new, before, outcome)

    def _looked_up(self, ranges: KeyRanges) -> Staged:
        """Returns the rows of the table with some keys. A query finds a few of them faster than DuckDB."""
        context = self._rows.context
        names = [name for name in context.schema.names if name in self._read]
        found = rows_of(context, Question(ranges, (), tuple(names)))
        schema = pa.schema(map(arrow_schema(context.schema).field, names))
        return Staged(context.objects, schema).add_all(found)

    def _edited(
        self, clauses: np.ndarray[Any, Any], new: pa.RecordBatch, before: pa.RecordBatch, outcome: Outcome
    ) -> Edited:
        def of(action: str) -> np.ndarray[Any, Any]:
            is_of = np.array([one.action == action for one in self._acting])
            found: np.ndarray[Any, Any] = is_of[clauses]
            return found

        inserted, deleted = of("insert"), of("delete")
        self._check_nulls(clauses, new, deleted)
        # a mark of deletion for a key that the table does not have deletes no row
        is_there = np.array([one.kind != "not_matched" for one in self._acting])[clauses]
        outcome.count("inserted", int(inserted.sum()))
        outcome.count("updated", int(of("update").sum()))
        outcome.count("deleted", int((deleted & is_there).sum()))
        if self._is_keyed:
            rows = new_rows(self._context, new.columns, pa.array(deleted), before.column(SEQUENCE))
            if (by := self._context.properties.newest_by) is not None:
                check_newest(self._what, self._schema, self._context.properties, rows, before.column(by))
            keys = self._inserts.gone.schema.names
            self._inserts.gone.add(rows.select(keys).filter(pa.array(inserted)))
            return Edited(rows)
        rows = new_rows(self._context, new.filter(pa.array(~deleted)).columns)
        return Edited(rows, before.filter(pa.array(~inserted)))

    def _check_nulls(
        self, clauses: np.ndarray[Any, Any], new: pa.RecordBatch, deleted: np.ndarray[Any, Any]
    ) -> None:
        """Raises `InvalidData` for a new row without a value for a column that must not be null."""
        for column in self._schema.fields:
            values = new.column(column.name)
            if column.nullable or not values.null_count:
                continue
            at = pc.index(pc.and_not(values.is_null(), pa.array(deleted)), True).as_py()
            if at >= 0:
                of = self._merge.clause_text(int(clauses[at]))
                raise InvalidData(
                    f"{self._what}{of}: column {column.name!r} must not be null, and the row with "
                    f"{key_text(self._schema, new, at)} has no value for it",
                    column=column.name,
                )

    def _naming(self) -> AbstractContextManager[None]:
        columns = dict.fromkeys(name for one in self._acting for name in one.values)
        has_conditions = any(one.condition != "true" for one in self._acting)
        return naming(self._what, columns, has_conditions=has_conditions or not self._clauses.on.is_equality)

    def _check_inserted(self) -> None:
        """Raises an error if rows inserted into a keyed table have one key, or one that the table has."""
        keys = self._inserts.gone
        if not self._is_keyed or not keys.row_count:
            return
        equated, names = self._clauses.equated(), self._schema.row_key_names
        are_new = self._clauses.are_new()
        listed = ", ".join(map(quoted, names))
        if not (are_new and set(equated) == set(names) and self._is_unique(list(equated.values()))):
            twice = self._rows.of_staged(
                f"SELECT {listed} FROM {KEYS} GROUP BY {listed} HAVING count(*) > 1 LIMIT 1", {KEYS: keys}
            )
            if twice.num_rows:
                raise AmbiguousRows(
                    f"{self._what}: several rows of the source insert the row with "
                    f"{key_text(self._schema, twice, 0)}; make them one",
                    table=self._context.table.name,
                )
        if are_new:
            return
        statement = f"SELECT {listed} FROM {KEYS} SEMI JOIN {quoted(TARGET)} USING ({listed}) LIMIT 1"
        for there in self._rows.read(
            statement, ranges_of(self._rows, keys, dict(zip(names, names, strict=True))), {KEYS: keys}
        ):
            if there.num_rows:
                raise already_there(self._what, self._schema, there)

    # Facts about the source.

    def _is_unique(self, columns: Sequence[str]) -> bool:
        """Returns whether no two rows of the source are equal in some columns; False if this is not known."""
        rows = self._given.rows
        if rows.row_count < 2:
            return True
        kinds = [self._given.columns[name] for name in columns]
        if not columns or any(kind.is_floating or kind.is_nested for kind in kinds):
            return False
        if rows.is_in_memory:
            distinct = rows.table().group_by(list(columns)).aggregate([])
            return bool(distinct.num_rows == rows.row_count)
        listed = ", ".join(map(quoted, columns))
        statement = f"SELECT 1 FROM {SOURCE} GROUP BY {listed} HAVING count(*) > 1 LIMIT 1"
        return not self._rows.of_staged(statement, {SOURCE: rows}).num_rows

    def _ranges(self) -> KeyRanges:
        """Returns ranges with the row keys of all rows of the table that the merge needs."""
        if self._acts("by_source"):
            return KeyRanges()
        clauses = self._clauses
        if not clauses.on.columns and not self._holds(clauses.on.text):
            return KeyRanges({self._schema.row_key_names[0]: ()})
        equated = {
            key: column
            for key, column in clauses.equated().items()
            if key in self._schema.row_key_names and clauses.is_exact(key, column)
        }
        found = ranges_of(self._rows, self._given.rows, equated)
        if clauses.on.is_equality:
            return found
        fields = [Field(name, kind, nullable=True) for name, kind in self._given.columns.items()]
        others = {SOURCE: Schema([unchecked(_ROW, LONG)], (), fields)}
        target = columns_text(TARGET, self._schema.names, quoted(TARGET))
        statement = f"SELECT 1 FROM ({target}) JOIN ({self._of_source()}) ON ({clauses.on.text})"
        return found.intersect(self._rows.ranges(statement, others))

    def _holds(self, constant: str) -> bool:
        """Returns whether a condition over no columns is true."""
        return bool(self._rows.of_staged(f"SELECT 1 WHERE {constant}", {}).num_rows)

    # The changes of other commits that concern the merge.

    def _concern(self, ranges: KeyRanges, outcome: Outcome) -> Concern:
        """Returns the concern for rows that match the source, and those on which other clauses act.

        For a keyed table, it is also for rows with a key that was written.
        """
        context, on = self._context, self._clauses.on.text
        target, source = target_text(context), self._of_source()
        statements = [f"SELECT 1 FROM ({target}) JOIN ({source}) ON ({on}) LIMIT 1"]
        if self._acts("by_source"):
            statements.append(
                f"SELECT 1 FROM ({target}) ANTI JOIN ({source}) ON ({on}) "
                f"WHERE {self._case('by_source')} >= 0 LIMIT 1"
            )
        if context.properties.aggregate is not None and not self._clauses.columns <= set(
            self._schema.key_names
        ):
            # a changed row is one of those that are merged into the row of its key
            condition = rendered(in_slices(self._schema, [ranges]), OF_TARGET)
            statements = [f"SELECT 1 FROM ({target}) WHERE {condition} LIMIT 1"]
        if self._is_keyed and self._acts("not_matched"):
            statements.append(self._may_match_no_more(ranges))
        staged = {SOURCE: self._given.rows}
        if self._is_keyed and outcome.gone.row_count:
            statements.append(Comparison.by_keys(context))
            staged[KEYS] = outcome.gone
            keys = self._schema.row_key_names
            ranges = united([ranges, ranges_of(self._rows, outcome.gone, dict(zip(keys, keys, strict=True)))])
        return Concern(ranges, Comparison(self._rows, tuple(statements), staged).finds)

    def _may_match_no_more(self, ranges: KeyRanges) -> str:
        """Returns the statement for keys of a keyed table whose row may have matched, and was left as it was.

        Without it, a clause would insert a row. The changed row, or mark of deletion, need not match itself.
        """
        keys = self._schema.row_key_names
        equal = {key: column for key, column in self._clauses.equated().items() if key in keys}
        target = columns_text(TARGET, keys, quoted(TARGET))
        if not equal:
            return f"SELECT 1 FROM ({target}) WHERE {rendered(in_slices(self._schema, [ranges]), OF_TARGET)}"
        on = " AND ".join(
            f"{reference(TARGET, key)} = {reference(SOURCE, name)}" for key, name in equal.items()
        )
        return f"SELECT 1 FROM ({target}) SEMI JOIN ({self._of_source()}) ON ({on}) LIMIT 1"
