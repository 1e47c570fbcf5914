"""Compactions that would lose rows, all of which fail: inputs are missing, empty or truncated, or they
vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_files import SKETCHES, add_file, objects_of, write_object
from data_files import rows_of as rows

from dormouse.model.file_reference import SplitFileReferenceRequest
from dormouse.writing import compaction_job as task
from dormouse.writing import merge
from dormouse.writing.compaction_job import CompactionResult
from dormouse.writing.parquet_file import FileFacts
from tests.stored import query
from tests.support.state import TableContext
from tests.support.writing import compact, run_compaction
from tests.support.writing import ingest_in_process as ingest

NewTable = Callable[..., TableContext]
PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}


def gone(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-20])


DAMAGES = pytest.mark.parametrize(
    ("damage", "says"),
    [
        (gone, "does not exist"),
        (emptied, "has 0 bytes, and was written with"),
        (truncated, "and was written with 317: 'dormouse check --deep' lists all damaged files"),
    ],
)
KINDS = pytest.mark.parametrize(
    "properties", [{}, {"filter": "age_off(key, 1000000)"}], ids=["all rows", "filtered rows"]
)


@pytest.fixture(params=["whole", "divided"])
def damaged(request: pytest.FixtureRequest, new_table: NewTable) -> Callable[..., tuple[TableContext, str]]:
    """A function that makes a table and returns it with the name of one of its two files.

    The files belong to one leaf, or each to two leaves.
    """

    def make(**properties: Any) -> tuple[TableContext, str]:
        table = new_table(**PAIRS, **properties)
        names = [add_file(table, name, [1, 2, 11, 12]) for name in "ab"]
        if request.param == "divided":
            left, right = table.partitions.split("root", 10)
            table.store.split_file_references(
                [
                    SplitFileReferenceRequest.split_to_children(r, left.partition_id, right.partition_id)
                    for r in table.store.file_references()
                ]
            )
        return table, names[0]

    return make


def path_of(table: TableContext, name: str) -> Path:
    path = table.objects.local_path(name)
    assert path is not None
    return path


def run_one(table: TableContext) -> CompactionResult:
    table.jobs.create()
    return run_compaction(table, table.jobs.take(1)[0], 0)


def check_failed(table: TableContext, before: list[Any], result: CompactionResult, *says: str) -> None:
    """Checks that the job will be retried, that its references are unchanged, and that no output is left."""
    assert (result.outcome, result.filename) == ("retry", None)
    assert result.error is not None
    assert all(text in result.error for text in says), result.error
    assert [replace(r, job_id=None, last_updated=None) for r in table.store.file_references()] == before
    assert {name.removesuffix(SKETCHES) for name in objects_of(table)} <= {r.filename for r in before}


def references(table: TableContext) -> list[Any]:
    return [replace(r, last_updated=None) for r in table.store.file_references()]


@DAMAGES
@KINDS
def test_an_input_that_is_missing_empty_or_truncated_fails_the_job(
    damaged: Any, damage: Callable[[Path], None], says: str, properties: dict[str, Any]
) -> None:
    table, name = damaged(**properties)
    before = references(table)
    damage(path_of(table, name))
    check_failed(table, before, run_one(table), repr(name) if says != "does not exist" else name, says)


@DAMAGES
@KINDS
def test_an_input_that_vanishes_before_it_is_read_fails_the_job(
    damaged: Any,
    damage: Callable[[Path], None],
    says: str,
    properties: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, name = damaged(**properties)
    before, write = references(table), merge.write_sorted

    def write_without_it(*args: Any) -> Any:
        damage(path_of(table, name))
        return write(*args)

    monkeypatch.setattr(merge, "write_sorted", write_without_it)
    check_failed(table, before, run_one(table), name)


def test_an_input_with_another_row_count_than_its_reference_fails_the_job(
    new_table: NewTable,
) -> None:
    table = new_table(**PAIRS)
    name, _ = add_file(table, "a", [1, 2, 3]), add_file(table, "b", [1])
    query(table.supplier, "update file set byte_count = null, digest = null")
    before = references(table)
    path_of(table, name).unlink()
    path_of(table, name + SKETCHES).unlink()
    write_object(table.objects, table.schema, name, rows(table, [1, 2]))
    check_failed(table, before, run_one(table), f"file {name!r} has 2 rows; its reference records 3")


@pytest.mark.parametrize("rows_lost", [1, -1])
def test_an_output_with_another_row_count_than_the_references_fails_the_job(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch, rows_lost: int
) -> None:
    table = new_table(**PAIRS)
    names = [add_file(table, name, [1, 2]) for name in "ab"]
    before, merged = references(table), task.merge_sorted

    def losing(*args: Any, **more: Any) -> Any:
        facts = merged(*args, **more)
        return replace(facts, row_count=facts.row_count - rows_lost)

    monkeypatch.setattr(task, "merge_sorted", losing)
    says = f"wrote {4 - rows_lost} rows; the references record 4"
    check_failed(table, before, run_one(table), *map(repr, names), says)


def test_the_rows_of_one_leaf_are_compared_with_its_exact_count(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files belong to two leaves, and have an exact row count for each leaf."""
    table = new_table(split_points=[10], ingest_file_writing="one_reference_per_leaf", **PAIRS)
    left = table.partitions.leaves()[0].partition_id
    for _ in range(2):
        ingest(table, rows(table, [1, 2, 11]))
    monkeypatch.setattr(task, "merge_sorted", lambda *a, **k: FileFacts(3))
    table.jobs.create()
    [job] = [job for job in table.jobs.take(9) if job.partition_id == left]
    assert "wrote 3 rows; the references record 4" in (run_compaction(table, job, 0).error or "")


def test_filters_and_aggregates_may_leave_fewer_rows(new_table: NewTable) -> None:
    table = new_table(filter="age_off(key, 1000)", **PAIRS)
    for name in "ab":
        add_file(table, name, [1, 2])
    report = compact(table)
    assert (report.jobs_run, report.rows_read, report.rows_written) == (1, 4, 0)
