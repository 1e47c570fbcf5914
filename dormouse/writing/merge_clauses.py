"""The clauses of a merge as SQL of DuckDB, over the rows `TARGET` of its table and `SOURCE` of its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dormouse.data.transform import quoted
from dormouse.model.edits import SOURCE, TARGET, Sql
from dormouse.model.types import INT, LONG, DataType, Field
from dormouse.reading.sql.conditions import type_name
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.scalars import Relations, Scalar, constant_text, reference
from dormouse.state.context import TableContext
from dormouse.writing.edit_rules import SEEN, Clause, ClauseReader, Kind, read_on
from dormouse.writing.edited_rows import checked_scalar, relation


class Clauses:
    """The condition that joins the rows of a merge's source with those of a table, and its clauses."""

    def __init__(
        self,
        sessions: Sessions,
        what: str,
        context: TableContext,
        source: Mapping[str, DataType],
        on: Sequence[str] | Sql | str,
    ) -> None:
        self._sessions = sessions
        self._what = what
        self._context = context
        self._schema = context.schema
        self._source = source
        self._rows: Relations = (*relation(TARGET, self._schema.fields), (SOURCE, tuple(source.items())))
        joined = read_on(what, self._schema, source, on, quoted)
        self.on = self._checked(f"{what}: on", joined, "matched", repeats=True)
        self.acting: list[Clause[str]] = []
        self._conditions = [self.on]
        self._values_used: list[Scalar] = []
        equated = self.equated().items()
        same = {name for name, column in equated if name == column and self.is_exact(name, column)}
        equal = same.intersection(self._schema.row_key_names)
        self._reader = ClauseReader[str](self, what, context, source, equal)

    # Facts about the clauses.

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the table on which the choice of rows depends."""
        return self._of_target(self._conditions)

    @property
    def read(self) -> frozenset[str]:
        """The columns of the table that conditions or new values use."""
        return self._of_target([*self._conditions, *self._values_used])

    @staticmethod
    def _of_target(used: Iterable[Scalar]) -> frozenset[str]:
        return frozenset(name for one in used for rows, name in one.columns if rows == TARGET)

    @property
    def tells_time(self) -> bool:
        return any(one.tells_time for one in (*self._conditions, *self._values_used))

    def equated(self) -> dict[str, str]:
        """Returns the columns of the table that equal columns of the source in each match, with these."""
        found = {}
        for pair in self.on.equal:
            sides = dict(pair)
            if len(sides) == len(pair):
                found[sides[TARGET]] = sides[SOURCE]
        return found

    def are_new(self) -> bool:
        """Returns whether a row of the source without a match has row keys that the table does not have."""
        equated, keys = self.equated(), self._schema.row_key_names
        if not self.on.is_equality or not set(equated) <= set(keys) or len(equated) < len(self.on.equal):
            return False
        inserts = [one.values for one in self.acting if (one.kind, one.action) == ("not_matched", "insert")]
        return all(
            values[key] == self._of_source(self._schema.field(key), column) and self.is_exact(key, column)
            for values in inserts
            for key, column in equated.items()
        )

    def is_exact(self, name: str, column: str) -> bool:
        """Returns whether a column of the source has the type of a column of the table, or a like one."""
        kinds = {self._schema.field(name).type, self._source[column]}
        return len(kinds) == 1 or kinds <= {INT, LONG}

    # The clauses.

    def add(self, when: object) -> None:
        """Adds the clauses of a list. Raises `InvalidInput` and `InvalidQuery`."""
        self.acting += self._reader.read(when)

    def add_upsert(self, deletes: str | None) -> None:
        """Adds the clauses of an upsert of data that lacks columns; `deletes` is that of `Table.upsert`.

        Data that is older than the table's row, by `newest_by`, changes nothing.
        """
        schema, by = self._schema, self._context.properties.newest_by
        columns = [one for one in schema.fields if one.name in self._source]
        values = {one.name: self.of_source(self._what, one) for one in columns}
        given = {name: text for name, text in values.items() if name not in schema.row_key_names}
        dated = {by: given[by]} if by is not None and by in given else {}
        for name, text in dated.items():
            self.acting.append(Clause("matched", "nothing", f"{text} < {reference(TARGET, name)}"))
        if deletes is not None:
            marked = reference(SOURCE, deletes)
            self.acting.append(Clause("matched", "delete", marked, dated))
            # without `newest_by`, there is nothing that a mark of a new key could delete
            keys = {name: values[name] for name in schema.row_key_names} | dated if dated else {}
            self.acting.append(Clause("not_matched", "delete" if keys else "nothing", marked, keys))
        self.acting.append(Clause("matched", "update" if given else "nothing", values=given))
        self.acting.append(Clause("not_matched", "insert", values=self._reader.inserted(self._what, values)))

    # The checks of `Engine`; values are SQL with the type of their column.

    def condition(self, what: str, given: Sql, kind: Kind) -> str:
        found = self._checked(what, given, kind, repeats=True)
        self._conditions.append(found)
        return found.text

    def expression(self, what: str, column: Field, given: Sql, kind: Kind) -> str:
        found = self._checked(what, given, kind)
        self._values_used.append(found)
        return f"CAST({found.text} AS {type_name(column.type)})"

    def constant(self, column: Field, value: Any) -> str:
        return constant_text(column.type, value)

    def of_source(self, what: str, column: Field) -> str:
        return self._of_source(column, column.name)

    def left_out(self, what: str, column: Field) -> str:
        # a null is an error only in a row that is inserted
        return constant_text(column.type, self._schema.default(column.name))

    def _checked(self, what: str, given: Sql, kind: Kind, *, repeats: bool = False) -> Scalar:
        rows: Relations = tuple(one for one in self._rows if one[0] in SEEN[kind])
        return checked_scalar(self._sessions, what, given, rows, repeats=repeats)

    def _of_source(self, field: Field, column: str) -> str:
        return f"CAST({reference(SOURCE, column)} AS {type_name(field.type)})"
