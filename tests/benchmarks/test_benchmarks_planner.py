"""Tests of the benchmark of the planner, with its probes on a small table."""

from __future__ import annotations

from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from threading import Event

import pytest

from benchmarks.harness.processes import remote
from benchmarks.planner.__main__ import BENCHMARK, _named
from benchmarks.planner.load import Load, load
from benchmarks.planner.planning import Probe, keys_of, planning
from benchmarks.state_tables import KEYS_PER_LEAF, open_tables
from dormouse.postgres import ConnectionSupplier
from tests.support.model import Range

PROBE = Probe(3, "new", ("old_1", "old_2"))


@pytest.mark.parametrize(
    ("filenames", "stale"), [(["new", "x"], False), (["x"], True), (["new", "old_2"], True)]
)
def test_a_plan_without_the_new_file_or_with_an_old_one_is_stale(filenames: list[str], stale: bool) -> None:
    assert PROBE.is_stale(filenames) is stale


def test_key_ranges_lie_in_the_given_leaves() -> None:
    at = 7 * KEYS_PER_LEAF
    assert keys_of(7, 3)["key"] == (Range(at + 3, at + 3, max_inclusive=True),)
    assert keys_of(7, 0, 10)["key"] == (Range(at, at + 10 * KEYS_PER_LEAF),)


def test_a_figure_is_named_by_size_then_by_load() -> None:
    assert _named("plan_p99_ms", "132k") == "plan_p99_ms_132k"
    assert _named("plan_p99_ms_under_load", "132k") == "plan_p99_ms_132k_under_load"


def test_the_tables_show_only_measured_figures() -> None:
    shown = BENCHMARK.text(
        {
            "files_per_leaf": 10,
            "stale_reads": 0,
            "probes": 7,
            "plan_p50_ms_132k": 1.5,
            "plan_p99_ms_132k": 4.25,
        }
    )
    assert "1.5  4.25" in shown
    assert "stale plans: 0 of 7" in shown
    assert "first plan" not in shown


def test_an_error_in_another_process_is_raised_here() -> None:
    with pytest.raises(RuntimeError, match="FileNotFoundError"), remote(open, "/nowhere/at/all"):
        pass
    with (
        remote(nullcontext, "{seven}") as other,
        pytest.raises(RuntimeError, match="KeyError: 'seven'"),
    ):
        other.call("format_map", {})


def test_plans_are_checked_while_leaves_are_compacted_ingested_and_split(
    shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path
) -> None:
    dsn, _ = shared_supplier
    objects, (here, there), stop = str(tmp_path / "objects"), Pipe(), Event()
    with open_tables(dsn, objects) as tables:
        table = tables.make("planned", 40, files_per_leaf=3, claimed_leaves=40)
    with planning(dsn, objects, table, here) as planner, load(dsn, objects, table, there, stop) as committer:
        planner.new_instances(1)
        for _ in range(6):
            _one_round(committer)
            planner.keys(0, 5)
        facts = committer.facts
        assert facts["commits"] == 60
        assert facts["splits"] == 6
        assert facts["probes"] == 12
        assert facts["stale"] == 0
        count, stale = planner.probed()
        assert (count, stale) == (6, 0)
        # both halves of each split leaf read its only file
        assert planner.scans(1)["scans"] == 40 + 6


def _one_round(committer: Load) -> None:
    committer.batch()
    committer.split()


def test_a_plot_in_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        BENCHMARK.parse(["--plot", "figure.txt"])
    assert ended.value.code == 2
    assert "must end in .svg or .png" in capsys.readouterr().err
