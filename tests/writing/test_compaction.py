"""Compactions of real files: the rows merged, the references committed, and the state after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from data_files import SKETCHES, add_file, keys_in, objects_of
from runners import EXPIRE_LEASE

from dormouse.errors import CommitOutcomeUnknown, InvalidInput
from dormouse.postgres import ConnectionSupplier
from dormouse.writing import compaction
from dormouse.writing import compaction_job as task
from dormouse.writing.compaction import compact_in_threads
from tests.standard import OF_KEYS
from tests.stored import assign, at_once, query, unreferenced, wait_until
from tests.support.model import Schema, TableProperties, encode_key
from tests.support.objects import ObjectStore
from tests.support.state import Catalog, CompactionJob, TableContext, WriteAttempts
from tests.support.writing import FileSketches, compact, run_compaction

NewTable = Callable[..., TableContext]
PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    """A table whose compaction jobs have two files each."""
    return new_table(**PAIRS)


def take_job(table: TableContext) -> CompactionJob:
    table.jobs.create()
    [job] = table.jobs.take(1)
    return job


def attempts(table: TableContext) -> int:
    text = "select count(*) from write_attempt where table_id = %s"
    return int(query(table.supplier, text, table.table.table_id)[0][0])


def assert_nothing_is_left_but(table: TableContext, *filenames: str) -> None:
    """Checks that the table's only objects are these files and their sketches, and that no job or attempt is
    left.
    """
    assert objects_of(table) == {name + suffix for name in filenames for suffix in ("", SKETCHES)}
    assert (table.jobs.count(), attempts(table)) == ((0, 0), 0)


def test_a_round_merges_a_leafs_files_into_one(table: TableContext) -> None:
    inputs = [add_file(table, "a", [1, 3, 5]), add_file(table, "b", [2, 3, 4])]
    report = compact(table)
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == [1, 2, 3, 3, 4, 5]
    assert (reference.row_count, reference.count_approximate, reference.job_id) == (6, False, None)
    assert reference.only_contains_data_for_this_partition
    assert (report.jobs_created, report.jobs_run, report.rows_read, report.rows_written) == (1, 1, 6, 6)
    assert (report.files_in, report.files_out, report.jobs_failed) == (2, 1, 0)
    assert_nothing_is_left_but(table, *inputs, reference.filename)


def test_the_commit_id_of_a_compaction_expires_with_the_history(table: TableContext) -> None:
    for name in "ab":
        add_file(table, name, [1])
    compact(table)
    text = """
        select extract(epoch from expires_at - applied_at)::integer from applied_commit where table_id = %s"""
    [(seconds,)] = query(table.supplier, text, table.table.table_id)
    assert seconds == table.properties.history_retention_seconds


def test_the_facts_and_sketches_of_the_output_are_stored(table: TableContext) -> None:
    add_file(table, "a", [1, 3])
    add_file(table, "b", [2, 9])
    compact(table)
    [file] = (file for file in table.store.all_files(10).files if file.references)
    assert file.byte_count == table.objects.size(file.filename)
    keys = [encode_key(table.schema.row_keys, [key]) for key in (1, 9)]
    assert (file.row_count, [file.min_key, file.max_key]) == (4, keys)
    assert FileSketches.from_bytes(table.objects.get(file.filename + SKETCHES)).row_count == 4


def test_a_compaction_leaves_out_rows_of_other_partitions(new_table: NewTable) -> None:
    table = new_table(split_points=[10], **PAIRS)
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    add_file(table, "wide", [1, 2, 11, 12, 13, 14], [left, right])
    add_file(table, "narrow", [3], [left])
    compact(table)
    [reference] = table.store.file_references_in([left])
    assert keys_in(table, reference.filename) == [1, 2, 3]
    assert (reference.row_count, reference.count_approximate) == (3, False)
    assert len(table.store.file_references_in([right])) == 1


def test_a_job_commits_although_its_partition_was_split_meanwhile(table: TableContext) -> None:
    for name in ("a", "b"):
        add_file(table, name, [1, 20])
    job = take_job(table)
    table.partitions.split("root", 10)
    assert run_compaction(table, job, 0).outcome == "committed"
    assert [(r.partition_id, r.row_count) for r in table.store.file_references()] == [("root", 4)]


def test_a_compaction_applies_the_filter_of_the_table(table: TableContext) -> None:
    """All rows of the files are too old, so the compaction writes no output file and no sketch."""
    record = replace(table.table, properties=TableProperties(filter="age_off(key, 1000)", **PAIRS))
    aged = TableContext(table.dsn, table.supplier, table.objects, record)
    inputs = [add_file(aged, "a", [1, 2]), add_file(aged, "b", [3])]
    report = compact(aged)
    assert (report.jobs_run, report.rows_read, report.rows_written, report.files_out) == (1, 3, 0, 0)
    assert list(aged.store.file_references()) == []
    assert unreferenced(aged.store) == sorted(inputs)
    assert_nothing_is_left_but(aged, *inputs)


def test_a_round_runs_earlier_jobs_and_reports_progress(table: TableContext) -> None:
    for name in "abcd":
        add_file(table, name, [1, 2, 3])
    assert table.jobs.create() == 2
    reports: list[tuple[int, int | None]] = []
    report = compact(table, create=False, progress=lambda *args: reports.append(args))
    assert reports == [(1, 2), (2, 2)]
    assert (report.jobs_created, report.jobs_run) == (0, 2)


def test_an_unknown_engine_is_refused(table: TableContext) -> None:
    with pytest.raises(InvalidInput, match="'warp'"):
        compact(table, engine="warp")


def test_a_job_with_a_corrupt_file_is_given_up_while_others_run(table: TableContext) -> None:
    bad, good = add_file(table, "bad", [1]), add_file(table, "good", [2])
    more = [add_file(table, name, [3, 4]) for name in ("c", "d")]
    table.objects.delete([bad])
    table.objects.put(bad, b"PAR1 this is no Parquet PAR1")
    report = compact(table)
    assert (report.jobs_run, report.jobs_failed, report.given_up) == (1, 3, 1)
    assert bad in report.errors[0]
    [output] = (r for r in table.store.file_references() if r.filename not in (bad, good))
    assert {r.job_id for r in table.store.file_references()} == {None}
    assert_nothing_is_left_but(table, bad, good, *more, output.filename)


def test_a_retry_that_succeeds_ends_the_job(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [add_file(table, name, [1]) for name in "ab"]
    fails = iter([OSError(28, "No space left on device"), None])
    merge = task.merge_sorted

    def merge_sometimes(inputs: Any, schema: Schema, path: Path, **more: Any) -> Any:
        path.write_bytes(b"half a file")
        if error := next(fails):
            raise error
        path.unlink()
        return merge(inputs, schema, path, **more)

    monkeypatch.setattr(task, "merge_sorted", merge_sometimes)
    report = compact(table)
    assert (report.jobs_run, report.jobs_failed, report.given_up, report.errors) == (1, 1, 0, ())
    assert_nothing_is_left_but(table, *names, *(r.filename for r in table.store.file_references()))


def test_another_thread_may_take_a_failed_job_before_the_first_one_goes_on(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = add_file(table, "bad", [1])
    for name in ("good", "c", "d"):
        add_file(table, name, [2])
    table.objects.delete([bad])
    table.objects.put(bad, b"PAR1 this is no Parquet PAR1")
    failed, again, run = threading.Event(), threading.Event(), compaction.run_compaction

    def run_twice(context: TableContext, job: CompactionJob, *given: Any, **options: Any) -> Any:
        if job.attempt > 1:
            again.set()
        result = run(context, job, *given, **options)
        if job.attempt == 1 and result.outcome == "retry":
            failed.set()
            assert again.wait(60), "the other thread takes the job"
        elif job.attempt == 1:
            assert failed.wait(60)
        return result

    monkeypatch.setattr(compaction, "run_compaction", run_twice)
    assert table.jobs.create() == 2
    results = list(compact_in_threads(table, 0, threads=2))
    assert sorted(result.outcome for result in results) == ["committed", "given_up", "retry", "retry"]


def test_a_job_delivered_twice_is_committed_once(table: TableContext) -> None:
    for name in "ab":
        add_file(table, name, range(20_000))
    job = take_job(table)
    results = at_once(*[lambda: run_compaction(table, job, 0)] * 4)
    assert sorted(result.outcome for result in results) == ["committed", *["superseded"] * 3]
    [reference] = table.store.file_references()
    assert len(keys_in(table, reference.filename)) == 40_000
    assert_nothing_is_left_but(table, *unreferenced(table.store), reference.filename)


def test_a_job_run_again_after_its_inputs_were_replaced_is_superseded(table: TableContext) -> None:
    names = [add_file(table, name, [1]) for name in "ab"]
    job = take_job(table)
    assert run_compaction(table, job, 0).outcome == "committed"
    table.objects.delete([name + suffix for name in names for suffix in ("", SKETCHES)])
    assert run_compaction(table, job, 0).outcome == "superseded"
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == [1, 1]


def test_an_old_attempt_cannot_end_the_lease_of_a_new_one(table: TableContext) -> None:
    add_file(table, "a", [1])
    add_file(table, "b", [1])
    table.jobs.create()
    [old] = table.jobs.take(1, lease_seconds=-1)
    [new] = table.jobs.take(1)
    assert table.jobs.fail(old, "late") == "superseded"
    table.jobs.put_back([old])
    assert table.jobs.take(1) == []
    assert run_compaction(table, new, 0).outcome == "committed"


def test_a_job_that_kills_its_workers_is_given_up_and_the_next_one_runs(
    new_table: NewTable, caplog: pytest.LogCaptureFixture
) -> None:
    table = new_table(compaction_attempts_max=1, **PAIRS)
    deadly = {add_file(table, name, [1]) for name in "ab"}
    table.jobs.create()
    assert table.jobs.take(1, lease_seconds=-1)
    for name in "cd":
        add_file(table, name, [1])
    counts: list[int] = []
    report = compact(table, progress=lambda done, jobs: counts.append(done))
    assert (report.jobs_run, report.given_up, counts) == (1, 1, [1, 2])
    assert report.errors == ("the process that compacted partition root died, at every attempt",)
    assert "died, at every attempt" in caplog.text
    references = {r.filename: r.job_id for r in table.store.file_references()}
    assert (len(references), {references.get(name, "gone") for name in deadly}) == (3, {None})


@pytest.mark.parametrize("applied", [True, False])
def test_the_commit_id_decides_an_unknown_outcome(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    names = [add_file(table, name, [1]) for name in "ab"]
    job = take_job(table)
    run, lost = task.run_transaction, iter([True])

    def lose_the_answer(*args: Any, **more: Any) -> Any:
        if not next(lost, False):
            return run(*args, **more)
        if applied:
            run(*args, **more)
        raise CommitOutcomeUnknown("the connection died")

    monkeypatch.setattr(task, "run_transaction", lose_the_answer)
    assert run_compaction(table, job, 0).outcome == "committed"
    [reference] = table.store.file_references()
    assert_nothing_is_left_but(table, *names, reference.filename)


def test_an_outcome_that_stays_unknown_deletes_nothing(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        add_file(table, name, [1])
    job, run = take_job(table), task.run_transaction

    def never_an_answer(*args: Any, **more: Any) -> Any:
        run(*args, **more)
        raise CommitOutcomeUnknown("the connection died")

    monkeypatch.setattr(task, "run_transaction", never_an_answer)
    assert run_compaction(table, job, 0).outcome == "superseded"
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == [1, 1]


def test_an_abandoned_attempt_commits_nothing_and_the_job_is_retried(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [add_file(table, name, [1]) for name in "ab"]
    job, merge = take_job(table), task.merge_sorted

    def slow_merge(*args: Any, **more: Any) -> Any:
        facts = merge(*args, **more)
        query(
            table.supplier,
            "update write_attempt set abandoned_at = now() where table_id = %s",
            table.table.table_id,
        )
        return facts

    monkeypatch.setattr(task, "merge_sorted", slow_merge)
    assert run_compaction(table, job, 0).outcome == "retry"
    assert {r.filename for r in table.store.file_references()} == set(names)
    monkeypatch.undo()
    assert compact(table, create=False).jobs_run == 1


def test_an_interrupted_round_releases_its_jobs_without_waiting_for_merges(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        add_file(table, f"file-{number}", [number])
    merging, resume, merge, calls = threading.Event(), threading.Event(), task.merge_sorted, count()

    def first_fast_then_slow(*args: Any, **more: Any) -> Any:
        facts = merge(*args, **more)
        if next(calls) == 0:
            merging.wait(60)
        else:
            merging.set()
            resume.wait(60)
        return facts

    def interrupt(*_: int | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(task, "merge_sorted", first_fast_then_slow)
    with pytest.raises(KeyboardInterrupt):
        compact(table, progress=interrupt)
    assert not resume.is_set()
    assert table.jobs.count() == (2, 0)
    wait_until(lambda: attempts(table) == 0)
    assert {job.attempt for job in table.jobs.take(2, lease_seconds=-1)} == {1}
    resume.set()
    wait_until(lambda: not any(t.name.startswith("dormouse-compaction") for t in threading.enumerate()))
    [output] = (r.filename for r in table.store.file_references() if r.row_count == 2)
    assert len(objects_of(table)) == 2 * 7
    assert (output in objects_of(table), attempts(table)) == (True, 0)
    assert compact(table, create=False).jobs_run == 2


def test_objects_in_s3_are_merged_in_s3(
    dsn: str, supplier: ConnectionSupplier, s3_store: ObjectStore
) -> None:
    schema = OF_KEYS
    record = Catalog(supplier, WriteAttempts(supplier, s3_store)).create(
        "t", schema, TableProperties(**PAIRS)
    )
    table = TableContext(dsn, supplier, s3_store, record)
    names = [add_file(table, "a", [1, 3]), add_file(table, "b", [2])]
    assert compact(table).jobs_run == 1
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == [1, 2, 3]
    assert_nothing_is_left_but(table, *names, reference.filename)


def test_jobs_with_one_id_in_two_partitions_both_commit(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, both, merge = new_table(split_points=[100]), threading.Barrier(2), task.merge_sorted
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    files = [add_file(table, leaf, [100 * number], [leaf]) for number, leaf in enumerate(leaves)]
    table.store.assign_job_ids(map(partial(assign, "job"), leaves, files))

    def merge_both(*args: Any, **options: Any) -> Any:
        both.wait(60)
        return merge(*args, **options)

    monkeypatch.setattr(task, "merge_sorted", merge_both)
    results = list(compact_in_threads(table, 0, threads=2))
    assert {(one.partition_id, one.outcome) for one in results} == {(leaf, "committed") for leaf in leaves}


def test_the_lease_of_a_running_job_is_short_and_renewed(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_file(table, "a", [1])
    add_file(table, "b", [2])
    table.jobs.create()
    monkeypatch.setattr(compaction, "LEASE_SECONDS", 2.0)
    merge = task.merge_sorted

    def lease() -> datetime:
        text = "select leased_until from compaction_job where table_id = %s"
        return query(table.supplier, text, table.table.table_id)[0][0]  # type: ignore[no-any-return]

    def merge_late(*args: Any, **options: Any) -> Any:
        first = lease()
        assert first - datetime.now(UTC) < timedelta(seconds=3)
        wait_until(lambda: lease() > first, 20)
        return merge(*args, **options)

    monkeypatch.setattr(task, "merge_sorted", merge_late)
    [result] = compact_in_threads(table, 0)
    assert result.outcome == "committed"


@pytest.mark.parametrize("end", ["put back", "failed", "taken", "released"])
def test_only_the_holder_of_a_job_renews_its_lease(table: TableContext, end: str) -> None:
    add_file(table, "a", [1])
    add_file(table, "b", [2])
    job, others = take_job(table), []
    if end == "put back":
        table.jobs.put_back([job])
    elif end == "failed":
        assert table.jobs.fail(job, "it failed") == "retry"
    elif end == "taken":
        query(table.supplier, EXPIRE_LEASE, table.table.table_id)
        others = table.jobs.take(1, 0.0)
    else:
        table.store.unassign_job(job.job_id)
    table.jobs.renew([job], 60.0)
    assert table.jobs.count()[1] == 0
    table.jobs.renew(others, 60.0)
    assert table.jobs.count()[1] == len(others)


def test_a_lease_is_not_renewed_beyond_the_end_of_its_run(table: TableContext) -> None:
    add_file(table, "a", [1])
    add_file(table, "b", [2])
    table.jobs.create()
    run_id = str(uuid4())
    table.jobs.hand_over(run_id, 1, 30.0)
    jobs = table.jobs.take(1, 1.0, run_id=run_id)
    table.jobs.renew(jobs, 60.0)
    text = "select leased_until = run_until from compaction_job where table_id = %s"
    assert query(table.supplier, text, table.table.table_id) == [(True,)]
