"""Tests of the functions of the benchmark of queries that need no database."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from benchmarks.harness.command import quick
from benchmarks.harness.report import flat, turned
from benchmarks.query.__main__ import BENCHMARK, KINDS, Plan, figures, queries
from benchmarks.query.lake import KEY_STEP
from benchmarks.query.sides import SIDES, Engine, Wanted, digest

ROWS = pa.table({"key": [1, 2], "text": ["a", "bc"]})


@pytest.mark.parametrize("plan", [Plan(), quick(Plan)])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_have_existing_keys_and_are_repeatable(plan: Plan, kind: str) -> None:
    wanted = queries(plan, kind, 1)
    assert wanted == queries(plan, kind, 1) != queries(plan, kind, 2)
    assert all(0 <= one.low < one.high <= plan.rows * KEY_STEP for one in wanted)
    assert {one.rows for one in wanted} == {KINDS[kind]}


def test_the_sql_of_a_key_has_an_equality_and_of_a_range_an_order() -> None:
    assert Wanted(3, 1, by_key=True).sql == "key = 24"
    assert Wanted(3, 10).sql == "key >= 24 and key < 104 order by key"


def test_a_digest_depends_only_on_values_and_their_order() -> None:
    views = ROWS.cast(pa.schema([("key", pa.int64()), ("text", pa.string_view())]))
    chunks = pa.concat_tables([ROWS.slice(0, 1), ROWS.slice(1)])
    assert digest(ROWS) == digest(views) == digest(chunks) == digest(pl.from_arrow(ROWS))
    assert digest(ROWS) != digest(ROWS.take([1, 0]))
    assert digest(ROWS) != digest(ROWS.set_column(1, "text", pa.array(["ab", "c"])))


def test_an_answer_with_too_few_rows_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 rows instead of 3"):
        Engine(lambda _: ROWS).seconds([Wanted(0, 3)])


def test_every_engine_is_compared_in_every_kind_of_query() -> None:
    sides = {(kind, name): [2.0, 4.0] for kind in KINDS for name in SIDES}
    sides["lookup", "duckdb"] = [4.0, 12.0]
    found = figures(sides, sides)
    assert found["lookup_ms"] == 3_000
    assert found["lookup_ms_duckdb"] == 8_000
    assert found["lookup_vs_duckdb"] == 2.5
    assert {name for name in found if "_vs_" in name} == {
        f"{kind}_vs_{name}" for kind in KINDS for name in SIDES if name != "dormouse"
    }
    plain = ("rows", "files", "leaves", "rounds", "warming", "head_requests", "get_requests")
    rest: dict[str, Any] = dict.fromkeys(plain, 1) | {f"peak_memory_bytes_{name}": 1 for name in SIDES}
    rest |= {f"first_lookups_ms_{name}".removesuffix("_dormouse"): 1 for name in SIDES}
    assert "2.5" in BENCHMARK.text({**found, **rest})
    assert flat({**found, **rest}).keys() == BENCHMARK.keys


def test_the_order_of_engines_rotates() -> None:
    assert turned(["a", "b", "c"], 4) == ["b", "c", "a"]


def test_a_plot_in_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        BENCHMARK.parse(["--plot", "figure.txt"])
    assert ended.value.code == 2
    assert "must end in .svg or .png" in capsys.readouterr().err
