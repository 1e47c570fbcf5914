"""Tests of the functions of the benchmark of SQL."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from benchmarks.harness.report import flat
from benchmarks.sql.__main__ import BENCHMARK, KINDS, OF_ALL, TABLES, TPCH, figures, statements
from benchmarks.sql.lake import MAIN
from benchmarks.sql.pruning import read_vs_needed
from benchmarks.sql.sides import Row, resident_of_descendants, same
from tests.support.api import Instance

ROWS: list[Row] = [("a", 0.1 + 0.2, 3, None), ("a", 1e300, 3, datetime(2024, 1, 1, tzinfo=UTC))]


def test_keys_differ_between_rounds_and_are_repeatable() -> None:
    assert [*TPCH] == [f"q{number}" for number in range(1, 23)]
    first = statements(1, 1.0)
    assert first == statements(1, 1.0)
    assert {name for name, text in statements(2, 1.0).items() if text != first[name]} == {
        "one_key",
        "key_range",
    }


def test_equal_answers_may_differ_in_order_and_in_the_last_digits_of_sums() -> None:
    theirs = [ROWS[1], ("a", 0.3, Decimal(3), None)]
    assert same(ROWS, theirs)
    assert same([], [])


@pytest.mark.parametrize(
    "theirs",
    [
        [],
        ROWS[:1],
        [ROWS[0], ROWS[0]],
        [("a", 0.300_001, 3, None), ROWS[1]],
        [("b", 0.3, 3, None), ROWS[1]],
        [("a", 0.3, 3, 0), ROWS[1]],
        [row[:3] for row in ROWS],
    ],
)
def test_a_different_answer_is_not_the_same(theirs: list[Row]) -> None:
    assert not same(ROWS, theirs)


def test_conditions_on_keys_read_few_files_that_they_do_not_need(instance: Instance) -> None:
    found = read_vs_needed(instance)
    assert found["files_read_vs_needed_conditions_max"] <= 1.2
    assert found["files_read_vs_needed_max"] >= found["files_read_vs_needed_conditions_max"]


def test_every_query_and_table_is_compared() -> None:
    times = {(name, side): [2.0, 4.0] for name in (*TPCH, *KINDS) for side in ("dormouse", "duckdb")}
    times |= {(name, side): [4.0, 8.0] for name in OF_ALL for side in TABLES if side != "duckdb"}
    times["q7", "duckdb"] = [1.0, 1.0]
    found = figures(times)
    assert found["q7_vs_duckdb"] == found["tpch_worst"] == 0.375
    assert found["q6_vs_duckdb"] == found["top10_vs_duckdb"] == 0.5
    assert found["tpch_vs_duckdb"] == round((0.375 * 0.5**2) ** (1 / 22), 3)
    assert found["divided_vs_whole"] == found["aggregated_vs_plain"] == 1
    assert (found["lookup_sql_ms"], found["q6_ms_duckdb"], found["q6_ms_divided"]) == (6_000, 3_000, 6_000)
    rest = dict.fromkeys(BENCHMARK.keys - flat(found).keys())
    assert flat(found).keys() <= BENCHMARK.keys
    assert {name for name in rest if "_vs_" in name and not name.startswith("files_")} == set()


def test_statements_for_other_tables_name_the_table_once() -> None:
    texts = statements(0, 1.0)
    assert all(texts[name].count(MAIN) == 1 for name in OF_ALL)


def test_the_memory_of_all_descendants_is_returned() -> None:
    command = ["sh", "-c", "sh -c 'cat; true'; true"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"ready\n")
        process.stdin.flush()
        process.stdout.readline()
        found = resident_of_descendants(process.pid)
        assert len(found) == 2
        assert min(found) > 100_000
