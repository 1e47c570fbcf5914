"""Large jobs merged by key ranges, whose output is one file with the rows of the whole job."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from data_files import add_file, keys_in, objects_of
from keyed_tables import delete_keys, keyed, seen, upsert

import dormouse as dm
from dormouse.errors import JobFailed
from dormouse.writing.compaction_job import CompactionResult
from dormouse.writing.divided_compaction import (
    CheckInputs,
    MergeRange,
    Task,
    key_ranges,
    run_divided,
)
from tests.standard import OF_K
from tests.support.api import Instance
from tests.support.model import LONG, STRING, Field, Region
from tests.support.objects import ObjectStore
from tests.support.state import CompactionJob, TableContext

NewTable = Callable[..., TableContext]
PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}


def run(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
    """Runs each task like a worker of Spark: with the task as bytes, and the table opened by its address."""
    results = []
    for sent in sent_to_another(list(tasks)):
        with context.address.open() as there:
            results.append(sent_to_another(sent.run(there)))
    return results


def sent_to_another(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 our own bytes


def divided(
    context: TableContext, parts: int = 4, run_tasks: Any = run
) -> tuple[CompactionResult, list[Region]]:
    """Runs the next job; returns its result and the regions into which it was divided."""
    [job] = taken(context)
    regions = key_ranges(context, job, parts)
    return run_divided(context, job, regions, 0, run_tasks), regions


def taken(context: TableContext) -> list[CompactionJob]:
    context.jobs.create()
    context.jobs.create_of_deleted()
    return context.jobs.take(1)


def test_one_file_has_the_rows_of_all_ranges(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))
    result, regions = divided(table)
    assert (result.outcome, result.rows_written, len(regions)) == ("committed", 2_000, 4)
    [reference] = table.store.file_references()
    assert reference.filename == result.filename
    assert (reference.row_count, reference.count_approximate) == (2_000, False)
    assert keys_in(table, reference.filename) == sorted([*range(1_000)] * 2)
    assert table.jobs.count() == (0, 0)
    # two inputs and the output, each with sketches; nothing of the ranges is left
    assert len(objects_of(table)) == 3 * 2


@pytest.mark.objects
@pytest.mark.slow
def test_parts_are_joined_in_s3(new_table_in: NewTable, s3_store: ObjectStore) -> None:
    table = new_table_in(s3_store, **PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))
    result, _ = divided(table)
    assert (result.outcome, result.rows_written) == ("committed", 2_000)
    assert keys_in(table, result.filename or "") == sorted([*range(1_000)] * 2)
    assert len(objects_of(table)) == 3 * 2


def test_a_job_with_text_keys_is_divided(new_table: NewTable) -> None:
    table = new_table(Field("name", STRING), Field("n", LONG), **PAIRS)
    keys = sorted((f"n{number % 50:02}", number) for number in range(500))
    for name in "ab":
        add_file(table, name, keys)
    result, regions = divided(table, 3)
    assert (result.outcome, len(regions)) == ("committed", 4)
    assert keys_in(table, result.filename or "") == sorted(keys * 2)


def test_the_output_has_only_the_rows_of_its_leaf(new_table: NewTable) -> None:
    table = new_table(split_points=[300], **PAIRS)
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    for name in "ab":
        add_file(table, name, range(1_000), [left, right])
    for job in [taken(table)[0], *table.jobs.take(1)]:
        assert run_divided(table, job, key_ranges(table, job, 4), 0, run).outcome == "committed"
    found = {one.partition_id: keys_in(table, one.filename) for one in table.store.file_references()}
    assert found == {left: sorted([*range(300)] * 2), right: sorted([*range(300, 1_000)] * 2)}


def test_a_job_of_one_key_is_one_range(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, [7] * 100)
    result, regions = divided(table)
    assert (result.outcome, len(regions)) == ("committed", 1)
    assert keys_in(table, result.filename or "") == [7] * 200


@pytest.mark.slow
def test_ranges_and_jobs_without_rows_commit(instance: Instance) -> None:
    table = instance.create_table("t", OF_K, properties=dm.TableProperties(**PAIRS))
    for _ in "ab":
        table.ingest({"k": list(range(1_000))})
    table.delete({"k": dm.Range(max=600)})
    result, _ = divided(table.context)
    assert (result.outcome, result.rows_written) == ("committed", 800)
    assert table.query().read_all().column("k").to_pylist() == sorted([*range(600, 1_000)] * 2)
    table.ingest({"k": [1]})
    table.delete({"k": dm.Range(min=0)})
    result, _ = divided(table.context)
    assert (result.outcome, result.rows_written, result.filename) == ("committed", 0, None)
    assert table.query().read_all().num_rows == 0


def test_a_deletion_during_the_merge_applies(instance: Instance) -> None:
    table = instance.create_table("t", OF_K, properties=dm.TableProperties(**PAIRS))
    for _ in "ab":
        table.ingest({"k": list(range(100))})
    table.delete({"k": 5})

    def meanwhile(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        done = run(context, tasks)
        if any(isinstance(task, MergeRange) for task in tasks):
            table.delete({"k": 6})
        return done

    result, _ = divided(table.context, run_tasks=meanwhile)
    assert (result.outcome, result.rows_written) == ("committed", 198)
    expected = sorted([key for key in range(100) if key not in (5, 6)] * 2)
    assert table.query().read_all().column("k").to_pylist() == expected


@pytest.mark.slow
def test_the_newest_row_of_each_key_stays(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, *((key, 1) for key in range(500)))
    upsert(table, *((key, 2) for key in range(0, 500, 2)))
    result, regions = divided(table.context)
    assert (result.outcome, result.rows_written, len(regions)) == ("committed", 500, 4)
    assert seen(table, instance) == {key: 1 if key % 2 else 2 for key in range(500)}
    delete_keys(table, *range(0, 500, 5))
    result, _ = divided(table.context)
    assert result.outcome == "committed"
    assert seen(table, instance) == {key: 1 if key % 2 else 2 for key in range(500) if key % 5}
    assert table.status().rows_exact


def test_damage_is_named_and_nothing_is_left(new_table: NewTable) -> None:
    table = new_table(compaction_attempts_max=2, **PAIRS)
    names = [add_file(table, name, range(1_000)) for name in "ab"]
    before = objects_of(table)
    data = bytearray(table.objects.get(names[1]))
    data[len(data) // 2] ^= 1
    table.objects.delete([names[1]])
    table.objects.put(names[1], bytes(data))
    [job] = taken(table)
    regions = key_ranges(table, job, 4)

    def one_after_the_other(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        """Runs all tasks one after another; raises the first error at the end."""
        errors = []
        for task in tasks:
            try:
                run(context, [task])
            except Exception as error:
                errors.append(error)
        raise errors[0]

    result = run_divided(table, job, regions, 0, one_after_the_other)
    assert (result.outcome, names[1] in (result.error or "")) == ("retry", True)
    assert "digest" in (result.error or "")
    assert objects_of(table) == before
    assert len(list(table.store.file_references())) == 2


@pytest.mark.objects
def test_an_input_that_vanishes_during_the_merge_fails_the_job(instance: Instance) -> None:
    """DataFusion reads a missing file like a file without rows."""
    table = keyed(instance)
    for value in (1, 2):
        upsert(table, *((key, value) for key in range(100)))
    before = {one.filename for one in table.context.store.file_references()}

    def vanishing(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        done = run(context, tasks[:1])
        assert isinstance(tasks[0], CheckInputs)
        context.objects.delete(before)
        return [*done, *(None for _ in tasks[1:])]

    result, _ = divided(table.context, run_tasks=vanishing)
    assert (result.outcome, "does not exist" in (result.error or "")) == ("retry", True), result.error
    assert {one.filename for one in table.context.store.file_references()} == before


def test_a_damaged_part_is_not_joined(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))

    def damaging(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        done = run(context, tasks)
        for part in done[1:2]:
            data = bytearray(context.objects.get(part.name))
            data[40] ^= 1
            context.objects.delete([part.name])
            context.objects.put(part.name, bytes(data))
        return done

    before = objects_of(table)
    result, _ = divided(table, run_tasks=damaging)
    assert (result.outcome, "changed after it was written" in (result.error or "")) == ("retry", True)
    assert objects_of(table) == before


def test_a_job_that_runs_twice_commits_once(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))
    [job] = taken(table)
    regions = key_ranges(table, job, 2)
    results = [run_divided(table, job, regions, 0, run).outcome for _ in range(2)]
    assert results == ["committed", "superseded"]
    assert len(list(table.store.file_references())) == 1
    assert len(objects_of(table)) == 3 * 2


def test_tasks_that_run_twice_count_once(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))

    def twice(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        run(context, tasks)
        return run(context, tasks)

    result, _ = divided(table, run_tasks=twice)
    assert (result.outcome, result.rows_written) == ("committed", 2_000)
    assert keys_in(table, result.filename or "") == sorted([*range(1_000)] * 2)
    assert len(objects_of(table)) == 3 * 2


def test_an_interrupted_job_leaves_nothing(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))
    before = objects_of(table)

    def interrupted(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        run(context, tasks)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        divided(table, run_tasks=interrupted)
    assert objects_of(table) == before


def test_the_error_of_a_task_is_in_the_result(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, range(1_000))

    def fails(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        raise JobFailed("its Python process died")

    assert divided(table, run_tasks=fails)[0].error == "its Python process died"
