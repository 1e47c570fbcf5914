"""Windows that DuckDB confuses are each computed over their own partitions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import duckdb
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery
from tests.support.api import Instance

ROWS = [
    {"k": n, "a": n % 3, "b": n % 2, "c": n % 4 or None, "five": 5, "v": n}
    for n in range(24)
]  # fmt: skip
ONE_OF = {
    "a": [
        "a",
        "t.a",
        "A",
        "a + 0",
        "(a)",
        "a::bigint",
        "coalesce(a, 1)",
        "-(-a)",
        "case when true then a end",
    ],
    "b": ["b", "b * 1", "coalesce(b, 7)", "ifnull(b, 2)", "if(b is null, 1, b)"],
    "c": ["c", "nullif(c, 9)", "coalesce(c, null)", "c - 0"],
    "five": ["five", "5", "five + 0", "coalesce(five, a)", "greatest(five, 5)"],
    "v % 5": ["v % 5", "(v + 0) % 5", "v::bigint % 5"],
}
FRAMES = ["", "order by k", "order by v rows between 1 preceding and current row", "order by b, k"]
FUNCTIONS = ["sum(v)", "count(*)", "max(v)", "min(k)"]
SEEDS = range(30)


@pytest.fixture
def filled(instance: Instance) -> Instance:
    fields = [dm.Field(name, dm.LONG, nullable=name == "c") for name in ROWS[0]]
    instance.create_table("t", dm.Schema(fields[:1], [], fields[1:])).ingest(ROWS)
    return instance


def windows(seed: int) -> Iterator[tuple[str, str]]:
    """Yields random pairs of a window function and a window.

    The windows often have equal partitions that are written differently.
    """
    random_ = random.Random(seed)
    pool, count = random_.sample(list(ONE_OF), 2), random_.choice((2, 2, 3))
    for _ in range(random_.randint(2, 4)):
        names = [random_.choice(pool) for _ in range(count)]
        partitions = ", ".join(random_.choice(ONE_OF[name]) for name in names)
        yield random_.choice(FUNCTIONS), f"partition by {partitions} {random_.choice(FRAMES)}"


def test_windows_beside_others_have_the_values_that_they_have_alone(filled: Instance) -> None:
    wrong = []
    for seed in SEEDS:
        named = [f"{function} over ({window})" for function, window in windows(seed)]
        together = filled.sql(f"select k, {', '.join(named)} from t order by k").read_all()
        for number, one in enumerate(named, 1):
            alone = filled.sql(f"select {one} from t order by k").read_all()
            if together.column(number).to_pylist() != alone.column(0).to_pylist():
                wrong.append((seed, one, named))
    assert wrong == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "statement",
    [
        "select v, sum(v) over (partition by {}) x, sum(v) over (partition by a, b) y from t",
        "select v, sum(v) over w x, sum(v) over u y from t "
        "window w as (partition by {}), u as (partition by a, b)",
        "from t select v, sum(v) over (partition by {} -- twice\n) x, sum(v) over (partition by a,\n b) y;",
        "with s as (select v, sum(v) over (partition by {}) x, sum(v) over (partition by a, b) y from t) "
        "from s",
        "select t.v, sum(t.v) over (partition by t.a, u.a) x, sum(t.v) over (partition by t.a, t.b) y "
        "/* {} */ from t join t u on t.a = u.a and t.v = u.v",
        'select v, sum(v) over (partition by "order", {}) x, sum(v) over (partition by "order", a, b) y '
        'from (select *, true as "order" from t)',
        "select v, sum(v) over (partition by {}) x, (select 1) one, sum(v) over (partition by a, b) y from t "
        "qualify sum(v) over (partition by b, a) + rank() over (partition by {}) > 0",
    ],
)
def test_windows_stay_distinct_anywhere_in_a_statement(filled: Instance, statement: str) -> None:
    for twice in ("a, a", "a, coalesce(a, 1)", "a, a + $1 - $1") if "t.a" not in statement else ("a, a",):
        found = filled.sql(statement.replace("{}", twice), [3] if "$1" in twice and "{}" in statement else ())
        assert {(row["v"], row["x"], row["y"]) for row in found.read_all().to_pylist()} == {
            (
                row["v"],
                sum(one["v"] for one in ROWS if one["a"] == row["a"]),
                sum(one["v"] for one in ROWS if (one["a"], one["b"]) == (row["a"], row["b"])),
            )
            for row in ROWS
        }


def test_columns_keep_the_names_of_the_original_statement(filled: Instance) -> None:
    one, other = "sum(v) OVER (PARTITION BY a, a)", "sum(v) OVER (PARTITION BY a, b)"
    assert filled.sql(f"select {one}, {other}, {other} from t").schema.names == [one, other, f"{other}_1"]
    described = filled.sql(f"describe select {one}, {other} from t").read_all()
    assert described.column("column_name").to_pylist() == [one, other]
    assert filled.sql(f"summarize select {one} x, {other} y from t").read_all().num_rows == 2
    explained = filled.sql(f"explain select {one}, {other} from t").read_all()
    assert explained.column("plan_type").to_pylist()[0] == "dormouse"
    with pytest.raises(InvalidQuery, match="name each window by AS"):
        filled.sql(f'select "{other}" from (select {one}, {other} from t)')


def test_duckdb_still_gives_wrong_answers() -> None:
    """A failure means that DuckDB has fixed the error, and that `with_distinct_windows` can be removed."""
    rows = "(values (1, 1, 10), (1, 2, 20)) t(a, b, v)"
    found = duckdb.sql(
        f"select sum(v) over (partition by a, a), sum(v) over (partition by a, b) from {rows}"
    ).fetchall()
    assert found == [(30, 30), (30, 30)]
