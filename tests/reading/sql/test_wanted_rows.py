"""Statements with random conditions return the same rows from the ranges they need as from all rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dormouse.reading.row_filter import in_slices, rendered
from dormouse.reading.sql.conditions import DUCKDB, literal, type_name
from dormouse.reading.sql.wanted import Wanted
from tests.wanted_ranges import SCHEMAS, shown, wanted

ROWS = 150
VALUES = {
    "long": [-(1 << 63), -(1 << 31), -3, 0, 1, 2, 5, 9, (1 << 24) + 1, 1 << 31, (1 << 53) + 1, (1 << 63) - 2],
    "int": [-(1 << 31), -3, 0, 1, 2, 5, 9, (1 << 24) + 1, (1 << 31) - 2],
    "string": ["", "a", "A", "ab", "abc", "abd", "b", "a\0", "é", "e", "\ud7ff", "\U0010ffff", "%", "5"],
    "bytes": [b"", b"a", b"\x00", b"\xff", b"\xff\xff", b"'\\"],
    "double": [1.0, 2.0, 5.0, 4.5, -0.0, float("nan"), float("inf"), None],
}
NUMBERS = st.sampled_from(
    [
        "1", "2", "5", "9", "5.0", "4.5", "-0.5", "5::double", "4.5::double", "9007199254740992::double",
        "16777216::float", "'nan'::double", "'5'", "null", "'-inf'::double", "9223372036854775808",
        "-9223372036854775808", "2147483648", "5::utinyint", "16777217", "1e300", "4.5::float",
        "9007199254740993", "-3::hugeint", "null::double",
    ]
)  # fmt: skip
TEXTS = st.sampled_from(["''", "'a'", "'ab'", "'abc'", "'A'", "'é'", "'b'", "'a' || chr(0)", "'5'", "null"])
PATTERNS = st.sampled_from(
    ["a%", "ab_", "%b", "", "a!%", "é%", "A%", "\ud7ff%", "\U0010ffff%", "_", "a", "a.*"]
)
OPERATORS = st.sampled_from(
    ["=", "=", "<", "<=", ">", ">=", "<>", "is distinct from", "is not distinct from"]
)
MATCHES = st.sampled_from(["like", "like", "ilike", "not like", "glob", "^@", "~", "similar to"])
NUMBER = st.sampled_from(
    [
        "T.k", "T.k", "T.k", "T.k", "T.k + 1", "T.k::double", "T.k::float", "T.k::hugeint", "T.v",
        "try_cast(T.k as int)", "T.k::decimal(38, 2)",
    ]
)  # fmt: skip
TEXT = st.sampled_from(["T.s", "T.s", "lower(T.s)", "T.s collate nocase", "T.k::varchar"])
COMPARISONS = st.one_of(
    st.tuples(NUMBER, OPERATORS, NUMBERS).map(" ".join),
    st.tuples(NUMBERS, OPERATORS, NUMBER).map(" ".join),
    st.tuples(TEXT, OPERATORS, TEXTS).map(" ".join),
    st.builds("{} between {} and {}".format, NUMBER, NUMBERS, NUMBERS),
    st.builds("{} in ({}, {}, {})".format, NUMBER, NUMBERS, NUMBERS, NUMBERS),
    st.builds("{} not in ({}, {})".format, TEXT, TEXTS, TEXTS),
    st.builds("{} {} '{}'".format, TEXT, MATCHES, PATTERNS),
    st.builds("T.s like '{}' escape '!'".format, PATTERNS),
    st.builds("list_contains([{}, {}], {})".format, NUMBERS, NUMBERS, NUMBER),
    st.builds("(T.k, T.s) {} ({}, {})".format, OPERATORS, NUMBERS, TEXTS),
    st.builds("(T.s, T.k) in (({}, {}), ({}, {}))".format, TEXTS, NUMBERS, TEXTS, NUMBERS),
    st.builds("T.k in (select x.k from u x where x.v {} {})".format, OPERATORS, NUMBERS),
)
SOME = st.recursive(
    st.tuples(COMPARISONS, st.sampled_from(["a", "b"])).map(lambda one: one[0].replace("T.", f"{one[1]}.")),
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("not ({})".format, inner),
        st.builds("(({}) is true)".format, inner),
        st.builds("coalesce({}, true)".format, inner),
        st.builds("case when {} then {} else {} end".format, inner, inner, inner),
    ),
    max_leaves=4,
)
CONDITIONS = st.lists(SOME, min_size=1, max_size=3).map(" and ".join)
JOINS = st.sampled_from(["join", "left join", "right join", "full join", "semi join", "anti join"])
SHAPES = [
    "from t a where {0}",
    "from u a where {0} and {1}",
    "from (select distinct k, s from t) a where {0}",
    "from (select k, s, sum(v) as v from t group by k, s) a where {0}",
    "from (select k, s, sum(v) as v from t group by rollup (k, s)) a where {0}",
    "from (select *, count(*) over (partition by k) from t) a where {0}",
    "from (select k, s, v from t union all select k, s, v from u) a where {0}",
    "select k from t a where {0} except select k from u a where {1}",
    "with a as materialized (from t) select * from a where {0}",
    "with a as (from t) select count(*) from a, a as x where {0} and x.k = 5",
    "from t a {2} u b on a.k = b.k where {0}",
    "from t a {2} u b on a.k = b.k and {0} where {1}",
    "from u a {2} t b on a.k = b.k and a.s = b.s where {0}",
    "from t a {2} u b on a.v < b.v where {0}",
    "from t a {2} (select k, s, max(v) as v from u group by all) b on a.k = b.k where {0}",
    "from t a {2} u b on a.k = b.k {3} t c on c.k = b.k where {0}",
    "from t a {2} (u x {3} t b on x.k = b.k) on a.k = x.k where {0}",
    "from t a {2} (from u limit 100000) b on a.k = b.k where {0}",
    "from t a, (values (1, 'a'), (5, null)) c(x, y) where a.k = c.x and {0}",
    "from t a left join (values (1, 'a'), (5, null)) c(x, y) on a.k = c.x where {0}",
    "from t a where a.k = any ([1, 5]) or {0}",
    "from t a where a.k in (select b.k from u b where {1}) and {0}",
    "from t a where a.k not in (select b.k from u b where {1}) and {0}",
    "from t a where exists (from u b where a.k = b.k and {1}) and {0}",
    "from t a where not exists (from u b where a.k = b.k and {1}) and {0}",
    "select a.*, (select max(b.v) from u b where a.k = b.k and {1}) from t a where {0}",
    "select a.*, (select count(*) from u b where a.k = b.k and {1}) from t a where {0}",
    "select a.*, exists (from u b where a.k = b.k and {1}) from t a where {0}",
    "select a.*, (select sum((select max(c.v) from t c where c.k = b.k and c.s = a.s)) from u b "
    "where b.k = a.k and {1}) from t a where {0}",
    "from t a, lateral (select b.v from u b where a.k = b.k and {1}) l where {0}",
]


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields a connection with all rows, as the tables `all_t` and `all_u`."""
    chosen = random.Random(1)
    with duckdb.connect() as connection:
        for name, schema in SCHEMAS.items():
            columns = ", ".join(f"{field.name} {type_name(field.type)}" for field in schema.fields)
            connection.execute(f"CREATE TABLE all_{name} ({columns})")
            rows = []
            for _ in range(ROWS):
                values = [(field, chosen.choice(VALUES[field.type.name])) for field in schema.fields]
                texts = ("NULL" if value is None else literal(field, value) for field, value in values)
                rows.append(f"({', '.join(texts)})")
            connection.execute(f"INSERT INTO all_{name} VALUES {', '.join(rows)}")
        yield connection


def result(database: duckdb.DuckDBPyConnection, statement: str, needs: Wanted | None = None) -> list[str]:
    """Returns the rows of a statement as sorted texts.

    The tables have only the rows in the ranges of `needs`, or all rows without `needs`.
    """
    for name, schema in SCHEMAS.items():
        where: str | None = None
        if needs is not None:
            where = (
                rendered(in_slices(schema, [needs.ranges[name]]), DUCKDB) if name in needs.ranges else "false"
            )
        rows = f"SELECT * FROM all_{name} WHERE {where or 'true'}"
        database.execute(f"CREATE OR REPLACE VIEW {name} AS {rows}")
    return sorted(map(repr, database.execute(statement).fetchall()))


@settings(
    max_examples=4 * settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(shape=st.sampled_from(SHAPES), first=CONDITIONS, second=CONDITIONS, join=JOINS, other=JOINS)
def test_a_statement_has_the_same_rows_from_its_ranges_as_from_all_rows(
    database: duckdb.DuckDBPyConnection, shape: str, first: str, second: str, join: str, other: str
) -> None:
    if "{2}" not in shape or join in ("semi join", "anti join"):
        # only a is visible there
        first = first.replace("b.", "a.")
    if "b.k" not in shape:
        second = second.replace("b.", "a.")
    statement = shape.format(first, second, join, other)
    try:
        rows = result(database, statement)
    except duckdb.Error:
        # a number out of its type's range, or a column that this shape lacks
        return
    found = wanted(SCHEMAS, statement)
    assert result(database, statement, found) == rows, shown(found.ranges)
