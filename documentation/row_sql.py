"""The SQL of row tables, from the tables of the parser; each example has its answer, which a test runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

from sqlglot import exp

from documentation import cell, made_of
from dormouse.errors import InvalidQuery
from dormouse.model.types import PARAMETERS_MAX
from dormouse.rows import binding, pages, sql, statements, types
from dormouse.rows.binding import CLAUSES, EXPRESSIONS
from dormouse.rows.columns import TYPES, Column
from dormouse.rows.expressions import Cell, Kind
from dormouse.rows.types import AGGREGATES

COLUMNS = (
    Column("name", "STRING"),
    Column("team", "STRING"),
    Column("pay", "INTEGER"),
    Column("rate", "DOUBLE"),
    Column("since", "DATE"),
    Column("active", "BOOLEAN"),
    Column("more", "JSON"),
)
ROWS: list[dict[str, Any]] = [
    {
        "name": "ann",
        "team": "red",
        "pay": 100,
        "rate": 1.5,
        "since": "2024-01-01",
        "active": True,
        "more": {"a": 1},
    },
    {"name": "bob", "team": "blue", "pay": 80, "rate": None, "since": "2024-06-01", "active": False},
    {"name": "eve", "team": "red", "pay": None, "rate": 0.25, "since": "2025-01-01", "active": None},
]


class Example(NamedTuple):
    """A part of the language: how it is written, what it does, and a query of it with its answer."""

    written: str
    does: str
    query: str
    answer: list[tuple[Any, ...]]


def _where(condition: str) -> str:
    return f"select name from staff where {condition}"


def _of(item: str) -> str:
    return f"select {item} from staff where name = 'ann'"


OF_CLAUSES: Mapping[str, Example] = {
    "expressions": Example(
        "`SELECT *`, `SELECT item [AS name], …`",
        "Returns all columns, or expressions. An item without a name is called as it is written.",
        "select name, pay * 2 as twice from staff",
        [("ann", 200), ("bob", 160), ("eve", None)],
    ),
    "distinct": Example(
        "`SELECT DISTINCT`",
        "Returns equal rows once. ORDER BY then takes selected items.",
        "select distinct team from staff order by team",
        [("blue",), ("red",)],
    ),
    "from_": Example(
        "`FROM table [AS name]`",
        "Names the table that is asked, and no other.",
        "select s.name from staff as s where s.pay = 80",
        [("bob",)],
    ),
    "where": Example(
        "`WHERE condition`",
        "Keeps the rows for which the condition is true, not those for which it is null.",
        "select name from staff where pay > 90",
        [("ann",)],
    ),
    "group": Example(
        "`GROUP BY item, …`",
        "Makes one row of the rows that have the same values. An item is an expression, the name or the number of a "
        "selected item. With `count(*)` these are the facets of a column: how many rows each value has.",
        "select team, count(*) as n from staff group by team order by n desc",
        [("red", 2), ("blue", 1)],
    ),
    "having": Example(
        "`HAVING condition`",
        "Keeps the groups for which the condition is true. It names columns and aggregates, and not selected items.",
        "select team, count(*) from staff group by team having count(*) > 1",
        [("red", 2)],
    ),
    "order": Example(
        "`ORDER BY item [ASC or DESC] [NULLS FIRST or NULLS LAST], …`",
        "Sorts; nulls come last unless it is said otherwise. Without it, rows come by ROW_ID.",
        "select name from staff order by pay desc nulls first",
        [("eve",), ("ann",), ("bob",)],
    ),
    "limit": Example("`LIMIT n`", "Returns so many rows at most, in all pages.", "select name from staff limit 1", [("ann",)]),
    "offset": Example(
        "`OFFSET n`", "Leaves out the first rows.", "select name from staff order by name offset 2", [("eve",)]
    ),
}  # fmt: skip

OF_OPERATORS: Mapping[type, Example] = {
    exp.Column: Example(
        "`name`, `table.name`, `\"name\"`, `ROW_ID`, `ROW_VERSION`, `$1`, `$name`",
        "A column, in any case unless it is quoted, or a parameter.",
        _of("ROW_ID, ROW_VERSION, NAME"),
        [(1, 1, "ann")],
    ),
    exp.Literal: Example(
        "`7`, `2.5`, `1e3`, `'text'`",
        "A number or a text, in which `''` is a quote. A number with a point, or of more than 64 bits, is a DOUBLE. A "
        "text that is compared with a DATE, a number or a BOOLEAN is read as one.",
        _where("since > '2024-03-01'"),
        [("bob",), ("eve",)],
    ),
    exp.Null: Example("`null`", "No value.", _of("null as nothing"), [(None,)]),
    exp.Boolean: Example("`true`, `false`", "A BOOLEAN.", _where("active = false"), [("bob",)]),
    exp.Paren: Example("`(…)`", "Binds first.", _of("(pay + 1) * 2 as n"), [(202,)]),
    exp.Neg: Example("`-a`", "The negative of a number.", _of("-pay as n"), [(-100,)]),
    exp.Add: Example("`a + b`", "The sum of numbers.", _of("pay + 1 as n"), [(101,)]),
    exp.Sub: Example("`a - b`", "The difference of numbers.", _of("pay - rate as x"), [(98.5,)]),
    exp.Mul: Example("`a * b`", "The product of numbers.", _of("pay * 2 as n"), [(200,)]),
    exp.Div: Example(
        "`a / b`", "The quotient, always a DOUBLE; null when b is 0.", _of("pay / 8 as x, pay / 0 as none"), [(12.5, None)]
    ),
    exp.Mod: Example("`a % b`", "The remainder of INTEGERs; null when b is 0.", _of("pay % 7 as n"), [(2,)]),
    exp.EQ: Example("`a = b`", "Equal.", _where("pay = 80"), [("bob",)]),
    exp.NEQ: Example("`a <> b`, `a != b`", "Not equal; null when one of them is null.", _where("pay <> 80"), [("ann",)]),
    exp.LT: Example("`a < b`", "Less.", _where("rate < 1"), [("eve",)]),
    exp.LTE: Example("`a <= b`", "Less or equal.", _where("pay <= 80"), [("bob",)]),
    exp.GT: Example("`a > b`", "Greater.", _where("name > 'ann'"), [("bob",), ("eve",)]),
    exp.GTE: Example("`a >= b`", "Greater or equal.", _where("since >= '2025-01-01'"), [("eve",)]),
    exp.And: Example("`a AND b`", "Both are true.", _where("team = 'red' and pay > 1"), [("ann",)]),
    exp.Or: Example("`a OR b`", "One of them is true.", _where("pay = 80 or rate = 1.5"), [("ann",), ("bob",)]),
    exp.Not: Example("`NOT a`", "It is false.", _where("not active"), [("bob",)]),
    exp.Is: Example("`a IS [NOT] NULL`", "Has no value; the only test that null passes.", _where("pay is null"), [("eve",)]),
    exp.In: Example(
        "`a [NOT] IN (value, …)`", "Equals one of the values.", _where("name in ('ann', 'eve')"), [("ann",), ("eve",)]
    ),
    exp.Between: Example(
        "`a [NOT] BETWEEN b AND c`", "From b to c, both included.", _where("pay between 80 and 90"), [("bob",)]
    ),
    exp.Like: Example(
        "`a [NOT] LIKE 'pattern'`",
        "Matches the pattern as a whole and by case: `%` is any text, `_` any character.",
        _where("name like '_o%'"),
        [("bob",)],
    ),
    exp.Escape: Example(
        "`a LIKE 'pattern' ESCAPE 'c'`",
        "The same, where c before `%`, `_` or itself takes its meaning.",
        _where("name not like '%!%%' escape '!'"),
        [("ann",), ("bob",), ("eve",)],
    ),
    exp.NullSafeNEQ: Example(
        "`a IS DISTINCT FROM b`", "Not equal, where null equals null alone.", _where("pay is distinct from 80"), [("ann",), ("eve",)]
    ),
    exp.NullSafeEQ: Example(
        "`a IS NOT DISTINCT FROM b`", "Equal, where null equals null.", _where("pay is not distinct from null"), [("eve",)]
    ),
    exp.Case: Example(
        "`CASE WHEN condition THEN a … [ELSE b] END`, `CASE c WHEN d THEN a … END`",
        "The value of the first condition that is true, or of the first d that equals c; else b, or null.",
        "select case when pay > 90 then 'high' when pay is null then 'none' else 'low' end from staff",
        [("high",), ("low",), ("none",)],
    ),
    exp.Cast: Example(
        "`CAST(a AS type)`, `a::type`",
        "An INTEGER as DOUBLE, an INTEGER or BOOLEAN as VARCHAR or TEXT, a text in quotes as INT, BIGINT, DOUBLE, BOOLEAN or "
        "DATE. Others differ between databases, and are refused.",
        _of("pay::double, cast(active as text)"),
        [(100.0, "true")],
    ),
    exp.Coalesce: Example(
        "`coalesce(a, b, …)`", "The first value that is not null.", "select coalesce(pay, 0) from staff", [(100,), (80,), (0,)]
    ),
    exp.Nullif: Example("`nullif(a, b)`", "Null where a equals b, else a.", "select nullif(pay, 80) from staff", [(100,), (None,), (None,)]),
    exp.DPipe: Example("`a \\|\\| b`", "The texts after each other.", _of("name || '!'"), [("ann!",)]),
    exp.Length: Example("`length(a)`", "The characters of a text.", _of("length(team)"), [(3,)]),
    exp.Trim: Example("`trim(a)`", "The text without spaces at its ends.", _of("trim('  a ') || '.'"), [("a.",)]),
    exp.Abs: Example("`abs(a)`", "The number without its sign.", _of("abs(pay - 120)"), [(20,)]),
}  # fmt: skip

OF_FUNCTIONS: Mapping[str, Example] = {
    "count": Example(
        "`count(*)`, `count([DISTINCT] a)`",
        "Counts rows, or values that are not null.",
        "select count(*), count(pay), count(distinct team) from staff",
        [(3, 2, 2)],
    ),
    "sum": Example(
        "`sum([DISTINCT] a)`", "The sum; null of no values.", "select sum(pay), sum(rate) from staff", [(180, 1.75)]
    ),
    "avg": Example("`avg([DISTINCT] a)`", "The mean; null of no values.", "select avg(pay) from staff", [(90.0,)]),
    "min": Example("`min(a)`", "The least value.", "select min(name), min(since) from staff", [("ann", 1704067200000)]),
    "max": Example("`max(a)`", "The greatest value.", "select max(pay), max(active) from staff", [(100, True)]),
}  # fmt: skip

REFUSED: Mapping[str, tuple[str, str]] = {
    "casts that round or fail": ("select cast(rate as int) from staff", "a cast of DOUBLE to INT"),
    "joins, other tables": ("select * from staff a join staff b on a.pay = b.pay", "a join"),
    "sub-queries, `EXISTS`, WITH": ("select * from staff where pay in (select pay from staff)", "a sub-query"),
    "UNION, INTERSECT, EXCEPT": ("select name from staff union select team from staff", "'UNION'"),
    "window functions, QUALIFY, FILTER": ("select sum(pay) over () from staff", "a window"),
    "other functions, like `upper`, `round` and `now`, of which databases differ": ("select upper(name) from staff", "the function 'upper'"),
    "ILIKE, SIMILAR TO, ANY": ("select name from staff where name ilike 'A%'", "ILIKE"),
    "comments": ("select name from staff -- all", "a comment"),
}  # fmt: skip
"""Features that people often look for: a query with each, and the name in its refusal."""

_PAGE = """# SQL of row tables

{made}

`rows.query(…)`, `dormouse rows query`, `POST /v1/rows/{{table}}/query` and the `sql` of downloads take one SELECT of one row table. It is
read into a tree, of which only what stands here is let through. It reads the current rows, or those of a version or snapshot, and
answers in [pages](../how-to/edit-rows.md#query). All else of SQL (joins, sub-queries, windows, other functions) is for
[`instance.sql(…)`, `dormouse sql` and `/v1/sql`](../how-to/sql.md), which read the same current rows.

The examples are of this table `staff`:

| {names} |
| {lines} |
{rows}

## Clauses

{clauses}

## Values and operators

Null in an operator gives null, but for `IS NULL`, `IS DISTINCT FROM`, `coalesce` and `CASE`, and `AND` and `OR` where the other side decides.

{operators}

| operator | takes | gives |
| --- | --- | --- |
{operator_kinds}

## Functions

These are aggregates: of all rows, or of each group. An aggregate has no other within, and does not stand in WHERE. With aggregates
or GROUP BY, a selected column must be in GROUP BY.

{functions}

| function | takes | gives |
| --- | --- | --- |
{function_kinds}

## Types

| type of a column | in queries |
| --- | --- |
{column_kinds}

A DATE is compared with a text in ISO 8601 or with milliseconds since 1970, which is how pages show it. JSON can be selected, counted
and tested for null.

## Not understood

A query that has any of these is refused with `InvalidQuery`, which names it:

| | example |
| --- | --- |
{refused}

By name, these are refused, too: {words}.

## Limits

| what | at most |
| --- | --- |
{limits}
"""


def render() -> str:
    """Returns the page. Raises `KeyError` for what the parser takes and no example here shows."""
    shown = [{**dict.fromkeys(column.name for column in COLUMNS), **row} for row in ROWS]
    return _PAGE.format(
        made=made_of("dormouse/rows and documentation/row_sql.py"),
        names=" | ".join(f"{column.name} {column.type}" for column in COLUMNS),
        lines=" | ".join("---" for _ in COLUMNS),
        rows="\n".join(f"| {' | '.join(map(_value, row.values()))} |" for row in shown),
        clauses=_table(OF_CLAUSES[name] for name in sorted(CLAUSES, key=list(OF_CLAUSES).index)),
        operators=_table(OF_OPERATORS[kind] for kind in _operators()),
        functions=_table(OF_FUNCTIONS[name] for name in AGGREGATES.values()),
        operator_kinds=_operator_kinds(),
        function_kinds=_function_kinds(),
        column_kinds="\n".join(f"| {name} | {types.cell(Column('c', name)).kind} |" for name in TYPES),
        refused="\n".join(f"| {what} | `{cell(query)}` |" for what, (query, _) in REFUSED.items()),
        words=", ".join(sorted({cell(word) for word in sql.WORDS.values()}, key=str.casefold)),
        limits="\n".join(f"| {what} | {most:,} |" for what, most in _limits().items()),
    )


def examples() -> list[Example]:
    """Returns all examples, whose answers a test compares with those of a row table."""
    return [*OF_CLAUSES.values(), *OF_OPERATORS.values(), *OF_FUNCTIONS.values()]


def _operators() -> list[type]:
    """Returns what the parser takes and is no aggregate, in the order of the examples here."""
    taken = [kind for kind in EXPRESSIONS if kind not in AGGREGATES]
    return sorted(taken, key=list(OF_OPERATORS).index)


def _limits() -> dict[str, int]:
    return {
        "characters": sql.CHARACTERS_MAX,
        "words": sql.TOKENS_MAX,
        "parentheses within each other": sql.DEPTH_MAX,
        "depth of expressions": statements.DEPTH_MAX,
        "parameters": PARAMETERS_MAX,
        "rows of a page": pages.PAGE_ROWS_MAX,
        "rows of a page by default": pages.PAGE_ROWS,
        "bytes of JSON in a page": pages.JSON_BYTES_MAX,
        "LIMIT and OFFSET": binding.ROWS_MAX,
    }


def _table(listed: Iterable[Example]) -> str:
    lines = [
        f"| {one.written} | {cell(one.does)} | `{cell(one.query)}` | {_answer(one.answer)} |"
        for one in listed
    ]
    return "\n".join(["| | meaning | example | answer |", "| --- | --- | --- | --- |", *lines])


def _answer(rows: list[tuple[Any, ...]]) -> str:
    return "; ".join(", ".join(map(_value, row)) for row in rows)


def _value(value: Any) -> str:
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "NULL")


def _operator_kinds() -> str:
    lines = []
    for operator in types.ARITHMETIC.values():
        for left in KINDS:
            for right in KINDS[KINDS.index(left) :]:
                try:
                    gives = types.arithmetic(operator, Cell(left, 1), Cell(right, 2)).kind
                except InvalidQuery:
                    continue
                taken = left if left == right else f"{left} and {right}"
                lines.append(f"| `{operator}` | {taken} | {gives} |")
    compared = {name: [one for one in KINDS if _are_alike(name, one)] for name in KINDS}
    symbols = ", ".join(f"`{one}`" for one in types.COMPARED.values())
    lines += [
        f"| {symbols}, IN, BETWEEN | {name} with {' or '.join(others)} | BOOLEAN |"
        for name, others in compared.items()
        if others
    ]
    return "\n".join(lines)


def _are_alike(left: Kind, right: Kind) -> bool:
    try:
        types.alike([Cell(left, 1), Cell(right, 2)])
    except InvalidQuery:
        return False
    return True


def _function_kinds() -> str:
    lines = []
    for function in AGGREGATES.values():
        gives: dict[Kind, list[Kind]] = {}
        for kind in KINDS:
            try:
                found = types.aggregate(function, Cell(kind, 1), distinct=False)
            except InvalidQuery:
                continue
            gives.setdefault(found.kind, []).append(kind)
        lines += [f"| `{function}` | {', '.join(taken)} | {kind} |" for kind, taken in gives.items()]
    return "\n".join(lines)
