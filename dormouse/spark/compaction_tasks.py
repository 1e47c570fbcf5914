"""Compaction jobs as Spark tasks: one job each, which commits by itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from pyspark.sql import SparkSession

from dormouse.context import TableAddress, TableContext
from dormouse.errors import JobFailed
from dormouse.files.compaction_jobs import CompactionJob
from dormouse.rounds.compaction_job import CompactionResult, job_failed, run_compaction, runners_died
from dormouse.spark.session import spark_session
from dormouse.spark.tasks import JOBS_AT_ONCE_MIN, TaskOutcome, run_tasks
from dormouse.spark.worker import on_worker

BATCH_JOBS = 500
_Payload = tuple[TableAddress, CompactionJob, int]


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
    unfinished = {job.job_id: job for job in jobs}
    payloads: list[_Payload] = [(context.address, job, now_ms) for job in jobs]
    try:
        tasks = run_tasks(spark, run_task, payloads, jobs_at_once=_jobs_at_once(spark))
        with closing(tasks) as outcomes:
            for outcome in outcomes:
                result = _result(context, outcome)
                del unfinished[result.job_id]
                yield result
    finally:
        context.jobs.put_back(unfinished.values())


def _jobs_at_once(spark: SparkSession) -> int:
    """As many as all executors could run that Spark may ask for: it asks for no more than there is work."""
    settings = spark.sparkContext.getConf()
    executors = int(settings.get("spark.dynamicAllocation.maxExecutors") or 1)
    cores = int(settings.get("spark.executor.cores") or 1)
    known = max(spark.sparkContext.defaultParallelism, JOBS_AT_ONCE_MIN)
    return max(known, min(BATCH_JOBS, executors * cores))


def run_task(payload: _Payload) -> CompactionResult:
    """What a task does, in a process that knows the table only by its address."""
    address, job, now_ms = payload
    with on_worker(address) as context:
        return run_compaction(context, job, now_ms)


def _result(context: TableContext, outcome: TaskOutcome[_Payload, CompactionResult]) -> CompactionResult:
    if outcome.result is not None:
        return outcome.result
    return job_failed(
        context, outcome.payload[1], outcome.error or JobFailed("the Spark task gave no result")
    )
