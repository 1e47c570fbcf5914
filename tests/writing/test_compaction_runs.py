"""Compaction jobs assigned to runs: each job to one run, a limited number to each run, released at
its end.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from dormouse.durability import erasing
from dormouse.durability.erasing import _Erasing
from dormouse.postgres.migrate import MIGRATIONS, migrate
from dormouse.state.files import compaction_jobs
from dormouse.state.files.compaction_jobs import ReleasedJobs, tables_of_run
from tests.small_tables import add, keys, made
from tests.stored import assign, at_once, blocked, jobs_of, query, ref, replace, transaction, wait_until
from tests.support.api import Instance
from tests.support.state import Erasure, TableContext

LAYOUTS = ["file_table", "salted_counts", "dummy_reference"]
ALIVE_SECONDS = 3600.0


def new_run() -> str:
    return str(uuid4())


@pytest.fixture
def table(new_table: Callable[..., TableContext]) -> TableContext:
    """A table with ten jobs of two files each."""
    return filled(new_table(compaction_strategy="basic", compaction_batch_files=2, split_points=[0]))


def filled(table: TableContext, jobs: int = 10) -> TableContext:
    leaf = table.partitions.leaves()[0].partition_id
    table.store.add_files(ref(f"{n:05}", leaf, rows=10) for n in range(2 * jobs))
    assert table.jobs.create() == jobs
    return table


def end(table: TableContext, run_id: str) -> None:
    """Moves the deadline of a run, and the leases of its jobs, into the past."""
    text = """update compaction_job set run_until = now() - interval '1 s',
              leased_until = least(leased_until, now() - interval '1 s') where run_id = %s"""
    query(table.supplier, text, run_id)


def test_a_run_gets_up_to_a_number_of_jobs_and_the_same_ones_again(table: TableContext) -> None:
    one, other = new_run(), new_run()
    handed = table.jobs.hand_over(one, 4, ALIVE_SECONDS)
    assert len(set(handed)) == 4
    assert table.jobs.hand_over(one, 10, ALIVE_SECONDS) == handed
    rest = table.jobs.hand_over(other, 10, ALIVE_SECONDS)
    assert len(rest) == 6 and not set(rest) & set(handed)
    assert table.jobs.hand_over(new_run(), 10, ALIVE_SECONDS) == []
    assert tables_of_run(table.supplier, one) == {table.table.table_id: 4}


def test_only_the_workers_of_a_run_take_its_jobs(table: TableContext) -> None:
    one, other = new_run(), new_run()
    handed = table.jobs.hand_over(one, 4, ALIVE_SECONDS)
    assert table.jobs.due().jobs == 6
    assert (table.jobs.due(one).jobs, table.jobs.due(other).jobs) == (4, 0)
    assert table.jobs.take(10, run_id=other) == []
    assert len(table.jobs.take(10)) == 6
    assert sorted(job.job_id for job in table.jobs.take(10, run_id=one)) == handed
    assert table.jobs.take(10, run_id=one) == []


def test_a_job_that_is_running_is_not_handed_to_a_run(table: TableContext) -> None:
    taken = {job.job_id for job in table.jobs.take(3)}
    assert not taken & set(table.jobs.hand_over(new_run(), 10, ALIVE_SECONDS))


def test_a_job_that_fails_in_a_run_stays_in_the_run(table: TableContext) -> None:
    run_id = new_run()
    table.jobs.hand_over(run_id, 1, ALIVE_SECONDS)
    [job] = table.jobs.take(1, run_id=run_id)
    assert table.jobs.fail(job, "broken") == "retry"
    [again] = table.jobs.take(1, run_id=run_id)
    assert (again.job_id, again.attempt) == (job.job_id, 2)
    table.jobs.put_back([again])
    assert len(table.jobs.take(10)) == 9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unfinished_jobs_of_a_run_are_released_for_the_next_round(
    new_table: Callable[..., TableContext], layout: str
) -> None:
    table = filled(new_table(compaction_strategy="basic", compaction_batch_files=2, layout=layout))
    run_id, other = new_run(), new_run()
    table.jobs.hand_over(run_id, 5, ALIVE_SECONDS)
    kept = table.jobs.hand_over(other, 2, ALIVE_SECONDS)
    done, running = table.jobs.take(2, run_id=run_id)
    table.store.replace_file_references(
        [replace(done.job_id, [i.filename for i in done.inputs], "out", done.partition_id)]
    )
    assert table.jobs.release_run(run_id) == ReleasedJobs(jobs=4, files=8)
    assert table.jobs.release_run(run_id) == ReleasedJobs(0, 0)
    assert table.jobs.fail(running, "late") == "superseded"
    held = [job for job in jobs_of(table.store).values() if job is not None]
    assert len(held) == 2 * (2 + 3) and set(kept) <= set(held)
    assert table.jobs.create() == 4  # of the released files; the new file is left over


def test_jobs_are_released_in_batches(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dormouse.state.files.compaction_jobs.RELEASE_BATCH_JOBS", 3)
    run_id = new_run()
    table.jobs.hand_over(run_id, 10, ALIVE_SECONDS)
    assert table.jobs.release_run(run_id) == ReleasedJobs(10, 20)
    assert set(jobs_of(table.store).values()) == {None}


def test_jobs_of_an_unreported_run_are_free_after_its_deadline(table: TableContext) -> None:
    """This includes jobs that workers of the run have taken: no lease outlives the run."""
    run_id, other = new_run(), new_run()
    handed = table.jobs.hand_over(run_id, 10, ALIVE_SECONDS)
    assert len(table.jobs.take(4, run_id=run_id)) == 4
    lease = "select bool_and(leased_until <= run_until) from compaction_job where run_id = %s"
    assert query(table.supplier, lease, run_id) == [(True,)]
    assert table.jobs.take(10) == []
    end(table, run_id)
    assert table.jobs.take(10, run_id=run_id) == []
    assert len(table.jobs.hand_over(other, 7, ALIVE_SECONDS)) == 7
    local = table.jobs.take(10)
    assert len(local) == 3 and {job.job_id for job in local} < set(handed)
    # a late report of the run does not release jobs that another run has by now
    assert table.jobs.release_run(run_id) == ReleasedJobs(0, 0)
    assert table.jobs.count() == (10, 3)


def test_concurrent_calls_for_one_run_get_the_same_jobs(table: TableContext) -> None:
    run_id = new_run()
    answers = at_once(*[lambda: table.jobs.hand_over(run_id, 4, ALIVE_SECONDS)] * 4)
    assert [len(answer) for answer in answers] == [4] * 4
    assert all(answer == answers[0] for answer in answers)


def test_a_caller_waits_while_another_hands_jobs_to_the_same_run(table: TableContext) -> None:
    """Locked jobs are skipped. Without the wait, the second call would assign other jobs to the run."""
    run_id = new_run()
    values = {"table_id": table.table.table_id, "run_id": run_id, "limit": 4, "seconds": ALIVE_SECONDS}
    answers: list[list[str]] = []
    with transaction(table) as conn:
        for name in ("one_at_a_time", "hand_over"):
            found = conn.execute(compaction_jobs._QUERIES[name].on(), values).fetchall()
        other = threading.Thread(
            target=lambda: answers.append(table.jobs.hand_over(run_id, 4, ALIVE_SECONDS))
        )
        other.start()
        wait_until(lambda: answers or blocked(table.supplier), seconds_max=60)
        conn.execute("commit")
    other.join(60)
    assert answers == [[job for (job,) in found]]


def test_concurrent_runs_share_no_job(table: TableContext) -> None:
    answers = at_once(*[lambda: table.jobs.hand_over(new_run(), 4, ALIVE_SECONDS)] * 4)
    handed = [job for answer in answers for job in answer]
    assert len(handed) == len(set(handed))


def test_create_makes_at_most_the_given_number_of_jobs(new_table: Callable[..., TableContext]) -> None:
    table = new_table(compaction_strategy="basic", compaction_batch_files=2, compaction_jobs_max=3)
    table.store.add_files(ref(f"{n}", "root") for n in range(20))
    assert [table.jobs.create(n) for n in (2, 100, None, 0)] == [2, 3, 3, 0]


def test_a_job_of_two_partitions_is_handed_over_and_released_whole(table: TableContext) -> None:
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    table.store.add_files([ref("a", left), ref("b", right)])
    table.store.assign_job_ids([assign("j", left, "a"), assign("j", right, "b")])
    run_id = new_run()
    assert "j" in table.jobs.hand_over(run_id, 20, ALIVE_SECONDS)
    assert table.jobs.release_run(run_id).files == 22


def test_a_run_ignores_jobs_of_a_dropped_table(table: TableContext) -> None:
    run_id = new_run()
    table.jobs.hand_over(run_id, 3, ALIVE_SECONDS)
    query(table.supplier, "update compaction_job set table_id = -1 where run_id = %s", run_id)
    assert tables_of_run(table.supplier, run_id) == {}


def test_jobs_of_versions_without_runs_belong_to_no_run(empty_dsn: str, tmp_path: Path) -> None:
    for path in sorted(MIGRATIONS.glob("*.sql"))[:2]:
        shutil.copy(path, tmp_path)
    migrate(empty_dsn, tmp_path)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(
            "insert into dormouse.compaction_job (table_id, job_id, partition_id) values (1, 'j', 'p')"
        )
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        # like a process of the older version that still runs
        conn.execute(
            "insert into dormouse.compaction_job (table_id, job_id, partition_id) values (1, 'k', 'p')"
        )
        rows = conn.execute(
            "select job_id, run_id, run_until < now() from dormouse.compaction_job"
        ).fetchall()
    assert sorted(rows) == [("j", None, True), ("k", None, True)]


def test_an_erasure_recreates_jobs_whose_run_deadline_passed(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(instance)
    add(table, 0)
    run, referenced, runs, turns = _Erasing._run_jobs, Erasure.referenced, iter([False]), iter(range(9))

    def late(_: int) -> float:
        query(instance._supplier, "update compaction_job set run_until = now() - interval '1 s'")
        return 0.0

    monkeypatch.setattr(_Erasing, "_run_jobs", lambda *given: next(runs, True) and run(*given))
    monkeypatch.setattr(Erasure, "referenced", lambda self: (next(turns), referenced(self))[1])
    monkeypatch.setattr(erasing, "backoff_seconds", late)
    report = table.erase({"k": 3})
    assert (report.is_finished, report.files) == (True, 1)
    assert keys(table) == [key for key in range(20) if key != 3]
