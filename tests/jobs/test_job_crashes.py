"""Workers killed, stopped or disconnected at any step. Each job ends once, and no job is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dormouse.jobs import Worker
from dormouse.jobs.claims import KindsBusy
from dormouse.postgres import ConnectionSupplier
from tests.job_worker import LEASE_SECONDS, hold, job_worker
from tests.support.jobs import JobStore, Progress
from tests.working import Working, job_store, until


@pytest.fixture
def jobs(supplier: ConnectionSupplier, tmp_path: Path) -> JobStore:
    return job_store(supplier, tmp_path / "objects")


BUSY = """
select 1 from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and state <> 'idle'
    and pid <> pg_backend_pid()
"""


def end_leases(supplier: ConnectionSupplier) -> None:
    """Ends the leases of all workers, as if they had not renewed them for too long.

    Before that, waits for transactions of stopped workers, which may have locks or renew a lease.
    """
    with supplier.connection() as conn:
        until(lambda: not conn.execute(BUSY).fetchall())
        conn.execute(
            "update job_worker set lease_until = clock_timestamp() - interval '10 minutes', "
            "suspected_at = clock_timestamp() - interval '10 minutes'"
        )


def take_over(jobs: JobStore, supplier: ConnectionSupplier, job_id: str) -> None:
    """Runs a job of a stopped or killed worker in another one, which returns "second".

    The server of a busy machine may receive a statement of the first worker late, which then renews the
    lease once more. So this ends the leases until the job was run.
    """

    def is_run() -> bool:
        end_leases(supplier)
        jobs.worker({"hold": lambda request, progress: "second"}).run(drain=True)
        return jobs.status(job_id).has_ended

    until(is_run)


def count_ended(supplier: ConnectionSupplier) -> int:
    with supplier.connection() as conn:
        return int(conn.execute("select count(*) from ended_job").fetchall()[0][0])


def holding(jobs: JobStore, file: Path) -> str:
    """Starts a job that runs until the file is deleted, and waits until it runs."""
    job_id = jobs.start("hold", {"file": str(file)})
    until(file.exists)
    return job_id


@pytest.mark.slow
def test_the_job_of_a_killed_worker_is_run_by_another(
    jobs: JobStore, supplier: ConnectionSupplier, dsn: str, tmp_path: Path
) -> None:
    with job_worker(dsn, tmp_path / "objects") as first:
        job_id = holding(jobs, tmp_path / "held")
        first.kill()
        first.wait()
    (tmp_path / "held").unlink()
    assert not jobs.status(job_id).is_waiting
    take_over(jobs, supplier, job_id)
    assert jobs.result(job_id) == "second"
    assert jobs.status(job_id).attempts == 2
    assert count_ended(supplier) == 1


@pytest.mark.slow
def test_a_worker_stopped_for_longer_than_its_lease_finishes_no_job(
    jobs: JobStore, supplier: ConnectionSupplier, dsn: str, tmp_path: Path
) -> None:
    """Another worker has run the job meanwhile. The first worker's result must not replace the second's."""
    with job_worker(dsn, tmp_path / "objects") as first:
        job_id = holding(jobs, tmp_path / "held")
        first.send_signal(signal.SIGSTOP)
        take_over(jobs, supplier, job_id)
        assert jobs.result(job_id) == "second"
        (tmp_path / "held").unlink()
        first.send_signal(signal.SIGCONT)
        first.terminate()
        reported = first.stdout.read()  # type: ignore[union-attr]
    assert "complete=0" in reported
    assert "lost=1" in reported
    assert jobs.result(job_id) == "second"
    assert jobs.status(job_id).attempts == 2
    assert count_ended(supplier) == 1


@pytest.mark.slow
def test_a_worker_that_continues_before_its_job_is_taken_keeps_it(
    jobs: JobStore, supplier: ConnectionSupplier, dsn: str, tmp_path: Path
) -> None:
    """The worker renews its expired lease."""
    with job_worker(dsn, tmp_path / "objects") as worker:
        job_id = holding(jobs, tmp_path / "held")
        worker.send_signal(signal.SIGSTOP)
        end_leases(supplier)
        (tmp_path / "held").unlink()
        worker.send_signal(signal.SIGCONT)
        until(lambda: jobs.status(job_id).has_ended)
        assert jobs.status(job_id).attempts == 1
        worker.terminate()
        reported = worker.stdout.read()  # type: ignore[union-attr]
    assert ("complete=1" in reported, "lost=0" in reported) == (True, True)
    assert count_ended(supplier) == 1


@pytest.mark.slow
def test_a_worker_whose_function_reports_nothing_keeps_its_jobs(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    """The worker renews its lease even if the job's function never reports progress."""
    gate = threading.Event()

    def lease() -> Any:
        with supplier.connection() as conn:
            rows = conn.execute("select lease_until, lease_until - clock_timestamp() from job_worker")
            [found] = rows.fetchall()
            return found

    job_id = jobs.start("work", None)
    with Working(jobs.worker({"work": lambda *_: gate.wait()}, lease_seconds=3, idle_seconds=3_600)):
        until(lambda: not jobs.status(job_id).is_waiting and lease()[1] < timedelta(seconds=3))
        first = lease()[0]
        until(lambda: lease()[0] > first)
        gate.set()
        until(lambda: jobs.status(job_id).has_ended)
    assert (jobs.status(job_id).state, jobs.status(job_id).attempts) == ("COMPLETE", 1)


@pytest.mark.slow
def test_a_job_that_kills_its_processes_fails(
    jobs: JobStore, supplier: ConnectionSupplier, dsn: str, tmp_path: Path
) -> None:
    job_id = jobs.start("die", None)
    for number in range(1, 4):
        with job_worker(dsn, tmp_path / "objects") as process:
            process.wait()
        assert jobs.status(job_id).attempts == number
        end_leases(supplier)
    other = jobs.start("hold", None)
    jobs.worker({"hold": lambda request, progress: "well"}).run(drain=True)
    job = jobs.status(job_id)
    assert (job.state, job.attempts) == ("FAILED", 3)
    assert (job.error or "").startswith("the processes of 3 workers that ran it died, the last was process ")
    assert jobs.result(other) == "well"


@pytest.mark.slow
def test_a_cancelled_job_whose_worker_dies_is_cancelled(
    jobs: JobStore, supplier: ConnectionSupplier, dsn: str, tmp_path: Path
) -> None:
    with job_worker(dsn, tmp_path / "objects") as first:
        job_id = holding(jobs, tmp_path / "held")
        assert jobs.cancel(job_id).is_cancelled
        first.kill()
        first.wait()
    end_leases(supplier)
    jobs.worker({"other": hold}).run(drain=True)
    assert jobs.status(job_id).state == "CANCELLED"


def test_a_cancelled_job_that_is_released_is_cancelled(jobs: JobStore) -> None:
    """The worker is stopped before the job's function checks for a cancellation."""
    started, gate = threading.Event(), threading.Event()

    def work(request: Any, progress: Progress) -> None:
        started.set()
        gate.wait()

    job_id = jobs.start("work", None)
    worker = jobs.worker({"work": work})
    with Working(worker):
        assert started.wait(60)
        jobs.cancel(job_id)
        worker.stop()
    gate.set()
    job = jobs.status(job_id)
    assert (job.state, job.attempts, job.worker is None) == ("CANCELLED", 1, False)
    assert jobs.worker({"work": lambda *_: None}).run(drain=True).complete == 0


@pytest.mark.slow
def test_a_limit_covers_all_workers_and_survives_their_death(
    jobs: JobStore, supplier: ConnectionSupplier, dsn: str, tmp_path: Path
) -> None:
    jobs.limit("hold", 1)
    with job_worker(dsn, tmp_path / "objects") as first:
        holding(jobs, tmp_path / "first")
        second = jobs.start("hold", {"file": str(tmp_path / "second")})
        # a worker with free threads finds no job that it may run
        assert jobs.worker({"hold": hold}).run(drain=True).complete == 0
        assert jobs.status(second).is_waiting
        first.kill()
        first.wait()
    end_leases(supplier)
    jobs.worker({"hold": lambda request, progress: "well"}).run(drain=True)
    assert {job.state for job in jobs.list("hold")} == {"COMPLETE"}


@pytest.mark.slow
def test_a_limit_holds_while_many_claim_at_once(jobs: JobStore) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def work(request: Any, progress: Progress) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1

    jobs.limit("work", 3)
    ids = [jobs.start("work", number) for number in range(60)]
    workers = [jobs.worker({"work": work}, threads=4) for _ in range(4)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    until(lambda: not jobs.list("work", "PROCESSING"))
    for worker, thread in zip(workers, threads, strict=True):
        worker.stop()
        thread.join()
    assert most == 3
    assert all(jobs.status(job_id).state == "COMPLETE" for job_id in ids)


def test_raising_or_removing_a_limit_lets_more_jobs_run(jobs: JobStore) -> None:
    gate = threading.Event()
    jobs.limit("work", 1)
    for number in range(4):
        jobs.start("work", number)

    def running() -> int:
        return sum(not job.is_waiting for job in jobs.list("work"))

    with Working(jobs.worker({"work": lambda *_: gate.wait()}, threads=4)):
        until(lambda: running() == 1)
        jobs.limit("work", 2)
        until(lambda: running() == 2)
        jobs.limit("work", None)
        until(lambda: running() == 4)
        gate.set()


class Killed(BaseException):
    """An exception that stands for the death of the process."""


STEPS = ("register", "look", "claim", "awake", "finish", "take_over", "leave")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("nth", [1, 2])
def test_each_job_ends_once_if_a_worker_is_killed_at_any_step(
    jobs: JobStore,
    supplier: ConnectionSupplier,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    when: str,
    nth: int,
) -> None:
    ids = [jobs.start("work", number) for number in range(3)]
    worker = jobs.worker({"work": lambda request, progress: request * 2}, threads=1)
    _kill_at(monkeypatch, worker, step, when, nth)
    with monkeypatch.context() as patched:
        if step != "leave":
            patched.setattr(worker, "_leave", lambda: None)
        try:
            worker.run(drain=True)
        except Killed:
            monkeypatch.undo()
    monkeypatch.undo()
    end_leases(supplier)
    jobs.worker({"work": lambda request, progress: request * 2}).run(drain=True)
    assert [jobs.result(job_id) for job_id in ids] == [0, 2, 4]
    assert count_ended(supplier) == 3


def _kill_at(monkeypatch: pytest.MonkeyPatch, worker: Worker, step: str, when: str, nth: int) -> None:
    """Makes only this worker die at a step: a service that other tests share may have a worker too."""
    method: Callable[..., Any] = getattr(worker._claims, step)
    calls = 0

    def fatal(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < nth:
            return method(*args, **more)
        if when == "after":
            method(*args, **more)
        raise Killed

    monkeypatch.setattr(worker._claims, step, fatal)


def test_an_interrupted_worker_releases_its_jobs(jobs: JobStore) -> None:
    began, seen = threading.Event(), []

    def work(request: Any, progress: Progress) -> None:
        began.set()
        while True:
            try:
                progress()
            except BaseException as error:
                seen.append(type(error).__name__)
                raise
            threading.Event().wait(0.002)

    job_id = jobs.start("work", None)
    worker = jobs.worker({"work": work})
    with Working(worker):
        began.wait()
        worker.stop()
        worker.stop()
    assert jobs.status(job_id).is_waiting
    until(lambda: seen == ["JobLost"])
    jobs.worker({"work": lambda *_: "again"}).run(drain=True)
    assert jobs.result(job_id) == "again"


def test_lost_connections_lose_no_job(jobs: JobStore, supplier: ConnectionSupplier) -> None:
    """All sessions are ended repeatedly while jobs run."""
    with Working(jobs.worker({"work": lambda request, progress: request}, lease_seconds=LEASE_SECONDS)):
        ids = []
        for number in range(20):
            ids.append(jobs.start("work", number, job_id=f"job-{number}"))
            with supplier.connection() as conn:
                conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where datname = current_database() and pid <> pg_backend_pid()"
                )
        until(lambda: all(jobs.status(job_id).has_ended for job_id in ids))
    assert [jobs.result(job_id) for job_id in ids] == list(range(20))
    assert count_ended(supplier) == 20


def test_draining_waits_for_kinds_that_other_workers_have_locked(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = jobs.worker({"few": lambda request, _: request})
    claim, busy = worker._claims.claim, iter(range(2))

    def others_first(*given: Any, limited: bool = False) -> Any:
        if limited and next(busy, None) is not None:
            raise KindsBusy
        return claim(*given, limited=limited)

    jobs.limit("few", 1)
    job_id = jobs.start("few", "done")
    monkeypatch.setattr(worker._claims, "claim", others_first)
    worker.run(drain=True)
    assert jobs.result(job_id) == "done"
