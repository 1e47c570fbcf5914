"""Tests of the benchmark of changes: its rows, its figures, and that lost transfers count as failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import dormouse as dm
from benchmarks.changes.__main__ import BENCHMARK
from benchmarks.changes.beside import BESIDE, TABLE_SHARE
from benchmarks.changes.deletes import KINDS, chosen
from benchmarks.changes.edits import MATCHED, MERGED, NEW, fill_even, merged, merges, updates
from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import EDITED, PEERS, SIDES, VALUES, Delta, Rows, rows_of
from benchmarks.changes.transfers import (
    CASES,
    TRANSFERRING,
    Keyed,
    figures,
    transferred,
)
from benchmarks.changes.upserts import COUNTS, largest, start_of
from benchmarks.harness.command import quick
from benchmarks.harness.place import Place, own_place
from benchmarks.peers.peer import Steps
from benchmarks.peers.together import Result


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
    wanted |= {"update_vs_delta", "update_vs_ducklake", "merge_1000_vs_delta", "merge_1000_vs_ducklake"}
    wanted |= {"transfers_per_s_8", *(f"transfers_failed_{side.name}" for side in TRANSFERRING)}
    wanted |= {f"{edit}_beside_ms_{name}" for edit in BESIDE for name in EDITED}
    assert wanted <= BENCHMARK.keys


def test_upserts_have_existing_keys() -> None:
    for plan in (Plan(), Plan(rows=160_000, rounds=3)):
        starts = [start_of(count, number, plan) for count in COUNTS for number in range(plan.rounds)]
        assert all(0 < start <= plan.rows - largest(plan) or start < plan.rows for start in starts)
        assert max(starts) + 1 < plan.rows
        assert start_of(COUNTS[-1], plan.rounds - 1, plan) + largest(plan) <= plan.rows


def test_a_merge_has_nine_tenths_existing_keys_all_over_the_table() -> None:
    for plan in (Plan(), quick(Plan)):
        for rows, rounds in ((plan.rows, plan.rounds + 1), (plan.rows // TABLE_SHARE, plan.beside)):
            merges_ = [merged(number, rows)["k"].to_numpy() for number in range(rounds)]
            new = [key for keys in merges_ for key in keys if key % 2]
            assert len(set(new)) == len(new) == NEW * rounds
            for keys in merges_:
                assert len(set(keys)) == len(keys) == MERGED
                existing = sorted(key for key in keys if key % 2 == 0)
                assert len(existing) == MATCHED
                assert existing[0] < rows / 10
                assert rows < existing[-1] < 2 * rows
                assert list(keys) != sorted(keys)


def test_an_edit_of_a_peer_changes_the_rows_that_it_should(tmp_path: Path) -> None:
    side = Delta(Place("", tmp_path))
    fill_even(side, "t", 8_000)
    side.update("t", Rows(0, 20), VALUES)
    assert side.count("t", Rows(value=VALUES)) == 10
    side.merge("t", merged(1, 8_000))
    assert side.count("t", Rows(value=VALUES + 1)) == MERGED
    assert side.count("t", Rows(0, 16_000)) == 8_000 + NEW


def test_the_smaller_rate_of_our_tables_is_the_figure() -> None:
    rates = {"keyed": 4_000, "dormouse": 2_000, "ducklake": 0}
    found = figures(
        {
            (name, case): [Result(2.0, commits, (0.001,), refused=0, retries=None, unfinished=0)]
            for name, commits in rates.items()
            for case in CASES
        }
    )
    assert (found["transfers_per_s_8"], found["transfers_per_s_8_keyed"]) == (1_000, 2_000)
    assert found["transfers_8_vs_ducklake"] == 2_000
    assert set(found) <= BENCHMARK.keys
    assert [side.name for side in TRANSFERRING] == [*rates]


def nothing(_: str) -> None:
    pass


@pytest.mark.slow
def test_updates_and_merges_give_figures_of_every_side() -> None:
    plan = replace(quick(Plan), rows=16_000, rounds=1)
    found = updates(plan, nothing) | merges(plan, nothing)
    assert set(found) <= BENCHMARK.keys
    assert {f"merge_{MERGED}_ms_{name}" for name in EDITED} <= set(found)
    ratios = [found[f"update_{kind}_keyed_vs_delta"] for kind in KINDS]
    assert found["update_vs_delta"] <= min(ratios)


class Halving(Keyed):
    """Accounts whose transfers give, and never take."""

    name = "halving"

    @contextmanager
    def appender(self, table: str, writer: int) -> Iterator[Steps]:
        with self.open() as instance:
            giving = instance.table(f"{table}_from")

            def step(_: int) -> int:
                giving.update({"account": writer}, {"balance": dm.sql("balance - 1")})
                return 1

            yield Steps(step)


@pytest.mark.slow
def test_transfers_that_are_made_in_half_are_counted() -> None:
    with own_place() as place:
        for side in (Keyed(place), Halving(place)):
            side.set_up()
            result, lost = transferred(side, "t", "1", 0.5)
            assert result.latencies
            assert result.refused == 0
            assert (lost > 0) == isinstance(side, Halving)
