"""Tests of the benchmarks of commits and of contention, most of which need no database."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commits import kinds, layouts
from benchmarks.commits.__main__ import BENCHMARK as COMMITS
from benchmarks.commits.bench import Bench
from benchmarks.commits.bench import Plan as CommitsPlan
from benchmarks.commits.pgbench import as_script, read
from benchmarks.committers import Storm, batches, deal, merged
from benchmarks.contention import BENCHMARK as CONTENTION
from benchmarks.contention import CASES, ISOLATIONS, VARIANTS, Plan, figures
from benchmarks.harness.command import Benchmark
from benchmarks.harness.place import Place
from benchmarks.harness.report import median_ratio, turns
from benchmarks.state_tables import open_tables

_SAID = """
number of transactions actually processed: 500/500
number of failed transactions: 0 (0.000%)
tps = 305.719149 (without initial connection time)
statement latencies in milliseconds and failures:
         0.001           0 \\set i :i + 1
         0.198           0 select sent, commits from pgbench_1 where number = :number
         3.072           0 with sent as materialized (
"""


def test_pgbench_runs_the_statement_with_its_own_variables() -> None:
    assert as_script("select %(a)s::text[], 7 %% 2, %(b_1)s") == "select :a::text[], 7 % 2, :b_1"


def test_the_rate_of_pgbench_excludes_its_look_up_statement() -> None:
    found = read(_SAID, 500)
    assert (found.tps, found.statement_ms) == (305.719149, 3.072)
    assert found.statements_per_s(8) == pytest.approx(8_000 / 3.072)


def test_a_missing_transaction_of_pgbench_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ran 500 of 501"):
        read(_SAID, 501)


def test_work_is_divided_without_loss() -> None:
    assert deal(range(5), 2) == [[0, 2, 4], [1, 3]]
    assert [list(each) for each in batches(range(5), 2)] == [[0, 1], [2, 3], [4]]


def test_ratios_are_taken_within_a_round() -> None:
    assert median_ratio([10, 1, 30], [10, 2, 10]) == 1


def test_every_job_is_dealt_to_one_committer() -> None:
    for committers in (1, 3, 500):
        dealt = deal(range(256), committers)
        assert len(dealt) == min(256, committers)
        assert sorted(job for jobs in dealt for job in jobs) == list(range(256))


def test_a_storm_lasts_from_its_first_process_to_its_last() -> None:
    storm = merged([Storm(1.0, 2.0, [0.1, 0.3], ["a"], 2), Storm(1.5, 3.0, [0.2, 0.2], [], 1)])
    assert (storm.per_second, storm.retries, storm.errors) == (2.0, 3, ["a"])
    assert storm.percentile_ms(50) == pytest.approx(200)


def test_every_case_runs_once_in_each_round() -> None:
    rounds = list(turns(CASES, 2, step=7))
    assert sorted(case for number, case in rounds if number == 0) == sorted(CASES)
    assert sorted(case for number, case in rounds if number == 1) == sorted(CASES)


def test_contention_counts_failures_of_every_case() -> None:
    storms = {case: [Storm(0.0, 2.0, [0.1] * 4, ["no"], 3)] for case in CASES}
    found = figures(storms, Plan(rounds=1))
    assert found.keys() == CONTENTION.keys
    assert found["failed_jobs"] == len(CASES)
    for variant in VARIANTS:
        for suffix in ISOLATIONS.values():
            assert found[f"retries_{variant}{suffix}"] == 3
            assert found[f"commits_per_s_{variant}_500{suffix}"] == 2.0


@pytest.mark.slow
def test_the_parts_by_layout_give_known_figures(dsn: str, tmp_path: Path) -> None:
    plan = CommitsPlan(jobs_of_two=8, add_commits=2, files_per_commit=10, leaves=8, leaves_of_layouts=8)
    with open_tables(dsn, str(tmp_path)) as tables:
        bench = Bench(Place(dsn, tmp_path), tables, plan)
        found = kinds.adding(bench) | kinds.creating_jobs(bench) | layouts.by_layout(bench)
    assert found.keys() <= COMMITS.keys


@pytest.mark.parametrize("benchmark", [COMMITS, CONTENTION])
def test_a_plot_in_an_unknown_format_is_refused_before_measuring(
    benchmark: Benchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.parse(["--plot", "figure.txt"])
    assert ended.value.code == 2
    assert "must end in .svg or .png" in capsys.readouterr().err
