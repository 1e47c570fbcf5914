"""Tests of compaction jobs: chosen as by a Python model, made once, leased, released and given up."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import pytest

from tests.stored import (
    assign,
    at_once,
    blocked,
    check,
    jobs_of,
    live,
    query,
    ref,
    replace,
    transaction,
    wait_until,
)
from tests.support.state import TableContext

Files = list[tuple[int, str]]
"""Files as (number of rows, filename)."""


def batches(files: Files, size: int) -> Iterable[Files]:
    return (files[n : n + size] for n in range(0, len(files), size))


def meets(files: Files, ratio: float, keyed: bool = False) -> bool:
    """Returns whether the other files together have enough rows to be merged with the last and largest file.

    These are `ratio` times its rows. In a keyed table, 100,000 rows or a sixteenth are enough too, whichever
    is more. An empty list never has enough rows.
    """
    if not files:
        return False
    others, largest = sum(rows for rows, _ in files[:-1]), files[-1][0]
    return others >= ratio * largest or (keyed and others >= max(100_000, largest / 16))


def basic(files: Files, size: int) -> list[Files]:
    return [batch for batch in batches(sorted(files), size) if len(batch) == size]


def size_ratio(files: Files, size: int, ratio: float, keyed: bool = False) -> list[Files]:
    ratio = ratio if ratio < size - 1 else (size - 1) / 2
    ratio = min(ratio, 0.25) if keyed else ratio
    kept = sorted(files)
    while kept and not meets(kept, ratio, keyed):
        kept.pop()
    return [batch for batch in batches(kept, size) if len(batch) > 1 and meets(batch, ratio, keyed)]


def created(table: TableContext) -> list[tuple[str, list[int]]]:
    """Returns (partition id, sorted row counts of the files) of each job.

    Names are left out, because a job may take any of several files with equally many rows.
    """
    by_job: dict[tuple[str, str], list[int]] = defaultdict(list)
    for partition_id, _, rows, job in live(table.store):
        if job is not None:
            by_job[partition_id, job].append(rows)
    return sorted((partition_id, sorted(rows)) for (partition_id, _), rows in by_job.items())


@pytest.mark.parametrize("strategy", ["basic", "size_ratio", "keyed"])
@pytest.mark.parametrize("seed", range(6))
def test_jobs_are_those_that_the_model_chooses(
    new_table: Callable[..., TableContext], strategy: str, seed: int
) -> None:
    is_keyed = strategy == "keyed"
    chance = random.Random(seed)
    size, ratio = chance.randint(2, 12), chance.choice([0.5, 1, 1.5, 2, 3, 7])
    table = new_table(
        split_points=range(20),
        compaction_strategy="size_ratio" if is_keyed else strategy,
        compaction_batch_files=size,
        size_ratio=ratio,
        keep="newest_row" if is_keyed else "every_row",
    )
    expected = []
    for leaf in table.partitions.leaves():
        largest = chance.choice([0, 3, 100, 10**6, 10**7])
        names = [f"{leaf.partition_id}/{n}" for n in range(chance.randint(0, 40))]
        files = [(int(largest * chance.random() ** 3), name) for name in names]
        table.store.add_files(ref(name, leaf.partition_id, rows) for rows, name in files)
        taken = [name for name in names if chance.random() < 0.1]
        if taken:
            table.store.assign_job_ids([assign("other", leaf.partition_id, *taken)])
        free = [item for item in files if item[1] not in taken]
        chosen = basic(free, size) if strategy == "basic" else size_ratio(free, size, ratio, is_keyed)
        expected += [(leaf.partition_id, [rows for rows, _ in batch]) for batch in chosen]
        expected += [(leaf.partition_id, sorted(rows for rows, name in files if name in taken))] * bool(taken)
    table.jobs.create()
    assert created(table) == sorted(expected)
    if strategy == "basic":
        assert table.jobs.create() == 0


@pytest.mark.parametrize(("files", "ratio"), [(4, 3), (3, 3), (2, 7), (2, 1)])
def test_files_of_unequal_sizes_are_merged_whatever_the_ratio(
    new_table: Callable[..., TableContext], files: int, ratio: float
) -> None:
    table = new_table(compaction_batch_files=files, size_ratio=ratio)
    table.store.add_files(ref(f"f{rows}", "root", rows=rows) for rows in range(50, 210))
    assert table.jobs.create() == 160 // files


def test_the_model_chooses_the_expected_files() -> None:
    files = [(rows, str(rows)) for rows in (1, 2, 3, 7, 1000)]
    assert size_ratio(files, 10, 0.5) == [files[:4]]
    assert size_ratio(files[:2], 10, 3) == []
    assert basic(files, 2) == [files[:2], files[2:4]]


@pytest.fixture
def table(new_table: Callable[..., TableContext]) -> TableContext:
    return new_table(
        split_points=[0], compaction_strategy="basic", compaction_batch_files=2, compaction_attempts_max=2
    )


def fill(table: TableContext, count: int, partition_id: str = "0-0") -> list[str]:
    names = [f"{partition_id}-{n:03}" for n in range(count)]
    table.store.add_files(ref(name, partition_id, rows=10) for name in names)
    return names


def test_only_leaves_are_compacted(table: TableContext) -> None:
    fill(table, 4, "root")
    assert table.jobs.create() == 0
    fill(table, 4, "0-1")
    assert table.jobs.create() == 2
    table.partitions.split("0-1", 10)
    table.store.add_files([ref("late 1", "0-1"), ref("late 2", "0-1")])
    assert table.jobs.create() == 0


@pytest.mark.parametrize("strategy", ["basic", "size_ratio"])
def test_no_more_jobs_a_run_than_the_limit(new_table: Callable[..., TableContext], strategy: str) -> None:
    table = new_table(
        compaction_strategy=strategy, compaction_batch_files=2, compaction_jobs_max=3, size_ratio=0.5
    )
    fill(table, 10, "root")
    assert [table.jobs.create() for _ in range(3)] == [3, 2, 0]
    assert table.jobs.count() == (5, 0)


def test_concurrent_creations_never_make_the_same_job_twice(table: TableContext) -> None:
    fill(table, 60)
    made = at_once(*[table.jobs.create] * 4)
    assert sum(made) == 30
    assert table.jobs.count() == (30, 0)
    per_job = defaultdict(int)
    for job in jobs_of(table.store).values():
        per_job[job] += 1
    assert set(per_job.values()) == {2}


def test_a_concurrent_creation_and_assignment_share_no_file(table: TableContext) -> None:
    names = fill(table, 40)
    claims = [lambda n=n: table.store.assign_job_ids([assign(f"mine {n}", "0-0", n)]) for n in names[::8]]
    at_once(table.jobs.create, *claims)
    jobs = jobs_of(table.store)
    for name in names[::8]:
        job = jobs["0-0", name]
        assert job is not None
        assert job == f"mine {name}" or sum(j == job for j in jobs.values()) == 2


def test_a_claim_that_commits_during_creation_leaves_no_job_with_a_part_of_its_files(
    table: TableContext,
) -> None:
    fill(table, 6)
    with transaction(table) as conn:
        table.store.assign_job_ids([assign("mine", "0-0", "0-0-000", "0-0-003")], conn=conn)
        creation = threading.Thread(target=table.jobs.create)
        creation.start()
        wait_until(lambda: blocked(table.supplier))
        conn.execute("commit")
    creation.join(60)
    per_job = Counter(jobs_of(table.store).values())
    assert sorted(per_job.values()) == [2, 2, 2]
    assert table.jobs.count() == (3, 0)


@pytest.mark.slow
def test_20_000_files_of_2_000_leaves(new_table: Callable[..., TableContext]) -> None:
    table = new_table(split_points=range(1, 2_000), compaction_strategy="basic", compaction_batch_files=10)
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    table.store.add_files(ref(f"{leaf}/{n}", leaf, n) for leaf in leaves for n in range(10))
    assert table.jobs.create() == 2_000
    assert {len(rows) for _, rows in created(table)} == {10}


def test_a_job_is_taken_with_its_files(table: TableContext) -> None:
    table.store.add_files(
        [ref("b", "0-0", 5), ref("a", "0-0", 7, only_contains_data_for_this_partition=False)]
    )
    table.jobs.create()
    (job,) = table.jobs.take(10)
    assert [(i.filename, i.row_count, i.whole) for i in job.inputs] == [("a", 7, False), ("b", 5, True)]
    assert (job.partition_id, job.attempt, job.row_count) == ("0-0", 1, 12)
    assert table.store.is_assigned([check(job.job_id, "0-0", "a", "b")])
    assert table.jobs.count() == (1, 1)


def test_a_job_over_two_partitions_is_taken_as_one_for_each(table: TableContext) -> None:
    """Each output of a job has one partition. Only a direct call of `assign_job_ids` makes such a job."""
    table.store.add_files([ref("a", "0-0"), ref("b", "0-1"), ref("c", "0-0")])
    table.store.assign_job_ids([assign("j", "0-0", "a", "c"), assign("j", "0-1", "b")])
    found = {job.partition_id: [i.filename for i in job.inputs] for job in table.jobs.take(10)}
    assert found == {"0-0": ["a", "c"], "0-1": ["b"]}


def test_a_leased_job_is_not_taken_again(table: TableContext) -> None:
    fill(table, 8)
    table.jobs.create()
    assert len(table.jobs.take(3)) == 3
    assert len(table.jobs.take(3)) == 1
    assert table.jobs.take(3) == []


def test_concurrent_takers_share_no_job(table: TableContext) -> None:
    fill(table, 80)
    table.jobs.create()
    taken = [job.job_id for jobs in at_once(*[lambda: table.jobs.take(10)] * 4) for job in jobs]
    assert len(taken) == len(set(taken))
    taken += [job.job_id for job in table.jobs.take(40)]
    assert len(taken) == len(set(taken)) == 40


def test_a_job_whose_lease_expired_is_taken_again(table: TableContext) -> None:
    fill(table, 2)
    table.jobs.create()
    (first,) = table.jobs.take(1, lease_seconds=0)
    (second,) = table.jobs.take(1)
    assert (first.job_id, first.attempt, second.attempt) == (second.job_id, 1, 2)


def test_a_job_that_failed_is_taken_again_and_after_its_last_attempt_given_up(table: TableContext) -> None:
    names = fill(table, 2)
    table.jobs.create()
    (first,) = table.jobs.take(1)
    assert table.jobs.fail(first, "broken\x00" * 1000) == "retry"
    assert table.jobs.count() == (1, 0)
    (second,) = table.jobs.take(1)
    assert second.attempt == 2
    assert table.jobs.fail(second, "again") == "given_up"
    assert table.jobs.count() == (0, 0)
    assert jobs_of(table.store) == {("0-0", name): None for name in names}
    assert table.jobs.create() == 1


def test_a_job_that_kills_its_runners_is_given_up_too(table: TableContext) -> None:
    """A process that ran out of memory reports nothing, but its lease ends."""
    names = fill(table, 2)
    table.jobs.create()
    assert [len(table.jobs.take(1, lease_seconds=0)) for _ in range(3)] == [1, 1, 0]
    assert table.jobs.count() == (0, 0)
    assert jobs_of(table.store) == {("0-0", name): None for name in names}


def test_a_late_failure_does_not_end_another_runners_lease(table: TableContext) -> None:
    fill(table, 2)
    table.jobs.create()
    (late,) = table.jobs.take(1, lease_seconds=0)
    table.jobs.take(1)
    assert table.jobs.fail(late, "late") == "superseded"
    assert table.jobs.take(1) == []


def test_a_job_whose_files_were_replaced_no_longer_exists(table: TableContext) -> None:
    names = fill(table, 2)
    table.jobs.create()
    (job,) = table.jobs.take(1)
    table.store.replace_file_references([replace(job.job_id, names, "out", "0-0")])
    assert table.jobs.count() == (0, 0)
    assert table.jobs.fail(job, "late") == "superseded"
    assert jobs_of(table.store) == {("0-0", "out"): None}


def test_a_job_without_files_is_forgotten(table: TableContext) -> None:
    fill(table, 2)
    table.jobs.create()
    query(table.supplier, f"delete from file_reference_{table.table.table_id}")
    assert table.jobs.take(1) == []
    assert table.jobs.count() == (0, 0)


def test_tables_do_not_take_each_others_jobs(new_table: Callable[..., TableContext]) -> None:
    one, two = (new_table(compaction_strategy="basic", compaction_batch_files=2) for _ in range(2))
    fill(one, 4, "root")
    assert two.jobs.create() == 0
    assert one.jobs.create() == 2
    assert two.jobs.take(5) == []
    assert two.jobs.count() == (0, 0)
    assert one.jobs.count() == (2, 0)
