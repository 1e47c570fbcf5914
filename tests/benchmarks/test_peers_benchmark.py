"""Tests of the figures and arguments of the benchmark of peers, without measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.report import flat
from benchmarks.peers.__main__ import _SIDES, BENCHMARK, figures
from benchmarks.peers.experiments import COMPACTORS, WRITERS, Measured
from benchmarks.peers.together import Done, Result, Tally, summary

NAMES = ("dormouse", "committer", "waiting", "ducklake", "delta", "pyiceberg")


def result(commits: int, refused: int = 0) -> Result:
    return Result(2.0, commits, (0.001, 0.002), refused, retries=None, unfinished=0)


def side(commits: int, *, compactions: int | None = None, refused: int = 0) -> Measured:
    measured: Measured = {("appends", writers): [result(commits, refused)] for writers in WRITERS}
    measured |= {
        ("new", 8): [result(commits)],
        ("grown", 8): [result(commits // 2)],
        ("history", 8): [result(1_500), result(500)],
    }
    for workers in COMPACTORS if compactions is not None else ():
        measured["compactors", workers] = [result(compactions or 0, refused)]
        measured["beside", workers] = [result(7)]
    return measured


def made_up() -> dict[str, Measured]:
    return {
        "dormouse": side(4_000, compactions=400),
        "committer": side(8_000),
        "waiting": side(6_000),
        "ducklake": side(200, compactions=40, refused=3),
        "delta": side(100, compactions=20),
        "pyiceberg": side(0),
    }


def test_ratios_are_ours_to_theirs_and_failures_are_ours() -> None:
    found = figures(made_up())
    assert {name: found[name] for name in list(found)[:13]} == {
        "vs_ducklake_8": 20.0,
        "vs_delta_8": 40.0,
        "vs_pyiceberg_8": 4_000.0,  # a side without commits counts as one commit
        "failed": 0,
        "vs_ducklake_8_committer": 40.0,
        "vs_delta_8_committer": 80.0,
        "vs_pyiceberg_8_committer": 8_000.0,
        "failed_committer": 0,
        "compactions_vs_ducklake_8": 10.0,
        "compactions_vs_delta_8": 20.0,
        "committer_32_vs_sync": 1.5,
        "compaction_failures": 0,
        "commits_per_s_dormouse_1": 2_000.0,
    }
    assert found["failed_ducklake_8"] == 3
    assert found["compaction_failures_ducklake_8"] == 3


def test_the_table_has_every_side() -> None:
    found = {**figures(made_up()), "versions": dict.fromkeys(NAMES, "1"), "postgres": "18"}
    shown = BENCHMARK.text(found)
    assert flat(found).keys() == BENCHMARK.keys
    assert found["grown_commits_delta"] == 2_000
    assert [side.name for side in _SIDES] == list(NAMES)
    assert all(shown.count(side.label) >= 2 for side in _SIDES)


def test_only_steps_that_ended_in_time_count() -> None:
    late = Tally(done=[Done(0.5, 0.5, 1), Done(2.5, 2.0, 1)])
    assert (summary([late], 2.0).commits, summary([late], 2.0).per_second) == (1, 0.5)
    early = Tally(done=[Done(0.5, 0.5, 1), Done(1.0, 0.5, 3)], exhausted=True)
    assert (summary([early], 2.0).commits, summary([early], 2.0).seconds) == (4, 1.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--slow"], "unrecognized arguments: --slow"),
        (["--plot", "rates.txt"], "--plot rates.txt: the file's name must end in .svg or .png"),
        (["--plot", "nowhere/rates.svg"], "there is no folder nowhere"),
    ],
)
def test_wrong_arguments_get_one_clear_line(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        BENCHMARK.parse(given)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "benchmarks.harness.command.find_spec", lambda name: None if name == "duckdb" else name
    )
    with pytest.raises(SystemExit):
        BENCHMARK.parse(["--quick", "--plot", str(Path("rates.svg"))])
    says = capsys.readouterr().err.splitlines()[-1]
    assert "not installed: duckdb;" in says
    assert "dormouse-lake[local,query,benchmark]" in says
