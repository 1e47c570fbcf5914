"""The results of edits: new rows, the rows that they replace, and which later changes concern them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_schema, conform
from dormouse.data.transform import quoted
from dormouse.errors import InvalidQuery
from dormouse.model.edits import SOURCE, TARGET, Sql
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.loops import Progress, no_progress, portions
from dormouse.model.region import KeyRanges, Range
from dormouse.model.table import SEQUENCE, given_schema, is_keyed
from dormouse.model.text import COLUMNS_SHOWN, shown_list
from dormouse.model.types import INT, Field
from dormouse.reading.changes import CHANGE, DELETE
from dormouse.reading.sql.conditions import DuckDb
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.scalars import (
    Relations,
    Scalar,
    columns_text,
    reference,
)
from dormouse.reading.sql.staged import Staged
from dormouse.reading.sql.table_rows import TableRows
from dormouse.reading.streams import Interruption
from dormouse.sources.source import Source
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.deleting import DELETES
from dormouse.writing.edits import CHANGED_ROWS, Changed
from dormouse.writing.ingest import keyed_rows, written

OF_TARGET = DuckDb(lambda column: reference(TARGET, column.name))
"""The renderer of conditions over columns of the rows `TARGET`."""
VALUES_MAX = 10_000
"""The most values of a column that are looked for one by one; more are looked for as a range."""
_INTS = (-(1 << 31), (1 << 31) - 1)
KEYS = "k"
"""The name, in statements, of the keys that an edit wrote."""

# Expressions that users give.


def relation(name: str, fields: Iterable[Field]) -> Relations:
    """Returns the columns of some rows, for expressions."""
    return ((name, tuple((one.name, one.type) for one in fields)),)


def checked_scalar(
    sessions: Sessions, what: str, value: Sql, relations: Relations, *, repeats: bool = False
) -> Scalar:
    """Returns a checked expression. Its errors begin with `what`. For `repeats`, see `scalars.scalar`."""
    try:
        with closing(sessions(Interruption())) as session:
            return session.scalar(value.text, relations, repeats)
    except InvalidQuery as error:
        raise InvalidQuery(f"{what}: {error}") from None


@contextmanager
def naming(what: str, columns: Iterable[str], *, has_conditions: bool) -> Iterator[None]:
    """Adds the columns that expressions set to an error of DuckDB, which may also be of a condition."""
    try:
        yield
    except InvalidQuery as error:
        names = shown_list([*map(repr, columns)], COLUMNS_SHOWN)
        of = f"{'a condition or ' * has_conditions}a value of {names}: " if names else ""
        raise InvalidQuery(f"{what}: {of}{error}") from error


# New rows, and the rows that they replace.


@dataclass(frozen=True, slots=True)
class Edited:
    """A part of an edit's result.

    `rows` have the table's columns, of a keyed table followed by `DELETES`. `gone` has the columns by which
    replaced rows are deleted, or is None if they need no such deletion.
    """

    rows: pa.RecordBatch
    gone: pa.RecordBatch | None = None


@dataclass
class Outcome:
    """The rows that an edit changes: the keys or the deleted rows, which are staged, and their numbers."""

    context: TableContext
    gone: Staged
    counts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(context: TableContext, names: Sequence[str], *kinds: str) -> Outcome:
        """Returns an outcome without rows. `names` are the columns by which replaced rows are deleted.

        Of a keyed table, it keeps the keys of all rows that are written instead.
        """
        if is_keyed(context.properties):
            names = context.schema.row_key_names
        whole = arrow_schema(context.schema)
        schema = pa.schema([whole.field(name) for name in names])
        return Outcome(context, Staged(context.objects, schema), dict.fromkeys(kinds, 0))

    def count(self, kind: str, rows: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + rows

    def write(
        self, attempt: WriteAttempt | None, parts: Iterator[Edited], progress: Progress = no_progress
    ) -> list[FileWithReferences]:
        """Writes the new rows as files of the attempt, and stages the replaced ones.

        Without an attempt, only takes the rows, which counts them.
        """
        batches = (batch for batch in self._taken(parts) if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return []
        if attempt is None:
            for _ in batches:
                pass
            return []
        found = chain([first], batches)
        rows = keyed_rows(self.context, attempt, DELETES)
        source = Source(found if rows is None else rows.stored(found), None)
        return written(self.context, attempt, source, progress)

    def _taken(self, parts: Iterator[Edited]) -> Iterator[pa.RecordBatch]:
        keyed = is_keyed(self.context.properties)
        for part in parts:
            gone = part.rows.select(self.gone.schema.names) if keyed else part.gone
            if gone is not None:
                self.gone.add(pa.RecordBatch.from_arrays(gone.columns, schema=self.gone.schema))
            yield part.rows


def new_rows(
    context: TableContext,
    columns: Sequence[pa.Array],
    deletes: pa.Array | None = None,
    places: pa.Array | None = None,
) -> pa.RecordBatch:
    """Returns new rows of a table from the values of its columns.

    Those of a keyed table get the column `DELETES` and, if they are given, the places of the rows that they
    replace; null for none.

    Raises `InvalidData` for values that the columns cannot have.
    """
    schema, names = context.schema, list(context.schema.names)
    if is_keyed(context.properties):
        schema = given_schema(schema, context.properties, DELETES)
        rows = len(columns[0])
        columns = [*columns, pa.repeat(pa.scalar(False), rows) if deletes is None else deletes]
        names.append(DELETES)
    rows = conform(pa.RecordBatch.from_arrays(list(columns), names=names), schema)
    return rows if places is None else rows.append_column(SEQUENCE, places)


# The changes of other commits that concern an edit.


def ranges_of(rows: TableRows, staged: Staged, columns: Mapping[str, str]) -> KeyRanges:
    """Returns ranges with the values of columns of staged rows; `columns` gives them by row key."""
    schema = rows.context.schema
    found = {}
    for key, column in columns.items():
        if (values := _values_of(rows, staged, column)) is not None:
            found[key] = values
    ranges = KeyRanges(found)
    for key in found:
        if schema.field(key).type == INT:
            ranges = ranges.clipped(key, Range(*_INTS, max_inclusive=True))
    return ranges


def _values_of(rows: TableRows, staged: Staged, column: str) -> list[Range] | None:
    """Returns the values of a column of staged rows as ranges; None if a value is none of a key."""
    if staged.is_in_memory:
        values = pc.unique(staged.table().column(column)).drop_null()
        ends = pc.min_max(values)
        low, high = ends["min"], ends["max"]
    else:
        name = quoted(column)
        statement = f"SELECT min({name}) AS low, max({name}) AS high FROM {SOURCE}"
        answer = rows.of_staged(statement, {SOURCE: staged})
        values, low, high = None, answer["low"][0], answer["high"][0]
    try:
        if values is not None and len(values) <= VALUES_MAX:
            return [Range.exactly(value) for value in values.to_pylist()]
        return [Range(low.as_py(), high.as_py(), max_inclusive=True)] if low.is_valid else []
    except (ValueError, OverflowError):
        return None


def target_text(context: TableContext) -> str:
    """Returns a SELECT of changed rows as rows of the table, without those that have only a key."""
    place = quoted(TARGET)
    if is_keyed(context.properties):
        place += f" WHERE {quoted(CHANGE)} <> '{DELETE}'"
    return columns_text(TARGET, context.schema.names, place)


@dataclass(frozen=True)
class Comparison:
    """Statements that return a row if some changed rows, by the name `TARGET`, concern an edit.

    They also read staged rows, by their names.
    """

    rows: TableRows
    statements: tuple[str, ...]
    staged: Mapping[str, Staged]

    @staticmethod
    def by_keys(context: TableContext) -> str:
        """Returns the statement for keys of a keyed table that the edit wrote."""
        keys = ", ".join(map(quoted, context.schema.row_key_names))
        return f"SELECT 1 FROM {quoted(TARGET)} SEMI JOIN {quoted(KEYS)} USING ({keys}) LIMIT 1"

    def finds(self, context: TableContext, changed: Changed) -> bool:
        """Returns whether one of the changed rows concerns the edit."""
        parts = (batch for batch in changed if batch.num_rows)
        for some in portions(parts, attrgetter("num_rows"), CHANGED_ROWS):
            with Staged(context.objects, some[0].schema).add_all(some) as rows:
                staged = {**self.staged, TARGET: rows}
                if any(self.rows.of_staged(one, staged).num_rows for one in self.statements):
                    return True
        return False
