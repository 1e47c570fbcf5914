"""Conditions on row keys that SQL states in many ways: what they prune, and that it is never too much."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from query_lake import Lake, tuples

from dormouse.data.arrow_schema import arrow_schema
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, DOUBLE, INT, LONG, STRING
from dormouse.postgres import ConnectionSupplier
from dormouse.query import explain_sql, sql
from dormouse.query.key_ranges import KeyRanges
from dormouse.query.pushdown import after_prefix, scans, wanted
from dormouse.query.scan_session import session

SCHEMA = Schema(
    [Field("s", STRING), Field("n", LONG), Field("i", INT), Field("b", BYTES)],
    [],
    [Field("v", DOUBLE, nullable=True)],
)
TEXTS = ["", "a", "ab", "abc", "abd", "b", "a%", "a_", "é", "\U0010ffff", "it's"]
NUMBERS = [-(2**63), -(2**53) - 1, -3, -1, 0, 1, 2, 5, 7, 2**31, 2**53 + 1, 2**63 - 1]
SMALL = [-(2**31), -2, 0, 3, 2**31 - 1]


@pytest.fixture(scope="module")
def lake(own_database: tuple[str, ConnectionSupplier], tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """1,200 rows in eight leaves of three keys; some files have references on several leaves."""
    lake = Lake(*own_database, tmp_path_factory.mktemp("lake"), SCHEMA, split_points=["a", "abc", "b"])
    for leaf, field, point in zip(lake.context.partitions.leaves(), "nnin", (0, 2, 0, 5), strict=True):
        lake.context.partitions.split(leaf.partition_id, point, field)
    rng = random.Random(1)
    for number in range(3):
        lake.add([_row(rng) for _ in range(400)], one_file=number == 1)
    return lake


def _row(rng: random.Random) -> dict[str, object]:
    return {
        "s": rng.choice(TEXTS),
        "n": rng.choice(NUMBERS),
        "i": rng.choice(SMALL),
        "b": rng.choice([b"", b"a", b"ab"]),
        "v": rng.choice([None, 1.5, -2.0]),
    }


def _asked(condition: str) -> KeyRanges:
    """What a condition wants of the row keys."""
    ctx = session(None, in_key_order=False)
    ctx.register_parquet("t", "file:///nowhere", schema=arrow_schema(SCHEMA), file_extension="")
    [scan] = scans(ctx.sql(f"select v from t where {condition}").optimized_logical_plan())
    return wanted(SCHEMA, scan.filters())


@pytest.mark.parametrize(
    ("condition", "inside", "outside"),
    [
        ("s like 'ab%'", ["ab", "abz"], ["a", "aa", "ac"]),
        ("s like 'a_c%d'", ["a", "azz"], ["", "b"]),
        (r"s like 'a\%%'", ["a%"], ["b"]),
        ("starts_with(s, 'ab')", ["ab"], ["ac"]),
        ("s ~ '^ab'", ["ab"], ["ac"]),
        ("s like 'ab%' or s = 'x'", ["ab", "x"], ["ac", "y"]),
        ("not (s < 'b' or s >= 'c')", ["b"], ["a", "c"]),
        ("'b' <= s and 'c' > s", ["b"], ["a", "c"]),
        ("s in ('a', 'c')", ["a", "c"], ["b"]),
        ("s is not distinct from 'a'", ["a"], ["b"]),
        ("(s = 'a') is true", ["a"], ["b"]),
        ("(s, n) = ('a', 1)", ["a"], ["b"]),
        ("(s, n) in (('a', 1), ('c', 2))", ["a", "c"], ["b"]),
        ("s between 'b' and 'c'", ["b", "c"], ["a", "d"]),
        ("case when s = 'a' then true else false end", ["a"], ["b"]),
    ],
)
def test_conditions_on_text(condition: str, inside: list[str], outside: list[str]) -> None:
    found = _asked(condition)
    assert all(any(item.contains(text) for item in found["s"]) for text in inside)
    assert not any(item.contains(text) for item in found["s"] for text in outside)


@pytest.mark.parametrize(
    ("condition", "inside", "outside"),
    [
        ("n > 5.5", [6, 2**63 - 1], [5]),
        ("n >= 5.0", [5], [4]),
        ("n < 5.5", [5, -(2**63)], [6]),
        ("n <= -5.5", [-6], [-5]),
        ("n = 5.0", [5], [4, 6]),
        ("n = '5'", [5], [4, 6]),
        ("cast(n as varchar) = '5'", [5], [4]),
        ("cast(n as decimal(20, 2)) > 5.25", [6], [5]),
        ("n between 2 and 4 or n = 9", [2, 4, 9], [1, 5]),
        ("n = any([1, 3])", [1, 3], [2]),
        ("n = 2 + 3", [5], [4]),
        ("5 > n", [4], [5]),
    ],
)
def test_conditions_on_numbers(condition: str, inside: list[int], outside: list[int]) -> None:
    found = _asked(condition)
    assert all(any(item.contains(number) for item in found["n"]) for number in inside)
    assert not any(item.contains(number) for item in found["n"] for number in outside)


@pytest.mark.parametrize(
    "condition",
    [
        "n = 5.5", "i > 3000000000", "i = -3000000000", "i in (3000000000, 4000000000)",
        "cast(n as double) = 0.5",
    ],
)  # fmt: skip
def test_conditions_that_no_key_meets_want_nothing(condition: str) -> None:
    assert _asked(condition).is_empty


@pytest.mark.parametrize(
    "condition",
    [
        "s not like 'ab%'", "s ilike 'ab%'", "s like '%b'", "s <> 'a'", "s not in ('a', 'b')", "n + 1 = 5",
        "abs(n) = 5", "n > 1e300", "n < 9007199254740993.0", "i < 3000000000", "i > -3000000000",
        "b like 'a%'",
        "cast(n as real) = 5.5", "cast(s as bigint) = 5", "v = 5", "n = v", "(s = 'a') is not true",
        "n is distinct from 5", "date_trunc('day', to_timestamp(n)) = '2024-01-01'",
        "round(cast(n as double)) = 5", "cast(n as decimal(20, 0)) / 2 = 5",
    ],
)  # fmt: skip
def test_what_bounds_no_key_bounds_nothing(condition: str) -> None:
    assert dict(_asked(condition)) == {}


@pytest.mark.parametrize(
    ("prefix", "after"),
    [("a", "b"), ("az", "a{"), ("a\U0010ffff", "b"), ("\U0010ffff", None), ("\ud7ff", "\ue000"), ("é", "ê")],
)
def test_the_text_after_all_with_a_prefix(prefix: str, after: str | None) -> None:
    assert after_prefix(prefix) == after


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_text = st.sampled_from(TEXTS).map(_quoted)
_number = st.sampled_from([*map(str, NUMBERS[1:]), "0.5", "1.0", "-2.5", "7e0"])
_small = st.sampled_from([*map(str, SMALL[1:]), "3000000000", "-3000000000"])
_compared = st.sampled_from(["=", "<", "<=", ">", ">=", "<>", "is distinct from", "is not distinct from"])
_column = st.sampled_from([("s", _text), ("n", _number), ("i", _small)])


@st.composite
def _term(draw: st.DrawFn) -> str:
    name, values = draw(_column)
    kind = draw(st.integers(0, 6))
    if kind == 0:
        listed = ", ".join(draw(st.lists(values, min_size=1)))
        return f"{name} {draw(st.sampled_from(['in', 'not in']))} ({listed})"
    if kind == 1:
        return f"{name} between {draw(values)} and {draw(values)}"
    if kind == 2:
        operator = draw(st.sampled_from(["like", "not like", "ilike"]))
        return f"s {operator} '{draw(st.sampled_from(['a%', 'ab%', 'a_', 'A%', '%b', 'abc', 'é%', 'a%c%']))}'"
    if kind == 3:
        return f"{draw(values)} {draw(_compared)} {name}"
    if kind == 4:
        return f"(s, i) in (({draw(_text)}, {draw(_small)}), ('a', 3))"
    if kind == 5:
        return draw(st.sampled_from(["v > 0", "v is null", "n is null", "n > i", "s > 'a' || s"]))
    return f"{name} {draw(_compared)} {draw(values)}"


_condition = st.recursive(
    _term(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})"),
        inner.map(lambda one: f"not ({one})"),
        inner.map(lambda one: f"({one}) is true"),
    ),
    max_leaves=5,
)


@settings(max_examples=15, deadline=None)
@given(condition=_condition)
def test_any_condition_finds_the_rows_that_duckdb_finds(lake: Lake, condition: str) -> None:
    _check_condition(lake, condition)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(condition=_condition)
def test_many_conditions_find_the_rows_that_duckdb_finds(lake: Lake, condition: str) -> None:
    _check_condition(lake, condition)


def _check_condition(lake: Lake, condition: str) -> None:
    contexts = {"t": lake.context}
    text = f"select count(*), count(v), min(n), max(s), sum(i) from t where {condition}"
    assert tuples(sql(contexts, text)) == lake.expect(text)
    everything = explain_sql(contexts, "select * from t")["t"]
    found = explain_sql(contexts, text).get("t")
    assert found is None or (found.files <= everything.files and found.partitions <= everything.partitions)
