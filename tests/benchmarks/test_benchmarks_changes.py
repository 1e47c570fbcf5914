"""Tests of the functions of the benchmark of changes that need no database."""

from __future__ import annotations

from benchmarks.changes.__main__ import BENCHMARK
from benchmarks.changes.deletes import KINDS, chosen
from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import PEERS, SIDES, VALUES, Rows, rows_of
from benchmarks.changes.upserts import COUNTS, largest, start_of


def test_each_round_deletes_different_existing_rows() -> None:
    each = [chosen(kind, number, 160_000) for kind in KINDS for number in range(3)]
    assert len(set(each)) == len(each)
    ranges = [set(range(one.low, one.high)) for one in each if one.value is None]
    assert sum(map(len, ranges)) == len(set().union(*ranges)) == 3 * 1_001
    assert all(0 <= one.low < one.high <= 160_000 for one in each if one.value is None)


def test_one_percent_of_the_rows_have_a_given_value() -> None:
    rows = rows_of(1_000, 5_000)
    assert rows["k"].to_pylist() == list(range(1_000, 6_000))
    assert {rows["v"].to_pylist().count(value) for value in range(VALUES)} == {50}
    assert {len(one) for one in rows["payload"].to_pylist()} == {32}


def test_conditions_are_equal_in_sql_and_python() -> None:
    assert (Rows(3, 5).sql, Rows(value=7).sql) == ("k >= 3 and k < 5", "v = 7")
    assert Rows(value=7).where == {"v": 7}
    assert (Rows(3, 5).where["k"].min, Rows(3, 5).where["k"].max) == (3, 5)


def test_every_side_and_ratio_has_a_figure() -> None:
    wanted = {"delete_vs_delta", "delete_vs_ducklake", "failed", "lookup_with_1000_deletions_vs_none"}
    wanted |= {"upsert_1000_vs_delta", "upsert_1000_vs_ducklake", "keyed_scan_vs_plain"}
    wanted |= {"keyed_compaction_vs_plain"}
    wanted |= {"sums_with_few_upserts_vs_plain", "scan_with_many_upserts_vs_plain"}
    wanted |= {f"{kind}_ms_{side.name}" for kind in KINDS for side in SIDES}
    wanted |= {"q1_with_five_upserts_vs_duckdb", "q12_with_one_upsert_vs_duckdb"}
    wanted |= {f"failed_{peer.name}" for peer in PEERS}
    assert wanted <= BENCHMARK.keys


def test_upserts_have_existing_keys() -> None:
    for plan in (Plan(), Plan(rows=160_000, rounds=3)):
        starts = [start_of(count, number, plan) for count in COUNTS for number in range(plan.rounds)]
        assert all(0 < start <= plan.rows - largest(plan) or start < plan.rows for start in starts)
        assert max(starts) + 1 < plan.rows
        assert start_of(COUNTS[-1], plan.rounds - 1, plan) + largest(plan) <= plan.rows
