"""A stateful model of jobs: starts, claims, ends, deaths and cancellations, compared with a dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from dormouse.errors import CommitIdReused
from dormouse.jobs.claims import DEATHS_MAX, Ending
from dormouse.jobs.job import Claim
from dormouse.postgres import ConnectionSupplier
from tests.support.jobs import Claims, JobStore
from tests.working import job_store

KINDS = ("a", "b")
LIMITED, LIMIT = "b", 2
LONG_SECONDS = 3_600.0


@dataclass
class Known:
    """The state that a job should have."""

    kind: str
    number: int
    state: str = "PROCESSING"
    holder: UUID | None = None
    token: int = 0
    dead: list[UUID] = field(default_factory=list)
    is_cancelled: bool = False
    result: int | None = None


@dataclass
class Hand:
    """A worker, and the claims that it still believes to have."""

    worker_id: UUID
    is_over: bool = False
    is_dead: bool = False
    claims: list[Claim] = field(default_factory=list)


class Jobs(RuleBasedStateMachine):
    store: JobStore
    supplier: ConnectionSupplier

    ids = Bundle("ids")
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        with self.supplier.connection() as conn:
            conn.execute("truncate job, ended_job, job_worker")
        self.claims = Claims(self.supplier)
        self.store.limit(LIMITED, LIMIT)
        self.kind_ids = {kind: self.store._kind_id(kind) for kind in KINDS}
        self.jobs: dict[str, Known] = {}
        self.hands: list[Hand] = []
        self.started = 0

    @rule(target=ids, kind=st.sampled_from(KINDS), count=st.integers(1, 4))
    def start(self, kind: str, count: int) -> Any:
        made = []
        for _ in range(count):
            self.started += 1
            made.append(self.store.start(kind, self.started))
            self.jobs[made[-1]] = Known(kind, self.started)
        return multiple(*made)

    @rule(job_id=ids)
    def start_again(self, job_id: str) -> None:
        job = self.jobs[job_id]
        assert self.store.start(job.kind, job.number, job_id=job_id) == job_id
        with pytest.raises(CommitIdReused):
            self.store.start(job.kind, -1, job_id=job_id)

    @rule(target=workers)
    def register(self) -> Hand:
        hand = Hand(uuid4())
        self.hands.append(hand)
        self.claims.register(hand.worker_id, list(self.kind_ids.values()), "model", LONG_SECONDS)
        return hand

    @rule(hand=workers, kind=st.sampled_from(KINDS), count=st.integers(1, 3))
    def claim(self, hand: Hand, kind: str, count: int) -> None:
        found = self.claims.claim(hand.worker_id, {self.kind_ids[kind]: count}, {}, limited=kind == LIMITED)
        free = count
        if kind == LIMITED:
            running = sum(job.holder is not None for job in self.jobs.values() if job.kind == kind)
            free = max(0, min(count, LIMIT - running))
        waiting = [
            job_id
            for job_id, job in self.jobs.items()
            if (job.kind, job.state, job.holder) == (kind, "PROCESSING", None)
        ]
        expected = [] if hand.is_dead else waiting[:free]
        assert [one.job_id for one in found] == expected
        for one in found:
            job = self.jobs[one.job_id]
            job.holder, job.token = hand.worker_id, job.token + 1
            assert one.token == job.token
            hand.claims.append(one)

    @rule(hand=workers, state=st.sampled_from(["COMPLETE", "FAILED", "CANCELLED"]), count=st.integers(1, 4))
    def finish(self, hand: Hand, state: str, count: int) -> None:
        """Finishes claimed jobs.

        Some of them belong to a dead worker or to another worker by now, or have already ended.
        """
        mine, hand.claims = hand.claims[:count], hand.claims[count:]
        if not mine:
            return
        results = [(one, str(one.number)) for one in mine] if state == "COMPLETE" else []
        endings = [Ending(one, state, (None, None, None), "x") for one in mine]  # type: ignore[arg-type]
        own = [] if hand.is_dead else [one for one in mine if self._holds(hand, one)]
        assert self.claims.finish(hand.worker_id, endings, results) == {one.job_key for one in own}
        for one in own:
            job = self.jobs[one.job_id]
            job.state, job.holder = state, None
            job.result = one.number if state == "COMPLETE" else None

    def _holds(self, hand: Hand, claim: Claim) -> bool:
        job = self.jobs[claim.job_id]
        return (job.holder, job.token) == (hand.worker_id, claim.token)

    @rule(hand=workers, count=st.integers(1, 4), forgets=st.booleans())
    def give_back(self, hand: Hand, count: int, forgets: bool) -> None:
        """Gives jobs of a worker back.

        With `forgets`, the worker drops its claims. Otherwise, it will try to finish the jobs, perhaps after
        another claim.
        """
        mine, kept = hand.claims[:count], hand.claims[count:]
        hand.claims = kept if forgets else [*kept, *mine]
        self.claims.give_back(hand.worker_id, list(self.kind_ids.values()), [one.job_key for one in kept])
        runs = {one.job_id for one in kept}
        for job_id, job in self.jobs.items():
            if job.holder == hand.worker_id and job_id not in runs:
                job.holder = None
                job.state = "CANCELLED" if job.is_cancelled else job.state

    @rule(hand=workers)
    def falls_silent(self, hand: Hand) -> None:
        """Ends a worker's lease and the time in which it could be renewed. No other worker has noticed that
        yet.
        """
        with self.supplier.connection() as conn:
            conn.execute(
                "update job_worker set lease_until = clock_timestamp() - interval '10 minutes', "
                "suspected_at = clock_timestamp() - interval '10 minutes' "
                "where worker_id = %s and lease_until > '-infinity'",
                [hand.worker_id],
            )
        hand.is_over = True

    @rule(hand=workers)
    def pulse(self, hand: Hand) -> None:
        is_alive, cancelled = self.claims.pulse(
            hand.worker_id, list(self.kind_ids.values()), [], 2 * LONG_SECONDS
        )
        assert is_alive == (not hand.is_dead)
        if is_alive:
            hand.is_over = False
            with self.supplier.connection() as conn:
                statement = "select lease_until - clock_timestamp() from job_worker where worker_id = %s"
                [(left,)] = conn.execute(statement, [hand.worker_id]).fetchall()
            assert left.total_seconds() > LONG_SECONDS
        held = [job_id for job_id, job in self.jobs.items() if job.holder == hand.worker_id]
        assert len(cancelled) == sum(self.jobs[job_id].is_cancelled for job_id in held)

    @rule(hand=workers)
    def lives(self, hand: Hand) -> None:
        """Reports that a worker is alive although it was found dead."""
        if not hand.is_dead:
            return
        self.claims.lives(hand.worker_id, [one.job_key for one in hand.claims])
        for one in hand.claims:
            dead = self.jobs[one.job_id].dead
            if hand.worker_id in dead and self.jobs[one.job_id].state == "PROCESSING":
                dead.remove(hand.worker_id)

    @rule()
    def take_over(self) -> None:
        self.claims.take_over()
        for hand in self.hands:
            hand.is_dead = hand.is_dead or hand.is_over
        dead = {hand.worker_id for hand in self.hands if hand.is_dead}
        for job in self.jobs.values():
            if job.holder in dead:
                job.dead.append(job.holder)
                job.holder = None
                if job.is_cancelled:
                    job.state = "CANCELLED"
                elif len(job.dead) >= DEATHS_MAX:
                    job.state = "FAILED"

    @rule(job_id=ids)
    def cancel(self, job_id: str) -> None:
        self.store.cancel(job_id)
        job = self.jobs[job_id]
        if job.state == "PROCESSING" and job.holder is None:
            job.state = "CANCELLED"
        elif job.state == "PROCESSING":
            job.is_cancelled = True

    @rule(hand=consumes(workers))
    def leave(self, hand: Hand) -> None:
        self.give_back(hand, len(hand.claims), True)
        self.claims.leave(hand.worker_id)
        self.hands.remove(hand)

    @invariant()
    def every_job_matches_the_model(self) -> None:
        found = {job.job_id: job for job in self.store.list(limit=10_000)}
        assert found.keys() == self.jobs.keys()
        for job_id, known in self.jobs.items():
            job = found[job_id]
            assert (job.kind, job.state, job.attempts) == (known.kind, known.state, known.token)
            if not job.has_ended:
                assert job.is_waiting == (known.holder is None)
        assert sum(job.holder is not None for job in self.jobs.values() if job.kind == LIMITED) <= LIMIT

    def teardown(self) -> None:
        for job_id, known in self.jobs.items():
            assert self.store.request(job_id) == known.number
            if known.state == "COMPLETE":
                assert self.store.result(job_id) == known.result


@pytest.mark.slow
def test_jobs_match_the_model(supplier: ConnectionSupplier, tmp_path: object) -> None:
    machine = type(
        "OfThisTest",
        (Jobs,),
        {"store": job_store(supplier, tmp_path / "objects"), "supplier": supplier},  # type: ignore[operator]
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=60))
