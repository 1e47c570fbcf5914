"""The benchmark of growth: its figures of what was measured, and each of its operations on a small table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale
from benchmarks.harness.report import flat
from benchmarks.state_tables import open_tables
from dormouse.files.layout import LAYOUTS


def figures(seconds: float, rss_mb: float) -> dict[str, Any]:
    return {"seconds": seconds, "rss_mb": rss_mb, "answer": ""}


def test_growth_is_from_the_smallest_table_to_the_largest_of_ten_files_a_leaf() -> None:
    sizes = ((1_000, 10), (132_000, 10), (132_000, 50))
    found = {
        name: {"1000x10": figures(0.1, 50), "132000x10": figures(0.2, 60), "132000x50": figures(9, 70)}
        for name in scale.measured()
    }
    found["references_counted_in_sql"]["132000x10"]["seconds"] = 13.2
    summed = scale.summary(found, sizes)
    assert summed["rss_mb_max"] == 70
    assert (summed["references_counted_growth"], summed["growth_max_of_the_rest"]) == (132, 2)
    assert "132000x50" in scale.BENCHMARK.text(summed)
    assert flat(summed).keys() <= scale.BENCHMARK.keys


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])]
)
def test_every_operation_finds_what_there_is_to_do(dsn: str, tmp_path: Path, layout: str) -> None:
    objects = str(tmp_path)
    with open_tables(dsn, objects) as tables:
        table = scale._table(tables, 300, 2, layout)
        answers = {}
        for name in scale.measured():
            scale.prepare(name, tables, table)
            with scale.alone(dsn, objects, table) as process:
                answers[name] = process.run(name)["answer"]
    assert answers["references_counted_in_sql"].isdecimal()
    assert (answers["jobs_first"], answers["jobs_nothing_due"], answers["jobs_due"]) == ("0", "0", "300")
    assert answers["splits_first"] == answers["splits_nothing_new"] == "(10, 100)"
    assert (answers["split_leaves"], answers["jobs_take"]) == ("10", "100")
    assert answers["push_down"] == "100"
    assert answers["garbage_nothing"] == "0"
    assert int(answers["garbage_due"]) > 0
