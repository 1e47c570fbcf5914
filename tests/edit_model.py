"""A plain model of edits: rows as dicts, and random operations that change a table and a list of rows alike.

The meaning of values is DuckDB's: NaN equals itself and is the largest number, -0.0 equals 0.0, texts compare
by their bytes, and a comparison with null is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from math import inf, nan
from random import Random
from typing import Any

import pyarrow as pa

import dormouse as dm
from dormouse.errors import AmbiguousRows, InvalidInput
from tests.support.api import Instance, Table

Row = Mapping[str, Any]
REFUSED = InvalidInput, AmbiguousRows
KEYED, EVERY = "keyed", "every"
"""The keys of the two tables in a model: one keeps the newest row of each key, one keeps every row."""
VALUES = [
    dm.Field("x", dm.DOUBLE, nullable=True),
    dm.Field("n", dm.LONG, nullable=True),
    dm.Field("s", dm.STRING, nullable=True),
    dm.Field("d", dm.DECIMAL(18, 3), nullable=True),
    dm.Field("at", dm.TIMESTAMP, nullable=True),
]
SCHEMAS = {
    KEYED: dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("t", dm.LONG), *VALUES]),
    EVERY: dm.Schema([dm.Field("k", dm.LONG)], [dm.Field("t", dm.LONG)], VALUES),
}
COLUMNS = SCHEMAS[EVERY].names
ADDED, ADDED_DEFAULT = "c", 7
"""A column that a model may add to a table, and the value that earlier rows have in it."""
ARROW = pa.schema(
    [
        ("k", pa.int64()),
        ("t", pa.int64()),
        ("x", pa.float64()),
        ("n", pa.int64()),
        ("s", pa.string()),
        ("d", pa.decimal128(18, 3)),
        ("at", pa.timestamp("us", "UTC")),
        (ADDED, pa.int64()),
    ]
)
EARLY, LATE = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
LEAP = datetime(2024, 2, 29, 12, 0, 0, 1, tzinfo=UTC)
POOLS: Mapping[str, Sequence[Any]] = {
    "k": range(12),
    "t": range(3),
    "x": [None, nan, -0.0, 0.0, 1.0, -1.5, 2.5, inf, -inf, 1e300, 5e-324],
    "n": [None, -(2**62), -3, 0, 1, 2, 2**53 + 1, 2**62],
    "s": [None, "", "a", "B", "é", "e\u0301", "\u202e😀", "a'b", "\n", "a" * 40],
    "d": [None, Decimal("-1.500"), Decimal("0.000"), Decimal("2.500"), Decimal("999999999999.999")],
    "at": [None, EARLY, LEAP, LATE],
    ADDED: [None, 7, 8],
}


# Values, as DuckDB compares them.


def compared(a: Any, b: Any) -> int | None:
    """Returns -1, 0 or 1 for the order of two values; None if one of them is null."""
    if a is None or b is None:
        return None
    one, other = _place(a), _place(b)
    return (one > other) - (one < other)


def _place(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    return (value != value, 0 if value != value else value) if isinstance(value, int | float) else value


def equal(a: Any, b: Any) -> bool | None:
    order = compared(a, b)
    return None if order is None else order == 0


def exact(row: Row, columns: Sequence[str]) -> tuple[Any, ...]:
    """Returns a form of a row that is equal only for the same values: NaN equals NaN, and -0.0 is not 0.0."""
    return tuple(_exact(row[name]) for name in columns)


def _exact(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return f"{value:.3f}" if isinstance(value, Decimal) else repr(value)


def in_order(rows: Sequence[Row], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return sorted(exact(row, columns) for row in rows)


# Expressions, each as SQL and as a function.


@dataclass(frozen=True)
class Expression:
    """SQL over the columns of `{t}`, the table, and `{s}`, the source, and a function of a row of each."""

    text: str
    of: Callable[[Row, Row], Any] = field(repr=False)

    def sql(self, t: str = "t.", s: str = "s.") -> dm.Sql:
        return dm.sql(self.text.format(t=t, s=s))


def _null(work: Callable[..., Any], *values: Any) -> Any:
    return None if any(value is None for value in values) else work(*values)


EXPRESSIONS: Mapping[str, Sequence[Expression]] = {
    "k": [Expression("({t}k + 3) % 13", lambda t, s: (t["k"] + 3) % 13)],
    "t": [Expression("{t}t + 1", lambda t, s: t["t"] + 1), Expression("{t}k % 2", lambda t, s: t["k"] % 2)],
    "x": [
        # none copies a zero: where x = 0, DuckDB may take 0.0 for -0.0
        Expression("{t}x + 1", lambda t, s: _null(lambda x: x + 1, t["x"])),
        Expression("-({t}x + 3)", lambda t, s: _null(lambda x: -(x + 3), t["x"])),
        Expression("coalesce({t}x + 2, 0.5)", lambda t, s: 0.5 if t["x"] is None else t["x"] + 2),
        Expression(
            "case when {t}n > 1 then {t}x - 7 else '-0.0'::double end",
            lambda t, s: _null(lambda x: x - 7, t["x"]) if compared(t["n"], 1) == 1 else -0.0,
        ),
    ],
    "n": [
        Expression("{t}n + 1", lambda t, s: _null(lambda n: n + 1, t["n"])),
        Expression("{t}k * 10 - coalesce({t}n, 0)", lambda t, s: t["k"] * 10 - (t["n"] or 0)),
        Expression("{t}k", lambda t, s: t["k"]),
    ],
    "s": [
        Expression("coalesce({t}s, '') || 'é'", lambda t, s: (t["s"] or "") + "é"),
        Expression("nullif({t}s, 'a')", lambda t, s: None if t["s"] == "a" else t["s"]),
    ],
    "d": [
        Expression("{t}d + 1", lambda t, s: _null(lambda d: d + 1, t["d"])),
        Expression("-{t}d", lambda t, s: _null(lambda d: -d, t["d"])),
    ],
    "at": [
        Expression(
            "greatest({t}\"at\", '2024-02-29 12:00:00.000001+00'::timestamptz)",
            lambda t, s: max(t["at"] or LEAP, LEAP),
        )
    ],
    ADDED: [Expression("{t}k + 1", lambda t, s: t["k"] + 1)],
}
CONDITIONS = [
    Expression("{t}x > 1", lambda t, s: compared(t["x"], 1.0) == 1),
    Expression("not ({t}x <= 1)", lambda t, s: compared(t["x"], 1.0) == 1),
    Expression("{t}x = 0", lambda t, s: equal(t["x"], 0.0)),
    Expression("{t}x = 'nan'::double", lambda t, s: equal(t["x"], nan)),
    Expression("{t}n is null", lambda t, s: t["n"] is None),
    Expression("{t}n % 2 = 0", lambda t, s: _null(lambda n: n % 2 == 0, t["n"])),
    Expression("{t}n in (1, 2, null)", lambda t, s: t["n"] in (1, 2)),
    Expression("{t}s >= 'a'", lambda t, s: compared(t["s"], "a") in (0, 1)),
    Expression("{t}s = '' or {t}k < 3", lambda t, s: t["s"] == "" or t["k"] < 3),
    Expression("{t}d < 2.5", lambda t, s: compared(t["d"], Decimal("2.5")) == -1),
    Expression("{t}\"at\" >= '2024-02-29'::timestamptz", lambda t, s: compared(t["at"], LEAP) in (0, 1)),
    Expression("{t}k between 3 and 6", lambda t, s: 3 <= t["k"] <= 6),
    Expression("{t}t = 1 and {t}k < 8", lambda t, s: t["t"] == 1 and t["k"] < 8),
]
PAIRS = [
    Expression("{t}n < {s}n", lambda t, s: compared(t["n"], s["n"]) == -1),
    Expression("{s}x > {t}x", lambda t, s: compared(s["x"], t["x"]) == 1),
    Expression("{t}s is distinct from {s}s", lambda t, s: t["s"] != s["s"]),
    Expression("{s}k % 2 = 0", lambda t, s: s["k"] % 2 == 0),
]
JOINS = [
    Expression("{t}k = {s}k", lambda t, s: t["k"] == s["k"]),
    Expression("{t}x = {s}x", lambda t, s: equal(t["x"], s["x"])),
    Expression("{t}k = {s}k and {t}n = {s}n", lambda t, s: t["k"] == s["k"] and equal(t["n"], s["n"])),
    Expression("{s}t = {t}t and {s}s = {t}s", lambda t, s: t["t"] == s["t"] and equal(t["s"], s["s"])),
]
"""Conditions of a merge. Only the first finds all rows with a key."""


# Operations.


@dataclass(frozen=True)
class Done:
    """The rows after an operation, and the numbers of rows that it inserted, updated and deleted.

    `may_be_refused` is true if the operation may be refused instead, and `is_refused` if it must be.
    """

    rows: list[Row]
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    may_be_refused: bool = False
    is_refused: bool = False


class Operation:
    """A change of one table, `name`: `on` changes the model's rows, and `to` changes the table.

    `reads` is true if the change depends on the rows that the table has.
    """

    name: str
    reads = True

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        raise NotImplementedError

    def to(self, table: Any, **how: Any) -> Any:
        """Applies the change by `table`, which is a table, or binds the table's name in a transaction."""
        raise NotImplementedError


@dataclass(frozen=True)
class Load(Operation):
    """An ingest into the table that keeps every row, or an upsert into the keyed one."""

    name: str
    rows: Sequence[Row]
    reads = False

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        added = [filled(row, columns) for row in self.rows]
        if self.name == EVERY:
            return Done([*rows, *added], inserted=len(added))
        return Done(
            [*{row["k"]: row for row in [*rows, *added]}.values()], inserted=len({row["k"] for row in added})
        )

    def to(self, table: Any, **how: Any) -> Any:
        load = table.ingest if self.name == EVERY else table.upsert
        return load(data_of(self.rows), **_ingest_id(how))


@dataclass(frozen=True)
class PartialUpsert(Operation):
    """An upsert of some columns, of distinct keys; the columns include those that may not be null."""

    rows: Sequence[Row]
    name = KEYED

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        known = {row["k"]: row for row in rows}
        for row in self.rows:
            known[row["k"]] = known.get(row["k"], filled({}, columns)) | dict(row)
        return Done([*known.values()], inserted=len(self.rows))

    def to(self, table: Any, **how: Any) -> Any:
        return table.upsert(data_of(self.rows), **_ingest_id(how))


@dataclass(frozen=True)
class Where:
    """A condition on a table's rows as it is given, and as a function of a row."""

    given: Any
    of: Callable[[Row], Any] = field(repr=False)


@dataclass(frozen=True)
class Delete(Operation):
    name: str
    where: Where

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        left = [row for row in rows if self.where.of(row) is not True]
        return Done(left, deleted=len(rows) - len(left))

    def to(self, table: Any, **how: Any) -> Any:
        return table.delete(
            self.where.given, **{key: value for key, value in how.items() if key != "edit_id"}
        )


@dataclass(frozen=True)
class Update(Operation):
    name: str
    where: Where
    values: Mapping[str, Any]

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        hit = [self.where.of(row) is True for row in rows]
        changed = [
            changed_row(row, {}, self.values) if is_hit else row
            for row, is_hit in zip(rows, hit, strict=True)
        ]
        return Done(changed, updated=sum(hit))

    def to(self, table: Any, **how: Any) -> Any:
        return table.update(self.where.given, given(self.values, "", "s."), **how)


@dataclass(frozen=True)
class Replace(Operation):
    name: str
    where: Where
    rows: Sequence[Row]

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        left = Delete(self.name, self.where).on(rows, columns)
        done = Load(self.name, self.rows).on(left.rows, columns)
        return replace(done, deleted=left.deleted)

    def to(self, table: Any, **how: Any) -> Any:
        return table.replace(self.where.given, data_of(self.rows), **_ingest_id(how))


@dataclass(frozen=True)
class Clause:
    """A clause of a merge. `kind` is "matched", "not matched" or "not matched by source"."""

    kind: str
    condition: Expression | None = None
    columns: str | Sequence[str] | Mapping[str, Any] | None = None
    delete: bool = False

    def is_of(self, t: Row, s: Row) -> bool:
        return self.condition is None or self.condition.of(t, s) is True

    @property
    def does_nothing(self) -> bool:
        return self.columns is None and not self.delete

    def changed(self, row: Row, s: Row) -> Row | None:
        """Returns the row that the clause makes of a row of the table; None if it deletes the row."""
        if self.delete:
            return None
        values = self.columns if isinstance(self.columns, Mapping) else {}
        return {**row, **_from_source(self.columns, s, row)} | changed_row(row, s, values, only=True)

    def inserted(self, s: Row, columns: Sequence[str]) -> Row:
        made = filled({}, columns)
        values = self.columns if isinstance(self.columns, Mapping) else {}
        return {**made, **_from_source(self.columns, s, made), **changed_row(s, s, values, only=True)}

    @property
    def when(self) -> Any:
        condition = None if self.condition is None else self.condition.sql()
        is_insert = self.kind == "not matched"
        columns = self.columns
        if isinstance(columns, Mapping):
            columns = given(columns, "s." if is_insert else "t.", "s.")
        if is_insert:
            return dm.WhenNotMatched(condition, insert=columns)
        if self.kind == "matched":
            return dm.WhenMatched(condition, update=columns, delete=self.delete)
        return dm.WhenNotMatchedBySource(condition, update=columns, delete=self.delete)  # type: ignore[arg-type]


def _from_source(columns: Any, s: Row, row: Row) -> Row:
    if columns == "*":
        return {name: s[name] for name in row if name in s}
    return {} if columns is None or isinstance(columns, Mapping) else {name: s[name] for name in columns}


@dataclass(frozen=True)
class Merge(Operation):
    """A merge. `on` is a list of columns, or an expression; `source` replaces the rows by a query of them."""

    name: str
    rows: Sequence[Row]
    join: Sequence[str] | Expression
    clauses: Sequence[Clause]

    def on(self, rows: list[Row], columns: Sequence[str]) -> Done:
        after: list[Row] = []
        matched, counts = set[int](), {"inserted": 0, "updated": 0, "deleted": 0}
        doubtful = refused = False
        for row in rows:
            pairs = [number for number, s in enumerate(self.rows) if self._joins(row, s)]
            matched.update(pairs)
            kind = "matched" if pairs else "not matched by source"
            sources = [self.rows[number] for number in pairs] or [{}]
            chosen = [(self._clause(kind, row, s), s) for s in sources]
            acting = [(clause, s) for clause, s in chosen if clause is not None and not clause.does_nothing]
            refused = refused or len(acting) > 1
            # a row with two matches may be refused even if only one of them changes it
            doubtful = doubtful or (len(acting) == 1 and len(pairs) > 1)
            made = acting[0][0].changed(row, acting[0][1]) if acting else row
            if acting:
                counts["deleted" if made is None else "updated"] += 1
            if made is not None:
                after.append(made)
        inserted: list[Row] = []
        for number, s in enumerate(self.rows):
            clause = None if number in matched else self._clause("not matched", s, s)
            if clause is not None and not clause.does_nothing:
                inserted.append(clause.inserted(s, columns))
        if self.name == KEYED:
            refused = refused or len({row["k"] for row in inserted}) < len(inserted)
        counts["inserted"] = len(inserted)
        refused = refused or all(clause.does_nothing for clause in self.clauses)
        return Done([*after, *inserted], **counts, may_be_refused=doubtful, is_refused=refused)

    def _joins(self, t: Row, s: Row) -> bool:
        if isinstance(self.join, Expression):
            return self.join.of(t, s) is True
        return all(equal(t[name], s[name]) is True for name in self.join)

    def _clause(self, kind: str, t: Row, s: Row) -> Clause | None:
        return next((one for one in self.clauses if one.kind == kind and one.is_of(t, s)), None)

    def to(self, table: Any, **how: Any) -> Any:
        return self.by(table, data_of(self.rows), **how)

    def by(self, table: Any, source: Any, **how: Any) -> Any:
        on = self.join.sql() if isinstance(self.join, Expression) else [*self.join]
        return table.merge_into(source, on, [clause.when for clause in self.clauses], **how)


def filled(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    """Returns a row with all columns: those that it lacks are null, or have the default of the added one."""
    return {name: ADDED_DEFAULT if name == ADDED else None for name in columns} | dict(row)


def changed_row(row: Row, s: Row, values: Mapping[str, Any], *, only: bool = False) -> dict[str, Any]:
    new = {k: v.of(row, s) if isinstance(v, Expression) else v for k, v in values.items()}
    return new if only else {**row, **new}


def given(values: Mapping[str, Any], t: str, s: str) -> dict[str, Any]:
    """Returns values as an edit takes them."""
    return {k: v.sql(t, s) if isinstance(v, Expression) else v for k, v in values.items()}


def data_of(rows: Sequence[Row]) -> pa.Table:
    names = [field.name for field in ARROW if rows and field.name in rows[0]] or COLUMNS
    return pa.Table.from_pylist([*rows], schema=pa.schema([ARROW.field(name) for name in names]))


def _ingest_id(how: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an edit as those of a load."""
    return {"ingest_id" if key == "edit_id" else key: value for key, value in how.items()}


class Bound:
    """A transaction's methods for one table, with the names that the methods of a table have."""

    def __init__(self, transaction: Any, name: str) -> None:
        self._transaction, self._name = transaction, name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._transaction, method)
        return lambda *args, **how: call(self._name, *args, **how)


# Random operations.


class Dice:
    """A source of random rows, conditions and operations over a table's columns."""

    def __init__(self, random: Random, keys: Sequence[int] = POOLS["k"]) -> None:
        self._random, self._keys = random, keys

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self._random.randrange(len(items))]

    def chance(self, share: float) -> bool:
        return self._random.randrange(100) < share * 100

    def some(self, items: Sequence[Any], least: int = 1) -> list[Any]:
        """Returns some of the items, in their order."""
        kept = [item for item in items if self.chance(0.4)]
        return kept if len(kept) >= least else [*items[:least]]

    def value(self, name: str) -> Any:
        return self.pick(self._keys if name == "k" else POOLS[name])

    def row(self, columns: Sequence[str]) -> Row:
        return {name: self.value(name) for name in columns}

    def rows(self, columns: Sequence[str], most: int = 5) -> list[Row]:
        return [self.row(columns) for _ in range(1 + self._random.randrange(most))]

    def distinct(self, columns: Sequence[str], *names: str) -> list[Row]:
        """Returns rows whose values of some columns are all different, and not null."""
        rows = {exact(row, names): row for row in self.rows(columns, 6)}
        return [row for row in rows.values() if all(row[name] is not None for name in names)] or [
            {**self.row(columns), **{name: self.value("k") for name in names if name in "kt"}}
        ]

    def where(self, *, is_mapping: bool = False) -> Where:
        kind = self._random.randrange(8)
        k, n, x = self.value("k"), self.value("n"), self.value("x")
        if kind == 0:
            return Where({"k": k}, lambda row: row["k"] == k)
        if kind == 1:
            return Where({"k": dm.Range(k, k + 3)}, lambda row: k <= row["k"] < k + 3)
        if kind == 2:
            return Where({"t": 1, "n": [n, None]}, lambda row: row["t"] == 1 and row["n"] in (n, None))
        if kind == 3:
            return Where({"x": x}, lambda row: row["x"] is None if x is None else equal(row["x"], x))
        if kind == 4 and self.chance(0.2):
            return Where(dm.ALL, lambda row: True)
        if is_mapping or kind == 4:
            return Where({"k": [k, k + 4]}, lambda row: row["k"] in (k, k + 4))
        condition = self.pick(CONDITIONS)
        return Where(condition.sql(""), lambda row: condition.of(row, {}))

    def values(self, names: Sequence[str], *, constants: bool = True) -> dict[str, Any]:
        """Returns new values of some columns: constants and expressions of the row."""
        return {
            name: self.value(name) if constants and self.chance(0.4) else self.pick(EXPRESSIONS[name])
            for name in self.some(names)
        }

    def settable(self, name: str, columns: Sequence[str]) -> list[str]:
        return [one for one in columns if name == EVERY or one != "k"]

    def operation(self, name: str, columns: Sequence[str]) -> Operation:
        kind = self._random.randrange(10)
        if kind < 2:
            return self.load(name, columns)
        if kind == 2 and name == KEYED:
            return self.partial(columns)
        return self.reading(name, columns)

    def load(self, name: str, columns: Sequence[str]) -> Load:
        names = [one for one in columns if one != ADDED or self.chance(0.5)]
        return Load(name, self.rows(names))

    def partial(self, columns: Sequence[str]) -> PartialUpsert:
        names = ["k", "t", *self.some(columns[2:])]
        return PartialUpsert(self.distinct(names, "k"))

    def reading(self, name: str, columns: Sequence[str]) -> Operation:
        """Returns an operation that depends on the rows of the table."""
        kind = self._random.randrange(8)
        if kind == 0:
            return Delete(name, self.where(is_mapping=True))
        if kind == 1:
            return Replace(name, self.where(is_mapping=True), self.load(name, columns).rows)
        if kind < 5:
            return Update(name, self.where(), self.values(self.settable(name, columns)))
        return self.merge(name, columns)

    def merge(self, name: str, columns: Sequence[str]) -> Merge:
        join: Sequence[str] | Expression = self.pick([["k"], JOINS[0]])
        if name == EVERY and self.chance(0.5):
            join = self.pick([["k", "t"], ["k", "t", "x"], *JOINS[1:]])
        source = [one for one in columns if one in COLUMNS or self.chance(0.5)]
        rows = self.rows(source) if self.chance(0.15) else self.distinct(source, "k")
        names = self.settable(name, columns)
        clauses: list[Clause] = []
        for clause in [self._clause(names, source) for _ in range(1 + self._random.randrange(4))]:
            if not any(one.kind == clause.kind and one.condition is None for one in clauses):
                clauses.append(clause)
        return Merge(name, rows, join, clauses)

    def _clause(self, names: Sequence[str], source: Sequence[str]) -> Clause:
        kind = self.pick(["matched", "matched", "not matched", "not matched by source"])
        may = [None, None, self.pick(CONDITIONS), self.pick(PAIRS) if kind == "matched" else None]
        condition = self.pick(may)
        if kind == "not matched":
            condition = self.pick([None, None, PAIRS[-1]])
            values = {"k": _copied("k"), "t": _copied("t"), **self.values(names[2:])}
            columns = self.pick(["*", "*", ["k", "t", *self.some(source[2:])], values, None])
            return Clause(kind, condition, columns)
        if self.chance(0.25):
            return Clause(kind, condition, delete=True)
        if self.chance(0.15):
            return Clause(kind, condition)
        if kind == "matched":
            of_source = [one for one in names if one in source]
            mixed = {**self.values(names), "n": _copied("n")}
            # `*` would set the keys of a keyed table too, to the values that they have
            return Clause(kind, condition, self.pick(["*", self.some(of_source), mixed]))
        return Clause(kind, condition, self.values(names))


@cache
def _copied(name: str) -> Expression:
    return Expression(f'{{s}}"{name}"', lambda t, s: s[name])


# Tables.

SMALL = {
    "compaction_strategy": "basic", "compaction_batch_files": 2, "split_threshold_rows": 8,
    "split_min_rows": 2, "merge_threshold_rows": 6, "gc_delay_seconds": 0, "deletions_max": 4,
}  # fmt: skip
"""Properties of tables that split, merge and compact after a few rows."""


def create(instance: Instance, kind: str, name: str, layout: str, **properties: Any) -> Table:
    """Creates one of the two tables of a model."""
    keep = {"keep": "newest_row"} if kind == KEYED else {}
    made = dm.TableProperties(**{**SMALL, **keep, **properties})
    return instance.create_table(name, SCHEMAS[kind], layout=layout, properties=made)
