"""What else is committed: files, claims, and the jobs that the database makes itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from benchmarks.commits.bench import Bench
from benchmarks.commits.together import apply_all, batches
from benchmarks.state_tables import BYTES_PER_FILE, FILES_PER_JOB, ROWS_PER_FILE, StateTable
from dormouse.commits.requests import AddFiles, AssignJobIds, CommitRequest, Envelope
from dormouse.commits.table_cache import Tables
from dormouse.files.compaction_jobs import CompactionJobs
from dormouse.files.store import FileReferenceStore
from dormouse.model.file_reference import AssignJobIdRequest, FileReference, FileWithReferences
from dormouse.postgres import ConnectionSupplier

_LEAVES = 1_024
_ASSIGN_BATCH = 500
_JOBS_WANTED = 65_536


def adding(bench: Bench) -> dict[str, Any]:
    """Files a second, many to a commit and a commit to a batch, each with one reference."""
    table = bench.tables.empty("adding", bench.layout)
    work = []
    for _ in range(bench.plan.add_commits):
        files = []
        for number in range(bench.plan.files_per_commit):
            partition = f"0-{number % _LEAVES}"
            name = f"{table.object_prefix}{uuid4()}/{partition}.parquet"
            reference = FileReference(filename=name, partition_id=partition, row_count=ROWS_PER_FILE)
            files.append(
                FileWithReferences(
                    filename=name,
                    references=(reference,),
                    byte_count=BYTES_PER_FILE,
                    row_count=ROWS_PER_FILE,
                    min_key=bytes(9),
                    max_key=bytes(9),
                )
            )
        request = AddFiles(commit_id=str(uuid4()), table=table.name, files=tuple(files))
        work.append([Envelope(request, table.table_id)])
    seconds = _timed(bench, work)
    files_added = bench.plan.add_commits * bench.plan.files_per_commit
    return {
        "files_added_per_s": round(files_added / seconds, 1),
        "add_commits_per_s": round(bench.plan.add_commits / seconds, 2),
        "files_per_commit": bench.plan.files_per_commit,
    }


def assigning(bench: Bench) -> dict[str, Any]:
    """References claimed a second: a job's eleven to a commit, commits in batches."""
    jobs = bench.plan.assignments
    table = bench.tables.with_leaves("assigning", jobs, bench.layout, assigned=False)
    commits = [_assignment(table, job) for job in bench.shuffled(table)]
    seconds = _timed(
        bench,
        batches([Envelope(commit, table.record.table_id) for commit in commits], _ASSIGN_BATCH),
    )
    return {
        "assign_per_s": round(jobs * FILES_PER_JOB / seconds, 1),
        "assign_commits_per_s": round(jobs / seconds, 1),
    }


def creating_jobs(bench: Bench) -> dict[str, Any]:
    """Jobs made a second, of exactly eleven files each, on all leaves at once."""
    table = bench.tables.with_leaves(
        "creating",
        bench.plan.leaves,
        bench.layout,
        assigned=False,
        compaction_strategy="basic",
        compaction_batch_files=FILES_PER_JOB,
    )
    with _supplier(bench) as supplier:
        jobs = CompactionJobs(supplier, table.record, FileReferenceStore(supplier, table.record))
        began = time.monotonic()
        made = jobs.create()
        seconds = time.monotonic() - began
    if made != bench.plan.leaves:
        raise RuntimeError(f"{made} jobs were made, not {bench.plan.leaves}")
    return {
        "jobs_created_per_s": round(made / seconds, 1),
        "jobs_65536_seconds": round(seconds * _JOBS_WANTED / made, 2),
        "jobs_created": made,
    }


def _assignment(table: StateTable, job: int) -> CommitRequest:
    request = AssignJobIdRequest(
        job_id=table.job_id(job), partition_id=table.partition_id(job), filenames=table.inputs(job)
    )
    return AssignJobIds(commit_id=table.commit_id(job), table=table.record.name, requests=(request,))


def _timed(bench: Bench, work: Sequence[Sequence[Envelope]]) -> float:
    """Seconds that one committer takes for these batches."""
    with _supplier(bench) as supplier:
        tables = Tables(supplier)
        tables.named([(work[0][0].table_id, "")])
        return timed([partial(apply_all, tables, batch) for batch in work])


def timed(work: Iterable[Callable[[], object]]) -> float:
    """Seconds; what was made before does not cost at every collection."""
    gc.collect()
    gc.freeze()
    try:
        began = time.monotonic()
        for call in work:
            call()
        return time.monotonic() - began
    finally:
        gc.unfreeze()


@contextmanager
def _supplier(bench: Bench) -> Iterator[ConnectionSupplier]:
    supplier = ConnectionSupplier(bench.dsn, connections_max=1)
    try:
        yield supplier
    finally:
        supplier.close()
