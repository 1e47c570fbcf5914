"""Windows of which DuckDB gives wrong answers are refused, and no others."""

from __future__ import annotations

import duckdb
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery
from dormouse.instance import Instance

ROWS = [{"a": n % 3, "b": n % 2, "v": n} for n in range(12)]
WRONG = [
    "select v, sum(v) over (partition by {}) x, sum(v) over (partition by a, b) y from t",
    "select v, sum(v) over w, sum(v) over u from t window w as (partition by {}), u as (partition by b, a)",
    "select v, rank() over (partition by {} order by v), rank() over (partition by b, a order by v) from t",
    "explain analyze select v, sum(v) over (partition by {}) x, sum(v) over (partition by a, b) y from t",
    "select * from (select sum(v) over (partition by b, a), sum(v) over (partition by {}) from t) limit 2",
    "select sum(t.v) over (partition by t.a, u.a) x, sum(t.v) over (partition by t.a, t.b) y /* {} */ "
    "from t join t u on t.a = u.a and t.v = u.v",
]
TWICE = ["a, a", "a, t.a", "a, A", "a, a + 0", "a, (a)", "a, a::bigint"]
RIGHT = {
    "select v, sum(v) over (partition by a, a) x from t": "select v, sum(v) over (partition by a) x from t",
    "select sum(v) over (partition by a, b) x, sum(v) over (partition by b, a) y from t": (
        "select sum(v) over (partition by a, b) x, x as y from t"
    ),
    "select sum(v) over (partition by a, a) x, max(v) over (partition by a, a) y from t": (
        "select sum(v) over (partition by a) x, max(v) over (partition by a) y from t"
    ),
    "select sum(v) over (partition by a, a, a) x, max(v) over (partition by a, b) y from t": (
        "select sum(v) over (partition by a) x, max(v) over (partition by a, b) y from t"
    ),
}


@pytest.fixture
def filled(instance: Instance) -> Instance:
    fields = [dm.Field(name, dm.LONG) for name in ("a", "b", "v")]
    instance.create_table("t", dm.Schema(fields)).ingest({n: [row[n] for row in ROWS] for n in "abv"})
    return instance


def test_windows_that_duckdb_takes_for_one_another_are_refused(filled: Instance) -> None:
    for statement in WRONG:
        for twice in TWICE:
            with pytest.raises(InvalidQuery, match=r"PARTITION BY names an expression twice.*name it once"):
                filled.sql(statement.format(twice))
    with pytest.raises(InvalidQuery, match="twice"):
        filled.sql(WRONG[0].replace("b)", "a % $1)").format("a, a"), [2])
    assert filled.sql(WRONG[0].format("a")).read_all().num_rows == len(ROWS)


def test_other_windows_are_answered(filled: Instance) -> None:
    for statement, same in RIGHT.items():
        found, expected = (
            sorted(map(repr, filled.sql(text).read_all().to_pylist())) for text in (statement, same)
        )
        assert found == expected, statement


def test_duckdb_still_gives_wrong_answers() -> None:
    """When this fails, `dormouse.sql.windows` can go."""
    rows = "(values (1, 1, 10), (1, 2, 20)) t(a, b, v)"
    found = duckdb.sql(
        f"select sum(v) over (partition by a, a), sum(v) over (partition by a, b) from {rows}"
    ).fetchall()
    assert found == [(30, 30), (30, 30)]
