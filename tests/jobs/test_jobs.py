"""Jobs: they are started, run, inspected and cancelled, and each error is one clear answer."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dormouse import errors
from dormouse.errors import (
    InvalidInput,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    JobIdTaken,
    JobNotEnded,
    JobNotFound,
    PayloadNotFound,
)
from dormouse.jobs.runs import Run
from dormouse.postgres import ConnectionSupplier
from tests.support.jobs import JobStore, Progress
from tests.working import Working, job_store, until

UUID = "3f0c7f1e-9a5d-4b1e-8f53-0d5a5a7f6a01"


@pytest.fixture
def jobs(supplier: ConnectionSupplier, tmp_path: Path) -> JobStore:
    return job_store(supplier, tmp_path / "objects")


def echo(request: Any, progress: Progress) -> Any:
    return request


def drain(jobs: JobStore, function: Callable[..., Any] = echo, kind: str = "work", **options: Any) -> None:
    jobs.worker({kind: function}, **options).run(drain=True)


def test_a_job_is_run_and_gives_its_result(jobs: JobStore) -> None:
    job_id = jobs.start("work", {"n": 21}, owner="ada")
    waiting = jobs.status(job_id)
    assert (waiting.state, waiting.is_waiting, waiting.has_workers) == ("PROCESSING", True, False)
    with pytest.raises(JobNotEnded):
        jobs.result(job_id)
    drain(jobs, lambda request, progress: {"n": 2 * request["n"], "owner": progress.owner})
    assert jobs.result(job_id) == {"n": 42, "owner": "ada"}
    assert jobs.request(job_id) == {"n": 21}
    job = jobs.status(job_id)
    assert (job.state, job.attempts, job.is_waiting, job.worker) == (
        "COMPLETE", 1, False, f"process {os.getpid()} on host {os.uname().nodename}",
    )  # fmt: skip
    assert job.started_at <= job.claimed_at <= job.ended_at  # type: ignore[operator]


@pytest.mark.parametrize("value", [None, [], 0, False, "text", {"a": [1, 2.5, None]}])
def test_any_json_value_is_a_request_and_a_result(jobs: JobStore, value: Any) -> None:
    job_id = jobs.start("work", value)
    drain(jobs)
    assert jobs.result(job_id) == value


@pytest.mark.parametrize("job_id", ["mine", UUID, UUID.upper(), f" {UUID}"])
def test_starting_the_same_job_again_returns_the_same_job(jobs: JobStore, job_id: str) -> None:
    ran, request = [], {"n": 0, "of": [1.5, None, "x"]}
    for again in (request, dict(reversed(request.items()))):
        assert jobs.start("work", again, job_id=job_id) == job_id
    drain(jobs, lambda request, progress: ran.append(request))
    assert jobs.start("work", request, job_id=job_id) == job_id
    drain(jobs, lambda request, progress: ran.append(request))
    assert ran == [request]
    assert [job.job_id for job in jobs.list()] == [job_id]


def test_simultaneous_starts_with_one_id_make_one_job(jobs: JobStore) -> None:
    """This holds even while the job ends and its row moves from one table to another."""
    ran: list[int] = []
    gate = threading.Barrier(4)

    def start() -> None:
        gate.wait()
        for _ in range(10):
            jobs.start("work", 0, job_id="mine")

    worker = jobs.worker({"work": lambda request, progress: ran.append(1)})
    with Working(worker):
        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: jobs.status("mine").has_ended)
    drain(jobs, lambda request, progress: ran.append(1))
    assert ran == [1]
    assert len(jobs.list()) == 1


def test_an_id_of_another_kind_or_owner_is_refused(jobs: JobStore) -> None:
    jobs.start("work", 1, "ada", job_id="mine")
    for kind, owner in [("other", "ada"), ("work", "bob"), ("work", None)]:
        with pytest.raises(JobIdTaken, match="'mine'"):
            jobs.start(kind, 1, owner, job_id="mine")
    assert len(jobs.list()) == 1


def test_a_function_that_raises_fails_its_job(jobs: JobStore) -> None:
    def fail(request: Any, progress: Progress) -> None:
        progress(1, 2, "half done")
        raise ValueError("no such\nthing\0")

    job_id = jobs.start("work", None, "ada")
    drain(jobs, fail)
    job = jobs.status(job_id)
    assert (job.state, job.current, job.total, job.message) == ("FAILED", 1, 2, "half done")
    assert job.error == "ValueError: no such thing�"
    assert job.traceback is not None
    assert "in fail" in job.traceback
    with pytest.raises(JobFailed, match="no such thing"):
        jobs.result(job_id)


def test_owners_do_not_see_tracebacks(jobs: JobStore) -> None:
    job_id = jobs.start("work", None, "ada")
    drain(jobs, lambda request, progress: 1 / 0)
    assert jobs.status(job_id).traceback is not None
    assert jobs.status(job_id, "ada").traceback is None
    assert jobs.status(job_id, "ada").error == "ZeroDivisionError: division by zero"
    assert [job.traceback for job in jobs.list(owner="ada")] == [None]


def test_an_owner_does_not_see_other_owners_jobs(jobs: JobStore) -> None:
    hers, theirs = jobs.start("work", 1, "ada"), jobs.start("work", 1)
    for ask in (jobs.status, jobs.result, jobs.cancel, jobs.request):
        with pytest.raises(JobNotFound):
            ask(hers, "bob")
        with pytest.raises(JobNotFound):
            ask(theirs, "bob")
    assert jobs.list(owner="bob") == []
    assert [job.job_id for job in jobs.list(owner="ada")] == [hers]
    assert {job.job_id for job in jobs.list()} == {hers, theirs}
    seen: list[list[str]] = []
    drain(jobs, lambda *_: seen.append([job.job_id for job in jobs.list(owner="bob")]))
    assert [*seen, jobs.list(owner="bob")] == [[], [], []]


@pytest.mark.parametrize("result", [{1, 2}, float("nan"), "\ud800", "nul\0", {1: 2}, object()])
def test_a_result_that_is_no_json_fails_only_its_job(jobs: JobStore, result: Any) -> None:
    bad, good = jobs.start("work", "bad"), jobs.start("work", "good")
    drain(jobs, lambda request, progress: result if request == "bad" else "fine")
    assert jobs.status(bad).state == "FAILED"
    assert (jobs.status(bad).error or "").startswith("its result cannot be kept: payload dormouse.job.result")
    assert jobs.result(good) == "fine"


def test_a_result_that_is_too_large_fails_its_job(jobs: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dormouse.payloads.keys.CONTENT_BYTES_MAX", 1_000)
    job_id = jobs.start("work", None)
    drain(jobs, lambda request, progress: "x" * 1_000)
    assert "1,002 bytes of JSON; the limit is 1,000" in (jobs.status(job_id).error or "")


def test_a_result_that_the_database_refuses_fails_only_its_job(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is a text that PostgreSQL does not accept as JSON.

    It stands for any value that passes the checks of Dormouse but not those of the database.
    """
    ended = Run.ended

    def broken(self: Run, request: Any, encode: Any) -> Any:
        ending, text = ended(self, request, encode)
        return ending, "{" if request == "bad" else text

    monkeypatch.setattr(Run, "ended", broken)
    bad, good = jobs.start("work", "bad"), jobs.start("work", "good")
    drain(jobs)
    assert jobs.status(bad).state == "FAILED"
    assert (jobs.status(bad).error or "").startswith("its result cannot be kept: invalid input syntax")
    assert jobs.result(good) == "good"


def test_a_function_that_ends_its_thread_fails_its_job(jobs: JobStore) -> None:
    job_id = jobs.start("work", None)
    drain(jobs, lambda request, progress: sys.exit(3))
    assert jobs.status(job_id).error == "its function ended the thread by SystemExit(3)"


@pytest.mark.slow
def test_a_function_that_hangs_fails_its_job_and_holds_up_no_other(jobs: JobStore) -> None:
    gate = threading.Event()
    stuck, other = jobs.start("work", "stuck"), jobs.start("work", "other")
    worker = jobs.worker(
        {"work": lambda request, progress: gate.wait() if request == "stuck" else "done"},
        threads=1,
        seconds_max=0.5,
    )
    worker.run(drain=True)
    gate.set()
    assert jobs.status(stuck).error == "its function did not return within 0.5 s"
    assert jobs.result(other) == "done"


def test_a_stuck_kind_does_not_hold_up_others(jobs: JobStore) -> None:
    gate = threading.Event()
    worker = jobs.worker({"stuck": lambda *_: gate.wait(), "quick": echo}, threads=1)
    for _ in range(3):
        jobs.start("stuck", None)
    with Working(worker):
        until(lambda: any(not job.is_waiting for job in jobs.list("stuck")))
        quick = [jobs.start("quick", number) for number in range(3)]
        until(lambda: all(jobs.status(job_id).has_ended for job_id in quick))
        assert [job.is_waiting for job in jobs.list("stuck")].count(True) == 2
        gate.set()


def test_jobs_of_a_kind_are_taken_in_the_order_of_start(jobs: JobStore) -> None:
    ran: dict[str, list[int]] = {"a": [], "b": []}
    for number in range(30):
        jobs.start("ab"[number % 2], number)
    functions = {kind: lambda n, progress, kind=kind: ran[kind].append(n) for kind in ran}
    jobs.worker(functions, threads=1).run(drain=True)
    assert ran == {"a": list(range(0, 30, 2)), "b": list(range(1, 30, 2))}


def test_a_lost_request_fails_its_job(jobs: JobStore, supplier: ConnectionSupplier) -> None:
    lost, kept = jobs.start("work", 1), jobs.start("work", 2)
    with supplier.connection() as conn:
        conn.execute("delete from payload where id = %s", [lost])
    drain(jobs)
    assert (jobs.status(lost).error or "").startswith("its request cannot be read: there is no payload")
    assert jobs.result(kept) == 2
    with pytest.raises(PayloadNotFound):
        jobs.request(lost)


def test_a_waiting_job_is_cancelled_at_once(jobs: JobStore) -> None:
    job_id = jobs.start("work", None)
    assert jobs.cancel(job_id).state == "CANCELLED"
    drain(jobs)
    with pytest.raises(JobCancelled):
        jobs.result(job_id)
    assert jobs.cancel(job_id).state == "CANCELLED"


def test_a_running_job_is_cancelled_by_its_next_report(jobs: JobStore) -> None:
    reached = threading.Event()

    def work(request: Any, progress: Progress) -> None:
        while True:
            reached.set()
            progress()
            threading.Event().wait(0.001)

    job_id = jobs.start("work", None)
    with Working(jobs.worker({"work": work})):
        reached.wait()
        asked = jobs.cancel(job_id)
        assert asked.is_cancelled or asked.has_ended
        until(lambda: jobs.status(job_id).has_ended)
    assert jobs.status(job_id).state == "CANCELLED"


def test_a_wrapped_cancellation_counts_as_a_cancellation(jobs: JobStore) -> None:
    reached = threading.Event()

    def work(request: Any, progress: Progress) -> None:
        try:
            while True:
                reached.set()
                progress()
                threading.Event().wait(0.001)
        except Exception as error:
            raise RuntimeError("the library says that it failed") from error

    job_id = jobs.start("work", None)
    with Working(jobs.worker({"work": work})):
        reached.wait()
        jobs.cancel(job_id)
        until(lambda: jobs.status(job_id).has_ended)
    assert jobs.status(job_id).state == "CANCELLED"


def test_a_function_that_does_not_check_completes_its_cancelled_job(jobs: JobStore) -> None:
    began, gate = threading.Event(), threading.Event()

    def work(request: Any, progress: Progress) -> str:
        began.set()
        gate.wait()
        return "done"

    job_id = jobs.start("work", None)
    with Working(jobs.worker({"work": work})):
        began.wait()
        assert jobs.cancel(job_id).is_cancelled
        gate.set()
        until(lambda: jobs.status(job_id).has_ended)
    assert jobs.result(job_id) == "done"


@pytest.mark.slow
def test_progress_is_visible_while_a_job_runs(jobs: JobStore) -> None:
    gate = threading.Event()

    def work(request: Any, progress: Progress) -> None:
        progress(1, 10)
        progress(2, message="second")
        gate.wait()

    job_id = jobs.start("work", None)
    with Working(jobs.worker({"work": work})):
        until(lambda: jobs.status(job_id).current == 2)
        job = jobs.status(job_id)
        assert (job.current, job.total, job.message) == (2, 10, "second")
        assert job.told_at is not None
        gate.set()


def test_a_kind_without_workers_is_shown(jobs: JobStore) -> None:
    job_id = jobs.start("nobody", None)
    with Working(jobs.worker({"work": echo})):
        until(lambda: any(kind.workers for kind in jobs.kinds()))
        assert not jobs.status(job_id).has_workers
        kinds = {kind.kind: (kind.waiting, kind.running, kind.workers) for kind in jobs.kinds()}
        assert kinds == {"nobody": (1, 0, 0), "work": (0, 0, 1)}
    assert [kind.workers for kind in jobs.kinds()] == [0, 0]


def test_a_list_begins_with_running_jobs_and_then_has_the_newest_ended_ones(jobs: JobStore) -> None:
    first = [jobs.start("work", number, "ada") for number in range(3)]
    drain(jobs, threads=1)
    failed = jobs.start("other", None)
    drain(jobs, lambda *_: 1 / 0, kind="other")
    waiting = [jobs.start("work", number, "ada") for number in range(2)]
    assert [job.job_id for job in jobs.list()] == [*waiting[::-1], failed, *first[::-1]]
    assert [job.job_id for job in jobs.list("work", "COMPLETE")] == first[::-1]
    assert [job.job_id for job in jobs.list(state="FAILED")] == [failed]
    assert [job.job_id for job in jobs.list(state="PROCESSING")] == waiting[::-1]
    assert [job.job_id for job in jobs.list("work", owner="ada", limit=3)] == [*waiting[::-1], first[2]]
    assert jobs.list("work", "CANCELLED") == jobs.list("unknown") == []


WRONG: list[tuple[Any, str]] = [
    (lambda jobs: jobs.start("", 1), "kind ''"),
    (lambda jobs: jobs.start("round:ingest", 1), "kind 'round:ingest'"),
    (lambda jobs: jobs.start("x" * 65, 1), "1 to 64 letters"),
    (lambda jobs: jobs.start(7, 1), "kind '7'"),
    (lambda jobs: jobs.start("work", 1, ""), "owner must be a non-empty string"),
    (lambda jobs: jobs.start("work", 1, "a\0b"), "no NUL"),
    (lambda jobs: jobs.start("work", 1, job_id=""), "job_id must be"),
    (lambda jobs: jobs.start("work", 1, job_id="x" * 201), "at most 200 bytes"),
    (lambda jobs: jobs.start("work", 1, job_id="\ud800"), "not valid Unicode"),
    (lambda jobs: jobs.status(None), "job_id must be"),
    (lambda jobs: jobs.list(state="DONE"), "PROCESSING, COMPLETE, FAILED, CANCELLED"),
    (lambda jobs: jobs.list(limit=0), "limit must be from 1"),
    (lambda jobs: jobs.list("round:"), "kind ''"),
    (lambda jobs: jobs.limit("work", 0), "running_max must be"),
    (lambda jobs: jobs.limit("work", True), "running_max must be"),
    (lambda jobs: jobs.worker({}), "a worker needs functions"),
    (lambda jobs: jobs.worker({"work": "echo"}), "cannot be called"),
    (lambda jobs: jobs.worker({"work": echo}, threads=0), "threads must be"),
    (lambda jobs: jobs.worker({"work": echo}, lease_seconds=0), "lease_seconds must be"),
    (lambda jobs: jobs.worker({"work": echo}, seconds_max=float("nan")), "seconds_max must be"),
]


def test_invalid_arguments_are_refused_in_one_line(jobs: JobStore) -> None:
    for ask, said in WRONG:
        with pytest.raises(InvalidInput) as caught:
            ask(jobs)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert jobs.list() == [], said


@pytest.mark.parametrize("request_", [{1}, float("inf"), "\ud800", "\0", b"bytes"])
def test_a_request_that_is_no_json_starts_nothing(jobs: JobStore, request_: Any) -> None:
    with pytest.raises(InvalidPayload):
        jobs.start("work", request_)
    assert jobs.list() == []


@pytest.mark.parametrize("values", [(-1,), (1.5,), (1 << 63,), (True,), (1, 2, 3)])
def test_progress_takes_whole_numbers_and_a_text(values: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput):
        Progress("id")(*values)


def test_an_unknown_job_is_reported(jobs: JobStore) -> None:
    for ask in (jobs.status, jobs.result, jobs.cancel, jobs.request):
        with pytest.raises(JobNotFound, match="no job 'none'"):
            ask("none")


def test_job_errors_are_subclasses_of_the_public_base_classes() -> None:
    assert issubclass(errors.JobNotFound, errors.JobError)
    assert issubclass(errors.JobError, errors.DormouseError)
