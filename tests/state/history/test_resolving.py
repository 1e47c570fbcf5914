"""Deletions by values: each file is examined once, and readers skip deletions that match none of its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.aws.schedules import runs
from dormouse.errors import ReplaceRequestsFailed
from dormouse.model.file_reference import ReplaceFileReferencesRequest
from dormouse.reading import scan_session
from dormouse.reading.scan_session import look_at
from dormouse.state.files.compaction_jobs import CompactionJobs
from dormouse.state.files.deletions import Noted
from dormouse.writing import compaction_job
from dormouse.writing.compaction_job import JobDeletions
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance, Table
from tests.support.reading import KeyRanges, plan_query
from tests.support.state import LAYOUTS

SCHEMA = OF_K_AND_NUMBERS
FILES = 5


def filled(instance: Instance, layout: str = "file_table", **properties: Any) -> Table:
    """Returns a table of five files with 40 rows each.

    In each file, 39 rows have the file's number in `v`, and one row has 7.
    """
    given = dm.TableProperties(
        **{"compaction_strategy": "basic", "compaction_batch_files": 100, **properties}
    )
    table = instance.create_table("t", SCHEMA, layout=layout, properties=given)
    for number in range(FILES):
        values = [number] * 39 + [7]
        table.ingest(pa.table({"k": [40 * number + n for n in range(40)], "v": values}))
    return table


def applied(table: Table) -> list[tuple[int, ...]]:
    """Returns the ids of the deletions that a reader applies to each file, in key order of the files."""
    scans = [scan for group in plan_query(table.context, KeyRanges()) for scan in group]
    order = {file.filename: file.min_key or b"" for file in table.file_page()}
    scans.sort(key=lambda scan: order[scan.filename])
    return [tuple(one.deletion_id for one in scan.deletions) for scan in scans]


def count(table: Table) -> int:
    return sum(batch.num_rows for batch in table.query(columns=["k"]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_file_is_read_once(instance: Instance, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, looks = filled(instance, layout), list[str]()
    cut = table.history.record_cut()
    real = scan_session.count_rows

    def noted(context: Any, filename: str, *given: Any) -> dict[int, int]:
        looks.append(filename)
        return real(context, filename, *given)

    monkeypatch.setattr(scan_session, "count_rows", noted)
    names = {file.filename for file in table.file_page()}
    table.delete({"v": 1})
    table.delete({"v": 9})
    assert applied(table) == [(1, 2)] * FILES
    report = table.compact()
    assert (report.jobs_created, report.jobs_looked, report.jobs_run) == (FILES, FILES - 1, 1)
    assert sorted(looks) == sorted(names)
    assert applied(table) == [()] * FILES
    assert count(table) == 40 * FILES - 39
    now = {file.filename for file in table.files.all_files(0).files}
    assert len(names & now) == FILES - 1, "only the file that has many such rows was written anew"
    table.collect_garbage()
    assert not table.deletions(), "no file needs them"
    looks.clear()
    assert not table.compact().jobs_created
    assert not looks
    assert sum(batch.num_rows for batch in table.query(columns=["k"], as_of=cut)) == 40 * FILES
    table.delete({"v": 3})
    table.convert_layout(LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)])
    table.compact()
    assert applied(table) == [()] * FILES


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_with_few_rows_stay_until_the_deletion_is_old(
    instance: Instance, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance, layout)
    names = {file.filename for file in table.file_page()}
    table.delete({"v": 7})
    table.delete({"k": 5})
    table.delete({"v": 8})
    assert table.compact().jobs_looked == FILES
    assert applied(table) == [(1, 2), *[(1,)] * (FILES - 1)], "of the others none is applied to any"
    assert {file.filename for file in table.file_page()} == names
    table.convert_layout(LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)])
    assert applied(table) == [(1, 2), *[(1,)] * (FILES - 1)]
    assert count(table) == 39 * FILES - 1
    got = instance.sql("select count(*) as n from t").read_all().to_pylist()
    assert got == [{"n": 39 * FILES - 1}]
    table.collect_garbage()
    assert [one.deletion_id for one in table.deletions()] == [1, 2], "the third is done with"
    assert not table.compact().jobs_created
    with table.context.supplier.connection() as conn:
        conn.execute("update deletion set deleted_at = deleted_at - interval '8 days'")
    report = table.compact()
    assert (report.jobs_run, report.rows_written) == (1, 39 * FILES - 1)
    table.collect_garbage()
    assert not table.deletions()
    assert count(table) == 39 * FILES - 1


@pytest.mark.slow
def test_an_undone_deletion_is_counted_and_applies_when_it_is_pending_again(instance: Instance) -> None:
    """A look also counts the rows of a deletion that a restore undid: another restore may bring it back."""
    table = filled(instance)
    before = table.history.record_cut("before")
    table.delete({"v": 7})
    deleted = table.history.record_cut("deleted")
    table.restore(to=before)
    table.delete({"v": 100})
    table.compact()
    assert applied(table) == [()] * FILES
    assert count(table) == 40 * FILES
    table.restore(to=deleted)
    assert applied(table) == [(1,)] * FILES
    assert count(table) == 39 * FILES
    assert sum(batch.num_rows for batch in table.query(as_of="before")) == 40 * FILES


def test_a_deletion_during_a_look_does_not_count_as_looked_at(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance)
    table.delete({"v": 100})
    real, turn = scan_session.count_rows, threading.Lock()

    def slow(context: Any, *given: Any) -> dict[int, int]:
        with turn:  # threads look at the files
            if len(table.deletions()) == 1:
                table.delete({"v": 7})
        return real(context, *given)

    monkeypatch.setattr(scan_session, "count_rows", slow)
    files = [(file.filename, file.byte_count) for file in table.file_page()]
    look_at(table.context, files[:2])
    assert count(table) == 39 * FILES
    assert sorted(applied(table)) == [*[(1, 2)] * 3, *[(2,)] * 2]
    # the result of a slower look does not replace a newer result
    table.context.deletions.note([Noted(files[0][0], 0, [])])
    assert count(table) == 39 * FILES


@pytest.mark.slow
def test_compactions_apply_deletions_that_they_learned_before_a_look(instance: Instance) -> None:
    table = filled(instance, compaction_batch_files=FILES)
    context = table.context
    table.delete({"v": 7})
    context.jobs.create()
    [job] = context.jobs.take(1)
    deletions = JobDeletions.of(context, job)
    look_at(context, [(item.filename, item.byte_count) for item in job.inputs])
    assert applied(table) == [(1,)] * FILES
    later = JobDeletions.of(context, job)
    assert [[one.deletion_id for one in of] for of in later.of_inputs] == [[1]] * FILES
    old = ReplaceFileReferencesRequest(
        job_id=job.job_id,
        partition_id=job.partition_id,
        input_filenames=tuple(item.filename for item in job.inputs),
        new_reference=None,
    )
    with pytest.raises(ReplaceRequestsFailed) as caught:
        context.store.replace_file_references([old])
    assert "DeletionsNotApplied" in str(caught.value.failed), "it has rows of one, though it was looked at"
    with context.attempts.attempt(context.table) as attempt:
        name = attempt.object_name(job.partition_id)
        facts = compaction_job._write(context, job, name, 0, compaction_job.Cancellation(), deletions)
        compaction_job.commit_output(context, job, attempt, name, facts, deletions.till)
    assert facts.row_count == count(table) == 39 * FILES
    assert applied(table) == [()]


@pytest.mark.slow
def test_a_split_keeps_the_results_of_a_look(instance: Instance) -> None:
    table = filled(instance, split_threshold_rows=50, split_min_rows=2)
    table.delete({"v": 7})
    table.compact()
    assert applied(table) == [(1,)] * FILES
    while (report := table.split()).partitions_split or report.references_pushed:
        assert count(table) == 39 * FILES
    table.delete({"v": 2})
    for _ in range(2):
        table.compact()
    assert count(table) == 39 * FILES - 39
    assert {2} & {one for of in applied(table) for one in of} == set()


@pytest.mark.slow
def test_many_deletions_of_one_file_and_bounded_rounds(instance: Instance) -> None:
    table = filled(instance, compaction_jobs_max=2, deletions_max=3)
    for value in range(50, 120):
        table.delete({"v": [value, 1000 + value]})
    for value in range(4):
        table.delete({"k": 40 * 4 + value, "v": 4})
    while (report := table.compact()).jobs_created:
        assert report.jobs_created == report.jobs_looked + report.jobs_run <= 2, "so many at a time"
    assert applied(table) == [()] * FILES
    assert count(table) == 40 * FILES - 4


@pytest.mark.slow
def test_a_job_of_a_look_runs_again_if_its_process_died(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance, compaction_attempts_max=2)
    table.delete({"v": 7})
    table.context.jobs.create_of_deleted()
    jobs = table.context.jobs.take(FILES, lease_seconds=0.0)
    assert [job.looks for job in jobs] == [True] * FILES
    report = table.compact()
    assert report.jobs_looked == FILES
    assert not table.context.jobs.count()[0]
    assert count(table) == 39 * FILES


def test_jobs_of_deletions_are_made_by_the_schedule_of_a_deployment(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, made = filled(instance), list[str]()
    table.delete({"v": 7})
    real: Callable[..., int] = CompactionJobs.create_of_deleted

    def noted(self: CompactionJobs, jobs_max: int | None = None) -> int:
        made.append(f"{jobs_max}")
        return real(self, jobs_max)

    monkeypatch.setattr(CompactionJobs, "create_of_deleted", noted)
    runs._make_jobs_of(table.context.supplier, table.context.table, 3)
    assert made == ["3"], "as many as there is room for"
    assert table.context.jobs.count()[0] == 3
