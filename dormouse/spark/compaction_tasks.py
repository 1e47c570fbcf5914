"""Compaction jobs as Spark tasks: one job each, which commits by itself; a large one as several tasks."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from dormouse.errors import JobFailed
from dormouse.model.region import Region
from dormouse.spark.session import spark_session
from dormouse.spark.tasks import JOBS_AT_ONCE_MIN, TaskOutcome, run_tasks
from dormouse.spark.worker import on_worker
from dormouse.state.context import TableAddress, TableContext
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.writing.compaction_job import (
    CompactionResult,
    job_failed,
    run_compaction,
    runners_died,
)
from dormouse.writing.divided_compaction import Task, key_ranges, run_divided

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
                result = _result(context, outcome)
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


def _result(context: TableContext, outcome: TaskOutcome[_Payload, CompactionResult]) -> CompactionResult:
    if outcome.result is not None:
        return outcome.result
    return job_failed(
        context, outcome.payload[1], outcome.error or JobFailed("the Spark task gave no result")
    )
