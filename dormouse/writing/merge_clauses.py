"""The clauses of a merge, checked against the columns of its table and its source, as SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dormouse.data.transform import quoted
from dormouse.errors import InvalidInput, InvalidQuery
from dormouse.model.edits import (
    Columns,
    Condition,
    Sql,
    When,
    WhenMatched,
    WhenNotMatched,
    WhenNotMatchedBySource,
)
from dormouse.model.types import INT, LONG, DataType, Field
from dormouse.reading.sql.conditions import type_name
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.scalars import (
    SOURCE,
    TARGET,
    Relations,
    Scalar,
    constant_text,
    reference,
)
from dormouse.reading.where import unknown
from dormouse.state.context import TableContext
from dormouse.writing.edited_rows import (
    check_not_key,
    checked_columns,
    checked_scalar,
    relation,
    value_text,
)

Kind = Literal["matched", "not_matched", "by_source"]
Action = Literal["update", "insert", "delete", "nothing"]


@dataclass(frozen=True, slots=True)
class Acting:
    """A clause as SQL over columns of the rows `TARGET` and `SOURCE`.

    `values` has the new value of each column that the clause sets, with the column's type.
    """

    kind: Kind
    action: Action
    condition: str = "true"
    values: Mapping[str, str] = field(default_factory=dict)


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
        self._target_only = relation(TARGET, self._schema.fields)
        self._source_only: Relations = ((SOURCE, tuple(source.items())),)
        self._both = self._target_only + self._source_only
        self.on = self._joining(on)
        self.acting: list[Acting] = []
        self._conditions = [self.on]
        self._values_used: list[Scalar] = []

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

    def having(self, kind: Kind) -> list[tuple[int, Acting]]:
        """Returns the clauses of a kind, each with its number."""
        return [(number, one) for number, one in enumerate(self.acting) if one.kind == kind]

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
        inserts = [one.values for _, one in self.having("not_matched") if one.action == "insert"]
        return all(
            values[key] == self._of_source(self._schema.field(key), column) and self.is_exact(key, column)
            for values in inserts
            for key, column in equated.items()
        )

    def is_exact(self, name: str, column: str) -> bool:
        """Returns whether a column of the source has the type of a column of the table, or a like one."""
        kinds = {self._schema.field(name).type, self._source[column]}
        return len(kinds) == 1 or kinds <= {INT, LONG}

    def _joining(self, on: Sequence[str] | Sql | str) -> Scalar:
        if isinstance(on, str):
            on = [on] if on in self._schema else Sql(on)
        if isinstance(on, Sequence):
            if not on:
                raise InvalidInput(f"{self._what}: on is empty; name the columns that match")
            for one in checked_columns(f"{self._what}: on", self._schema, on):
                if one.name not in self._source:
                    raise unknown("column", one.name, self._source, f"{self._what}: on: the source has no")
            names = map(quoted, on)
            on = Sql(" AND ".join(f"{TARGET}.{name} = {SOURCE}.{name}" for name in names))
        return checked_scalar(self._sessions, f"{self._what}: on", on, self._both, repeats=True)

    # The clauses, as users give them.

    def add(self, when: object) -> None:
        """Adds the clauses of a list. Raises `InvalidInput` and `InvalidQuery`."""
        clauses: list[object] = [when] if isinstance(when, When) else []
        if isinstance(when, Sequence) and not isinstance(when, str):
            clauses = list(when)
        if not clauses:
            raise InvalidInput(
                f"{self._what}: give clauses: dm.WhenMatched, dm.WhenNotMatched, dm.WhenNotMatchedBySource"
            )
        for number, clause in enumerate(clauses, 1):
            self.acting.append(self._acting(f"{self._what}: clause {number}", clause))
        if all(one.action == "nothing" for one in self.acting):
            raise InvalidInput(f"{self._what}: no clause updates, deletes or inserts")

    def add_upsert(self, deletes: str | None) -> None:
        """Adds the clauses of an upsert of data that lacks columns; `deletes` is that of `Table.upsert`.

        Data that is older than the table's row, by `newest_by`, changes nothing.
        """
        schema, by = self._schema, self._context.properties.newest_by
        columns = [one for one in schema.fields if one.name in self._source]
        values = {one.name: self._of_source(one, one.name) for one in columns}
        given = {name: text for name, text in values.items() if name not in schema.row_key_names}
        dated = {by: given[by]} if by is not None and by in given else {}
        for name, text in dated.items():
            self.acting.append(Acting("matched", "nothing", f"{text} < {reference(TARGET, name)}"))
        if deletes is not None:
            marked = reference(SOURCE, deletes)
            self.acting.append(Acting("matched", "delete", marked, dated))
            # without `newest_by`, there is nothing that a mark of a new key could delete
            keys = {name: values[name] for name in schema.row_key_names} | dated if dated else {}
            self.acting.append(Acting("not_matched", "delete" if keys else "nothing", marked, keys))
        self.acting.append(Acting("matched", "update" if given else "nothing", values=given))
        self.acting.append(Acting("not_matched", "insert", values=self._inserted(self._what, list(values))))

    def _acting(self, what: str, clause: object) -> Acting:
        match clause:
            case WhenMatched(condition, update, delete):
                where = self._where(what, condition, self._both)
                return self._changing(what, "matched", where, update, delete)
            case WhenNotMatchedBySource(condition, update, delete):
                where = self._where(what, condition, self._target_only)
                if update is not None and not isinstance(update, Mapping):
                    raise InvalidInput(f"{what}: without a source, give new values as a dict by column")
                return self._changing(what, "by_source", where, update, delete)
            case WhenNotMatched(condition, insert):
                where = self._where(what, condition, self._source_only)
                if insert is None:
                    return Acting("not_matched", "nothing", where)
                return Acting("not_matched", "insert", where, self._inserted(what, insert))
        raise InvalidInput(
            f"{what}: {clause!r} is no clause; use dm.WhenMatched, dm.WhenNotMatched or "
            "dm.WhenNotMatchedBySource"
        )

    def _where(self, what: str, condition: Condition, relations: Relations) -> str:
        if condition is None:
            return "true"
        given = Sql(condition) if isinstance(condition, str) else condition
        found = checked_scalar(self._sessions, f"{what}: condition", given, relations, repeats=True)
        self._conditions.append(found)
        return found.text

    def _changing(self, what: str, kind: Kind, where: str, update: Columns, delete: bool) -> Acting:
        if update is not None and delete:
            raise InvalidInput(f"{what}: a clause updates or deletes, not both")
        if update is None:
            return Acting(kind, "delete" if delete else "nothing", where)
        relations = self._both if kind == "matched" else self._target_only
        values = self._values(what, update, relations)
        if update == "*":
            # a key that is equal in both stays
            equated, keys = self.equated(), self._schema.row_key_names
            same = {key for key in keys if equated.get(key) == key and self.is_exact(key, key)}
            values = {name: text for name, text in values.items() if name not in same}
        for name in values:
            check_not_key(what, self._context, name)
        return Acting(kind, "update", where, values)

    def _inserted(self, what: str, insert: Columns) -> dict[str, str]:
        values = self._values(what, insert, self._source_only)
        for one in self._schema.fields:
            if one.name not in values:
                values[one.name] = constant_text(one.type, self._schema.default(one.name))
        return values

    def _values(self, what: str, columns: Columns, relations: Relations) -> dict[str, str]:
        if isinstance(columns, Mapping):
            found = {}
            for one in checked_columns(what, self._schema, columns):
                found[one.name], used = value_text(self._sessions, what, one, columns[one.name], relations)
                self._values_used += [] if used is None else [used]
            listed: list[Field] = []
        elif columns == "*":
            found, listed = {}, [one for one in self._schema.fields if one.name in self._source]
        elif isinstance(columns, Sequence) and not isinstance(columns, str):
            found, listed = {}, checked_columns(what, self._schema, columns)
        else:
            raise InvalidInput(f'{what}: {columns!r} is neither "*", nor columns, nor values by column')
        for one in listed:
            if one.name not in self._source:
                raise unknown("column", one.name, self._source, f"{what}: the source has no")
            found[one.name] = self._of_source(one, one.name)
        if not found:
            raise InvalidQuery(f"{what}: it sets no column; name some")
        return found

    def _of_source(self, field: Field, column: str) -> str:
        return f"CAST({reference(SOURCE, column)} AS {type_name(field.type)})"
