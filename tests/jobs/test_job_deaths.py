"""The death of workers: when a worker counts as dead. An outage of the database must not count."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest

import dormouse as dm
from dormouse.jobs import runs as pulses
from dormouse.jobs import worker as workers
from dormouse.jobs.claims import DEATHS_MAX, Ending
from dormouse.jobs.job import Claim
from dormouse.postgres import ConnectionSupplier
from tests.stored import query
from tests.support.jobs import Claims, JobStore, Progress
from tests.working import Working, job_store, until

LEASE_SECONDS = 3_600.0


@pytest.fixture
def jobs(supplier: ConnectionSupplier, tmp_path: Path) -> JobStore:
    return job_store(supplier, tmp_path / "objects")


class Hand:
    """A worker of one kind of job. The test calls its steps."""

    def __init__(self, jobs: JobStore, supplier: ConnectionSupplier) -> None:
        self.claims, self.id, self.kind = Claims(supplier), uuid4(), jobs._kind_id("work")
        self._supplier = supplier
        self.claims.register(self.id, [self.kind], "hand", LEASE_SECONDS)

    def claim(self) -> Claim:
        [claim] = self.claims.claim(self.id, {self.kind: 1}, {})
        return claim

    def pulse(self) -> bool:
        return self.claims.pulse(self.id, [self.kind], [], LEASE_SECONDS)[0]

    def set(self, what: str) -> None:
        query(self._supplier, f"update job_worker set {what} where worker_id = '{self.id}'")

    def lease_ends(self) -> None:
        self.set("lease_until = clock_timestamp() - interval '1 minute'")

    def grace_ends(self) -> None:
        self.set(
            "suspected_at = suspected_at - interval '10 minutes', "
            "lease_until = lease_until - interval '10 minutes'"
        )

    def dies(self) -> None:
        """Ends the worker's lease and its grace period, and makes another worker take over its job."""
        self.lease_ends()
        self.claims.take_over()
        self.grace_ends()
        assert self.claims.take_over() == 1


def test_an_expired_lease_is_renewed_while_no_other_worker_has_the_jobs(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    """A job that ends after its worker's lease has expired counts, too."""
    first, second = jobs.start("work", 1), jobs.start("work", 2)
    hand = Hand(jobs, supplier)
    claim = hand.claim()
    hand.lease_ends()
    assert hand.claims.finish(hand.id, [Ending(claim, "COMPLETE", (None, None, None))], [(claim, "1")])
    assert hand.claim().job_id == second
    hand.lease_ends()
    assert hand.pulse()
    assert hand.claims.take_over() == 0
    assert jobs.result(first) == 1
    assert jobs.status(second).attempts == 1


def test_a_worker_has_time_to_renew_a_lease_that_was_found_expired(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    """The database may have been unreachable when the lease expired."""
    job_id, hand = jobs.start("work", 1), Hand(jobs, supplier)
    hand.claim()
    hand.lease_ends()
    assert hand.claims.take_over() == 0
    assert hand.claims.take_over() == 0, "the worker still has time to renew its lease"
    assert hand.pulse()
    hand.lease_ends()
    assert hand.claims.take_over() == 0, "a renewal resets the time"
    hand.grace_ends()
    assert hand.claims.take_over() == 1
    assert not hand.pulse()
    assert jobs.status(job_id).is_waiting


def test_the_supposed_death_of_a_live_worker_is_not_counted(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    job_id = jobs.start("work", 1)
    for _ in range(2 * DEATHS_MAX):
        hand = Hand(jobs, supplier)
        claim = hand.claim()
        hand.dies()
        hand.claims.lives(hand.id, [claim.job_key])
        hand.claims.lives(hand.id, [claim.job_key])  # a repetition, as after a lost answer
    for _ in range(DEATHS_MAX):
        assert not jobs.status(job_id).has_ended
        hand = Hand(jobs, supplier)
        hand.claim()
        hand.dies()
    job = jobs.status(job_id)
    assert (job.state, job.attempts) == ("FAILED", 3 * DEATHS_MAX)
    assert (job.error or "").startswith(f"the processes of {DEATHS_MAX} workers that ran it died")


def test_a_live_worker_that_was_found_dead_reports_that_it_is_alive(
    jobs: JobStore, supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gives up its jobs as soon as it learns of its death, and then runs jobs again."""
    monkeypatch.setattr(pulses, "NEWS_SECONDS", 0.01)
    job_id = jobs.start("work", None)
    gate, runs = threading.Event(), []

    def work(request: Any, progress: Progress) -> str:
        runs.append(progress)
        while not gate.wait(0.01):
            progress.check()
        return "done"

    worker = jobs.worker({"work": work}, lease_seconds=0.3)
    with Working(worker):
        for number in range(DEATHS_MAX + 1):
            until(lambda number=number: len(runs) > number)  # type: ignore[misc]
            # in one transaction, so that the worker cannot renew its lease in between
            take_over_now(supplier, worker._worker_id)
            until(lambda: query(supplier, "select deaths, cardinality(dead_workers) from job") == [(0, 0)])
        gate.set()
        until(lambda: jobs.status(job_id).has_ended)
    assert jobs.result(job_id) == "done"


def take_over_now(supplier: ConnectionSupplier, worker_id: UUID) -> None:
    """Takes over the job of a live worker, as if only that worker could not reach the database."""
    with supplier.connection() as conn, conn.transaction():
        conn.execute(
            "update job_worker set lease_until = clock_timestamp() - interval '20 minutes', "
            "suspected_at = clock_timestamp() - interval '10 minutes' where worker_id = %s",
            [worker_id],
        )

        from dormouse.jobs.claims import _TAKE_OVER

        [(again, gone, _)] = conn.execute(
            _TAKE_OVER.on(), {"deaths_max": DEATHS_MAX, "grace_seconds_max": 1.0}
        ).fetchall()
        assert (again, gone) == (1, 0)


def test_a_sleeping_worker_that_does_not_come_for_a_job_no_longer_counts(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    """A live worker takes a job within a minute of the job's start. Otherwise it no longer counts as a
    worker.
    """
    hand = Hand(jobs, supplier)
    hand.claims.sleep(hand.id, 86_400.0 + 30.0)
    job_id = jobs.start("work", 1)

    def counted() -> tuple[bool, int]:
        [kind] = jobs.kinds()
        return jobs.status(job_id).has_workers, kind.workers

    assert counted() == (True, 1)
    query(supplier, "update job_worker set asleep_since = asleep_since - interval '1 hour'")
    assert counted() == (True, 1)
    query(supplier, "update job set started_at = started_at - interval '2 minutes'")
    assert counted() == (False, 0)
    hand.claims.awake(hand.id, 30.0)
    assert counted() == (True, 1)
    hand.claims.sleep(hand.id, 86_400.0)
    assert counted() == (True, 1), "a worker that fell asleep after the start counts"


def test_a_sleeping_worker_beside_a_folder_has_a_short_lease(
    jobs: JobStore, supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of a sleeping worker is no longer than the time until its next look for work."""
    left: list[float] = []

    def may_have_work(*_: object) -> bool:
        seconds = "select extract(epoch from lease_until - clock_timestamp())::float8 from job_worker"
        left.extend(seconds for (seconds,) in query(supplier, seconds))
        return True

    monkeypatch.setattr(workers.Worker, "_may_have_work", may_have_work)
    monkeypatch.setattr(workers, "ASK_SECONDS", 0.01)
    with Working(jobs.worker({"work": print}, idle_seconds=0.01, lease_seconds=5.0)):
        until(lambda: left)
    assert left[0] <= 5.0 + 2 * 0.01


WORKER = """
import sys, time
import dormouse as dm
folder, runs = sys.argv[1:]

def work(request, progress):
    with open(runs, "a") as file:
        print("run", file=file)
    for _ in range(3_000):
        progress.check()
        if request["gate"] and __import__("os").path.exists(request["gate"]):
            return "done"
        time.sleep(0.02)

with dm.local(folder) as instance:
    instance.jobs.worker({"work": work}, lease_seconds=3).run()
"""


@pytest.mark.slow
def test_an_outage_of_the_database_does_not_count_as_a_death(tmp_path: Path) -> None:
    """The server is suspended repeatedly for longer than a lease; the first run of the job continues."""
    with local_lake() as folder, dm.local(folder) as instance, ExitStack() as stack:
        gate, runs = tmp_path / "gate", tmp_path / "runs"
        command = [sys.executable, "-c", WORKER, str(folder), str(runs)]
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        job_id = instance.jobs.start("work", {"gate": str(gate)})
        until(runs.exists)
        for _ in range(DEATHS_MAX + 1):
            server = processes_of(folder)
            before = lease_of(instance)
            for process_ in server:
                process_.suspend()
            # the freeze itself is tested, so the test must wait here
            threading.Event().wait(5.0)
            for process_ in server:
                process_.resume()
            until(lambda before=before: lease_of(instance) > before + timedelta(seconds=5))  # type: ignore[misc]
            assert instance.jobs.status(job_id).attempts == 1
        gate.touch()
        until(lambda: instance.jobs.status(job_id).has_ended)
        assert instance.jobs.result(job_id) == "done"
        assert runs.read_text() == "run\n"


def lease_of(instance: Any) -> datetime:
    [(until_,)] = query(
        instance._supplier, "select max(w.lease_until) from job join job_worker w using (worker_id)"
    ) or [(None,)]
    return until_ or datetime.min.replace(tzinfo=UTC)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Returns the processes of a folder's server: its postmaster and all descendants."""
    pid = int((folder / "postgres" / "postmaster.pid").read_text().split()[0])
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


@contextmanager
def local_lake() -> Iterator[Path]:
    import shutil
    import tempfile

    parent = Path(tempfile.mkdtemp(prefix="dormouse-deaths-"))
    try:
        yield parent / "lake"
    finally:
        shutil.rmtree(parent, ignore_errors=True)
