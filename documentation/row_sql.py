"""The page about the SQL of row tables, made from the lists of the parser. A test runs its examples."""

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
    """A part of the language, with an example.

    - `written`: its syntax
    - `does`: its meaning
    - `query`, `answer`: a query of the table `staff`, and the rows that it returns
    """

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
        "Returns all columns, or the given expressions. An expression without a name is named by its own SQL.",
        "select name, pay * 2 as twice from staff",
        [("ann", 200), ("bob", 160), ("eve", None)],
    ),
    "distinct": Example(
        "`SELECT DISTINCT`",
        "Removes duplicate rows. ORDER BY then accepts only selected items.",
        "select distinct team from staff order by team",
        [("blue",), ("red",)],
    ),
    "from_": Example(
        "`FROM table [AS name]`",
        "Names the table. It must be the row table that the query is sent to.",
        "select s.name from staff as s where s.pay = 80",
        [("bob",)],
    ),
    "where": Example(
        "`WHERE condition`",
        "Keeps the rows for which the condition is true, and drops those for which it is false or null.",
        "select name from staff where pay > 90",
        [("ann",)],
    ),
    "group": Example(
        "`GROUP BY item, …`",
        "Returns one row for each group of rows with equal values. An item is an expression, or the name or number of a "
        "selected item. With `count(*)`, it returns the number of rows of each value.",
        "select team, count(*) as n from staff group by team order by n desc",
        [("red", 2), ("blue", 1)],
    ),
    "having": Example(
        "`HAVING condition`",
        "Keeps the groups for which the condition is true. It can use columns and aggregates, but not the names of selected items.",
        "select team, count(*) from staff group by team having count(*) > 1",
        [("red", 2)],
    ),
    "order": Example(
        "`ORDER BY item [ASC or DESC] [NULLS FIRST or NULLS LAST], …`",
        "Sorts the rows, with nulls last by default. Without ORDER BY, rows are sorted by ROW_ID.",
        "select name from staff order by pay desc nulls first",
        [("eve",), ("ann",), ("bob",)],
    ),
    "limit": Example("`LIMIT n`", "Returns at most n rows, counted over all pages.", "select name from staff limit 1", [("ann",)]),
    "offset": Example(
        "`OFFSET n`", "Skips the first n rows.", "select name from staff order by name offset 2", [("eve",)]
    ),
}  # fmt: skip

OF_OPERATORS: Mapping[type, Example] = {
    exp.Column: Example(
        "`name`, `table.name`, `\"name\"`, `ROW_ID`, `ROW_VERSION`, `$1`, `$name`",
        "A column or a parameter. Upper and lower case are the same, except in a quoted name.",
        _of("ROW_ID, ROW_VERSION, NAME"),
        [(1, 1, "ann")],
    ),
    exp.Literal: Example(
        "`7`, `2.5`, `1e3`, `'text'`",
        "A number or a text. Within a text, `''` is one quote. A number of digits alone that fits 64 bits is an "
        "INTEGER, any other number a DOUBLE. A text that is compared with a DATE, a number or a BOOLEAN is converted to its type.",
        _where("since > '2024-03-01'"),
        [("bob",), ("eve",)],
    ),
    exp.Null: Example("`null`", "The null value.", _of("null as nothing"), [(None,)]),
    exp.Boolean: Example("`true`, `false`", "The BOOLEAN values.", _where("active = false"), [("bob",)]),
    exp.Paren: Example("`(…)`", "Evaluates the expression in parentheses first.", _of("(pay + 1) * 2 as n"), [(202,)]),
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
    exp.And: Example("`a AND b`", "True if both are true.", _where("team = 'red' and pay > 1"), [("ann",)]),
    exp.Or: Example("`a OR b`", "True if at least one of them is true.", _where("pay = 80 or rate = 1.5"), [("ann",), ("bob",)]),
    exp.Not: Example("`NOT a`", "True if a is false.", _where("not active"), [("bob",)]),
    exp.Is: Example("`a IS [NOT] NULL`", "True if a is [not] null. Use this, as `a = null` is null.", _where("pay is null"), [("eve",)]),
    exp.In: Example(
        "`a [NOT] IN (value, …)`", "True if a equals one of the values.", _where("name in ('ann', 'eve')"), [("ann",), ("eve",)]
    ),
    exp.Between: Example(
        "`a [NOT] BETWEEN b AND c`", "True if a is from b to c, both included.", _where("pay between 80 and 90"), [("bob",)]
    ),
    exp.Like: Example(
        "`a [NOT] LIKE 'pattern'`",
        "True if all of a matches the pattern. `%` matches any text, `_` any one character. Case matters.",
        _where("name like '_o%'"),
        [("bob",)],
    ),
    exp.Escape: Example(
        "`a LIKE 'pattern' ESCAPE 'c'`",
        "LIKE with an escape character: after c, the characters `%`, `_` and c stand for themselves.",
        _where("name not like '%!%%' escape '!'"),
        [("ann",), ("bob",), ("eve",)],
    ),
    exp.NullSafeNEQ: Example(
        "`a IS DISTINCT FROM b`", "Not equal. Null is equal to null, and to no other value.", _where("pay is distinct from 80"), [("ann",), ("eve",)]
    ),
    exp.NullSafeEQ: Example(
        "`a IS NOT DISTINCT FROM b`", "Equal. Null is equal to null, and to no other value.", _where("pay is not distinct from null"), [("eve",)]
    ),
    exp.Case: Example(
        "`CASE WHEN condition THEN a … [ELSE b] END`, `CASE c WHEN d THEN a … END`",
        "The value after the first condition that is true, or after the first d that equals c. If there is none: b, or null.",
        "select case when pay > 90 then 'high' when pay is null then 'none' else 'low' end from staff",
        [("high",), ("low",), ("none",)],
    ),
    exp.Cast: Example(
        "`CAST(a AS type)`, `a::type`",
        "Converts an INTEGER to DOUBLE, an INTEGER or BOOLEAN to VARCHAR or TEXT, and a text in quotes to INT, BIGINT, DOUBLE, "
        "BOOLEAN or DATE. Other casts are refused, because databases differ in their results.",
        _of("pay::double, cast(active as text)"),
        [(100.0, "true")],
    ),
    exp.Coalesce: Example(
        "`coalesce(a, b, …)`", "The first value that is not null.", "select coalesce(pay, 0) from staff", [(100,), (80,), (0,)]
    ),
    exp.Nullif: Example("`nullif(a, b)`", "Null if a equals b, else a.", "select nullif(pay, 80) from staff", [(100,), (None,), (None,)]),
    exp.DPipe: Example("`a \\|\\| b`", "Joins two texts.", _of("name || '!'"), [("ann!",)]),
    exp.Length: Example("`length(a)`", "The number of characters of a text.", _of("length(team)"), [(3,)]),
    exp.Trim: Example("`trim(a)`", "The text without spaces at its start and end.", _of("trim('  a ') || '.'"), [("a.",)]),
    exp.Abs: Example("`abs(a)`", "The absolute value of a number.", _of("abs(pay - 120)"), [(20,)]),
}  # fmt: skip

OF_FUNCTIONS: Mapping[str, Example] = {
    "count": Example(
        "`count(*)`, `count([DISTINCT] a)`",
        "Counts rows, or the values of a that are not null.",
        "select count(*), count(pay), count(distinct team) from staff",
        [(3, 2, 2)],
    ),
    "sum": Example(
        "`sum([DISTINCT] a)`", "The sum of the values that are not null, or null if there are none.", "select sum(pay), sum(rate) from staff", [(180, 1.75)]
    ),
    "avg": Example("`avg([DISTINCT] a)`", "The mean of the values that are not null, or null if there are none.", "select avg(pay) from staff", [(90.0,)]),
    "min": Example("`min(a)`", "The smallest value.", "select min(name), min(since) from staff", [("ann", 1704067200000)]),
    "max": Example("`max(a)`", "The largest value.", "select max(pay), max(active) from staff", [(100, True)]),
}  # fmt: skip

REFUSED: Mapping[str, tuple[str, str]] = {
    "casts that round or fail": ("select cast(rate as int) from staff", "a cast of DOUBLE to INT"),
    "joins, other tables": ("select * from staff a join staff b on a.pay = b.pay", "a join"),
    "sub-queries, `EXISTS`, WITH": ("select * from staff where pay in (select pay from staff)", "a sub-query"),
    "UNION, INTERSECT, EXCEPT": ("select name from staff union select team from staff", "'UNION'"),
    "window functions, QUALIFY, FILTER": ("select sum(pay) over () from staff", "a window"),
    "other functions, such as `upper`, `round` and `now`, because databases differ in their results": ("select upper(name) from staff", "the function 'upper'"),
    "ILIKE, SIMILAR TO, ANY": ("select name from staff where name ilike 'A%'", "ILIKE"),
    "comments": ("select name from staff -- all", "a comment"),
}  # fmt: skip
"""Common features that are not supported: for each, a query that has it, and its name in the error."""

_PAGE = """# SQL of row tables

{made}

Use this SQL to query one row table with `rows.query(…)`, `dormouse rows query`, `POST /v1/rows/{{table}}/query` or the `sql` of a
download. A query is one SELECT. It reads the current rows, or the rows of a version or snapshot, and returns them in
[pages](../how-to/edit-rows.md#query). Everything that this page does not list is refused.

For joins, sub-queries, windows and other functions, use [`instance.sql(…)`, `dormouse sql` or `/v1/sql`](../how-to/sql.md). They read
the same current rows with the SQL of DuckDB.

The examples query this table, `staff`:

| {names} |
| {lines} |
{rows}

## Clauses

{clauses}

## Values and operators

An operator with a null operand returns null. The exceptions are:

- `IS NULL`, `IS DISTINCT FROM`, `coalesce`, `nullif` and `CASE`.
- `AND`, `OR`, `IN` and `BETWEEN`, if the other operands decide the result: `false AND null` is false, `true OR null` is true.

{operators}

| operator | types of its operands | type of its result |
| --- | --- | --- |
{operator_kinds}

## Functions

These functions are aggregates: they combine all rows, or the rows of each group.

- An aggregate cannot contain another aggregate, and WHERE cannot contain one.
- In a query with aggregates or GROUP BY, each column outside of an aggregate must be in GROUP BY.

{functions}

| function | types of its argument | type of its result |
| --- | --- | --- |
{function_kinds}

## Types

| type of a column | in queries |
| --- | --- |
{column_kinds}

A DATE can be compared with a text in ISO 8601, or with a number of milliseconds since 1970. Pages show dates as such numbers. JSON can
be selected, counted and tested for null.

## Not supported

A query with any of these raises `InvalidQuery`. The message names the unsupported part.

| feature | example |
| --- | --- |
{refused}

Messages use these names for unsupported parts: {words}.

## Limits

| limit | largest value |
| --- | --- |
{limits}
"""


def render() -> str:
    """Returns the page. Raises `KeyError` or `ValueError` for a construct of the parser without an example."""
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
    """Returns all examples. A test compares their answers with those of a row table."""
    return [*OF_CLAUSES.values(), *OF_OPERATORS.values(), *OF_FUNCTIONS.values()]


def _operators() -> list[type]:
    """Returns the parser's constructs except aggregates, in the order of the examples."""
    taken = [kind for kind in EXPRESSIONS if kind not in AGGREGATES]
    return sorted(taken, key=list(OF_OPERATORS).index)


def _limits() -> dict[str, int]:
    return {
        "characters of a query": sql.CHARACTERS_MAX,
        "tokens": sql.TOKENS_MAX,
        "nested parentheses": sql.DEPTH_MAX,
        "nested expressions": statements.DEPTH_MAX,
        "parameters": PARAMETERS_MAX,
        "rows of a page": pages.PAGE_ROWS_MAX,
        "rows of a page, unless the query sets another number": pages.PAGE_ROWS,
        "bytes of JSON in a page": pages.JSON_BYTES_MAX,
        "LIMIT and OFFSET": binding.ROWS_MAX,
    }


def _table(listed: Iterable[Example]) -> str:
    lines = [
        f"| {one.written} | {cell(one.does)} | `{cell(one.query)}` | {_answer(one.answer)} |"
        for one in listed
    ]
    return "\n".join(["| syntax | meaning | example | answer |", "| --- | --- | --- | --- |", *lines])


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
