"""Run Python functions as Spark tasks, one job each, and stay interruptible meanwhile.

Calls into Spark block in its Java gateway, and a Ctrl-C there garbles the connection. So they are made on
other threads; the caller's thread only waits, and cancels what runs when it is interrupted.
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
"""A Ctrl-C that comes just before a wait begins is heard when it ends."""

_OURS = re.compile(r"^\s*dormouse\.errors(?:\.\w+)?\.(\w+): (.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class TaskOutcome(Generic[P, R]):
    """What became of one payload: its result, or the error that the function raised.

    A task whose process died, or that Spark gave up, has the error JobFailed.
    """

    payload: P
    result: R | None
    error: Exception | None


def run_action(spark: SparkSession, action: Callable[[], R]) -> R:
    """Call `action`, which runs Spark jobs; Ctrl-C cancels them and is raised here.

    The building of a DataFrame calls Spark as well, and belongs in `action`.
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
    """Call `function` on each payload in a Spark task of its own; outcomes come as they are ready.

    Each payload is a Spark job, so that one which fails, even by the death of its process, takes no other
    with it. `function` is a module-level function of a package that the executors have. Closing the iterator
    cancels what still runs.
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
    """A function that starts work on other threads; whatever is unfinished at the end is cancelled."""
    context = spark.sparkContext
    tag = f"dormouse-{uuid.uuid4().hex}"
    futures: list[Future[Any]] = []

    def submit(work: Callable[[], Any]) -> Future[Any]:
        inheriting = inheritable_thread_target(spark)  # the caller's job group, pool and the like
        futures.append(pool.submit(inheriting(partial(_tagged, context, tag, work))))
        return futures[-1]

    with ThreadPoolExecutor(threads, thread_name_prefix="dormouse-spark") as pool:
        try:
            yield submit
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # `wait` would wait for those that were cancelled, too
            begun = [future for future in futures if not future.cancelled()]
            while wait(begun, timeout=0).not_done:  # again: a job can start just after a cancellation
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
    except Exception as failure:  # whatever Spark raises: Py4JJavaError, PythonException, ...
        return TaskOutcome(payload, None, JobFailed(f"The Spark task failed: {_reason(failure)}"))
    return TaskOutcome(payload, result, error)


def _attempt(function: Callable[[P], R], payload: P) -> tuple[R | None, Exception | None]:
    """Runs in the task: an error travels home as a value, with its class, when it can be pickled."""
    settle()
    try:
        return function(payload), None
    except SystemExit as error:
        return None, JobFailed(f"The task ended itself: SystemExit({error.code!r})")
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 our own bytes
        except Exception:
            return None, JobFailed(f"{type(error).__name__}: {error}")
        return None, error


def dormouse_error(failure: Exception) -> DormouseError:
    """What a task raised, if it was one of ours, in its one line; else `JobFailed` with Spark's reason."""
    if isinstance(failure, DormouseError):
        return failure
    for name, message in reversed(_OURS.findall(str(failure))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, DormouseError):
            return kind.from_message(message)
    return JobFailed(f"the Spark job failed: {_reason(failure)}")


def _reason(failure: Exception) -> str:
    """The line that says what happened, out of Spark's pages of Java stack trace."""
    if "Python worker exited unexpectedly" in str(failure):
        return "its Python process died, perhaps for want of memory"
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by:", "org.apache.spark.", "java."))]
    return (causes or lines or [type(failure).__name__])[-1].removeprefix("Caused by: ")


# Compaction jobs as Spark tasks: one job each, which commits by itself; a large one as several tasks.

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
    """Takes jobs in batches and runs them until none is due; results come as they are ready.

    With `run_id` it takes the jobs that were handed to that run, and no others. Closing the iterator, or
    Ctrl-C, cancels the tasks and puts back at once what is not finished; what they wrote is collected when
    their attempts expire.
    """
    session = spark or spark_session()
    while True:
        given_up: list[CompactionJob] = []
        jobs = context.jobs.take(BATCH_JOBS, run_id=run_id, given_up=given_up.append)
        if jobs:
            yield from _run_batch(context, session, jobs, now_ms)
        # last: a caller that stops at one of these leaves no job that was taken
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
        # one after the other: each has the whole cluster
        for key, regions in divided.items():
            result = run_divided(context, unfinished[key], regions, now_ms, partial(_run_pieces, spark))
            del unfinished[key]
            yield result
    finally:
        context.jobs.put_back(unfinished.values())


def _divided(
    context: TableContext, spark: SparkSession, jobs: Sequence[CompactionJob]
) -> Iterator[tuple[tuple[str, str], list[Region]]]:
    """Jobs, by their keys, that would keep cores waiting, and the regions into which each is divided."""
    share = sum(job.byte_count for job in jobs) / _cores(spark)
    task_bytes = max(context.properties.compaction_task_bytes, share)
    for job in jobs:
        if not job.looks and job.byte_count >= 2 * task_bytes:
            regions = key_ranges(context, job, int(job.byte_count / task_bytes))
            if len(regions) > 1:
                yield job.key, regions


def _run_pieces(spark: SparkSession, context: TableContext, tasks: Sequence[Task]) -> list[Any]:
    payloads: list[_Piece] = [(number, context.address, task) for number, task in enumerate(tasks)]
    with closing(run_tasks(spark, run_piece, payloads, jobs_at_once=_jobs_at_once(spark))) as found:
        outcomes = sorted(found, key=lambda outcome: outcome.payload[0])
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.result for outcome in outcomes]


def _jobs_at_once(spark: SparkSession) -> int:
    return max(JOBS_AT_ONCE_MIN, min(BATCH_JOBS, _cores(spark)))


def _cores(spark: SparkSession) -> int:
    """Of all executors that Spark may ask for: it asks for no more than there is work."""
    settings = spark.sparkContext.getConf()
    executors = int(settings.get("spark.dynamicAllocation.maxExecutors") or 1)
    cores = int(settings.get("spark.executor.cores") or 1)
    return max(spark.sparkContext.defaultParallelism, executors * cores)


def run_task(payload: _Payload) -> CompactionResult:
    """What a task does, in a process that knows the table only by its address."""
    address, job, now_ms = payload
    with on_worker(address) as context:
        return run_compaction(context, job, now_ms)


def run_piece(payload: _Piece) -> Any:
    """What a task of a divided job does."""
    _, address, task = payload
    with on_worker(address) as context:
        return task.run(context)
