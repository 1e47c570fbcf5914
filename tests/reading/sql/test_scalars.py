"""Expressions that users give for edits: one expression over one row, written anew from DuckDB's tree."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery
from tests.support.reading import RANDOM, constant_text, reviewed, scalar, stepped

NESTED = dm.STRUCT([dm.Field("a b", dm.MAP(dm.STRING, dm.LIST(dm.FLOAT))), dm.Field("d", dm.DOUBLE)])
ROWS = (
    (
        "t",
        (
            ("id", dm.LONG),
            ("x", dm.INT),
            ("d", dm.DOUBLE),
            ("nested", NESTED),
            ("l", dm.LIST(dm.INT)),
            ("st", dm.STRUCT([dm.Field("a", dm.LONG, nullable=True)])),
            ("js", dm.STRING),
            ('odd "name', dm.INT),
        ),
    ),
    ("s", (("id", dm.LONG), ("y", dm.INT), ("Z", dm.DECIMAL(10, 2)))),
)
GIVEN = """(SELECT 7::BIGINT AS "t.id", 3 AS "t.x", '-0.0'::DOUBLE AS "t.d",
    {'a b': MAP {'k': [NULL, '-0.0', '-nan']}, 'd': '-nan'}::STRUCT("a b" MAP(VARCHAR, FLOAT[]), d DOUBLE)
    AS "t.nested", [1, 5] AS "t.l",
    {'a': 9::BIGINT} AS "t.st", '{"a": 1}' AS "t.js", 4 AS "t.odd ""name", 8::BIGINT AS "s.id", 2 AS "s.y",
    1.25::DECIMAL(10, 2) AS "s.Z")"""


def value(text: str, *, repeats: bool = False) -> Any:
    found = scalar(text, ROWS, repeats=repeats)
    return duckdb.sql(f"SELECT {found.text} FROM {GIVEN}").fetchall()[0][0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t.id + y", 9),
        ("X * 2", 6),
        ("z::VARCHAR", "1.25"),
        ('"odd ""name"', 4),
        ("T.ID = s.id", False),
        ("list_filter(l, q -> q > x)", [5]),
        ("list_transform(l, lambda id: id + t.x)", [4, 8]),
        ("[e * 2 for e in l if e > 1]", [10]),
        ("st.a + t.st.a", 18),
        ("js->>'$.a'", "1"),
        ("x -- a comment", 3),
        ("/* ( */ x", 3),
        ("CASE WHEN x > 2 THEN 'it''s' ELSE 'less' END", "it's"),
        ("x IN (1, 2, 3) AND y BETWEEN 1 AND 2 AND l IS NOT NULL", True),
        ("try(x // 0)", None),
        ("l[2]", 5),
        ("main.abs(-x)", 3),
    ],
)
def test_an_expression_is_evaluated_as_duckdb_does(text: str, expected: Any) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("d::VARCHAR", "-0.0", "0.0"),
        ("signbit(NESTED.D)", True, False),
        (
            "nested::VARCHAR",
            "{'a b': {k=[NULL, -0.0, -nan]}, 'd': -nan}",
            "{'a b': {k=[NULL, 0.0, nan]}, 'd': nan}",
        ),
        ("list_transform([x], x -> nested.\"a b\"['k'][2]::VARCHAR)", ["-0.0"], ["0.0"]),
    ],
)
def test_a_condition_sees_one_zero_and_one_nan(text: str, given: Any, expected: Any) -> None:
    assert value(text) == given
    assert value(text, repeats=True) == expected


def test_an_expression_tells_what_it_reads() -> None:
    found = scalar("t.id = s.id AND s.y = t.x AND t.js > 'a'", ROWS, repeats=True)
    assert found.columns == {("t", "id"), ("s", "id"), ("s", "y"), ("t", "x"), ("t", "js")}
    assert found.equal == ((("t", "id"), ("s", "id")), (("s", "y"), ("t", "x")))
    assert not found.is_equality
    assert not found.tells_time
    assert scalar("t.id = s.id", ROWS).is_equality
    assert not scalar("t.id = s.id OR t.x = 1", ROWS).equal
    for text in ("now()", "current_date", "t.x + year(today())"):
        assert scalar(text, ROWS).tells_time


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no expression"),
        ("x +", "is no expression: syntax error"),
        ("x; SELECT 1", "is no expression"),
        ("1), (2", "more than one expression"),
        ("1) FROM t WHERE (1", "more than one expression"),
        ("x) UNION SELECT (1", "more than one expression"),
        ("x AS y", "is no expression"),
        ("(SELECT 1)", "no subquery"),
        ("SELECT 1", "no subquery"),
        ("x = ANY(l)", "no subquery"),
        ("EXISTS (FROM other)", "no subquery"),
        ("sum(x)", "many rows"),
        ("geomean(x)", "aggregates"),
        ("count(*)", "many rows"),
        ("unnest(l)", "many rows"),
        ("row_number() OVER ()", "window"),
        ("$1", "parameters"),
        ("*", r"cannot be \*"),
        ("COLUMNS('x')", r"cannot be \*"),
        ("DEFAULT", "cannot be DEFAULT"),
        ("xx", "unknown column 'xx'; did you mean 'x'"),
        ("t.idd", "unknown column 't.idd'; did you mean 't.id'"),
        ("other.x", "reads no other table"),
        ("id", "write t.id or s.id"),
        ("nextval('x')", "no sequences"),
        ("getvariable('x')", "settings"),
        ("read_csv('x')", "unknown function"),
        ("system.main.abs(x)", "no schema"),
        ("x::nosuch", "nosuch"),
        ("x + 'a'::DATE + TRUE", "No function matches"),
        ("1e400", "too large"),
        ("\x00", "a text of at most"),
    ],
)
def test_anything_else_is_one_clear_line(text: str, complaint: str) -> None:
    with pytest.raises(InvalidQuery, match=complaint) as raised:
        scalar(text, ROWS)
    assert "\n" not in str(raised.value)


def test_functions_of_chance_select_no_rows() -> None:
    for name in RANDOM:
        with pytest.raises(InvalidQuery, match="another value each time"):
            scalar(f"{name}()::VARCHAR = 'x'", ROWS, repeats=True)
    volatile = duckdb.sql(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability = 'VOLATILE'"
    )
    allowed = reviewed("expressions").allowed
    # error(…) has no value
    assert {name for (name,) in volatile.fetchall() if name.lower() in allowed} - {"error"} == RANDOM


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (dm.LIST(dm.INT), [1, None]),
        (dm.LIST(dm.INT), []),
        (dm.LIST(dm.LIST(dm.STRING)), [["it's"], None]),
        (dm.STRUCT([dm.Field("a", dm.LONG, nullable=True)]), {"a": None}),
        (dm.MAP(dm.STRING, dm.INT), {"a": 1}),
        (dm.MAP(dm.STRING, dm.INT), {}),
        (dm.DOUBLE, inf),
        (dm.STRING, "a\n'b"),
        (dm.LONG, None),
    ],
)
def test_constants_of_all_types_are_written(kind: Any, given: Any) -> None:
    assert duckdb.sql(f"SELECT {constant_text(kind, given)}").fetchall() == [(given,)]
    assert duckdb.sql(f"SELECT isnan({constant_text(dm.DOUBLE, nan)})").fetchall() == [(True,)]


@pytest.mark.parametrize(("kind", "bits"), [(dm.INT, 32), (dm.LONG, 64)])
def test_a_step_has_the_values_that_duckdb_computes(kind: dm.DataType, bits: int) -> None:
    relations = (("t", (("v", kind), ("w", kind))),)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for number in (0, 1, 7, 999_999_999):
        for sign in "+-*":
            found = scalar(f" V{sign}{number} ", relations)
            assert found == scalar(f"t.v {sign} 0{number} -- x", relations), "as if it was checked itself"
            for v in (None, 0, 1, -1, 3, least, least + number, most, most - number):
                given = pa.record_batch([pa.array([v], f"int{bits}")], names=["v"])
                step = stepped(given, found.step, kind)
                try:
                    [[expected]] = duckdb.sql(
                        f'SELECT {found.text} FROM (SELECT {constant_text(kind, v)} AS "t.v")'
                    ).fetchall()
                except duckdb.OutOfRangeException:
                    assert step is None
                else:
                    assert step is not None
                    assert (step.to_pylist(), step.type) == ([expected], given.column(0).type)


@pytest.mark.parametrize(
    "text", ["x - y", "1 - x", "d - 1", "x / 2", "x - 1.5", "x - 3000000000", "st.a - 1", "x"]
)
def test_only_a_step_of_a_whole_number_is_one(text: str) -> None:
    assert scalar(text, ROWS).step is None


def test_a_step_of_another_type_is_left_to_duckdb() -> None:
    given = pa.record_batch([pa.array([2], pa.int32())], names=["x"])
    assert stepped(given, scalar("x + 1", ROWS).step, dm.LONG) is None


def test_a_column_with_the_name_of_a_word_of_sql_is_no_step() -> None:
    with pytest.raises(InvalidQuery, match="no expression"):
        scalar("order - 7", (("t", (("order", dm.INT),)),))
