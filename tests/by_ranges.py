"""Compaction jobs divided into key ranges, as Spark divides large jobs, but run in this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from dormouse.state.context import TableContext
from dormouse.writing.compaction import CompactionReport, compact
from dormouse.writing.compaction_job import CompactionResult, run_compaction
from dormouse.writing.divided_compaction import Task, key_ranges, run_divided


def compact_by_ranges(context: TableContext, parts: int = 3) -> CompactionReport:
    """Runs a round of compaction whose jobs are divided into about `parts` key ranges."""

    def run(context: TableContext, tasks: Sequence[Task]) -> list[Any]:
        return [task.run(context) for task in tasks]

    def run_jobs(context: TableContext, now_ms: int) -> Generator[CompactionResult, None, None]:
        while jobs := context.jobs.take(1):
            for job in jobs:
                if job.looks:
                    yield run_compaction(context, job, now_ms)
                else:
                    yield run_divided(context, job, key_ranges(context, job, parts), now_ms, run)

    return compact(context, engine="spark", on_spark=run_jobs)
