"""Tests of the benchmark of growth: its figures, and each of its operations on a small table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.report import flat
from benchmarks.scale import growth, operations
from benchmarks.scale.__main__ import BENCHMARK
from benchmarks.state_tables import open_tables
from tests.support.state import LAYOUTS


def figures(seconds: float, rss_mb: float) -> dict[str, Any]:
    return {"seconds": seconds, "rss_mb": rss_mb, "answer": ""}


def test_growth_compares_the_smallest_table_with_the_largest_of_ten_files_per_leaf() -> None:
    sizes = ((1_000, 10), (132_000, 10), (132_000, 50))
    found = {
        name: {"1000x10": figures(0.1, 50), "132000x10": figures(0.2, 60), "132000x50": figures(9, 70)}
        for name in operations.measured()
    }
    found["references_counted_in_sql"]["132000x10"]["seconds"] = 13.2
    summed = operations.summary(found, sizes)
    assert summed["rss_mb_max"] == 70
    assert (summed["references_counted_growth"], summed["growth_max_of_the_rest"]) == (132, 2)
    assert "132000x50" in BENCHMARK.text(summed)
    assert flat(summed).keys() <= BENCHMARK.keys


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])]
)
def test_every_operation_finds_its_work(dsn: str, tmp_path: Path, layout: str) -> None:
    objects = str(tmp_path)
    with open_tables(dsn, objects) as tables:
        table = operations._table(tables, 300, 2, layout)
        answers = {}
        for name in operations.measured():
            operations.prepare(name, tables, table)
            with operations.alone(dsn, objects, table) as process:
                answers[name] = process.run(name)["answer"]
    assert answers["references_counted_in_sql"].isdecimal()
    assert (answers["jobs_first"], answers["jobs_nothing_due"], answers["jobs_due"]) == ("0", "0", "300")
    assert answers["splits_first"] == answers["splits_nothing_new"] == "(10, 100)"
    assert (answers["split_leaves"], answers["jobs_take"]) == ("10", "100")
    assert answers["push_down"] == "100"
    assert answers["garbage_nothing"] == "0"
    assert int(answers["garbage_due"]) > 0


@pytest.mark.slow
def test_commit_rates_are_measured_as_an_instance_grows(dsn: str, tmp_path: Path) -> None:
    def silent(_: str) -> None: ...

    with open_tables(dsn, str(tmp_path)) as tables:
        found = growth.by_references(tables, (100, 1_000), 100, 1, "file_table", silent)
        found |= growth.by_tables(tables, (1, 2), 100, "file_table", silent)
        found |= growth.by_writers(tables, (1, 4), 20, "file_table", silent)
        found |= growth.after_commits(tables, 1_500, 100, "file_table", silent)
        aged = tables._supplier
        with aged.connection() as conn:
            counted = conn.execute(
                "select count(*) from dormouse.applied_commit join dormouse.tables using (table_id)"
                " where name = 'aged'"
            ).fetchone()
    assert flat(found).keys() <= BENCHMARK.keys | {
        f"commits_per_s_by_{of}.{size}" for of, size in (("references", 100), ("tables", 2))
    }
    assert (found["references_most"], found["tables_most"], found["writers_most"]) == (1_000, 2, 4)
    # four batches before and four after, each time three to warm up and one that counts
    assert counted == (1_500 + 8 * growth.BATCH,)
