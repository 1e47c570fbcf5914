"""Tests of the common parts of all benchmarks: their arguments, plans, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.command import Benchmark, Figures, amount, quick
from benchmarks.harness.report import Grid, values

ROOT = Path(__file__).parents[2]


def modules() -> Iterator[str]:
    """Yields the names of the modules that `python -m` can run."""
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if '__name__ == "__main__"' in path.read_text("utf-8"):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


BENCHMARKS: dict[str, Benchmark] = {name: import_module(name).BENCHMARK for name in modules()}


@pytest.mark.parametrize("module", BENCHMARKS)
def test_every_benchmark_offers_json_and_quick(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.command.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    benchmark = BENCHMARKS[module]
    assert module.removesuffix(".__main__") == f"benchmarks.{benchmark.name}"
    assert benchmark.question == import_module(module).__doc__
    given = benchmark.parse(["--quick", "--json"])
    assert given.json
    assert benchmark.planned(given) == quick(benchmark.plan)
    assert benchmark.planned(benchmark.parse([])) == benchmark.plan() != quick(benchmark.plan)


def test_the_page_of_figures_names_every_benchmark() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert all(f"| `{benchmark.name}` |" in text for benchmark in BENCHMARKS.values())
    assert len(BENCHMARKS) == 22


def keys_of_plots(benchmark: Benchmark) -> set[str]:
    return {
        key.format(point)
        for pane in benchmark.panes
        for key in (*pane.solid, *pane.dashed)
        for point in pane.points
    }


@pytest.mark.parametrize("module", BENCHMARKS)
def test_plotted_figures_are_in_the_tables(module: str) -> None:
    assert keys_of_plots(BENCHMARKS[module]) <= BENCHMARKS[module].keys


@dataclass(frozen=True)
class Plan:
    rounds: int = amount(5, 3, help="[5]")
    kinds: tuple[str, ...] = amount(("a", "b"), ("a",))


FOUND: Figures = {"rounds": 3, "ms_a": 1.5, "sides": {"ours": 2, "theirs": None}, "errors": []}


def shaped(figures: Figures) -> Benchmark:
    tables = [
        "medians of {rounds} rounds",
        Grid({"a": "one", "b": "two"}, {"ms_{}": "ms"}),
        values({"sides.ours": "ours", "sides.theirs": "theirs"}),
        "failed: {errors}",
    ]
    return Benchmark("shaped", "What?", Plan, lambda plan, _: {**figures, "rounds": plan.rounds}, tables)


def test_json_has_the_figures_of_the_given_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shaped(FOUND).main(["--quick", "--json"])
    assert json.loads(capsys.readouterr().out) == FOUND
    shaped(FOUND).main(["--quick", "--json", "--rounds", "7"])
    assert json.loads(capsys.readouterr().out) == {**FOUND, "rounds": 7}


def test_tables_show_only_measured_figures(capsys: pytest.CaptureFixture[str]) -> None:
    shaped(FOUND).main([])
    assert capsys.readouterr().out == "medians of 5 rounds\n      ms\none  1.5\nours  2\n"


@pytest.mark.parametrize("odd", [{"ms_c": 1}, {"sides": {"others": 1}}])
def test_a_figure_in_no_table_is_printed_and_exits_with_an_error(
    odd: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"not in the tables of figures: (ms_c|sides\.others)"):
        shaped({**FOUND, **odd}).main(["--json"])
    assert json.loads(capsys.readouterr().out) == {**FOUND, **odd, "rounds": 5}


def test_quick_returns_the_smaller_plan() -> None:
    assert quick(Plan) == replace(Plan(), rounds=3, kinds=("a",))
    assert [each.name for each in fields(Plan)] == ["rounds", "kinds"]
