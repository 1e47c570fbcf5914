"""Random statements that change one table: UPDATE, DELETE, MERGE and INSERT, with DuckDB as their judge.

Each can also be made as a call of a table's methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import duckdb
import pyarrow as pa

import dormouse as dm
from dormouse.errors import DormouseError
from tests.sql_fuzz import Create, Lake, merged
from tests.sql_judges import different
from tests.sql_statements import Scope, Writer
from tests.sql_values import NUMBERS, ORDERED, Columns, literal, quoted
from tests.support.api import Instance
from tests.support.model import DataType, Schema


@dataclass(frozen=True)
class When:
    """A clause of a merge. `kind` is "matched", "not matched" or "not matched by source".

    `values` has the SQL of new values, by column; it is None for a deletion or a clause that does nothing.
    """

    kind: str
    condition: str | None
    values: Mapping[str, str] | None = None
    delete: bool = False

    @property
    def acts(self) -> bool:
        return self.delete or self.values is not None

    @property
    def text(self) -> str:
        condition = "" if self.condition is None else f" and {self.condition}"
        return f"when {self.kind}{condition} then {self._action}"

    @property
    def _action(self) -> str:
        if self.values is None:
            return "delete" if self.delete else "do nothing"
        if self.kind == "not matched":
            names = ", ".join(map(quoted, self.values))
            return f"insert ({names}) values ({', '.join(self.values.values())})"
        return "update set " + ", ".join(f"{quoted(name)} = {value}" for name, value in self.values.items())

    @property
    def clause(self) -> Any:
        """The clause as `merge_into` takes it."""
        values = None if self.values is None else {name: dm.sql(one) for name, one in self.values.items()}
        if self.kind == "matched":
            return dm.WhenMatched(self.condition, update=values, delete=self.delete)
        if self.kind == "not matched":
            return dm.WhenNotMatched(self.condition, insert=values)
        return dm.WhenNotMatchedBySource(self.condition, update=values, delete=self.delete)


@dataclass(frozen=True)
class Edit:
    """A statement that changes `table`.

    `kind` is "update", "delete", "merge" or "insert". `source` is the text of the query that a merge or an
    insert reads; `on` is the condition of a merge.
    """

    kind: str
    table: str
    condition: str = "true"
    values: Mapping[str, str] | None = None
    source: str = ""
    on: str = ""
    clauses: Sequence[When] = ()
    names: Sequence[str] = ()

    @property
    def text(self) -> str:
        table = quoted(self.table)
        if self.kind == "update":
            assert self.values is not None
            sets = ", ".join(f"{quoted(name)} = {value}" for name, value in self.values.items())
            return f"update {table} set {sets} where {self.condition}"
        if self.kind == "delete":
            return f"delete from {table} where {self.condition}"
        if self.kind == "insert":
            return f"insert into {table} ({', '.join(map(quoted, self.names))}) {self.source}"
        clauses = " ".join(one.text for one in self.clauses)
        return f"merge into {table} as t using ({self.source}) as s on {self.on} {clauses}"

    @property
    def matches(self) -> str | None:
        """A query of the rows that more than one pair of a merge changes, or None."""
        if self.kind != "merge":
            return None
        cases = " ".join(
            f"when {one.condition or 'true'} then {str(one.acts).lower()}"
            for one in self.clauses
            if one.kind == "matched"
        )
        acts = f"case {cases} else false end" if cases else "false"
        return f"""
            select t.rowid, count(*) filter (where {acts}) as acting, count(*) as pairs
            from {quoted(self.table)} as t join ({self.source}) as s on {self.on}
            group by all having pairs > 1
        """

    def call(self, instance: Instance) -> Any:
        """Makes the change by a method of the table, or by a statement if there is none."""
        table = instance.table(self.table)
        if self.kind == "update":
            assert self.values is not None
            return table.update(
                dm.sql(self.condition), {name: dm.sql(value) for name, value in self.values.items()}
            )
        if self.kind == "merge":
            clauses = [one.clause for one in self.clauses]
            return table.merge_into(dm.sql(self.source), dm.sql(self.on), clauses)
        return instance.execute(self.text)


class EditWriter(Writer):
    """A writer of random edits of tables; their expressions read no other table."""

    def __init__(self, random: Random, made: Sequence[Create]) -> None:
        self._made = {one.table: one for one in made if "filter" not in one.properties}
        super().__init__(random, {name: _columns(one.schema) for name, one in self._made.items()})

    def edit(self) -> Edit:
        """Returns an edit of any kind."""
        self._begin()
        table = self._pick([*self._made])
        kind = self._pick(("update", "update", "merge", "merge", "delete", "insert"))
        if kind == "update":
            return Edit(kind, table, self._truth_of(table, ""), self._sets(table, ""))
        if kind == "delete":
            return Edit(kind, table, self._truth_of(table, ""))
        if kind == "insert":
            names, source = self._source(table)
            return Edit(kind, table, source=source, names=names)
        return self._merge(table)

    def _merge(self, table: str) -> Edit:
        schema = self._made[table].schema
        names, source = self._source(table)
        both = [name for name in names if name in schema.names]
        keys = schema.key_names
        is_keyed = bool(self._made[table].properties)
        on = keys if is_keyed or self._chance(0.5) else [self._pick(both), *self._some(both)]
        joined = " and ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in dict.fromkeys(on))
        if not is_keyed and self._chance(0.3):
            joined += f" and {self._pair(table, both)}"
        clauses: list[When] = []
        for clause in [self._when(table, names) for _ in range(self._random.randrange(1, 5))]:
            # DuckDB refuses clauses that no row can reach
            if not any(one.kind == clause.kind and one.condition is None for one in clauses):
                clauses.append(clause)
        if not any(one.acts for one in clauses):
            clauses = [When("matched", None, delete=True)]
        return Edit("merge", table, source=source, on=joined, clauses=clauses)

    def _when(self, table: str, names: Sequence[str]) -> When:
        kind = self._pick(("matched", "matched", "not matched", "not matched by source"))
        condition = None if self._chance(0.5) else self._condition_of(kind, table, names)
        if kind == "not matched":
            if self._chance(0.1):
                return When(kind, condition)
            schema = self._made[table].schema
            needed = [one.name for one in schema.fields if not one.nullable or one.name in schema.key_names]
            chosen = dict.fromkeys([*needed, *self._some(schema.names)])
            return When(kind, condition, {name: f"s.{quoted(name)}" for name in chosen})
        if self._chance(0.25):
            return When(kind, condition, delete=True)
        if self._chance(0.1):
            return When(kind, condition)
        if kind == "matched" and self._chance(0.6):
            settable = self._settable(table)
            return When(kind, condition, {name: f"s.{quoted(name)}" for name in self._some(settable)})
        return When(kind, condition, self._sets(table, "t."))

    def _condition_of(self, kind: str, table: str, names: Sequence[str]) -> str:
        if kind == "not matched":
            return self._truth_of(table, "s.", names)
        if kind == "matched" and self._chance(0.5):
            return self._pair(table, names)
        return self._truth_of(table, "t.")

    def _pair(self, table: str, names: Sequence[str]) -> str:
        columns = self._columns(self._tables[table], ORDERED)
        name = self._pick([one for one in columns if one in names])
        sign = self._pick(("=", "<>", "<", ">=", "is distinct from", "is not distinct from"))
        return f"t.{quoted(name)} {sign} s.{quoted(name)}"

    def _source(self, table: str) -> tuple[Sequence[str], str]:
        """Returns columns, and a query of a few rows that have them, with values of the table or others."""
        schema = self._made[table].schema
        names = schema.names
        by = self._chance(0.5)
        kept = ", ".join(
            quoted(name)
            if (self._chance(0.7) and name in schema.key_names) or not by
            else self._changed(table, name)
            for name in names
        )
        listed = ", ".join(map(quoted, names))
        where = self._truth_of(table, "")
        if by:
            inner = f"select {kept} from {quoted(table)} where {where}"
            return names, f"select * from ({inner}) as q ({listed})"
        keys = ", ".join(map(quoted, schema.key_names))
        rest = ", ".join(map(quoted, names))
        one = f"qualify row_number() over (partition by {keys} order by {rest}) = 1"
        return names, f"select {listed} from {quoted(table)} where {where} {one}"

    def _changed(self, table: str, name: str) -> str:
        """Returns another value of a column, with the column's name."""
        kind = self._tables[table][name]
        if kind not in ORDERED or self._chance(0.4):
            return quoted(name)
        return f"{self._fixed(kind)}::{_TYPE_NAMES[str(kind)]}"

    def _fixed(self, kind: DataType) -> str:
        while (text := self._literal(kind)) == "null":
            pass
        return text

    def _settable(self, table: str) -> list[str]:
        made = self._made[table]
        keys = made.schema.key_names if made.properties.get("keep") or "aggregate" in made.properties else ()
        return [name for name in made.schema.names if name not in keys]

    def _sets(self, table: str, alias: str) -> dict[str, str]:
        found = {}
        for name in self._some(self._settable(table)):
            kind = self._tables[table][name]
            if kind not in ORDERED:
                found[name] = f"{alias}{quoted(name)}"
                continue
            if kind in NUMBERS and self._chance(0.2):
                kind = self._pick(NUMBERS)
            found[name] = self._of(table, alias, lambda scope, kind=kind: self._value(scope, kind))
        return found

    def _truth_of(self, table: str, alias: str, names: Sequence[str] | None = None) -> str:
        parts = [self._of(table, alias, lambda scope: self._condition(scope, 0))]
        while self._chance(0.3):
            parts.append(self._of(table, alias, lambda scope: self._condition(scope, 0)))
        return f"({self._pick((' and ', ' or ')).join(f'({one})' for one in parts)})"

    def _of(self, table: str, alias: str, write: Any) -> str:
        """Returns an expression over one table, whose columns have the prefix `alias`."""
        scope: Scope = ({"t_": self._tables[table]},)
        text: str = write(scope)
        return text.replace('t_."', f'{alias}"')

    def _column(self, scope: Scope, kinds: Sequence[DataType]) -> str | None:
        found = [(a, name) for a, columns in scope[-1].items() for name in self._columns(columns, kinds)]
        if not found:
            return None
        alias, name = self._pick(found)
        return f"{alias}.{quoted(name)}"

    def _literal(self, kind: DataType) -> str:
        before = len(self._parameters)
        text = super()._literal(kind)
        return text if len(self._parameters) == before else literal(self._parameters.pop())

    def _some(self, items: Sequence[str]) -> list[str]:
        found = [item for item in items if self._chance(0.4)]
        return found or [self._pick(items)]


_TYPE_NAMES = {
    "int": "int4", "long": "int8", "double": "float8", "string": "text", "bytes": "blob",
    "timestamp": "timestamptz", "boolean": "boolean",
}  # fmt: skip


def _columns(schema: Schema) -> Columns:
    return {one.name: one.type for one in schema.fields}


class EditJudge:
    """A DuckDB that gets the rows of an edit's table, with its constraints on nulls."""

    def __init__(self, made: Sequence[Create]) -> None:
        self._made = {one.table: one for one in made}
        self._opened = duckdb.connect()
        self._opened.execute("set TimeZone = 'UTC'")

    def after(self, rows: pa.Table, edit: Edit) -> pa.Table | str:
        """Returns the rows that the changed table has after an edit, or why the edit must be refused.

        An edit reads no other table.
        """
        opened, schema = self._opened, self._made[edit.table].schema
        opened.register("rows_of_it", rows)
        opened.execute(f"create or replace table {quoted(edit.table)} as from rows_of_it")
        for one in schema.fields:
            if not one.nullable:
                opened.execute(f"alter table {quoted(edit.table)} alter {quoted(one.name)} set not null")
        try:
            if edit.matches and (several := opened.execute(edit.matches).fetchall()):
                acting = max(number for _, number, _ in several)
                if acting > 1:
                    return "ambiguous"
                if acting == 1:
                    return "perhaps ambiguous"
            opened.execute(edit.text)
        except duckdb.Error as error:
            return str(error)
        found = opened.execute(f"from {quoted(edit.table)}").to_arrow_table()
        found = found.cast(rows.schema)
        if self._made[edit.table].properties.get("keep"):
            keys = found.select(schema.key_names)
            if keys.group_by(schema.key_names).aggregate([]).num_rows < keys.num_rows:
                return "perhaps: a key twice"
        aggregate = self._made[edit.table].properties.get("aggregate")
        if aggregate:
            left = merged(schema, aggregate, found.to_pylist())
            found = pa.Table.from_pylist(left, schema=found.schema)
        return found


def check(instance: Instance, lake: Lake, judge: EditJudge, edit: Edit, *, by_statement: bool) -> str:
    """Makes an edit, and compares the table's rows with the judge's; returns what became of the edit."""
    rows = lake.tables()[edit.table]
    expected = judge.after(rows, edit)
    try:
        if by_statement:
            instance.execute(edit.text)
        else:
            edit.call(instance)
    except DormouseError as error:
        assert isinstance(expected, str), f"{edit.text}\nrefused: {error}\nDuckDB: {expected}"
        assert "\n" not in str(error), error
        expected, outcome = rows, "refused"
    else:
        outcome = "made"
        if isinstance(expected, str):
            # DuckDB may cast values of clauses that no row reaches
            allowed = ("perhaps", "Conversion Error")
            assert expected.startswith(allowed), f"{edit.text}\nmade, but: {expected}"
            found = instance.table(edit.table).query().read_all()
            lake.has(edit.table, found.to_pylist())
            return "perhaps"
    found = instance.table(edit.table).query().read_all().cast(expected.schema)
    assert not (wrong := different(found, expected, ordered=False)), f"{edit.text}\nDuckDB: {wrong}"
    lake.has(edit.table, expected.to_pylist())
    return outcome
