"""Compaction jobs as Spark tasks. Each commits by itself, in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from data_files import add_file, keys_in, objects_of
from pyspark.sql import SparkSession

from dormouse.spark import tasks
from dormouse.writing.compaction import CompactionReport
from tests.stored import assign
from tests.support.model import LONG, Field
from tests.support.state import TableContext
from tests.support.writing import compact

NewTable = Callable[..., TableContext]
PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}


def compact_on(spark: SparkSession, table: TableContext, **options: Any) -> CompactionReport:
    run_jobs = partial(tasks.compact_on_spark, spark=spark)
    return compact(table, engine="spark", on_spark=run_jobs, **options)


def test_each_job_is_a_task_that_commits_by_itself(new_table: NewTable, spark: SparkSession) -> None:
    """A job with a corrupt file is retried and then given up. It does not delay the others."""
    table = new_table(split_points=[100, 200], **PAIRS)
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    for number, leaf in enumerate(leaves):
        for name in "ab":
            add_file(table, f"{name}-{leaf}", range(100 * number, 100 * number + 50), [leaf])
    bad = f"{table.table.object_prefix}a-{leaves[1]}.parquet"
    table.objects.delete([bad])
    table.objects.put(bad, b"PAR1 this is no Parquet PAR1")
    reported: list[tuple[int, int | None]] = []
    report = compact_on(spark, table, progress=lambda *args: reported.append(args))
    assert (report.jobs_run, report.jobs_failed, report.given_up) == (2, 3, 1)
    assert bad in report.errors[0]
    assert reported[-1] == (3, 3)
    for number in (0, 2):
        [reference] = table.store.file_references_in([leaves[number]])
        expected = sorted([*range(100 * number, 100 * number + 50)] * 2)
        assert keys_in(table, reference.filename) == expected
    assert len(objects_of(table)) == 2 * (6 + 2)
    assert table.jobs.count() == (0, 0)


def test_jobs_of_several_partitions_may_have_the_same_id(new_table: NewTable, spark: SparkSession) -> None:
    table = new_table(split_points=[100])
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    files = [add_file(table, leaf, [100 * number], [leaf]) for number, leaf in enumerate(leaves)]
    table.store.assign_job_ids(map(partial(assign, "job"), leaves, files))
    results = list(tasks.compact_on_spark(table, 0, spark))
    assert {(one.partition_id, one.outcome) for one in results} == {(leaf, "committed") for leaf in leaves}


def test_a_task_whose_process_dies_is_retried(
    new_table: NewTable, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, run_task = new_table(**PAIRS), tasks.run_task
    for name in "ab":
        add_file(table, name, range(10))

    def die_at_first(payload: Any) -> Any:  # pickled by value: a worker does not know this module
        if payload[1].attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_task(payload)

    monkeypatch.setattr(tasks, "run_task", die_at_first)
    report = compact_on(spark, table)
    assert (report.jobs_run, report.jobs_failed, report.given_up) == (1, 1, 0)
    [reference] = table.store.file_references()
    assert reference.row_count == 20


@pytest.mark.objects
@pytest.mark.slow
def test_a_large_job_is_several_tasks(
    new_table: NewTable, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task dies at first. The job is retried, and leaves no file of the first try."""
    table, run_piece = new_table(compaction_task_bytes=1, **PAIRS), tasks.run_piece
    for name in "ab":
        add_file(table, name, range(1_000))
    objects, run_tasks, ran = objects_of(table), tasks.run_tasks, []

    def die_at_first(payload: Any) -> Any:  # pickled by value: a worker does not know this module
        if payload[0] == 1 and payload[2].job.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_piece(payload)

    def counted(spark: SparkSession, task: Any, payloads: list[Any], **options: Any) -> Any:
        ran.append(len(payloads))
        return run_tasks(spark, task, payloads, **options)

    monkeypatch.setattr(tasks, "run_piece", die_at_first)
    monkeypatch.setattr(tasks, "run_tasks", counted)
    report = compact_on(spark, table)
    assert (report.jobs_run, report.jobs_failed, report.given_up) == (1, 1, 0)
    # the check and two ranges, each run twice, and the joining of the results
    assert [number for number in ran if number] == [3, 3, 1]
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == sorted([*range(1_000)] * 2)
    assert len(objects_of(table) - objects) == 2
    read = spark.read.parquet(table.objects.uri(reference.filename))
    assert (read.count(), read.where("key = 700").count()) == (2_000, 2)


def test_a_job_that_killed_its_runners_is_reported_as_given_up(
    new_table: NewTable, spark: SparkSession
) -> None:
    table = new_table(compaction_attempts_max=1, **PAIRS)
    for name in "ab":
        add_file(table, name, [1])
    table.jobs.create()
    assert table.jobs.take(1, lease_seconds=-1)
    report = compact_on(spark, table, create=False)
    assert (report.jobs_run, report.given_up, len(report.errors)) == (0, 1, 1)
    assert table.jobs.count() == (0, 0)


@pytest.mark.slow
def test_an_interrupted_round_releases_its_jobs(
    new_table: NewTable, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(**PAIRS)
    for number in range(6):
        add_file(table, f"file-{number}", range(10))
    run_tasks = tasks.run_tasks
    monkeypatch.setattr(
        tasks,
        "run_tasks",
        lambda spark, task, payloads, **_: run_tasks(spark, task, payloads, jobs_at_once=1),
    )

    def interrupt(*_: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact_on(
            spark,
            table,
            progress=interrupt,
        )
    jobs, running = table.jobs.count()
    assert (jobs in (1, 2), running) == (True, 0)
    # a task that Spark has given up may still commit; then the local job is superseded
    report = compact(table, engine="local", create=False)
    assert report.jobs_run + report.superseded == jobs
    assert sum(reference.row_count for reference in table.store.file_references()) == 60


def test_jobs_know_their_sizes(new_table: NewTable) -> None:
    """A job's size is the bytes of its files, in proportion to the rows of its references."""
    table = new_table(Field("key", LONG), **PAIRS)
    for name in "ab":
        add_file(table, name, range(1000))
    table.jobs.create()
    due = table.jobs.due()
    size = sum(file.byte_count or 0 for file in table.store.all_files(0).files)
    assert (due.jobs, due.row_count) == (1, 2000)
    assert abs(due.byte_count - size) <= 2
