"""Python functions that run as Spark tasks, each in its own Spark job; and compaction jobs as such tasks.

Calls into Spark block in its Java gateway, and a Ctrl-C there breaks the connection. So these calls run on
other threads. The caller's thread only waits, and cancels the running jobs when it is interrupted.
"""

from __future__ import annotations

import pickle
import re
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar

from pyspark import SparkContext, inheritable_thread_target
from pyspark.sql import SparkSession

from dormouse import errors
from dormouse.errors import DormouseError, JobFailed
from dormouse.model.region import Region
from dormouse.spark.session import spark_session
from dormouse.spark.worker import on_worker, settle
from dormouse.state.context import TableAddress, TableContext
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.writing.compaction_job import (
    CompactionResult,
    job_failed,
    run_compaction,
    runners_died,
)
from dormouse.writing.divided_compaction import Task, key_ranges, run_divided

P = TypeVar("P")
R = TypeVar("R")

JOBS_AT_ONCE_MIN = 32  # enough for executors that a cluster has not granted yet
CANCEL_AGAIN_SECONDS = 0.2
WAIT_SECONDS = 0.5
"""The longest single wait. A Ctrl-C that comes just before a wait begins is handled when the wait ends."""

_OURS = re.compile(r"^\s*dormouse\.errors(?:\.\w+)?\.(\w+): (.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class TaskOutcome(Generic[P, R]):
    """The result of the function for one payload, or the error that it raised.

    The error is `JobFailed` if the task's process died, or if Spark stopped retrying the task.
    """

    payload: P
    result: R | None
    error: Exception | None


def run_action(spark: SparkSession, action: Callable[[], R]) -> R:
    """Calls `action`, which runs Spark jobs, and returns its result. At a Ctrl-C, cancels the jobs and raises
    it.

    Build DataFrames within `action`, because building them also calls Spark.
    """
    with _jobs(spark, threads=1) as submit:
        future = submit(action)
        while wait([future], timeout=WAIT_SECONDS).not_done:
            pass
        result: R = future.result()
    return result


def run_tasks(
    spark: SparkSession, function: Callable[[P], R], payloads: Sequence[P], *, jobs_at_once: int | None = None
) -> Generator[TaskOutcome[P, R], None, None]:
    """Calls `function` on each payload in a Spark task of its own, and yields outcomes as they are ready.

    Each payload is a Spark job, so that the failure of one, even by the death of its process, does not fail
    others. `function` must be a module-level function of a package that the executors have. Closing the
    iterator cancels the running tasks.
    """
    if not payloads:
        return
    context = spark.sparkContext
    threads = min(len(payloads), jobs_at_once or max(context.defaultParallelism, JOBS_AT_ONCE_MIN))
    with _jobs(spark, threads) as submit:
        running = {submit(partial(_run_one, context, function, payload)) for payload in payloads}
        while running:
            ended, running = wait(running, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)


@contextmanager
def _jobs(spark: SparkSession, threads: int) -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """Yields a function that starts work on other threads. Cancels unfinished work at the end."""
    context = spark.sparkContext
    tag = f"dormouse-{uuid.uuid4().hex}"
    futures: list[Future[Any]] = []

    def submit(work: Callable[[], Any]) -> Future[Any]:
        inheriting = inheritable_thread_target(spark)  # keeps the caller's job group and pool
        futures.append(pool.submit(inheriting(partial(_tagged, context, tag, work))))
        return futures[-1]

    with ThreadPoolExecutor(threads, thread_name_prefix="dormouse-spark") as pool:
        try:
            yield submit
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # leaves out cancelled futures, because `wait` would also wait for these
            begun = [future for future in futures if not future.cancelled()]
            while wait(
                begun, timeout=0
            ).not_done:  # repeats, because a job can start just after a cancellation
                canceller = Thread(target=context.cancelJobsWithTag, args=(tag,))
                canceller.start()
                canceller.join()
                wait(begun, timeout=CANCEL_AGAIN_SECONDS)


def _tagged(context: SparkContext, tag: str, work: Callable[[], R]) -> R:
    context.addJobTag(tag)
    context.setInterruptOnCancel(True)
    try:
        return work()
    finally:
        context.removeJobTag(tag)


def _run_one(context: SparkContext, function: Callable[[P], R], payload: P) -> TaskOutcome[P, R]:
    try:
        [(result, error)] = context.parallelize([payload], 1).map(partial(_attempt, function)).collect()
    except Exception as failure:  # Spark raises many classes: Py4JJavaError, PythonException, ...
        return TaskOutcome(payload, None, JobFailed(f"The Spark task failed: {_reason(failure)}"))
    return TaskOutcome(payload, result, error)


def _attempt(function: Callable[[P], R], payload: P) -> tuple[R | None, Exception | None]:
    """Calls the function in the task; returns its result, or its error as a value.

    The error keeps its class if it can be pickled.
    """
    settle()
    try:
        return function(payload), None
    except SystemExit as error:
        return None, JobFailed(f"The task ended itself: SystemExit({error.code!r})")
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 bytes of this process
        except Exception:
            return None, JobFailed(f"{type(error).__name__}: {error}")
        return None, error


def dormouse_error(failure: Exception) -> DormouseError:
    """Returns the Dormouse error that a task raised; for any other failure `JobFailed` with Spark's
    reason.
    """
    if isinstance(failure, DormouseError):
        return failure
    for name, message in reversed(_OURS.findall(str(failure))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, DormouseError):
            return kind.from_message(message)
    return JobFailed(f"the Spark job failed: {_reason(failure)}")


def _reason(failure: Exception) -> str:
    """Returns the line with the cause from Spark's long Java stack trace."""
    if "Python worker exited unexpectedly" in str(failure):
        return "its Python process died, perhaps for lack of memory"
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by:", "org.apache.spark.", "java."))]
    return (causes or lines or [type(failure).__name__])[-1].removeprefix("Caused by: ")


# Compaction jobs as Spark tasks: each task runs one job and commits it; a large job becomes several tasks.

BATCH_JOBS = 500
_Payload = tuple[TableAddress, CompactionJob, int]
_Piece = tuple[int, TableAddress, Task]


def compact_on_spark(
    context: TableContext,
    now_ms: int,
    spark: SparkSession | None = None,
    *,
    run_id: str | None = None,
) -> Generator[CompactionResult, None, None]:
    """Takes compaction jobs in batches and runs them until none is due. Yields results as they are ready.

    With `run_id`, only the jobs assigned to that run are taken. Closing the iterator, or a Ctrl-C, cancels
    the tasks and releases unfinished jobs at once. The files of those jobs are deleted when their attempts
    expire.
    """
    session = spark or spark_session()
    while True:
        given_up: list[CompactionJob] = []
        jobs = context.jobs.take(BATCH_JOBS, run_id=run_id, given_up=given_up.append)
        if jobs:
            yield from _run_batch(context, session, jobs, now_ms)
        # last, because a caller that stops at one of these must not leave taken jobs behind
        yield from map(runners_died, given_up)
        if not jobs:
            return


def _run_batch(
    context: TableContext, spark: SparkSession, jobs: list[CompactionJob], now_ms: int
) -> Generator[CompactionResult, None, None]:
    unfinished = {job.key: job for job in jobs}
    try:
        divided = dict(_divided(context, spark, jobs))
        whole = [job for job in jobs if job.key not in divided]
        payloads: list[_Payload] = [(context.address, job, now_ms) for job in whole]
        tasks = run_tasks(spark, run_task, payloads, jobs_at_once=_jobs_at_once(spark))
        with closing(tasks) as outcomes:
            for outcome in outcomes:
                result = outcome.result or job_failed(
                    context, outcome.payload[1], outcome.error or JobFailed("the Spark task gave no result")
                )
                del unfinished[result.job_id, result.partition_id]
                yield result
        # one after the other, because each uses the whole cluster
        for key, regions in divided.items():
            result = run_divided(context, unfinished[key], regions, now_ms, partial(_run_pieces, spark))
            del unfinished[key]
            yield result
    finally:
        context.jobs.put_back(unfinished.values())


def _divided(
    context: TableContext, spark: SparkSession, jobs: Sequence[CompactionJob]
) -> Iterator[tuple[tuple[str, str], list[Region]]]:
    """Yields the keys of jobs that are too large for one task, each with the regions that divide it."""
    share = sum(job.byte_count for job in jobs) / _cores(spark)
    task_bytes = max(context.properties.compaction_task_bytes, share)
    for job in jobs:
        if not job.looks and job.byte_count >= 2 * task_bytes:
            regions = key_ranges(context, job, int(job.byte_count / task_bytes))
            if len(regions) > 1:
                yield job.key, regions


def _run_pieces(spark: SparkSession, context: TableContext, tasks: Sequence[Task]) -> list[Any]:
    payloads: list[_Piece] = [(number, context.address, task) for number, task in enumerate(tasks)]
    with closing(run_tasks(spark, run_piece, payloads, jobs_at_once=_jobs_at_once(spark))) as ended:
        outcomes = sorted(ended, key=lambda outcome: outcome.payload[0])
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.result for outcome in outcomes]


def _jobs_at_once(spark: SparkSession) -> int:
    return max(JOBS_AT_ONCE_MIN, min(BATCH_JOBS, _cores(spark)))


def _cores(spark: SparkSession) -> int:
    """Returns the number of cores of all executors that Spark may start."""
    settings = spark.sparkContext.getConf()
    executors = int(settings.get("spark.dynamicAllocation.maxExecutors") or 1)
    cores = int(settings.get("spark.executor.cores") or 1)
    return max(spark.sparkContext.defaultParallelism, executors * cores)


def run_task(payload: _Payload) -> CompactionResult:
    """Runs a compaction job in a task, which knows the table only by its address."""
    address, job, now_ms = payload
    with on_worker(address) as context:
        return run_compaction(context, job, now_ms)


def run_piece(payload: _Piece) -> Any:
    """Runs one task of a divided compaction job."""
    _, address, task = payload
    with on_worker(address) as context:
        return task.run(context)
