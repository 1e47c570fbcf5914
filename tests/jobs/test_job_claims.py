"""The SQL statements of workers: claims, notifications, and claims that were lost."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from dormouse.errors import CommitOutcomeUnknown, JobCancelled, JobLost, PayloadUnavailable
from dormouse.jobs import claims
from dormouse.jobs import worker as workers
from dormouse.jobs.claims import Ending
from dormouse.jobs.job import Claim, read_requests
from dormouse.jobs.worker import Sight
from dormouse.payloads.rows import write
from dormouse.postgres import ConnectionSupplier
from tests.support.jobs import Claims, JobStore, Progress
from tests.working import PATIENCE_SECONDS, Working, job_store, until

LEASE_SECONDS = 3_600.0


@pytest.fixture
def jobs(supplier: ConnectionSupplier, tmp_path: Path) -> JobStore:
    return job_store(supplier, tmp_path / "objects")


class Hand:
    """A worker of one kind of job. The test calls its steps."""

    def __init__(
        self,
        jobs: JobStore,
        supplier: ConnectionSupplier,
        kind: str = "work",
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.claims, self.id, self.kind = Claims(supplier), uuid4(), jobs._kind_id(kind)
        self._supplier = supplier
        self.claims.register(self.id, [self.kind], "hand", lease_seconds)

    def claim(self, *, limited: bool = False) -> list[Claim]:
        return self.claims.claim(self.id, {self.kind: 1}, {}, limited=limited)

    def ends(self, claim: Claim, result: Any = None) -> bool:
        done = Ending(claim, "COMPLETE", (None, None, None))
        text = str(claim.token if result is None else result)
        return self.claims.finish(self.id, [done], [(claim, text)]) != set()

    def dies(self) -> None:
        with self._supplier.connection() as conn:
            conn.execute(
                "update job_worker set lease_until = clock_timestamp() - interval '10 minutes', "
                "suspected_at = clock_timestamp() - interval '10 minutes' where worker_id = %s",
                [self.id],
            )

    def lease_seconds(self) -> float:
        return lease_seconds(self._supplier, self.id)


def lease_seconds(supplier: ConnectionSupplier, worker_id: UUID) -> float:
    with supplier.connection() as conn:
        [(left,)] = conn.execute(
            "select extract(epoch from lease_until - clock_timestamp())::float8 from job_worker "
            "where worker_id = %s",
            [worker_id],
        ).fetchall()
    return float(left)


@contextmanager
def notified(supplier: ConnectionSupplier, expected: str | int) -> Iterator[None]:
    """Checks that the first notification to sleeping workers during the block is the expected one."""
    with supplier.connection() as conn:
        conn.execute("listen dormouse_jobs")
        yield
        [first] = conn.notifies(timeout=PATIENCE_SECONDS / 60, stop_after=1)
        conn.execute("unlisten *")
    assert first.payload == str(expected)


def test_a_released_claim_ends_no_job(jobs: JobStore, supplier: ConnectionSupplier) -> None:
    """A claim that was given back cannot end its job, even if the job waits, runs again or has ended."""
    job_id, me = jobs.start("work", None), Hand(jobs, supplier)
    [first] = me.claim()
    me.claims.give_back(me.id, [me.kind])
    assert not me.ends(first)
    assert jobs.status(job_id).is_waiting
    [second] = me.claim()
    assert not me.ends(first)
    me.claims.give_back(me.id, [me.kind], [second.job_key])
    assert not jobs.status(job_id).is_waiting
    assert me.ends(second)
    assert not me.ends(first)
    assert jobs.result(job_id) == 2


@pytest.mark.parametrize("kept_characters_max", [0, 1_000])
def test_a_claim_that_the_database_lost_replaces_no_result(
    jobs: JobStore, supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch, kept_characters_max: int
) -> None:
    """A server that lost its last transactions issues the same token a second time."""
    monkeypatch.setattr(claims, "_KEPT_CHARACTERS_MAX", kept_characters_max)
    job_id, one, other = jobs.start("work", None), Hand(jobs, supplier), Hand(jobs, supplier)
    [lost] = one.claim()
    with supplier.connection() as conn:
        conn.execute("update job set worker_id = null, token = token - 1")
    [claim] = other.claim()
    assert claim.token == lost.token
    assert other.ends(claim, 1)
    assert not one.ends(lost, 2)
    assert jobs.result(job_id) == 1


def test_a_working_worker_has_a_short_lease(jobs: JobStore, supplier: ConnectionSupplier) -> None:
    """Only the lease of a sleeping worker is as long as its sleep."""
    me = Hand(jobs, supplier)
    assert me.claims.look(me.id, [me.kind], 90.0, 60.0).is_alive
    assert 80 < me.lease_seconds() <= 90
    me.claims.awake(me.id, 30.0)
    assert 20 < me.lease_seconds() <= 30


def test_a_sleeping_worker_with_jobs_has_a_short_lease(
    jobs: JobStore, supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is as long as the sleep once the worker's jobs have ended."""
    looked, gate = queue.SimpleQueue[None](), threading.Event()
    worker = jobs.worker({"work": lambda *_: gate.wait()}, threads=2, lease_seconds=30.0)
    look = worker._claims.look

    def unheard(*given: Any) -> Any:
        found = look(*given)
        looked.put(None)
        return found

    monkeypatch.setattr(worker._claims, "look", unheard)
    jobs.start("work", None)
    with Working(worker):
        for _ in range(2):  # before the worker claims, and when it has no other work
            looked.get(timeout=PATIENCE_SECONDS)
        left = lease_seconds(supplier, worker._worker_id)
        gate.set()
        assert 0 < left <= 30
        while lease_seconds(supplier, worker._worker_id) <= 80:  # a look may come before the job's end
            looked.get(timeout=PATIENCE_SECONDS)


def test_a_worker_that_leaves_with_jobs_stays_registered(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    """No other worker would take over its jobs if its row were deleted."""
    job_id, me, other = jobs.start("work", None), Hand(jobs, supplier), Hand(jobs, supplier)
    assert len(me.claim()) == 1
    me.claims.leave(me.id)
    me.dies()
    assert other.claims.take_over() == 1
    assert jobs.status(job_id).is_waiting


def test_sleeping_workers_are_notified_of_released_jobs(jobs: JobStore, supplier: ConnectionSupplier) -> None:
    jobs.start("work", None)
    me, other = Hand(jobs, supplier), Hand(jobs, supplier)
    me.claim()
    with notified(supplier, me.kind):
        me.claims.give_back(me.id, [me.kind])
    me.claim()
    me.dies()
    with notified(supplier, me.kind):
        assert other.claims.take_over() == 1


def test_sleeping_workers_are_notified_when_a_dead_workers_place_is_free(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    jobs.limit("work", 1)
    job_id, me, other = jobs.start("work", None), Hand(jobs, supplier), Hand(jobs, supplier)
    assert len(me.claim(limited=True)) == 1
    jobs.cancel(job_id)
    me.dies()
    with notified(supplier, me.kind):
        assert other.claims.take_over() == 1


def test_a_sleeping_worker_is_notified_when_a_limit_allows_more_jobs(
    jobs: JobStore, supplier: ConnectionSupplier
) -> None:
    for _ in range(2):
        jobs.start("work", None)
    me, other = Hand(jobs, supplier), Hand(jobs, supplier)
    with notified(supplier, "limits"):
        jobs.limit("work", 1)
    [mine] = me.claim(limited=True)
    assert other.claim(limited=True) == []
    other.claims.look(other.id, [other.kind], LEASE_SECONDS, LEASE_SECONDS)
    with notified(supplier, other.kind):
        assert me.ends(mine)
    assert len(other.claim(limited=True)) == 1


def test_no_job_runs_twice_while_many_claim_at_once(jobs: JobStore) -> None:
    ran = Counter[int]()
    for number in range(120):
        jobs.start("work", number)
    made = [jobs.worker({"work": lambda n, _: ran.update([n])}, threads=2) for _ in range(4)]
    threads = [threading.Thread(target=worker.run, kwargs={"drain": True}) for worker in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran == dict.fromkeys(range(120), 1)
    assert sum(worker.report.lost for worker in made) == 0


def test_a_worker_that_is_stopped_takes_no_more_jobs(jobs: JobStore) -> None:
    ids = [jobs.start("work", number) for number in range(3)]
    worker = jobs.worker({"work": lambda number, _: worker.stop() if number == 0 else None}, threads=1)
    assert worker.run().complete == 1
    assert [jobs.status(job_id).is_waiting for job_id in ids] == [False, True, True]


def test_a_request_that_cannot_be_read_now_is_read_later(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object store is too busy, so the worker releases the job, which does not count as failed."""
    read, failures = read_requests, iter(range(2))

    def requests(payloads: Any, claims: Any) -> Mapping[Claim, Any]:
        if next(failures, None) is not None:
            return {claim: PayloadUnavailable("please reduce your request rate") for claim in claims}
        return read(payloads, claims)

    monkeypatch.setattr(workers, "read_requests", requests)
    job_id = jobs.start("work", 7)
    jobs.worker({"work": lambda request, _: request}).run(drain=True)
    assert (jobs.result(job_id), jobs.status(job_id).attempts) == (7, 3)


def test_a_request_that_can_never_be_read_holds_up_no_kind_with_a_limit(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, kind_id = read_requests, jobs._kind_id("unread")

    def requests(payloads: Any, claims: Any) -> Mapping[Claim, Any]:
        if any(claim.kind_id == kind_id for claim in claims):
            return {claim: PayloadUnavailable("access denied") for claim in claims}
        return read(payloads, claims)

    monkeypatch.setattr(workers, "read_requests", requests)
    jobs.limit("few", 1)
    jobs.start("unread", None)
    job_id = jobs.start("few", None)
    with Working(jobs.worker(dict.fromkeys(("unread", "few"), lambda *_: None))):
        until(lambda: jobs.status(job_id).has_ended, 20)


@pytest.mark.parametrize("limited", [False, True])
def test_a_claim_whose_answer_is_lost_is_made_again(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch, limited: bool
) -> None:
    """The database has recorded this worker as the job's holder. No other takes the job while the worker
    lives.
    """
    jobs.limit("few", 1)
    ids = [jobs.start(kind, kind) for kind in ("few", "many")]
    worker = jobs.worker(dict.fromkeys(("few", "many"), lambda request, _: request))
    claim, losses = worker._claims.claim, iter(range(1))

    def lose(*given: Any, **more: Any) -> list[Claim]:
        found = claim(*given, **more)
        if more.get("limited", False) == limited and next(losses, None) is not None:
            raise CommitOutcomeUnknown("the connection died")
        return found

    monkeypatch.setattr(worker._claims, "claim", lose)
    worker.run(drain=True)
    assert [jobs.result(job_id) for job_id in ids] == ["few", "many"]
    assert jobs.status(ids[limited]).attempts == 1


@pytest.mark.parametrize(
    ("lock_ms", "frozen_ms", "ends"), [(50, 60_000, ["free"]), (60_000, 100, ["free", "few"])]
)
def test_a_worker_frozen_during_a_claim_does_not_block_others(
    jobs: JobStore,
    supplier: ConnectionSupplier,
    monkeypatch: pytest.MonkeyPatch,
    lock_ms: int,
    frozen_ms: int,
    ends: list[str],
) -> None:
    """A frozen claim blocks kinds with a limit until the server ends it. It never blocks other kinds."""
    frozen, gate = threading.Event(), threading.Event()
    run = claims.run_transaction

    def freeze(given: Any, work: Any, **options: Any) -> Any:
        def freezing(conn: Any) -> Any:
            found = work(conn)
            if threading.current_thread() is freezer:
                frozen.set()
                gate.wait(PATIENCE_SECONDS)
            return found

        return run(given, freezing, **options)

    monkeypatch.setattr(claims, "LOCK_MS_MAX", lock_ms)
    monkeypatch.setattr(claims, "FROZEN_MS_MAX", frozen_ms)
    monkeypatch.setattr(claims, "run_transaction", freeze)
    jobs.limit("few", 1)
    hand = Hand(jobs, supplier, "few")
    freezer = threading.Thread(target=lambda: hand.claim(limited=True))
    ids = {kind: jobs.start(kind, None) for kind in ("few", "free")}
    freezer.start()
    assert frozen.wait(PATIENCE_SECONDS)
    with Working(jobs.worker(dict.fromkeys(ids, lambda *_: None))):
        try:
            for kind in ends:
                until(lambda kind=kind: jobs.status(ids[kind]).has_ended, 20)  # type: ignore[misc]
        finally:
            gate.set()
            freezer.join()


def test_a_worker_frozen_while_it_ends_jobs_is_found_dead(
    jobs: JobStore, supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, gate = threading.Event(), threading.Event()

    def freeze(conn: Any, contents: Any) -> None:
        frozen.set()
        gate.wait(PATIENCE_SECONDS)
        write(conn, contents)

    monkeypatch.setattr(claims, "_KEPT_CHARACTERS_MAX", 0)
    monkeypatch.setattr(claims, "FROZEN_MS_MAX", 100)
    monkeypatch.setattr(claims, "write", freeze)
    job_id, hand = jobs.start("work", None), Hand(jobs, supplier)
    [claim] = hand.claim()
    ended: list[bool] = []
    freezer = threading.Thread(target=lambda: ended.append(hand.ends(claim)))
    freezer.start()
    try:
        assert frozen.wait(PATIENCE_SECONDS)
        hand.dies()  # as when the server has ended the worker's session
        until(lambda: hand.claims.take_over() == 1, 20)
        assert jobs.status(job_id).is_waiting
    finally:
        gate.set()
        freezer.join()
    assert ended == [False]


def test_a_worker_that_cannot_register_yet_tries_again(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registration succeeded in one case, although its answer was lost."""
    worker = jobs.worker({"work": lambda request, _: request})
    register, failures = worker._claims.register, iter(range(1))

    def lose(*given: Any) -> None:
        register(*given)
        if next(failures, None) is not None:
            raise CommitOutcomeUnknown("the connection died")

    monkeypatch.setattr(worker._claims, "register", lose)
    job_id = jobs.start("work", 7)
    worker.run(drain=True)
    assert jobs.result(job_id) == 7


def test_a_worker_regularly_searches_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    sight = Sight()
    assert sight.since() == {}
    sight.saw([(1, 50), (1, 40), (2, 7)])
    assert sight.since() == {1: 40, 2: 7}
    sight.look_everywhere()
    assert sight.since() == {}
    assert sight.since() == {1: 40, 2: 7}
    monkeypatch.setattr("dormouse.jobs.worker.EVERYWHERE_SECONDS", 0.0)
    assert sight.since() == {}


def test_the_progress_of_a_cancelled_or_lost_job_raises() -> None:
    """After a cancellation or a loss, a report of progress raises an error, and so does a check."""
    for error in (JobCancelled("over"), JobLost("over")):
        progress = Progress("id")
        progress.end(error)
        for ask in (progress, progress.check):
            with pytest.raises(type(error)):
                ask()
