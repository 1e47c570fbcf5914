"""Tests of the figures of the benchmark of small batches, and of its steady load on little data."""

from __future__ import annotations

import pytest

import dormouse as dm
from benchmarks.harness.place import own_place
from benchmarks.harness.report import flat
from benchmarks.peers.together import Result
from benchmarks.small.__main__ import BENCHMARK, WRITERS, figures
from benchmarks.small.reads import Amounts, edited, flush, reads
from benchmarks.small.sides import SIDES
from benchmarks.small.steady import STEADY, steady


def result(commits: int, refused: int = 0, unfinished: int = 0) -> Result:
    return Result(2.0, commits, (0.001, 0.002), refused, retries=None, unfinished=unfinished)


def test_ratios_are_ours_to_theirs_and_failures_are_ours() -> None:
    commits = {"dormouse": 2_000, "ducklake": 200, "delta": 100, "pyiceberg": 0}
    found = figures(
        {
            name: {writers: [result(count * writers, refused=3, unfinished=1)] for writers in WRITERS}
            for name, count in commits.items()
        }
    )
    assert (found["small_ingests_per_s_1"], found["small_ingests_per_s_8"]) == (1_000, 8_000)
    assert (found["vs_ducklake_8"], found["vs_delta_1"], found["vs_pyiceberg_1"]) == (10, 20, 2_000)
    assert found["failed"] == 4 * len(WRITERS)
    assert [side.name for side in SIDES] == list(commits)


def nothing(_: str) -> None:
    pass


@pytest.mark.slow
def test_the_reads_and_the_steady_load_give_figures_that_are_in_the_tables() -> None:
    with own_place() as place:
        with dm.connect(place.create_database("reads"), f"file://{place.folder}/reads") as instance:
            found = reads(instance, Amounts(2_000, 20), 4, nothing)
            found |= edited(instance, nothing) | flush(instance, 30, nothing)
        found |= steady(place, 3, 2, nothing)
    assert {*flat(found), *STEADY} <= BENCHMARK.keys
    assert found["flush_rows_per_s"] > 0
    assert (found["steady_failed"], found["steady_lost_rows"]) == (0, 0)
    assert found["steady_wal_bytes_per_row"] > 0
