"""What else is committed: files, claims, jobs that the database makes itself; and commits to many tables."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from benchmarks.commits.bench import Bench, shuffled
from benchmarks.committers import apply_all, batches
from benchmarks.state_tables import FILES_PER_JOB, StateTable, new_file
from dormouse.commits.requests import AddFiles, AssignJobIds, Envelope
from dormouse.commits.table_cache import Tables
from dormouse.files.compaction_jobs import CompactionJobs
from dormouse.files.store import FileReferenceStore
from dormouse.model.file_reference import AssignJobIdRequest

_LEAVES = 1_024
_ASSIGN_BATCH = 500
_JOBS_WANTED = 65_536
_BATCH_OVER_TABLES = 1_000
_KEYS = (bytes(9), bytes(9))


def adding(bench: Bench) -> dict[str, Any]:
    """Files a second, many to a commit and a commit to a batch, each with one reference."""
    table = bench.tables.empty("adding", bench.layout)
    work = []
    for _ in range(bench.plan.add_commits):
        partitions = [f"0-{number % _LEAVES}" for number in range(bench.plan.files_per_commit)]
        files = tuple(
            new_file(f"{table.object_prefix}{uuid4()}/{partition}.parquet", partition, _KEYS)
            for partition in partitions
        )
        request = AddFiles(commit_id=str(uuid4()), table=table.name, files=files)
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
    table = bench.tables.make("assigning", jobs, bench.layout)
    commits = [_assignment(table, job) for job in shuffled(table)]
    seconds = _timed(bench, batches(commits, _ASSIGN_BATCH))
    return {
        "assign_per_s": round(jobs * FILES_PER_JOB / seconds, 1),
        "assign_commits_per_s": round(jobs / seconds, 1),
    }


def creating_jobs(bench: Bench) -> dict[str, Any]:
    """Jobs made a second, of exactly eleven files each, on all leaves at once."""
    table = bench.tables.make(
        "creating",
        bench.plan.leaves,
        bench.layout,
        compaction_strategy="basic",
        compaction_batch_files=FILES_PER_JOB,
    )
    with bench.supplier() as supplier:
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


def over_tables(bench: Bench) -> dict[str, Any]:
    """Batches of as many commits to each of 1, 10 and 1,000 tables, by one committer."""
    found: dict[str, Any] = {}
    for count in bench.plan.tables:
        leaves = 1 + max(1, bench.plan.jobs_over_tables // count)
        names = [f"of_{count}_{number}" for number in range(count)]
        tables = bench.tables.several(names, leaves, bench.layout, claimed_leaves=leaves)
        first, later = _rates(bench, tables)
        found[f"commits_per_s_{count}_tables"] = round(later, 1)
        found[f"first_commits_per_s_{count}_tables"] = round(first, 1)
    few, many = (found[f"commits_per_s_{count}_tables"] for count in (1, 1_000))
    return {"tables_1000_vs_1": round(many / few, 3), **found}


def _rates(bench: Bench, tables: list[StateTable]) -> tuple[float, float]:
    """Of the first commit to each table, whose statement is not prepared yet; and of all the others."""
    orders = [shuffled(table) for table in tables]
    rounds = [
        [table.envelope(order[number]) for table, order in zip(tables, orders, strict=True)]
        for number in range(tables[0].leaves)
    ]
    first, later = rounds[0], [envelope for each in rounds[1:] for envelope in each]
    with bench.supplier() as supplier:
        known = Tables(supplier)
        known.named((table.record.table_id, "") for table in tables)
        seconds = [_seconds(known, batches(some, _BATCH_OVER_TABLES)) for some in (first, later)]
    return len(first) / seconds[0], len(later) / seconds[1]


def _assignment(table: StateTable, job: int) -> Envelope:
    request = AssignJobIdRequest(
        job_id=table.job_id(job), partition_id=table.partition_id(job), filenames=table.inputs(job)
    )
    commit = AssignJobIds(commit_id=table.commit_id(job), table=table.record.name, requests=(request,))
    return Envelope(commit, table.record.table_id)


def _timed(bench: Bench, work: Sequence[Sequence[Envelope]]) -> float:
    """Seconds that one committer takes for these batches, of one table."""
    with bench.supplier() as supplier:
        tables = Tables(supplier)
        tables.named([(work[0][0].table_id, "")])
        return _seconds(tables, work)


def _seconds(tables: Tables, work: Sequence[Sequence[Envelope]]) -> float:
    """What was made before does not cost at every collection."""
    gc.collect()
    gc.freeze()
    try:
        began = time.monotonic()
        for batch in work:
            apply_all(tables, batch)
        return time.monotonic() - began
    finally:
        gc.unfreeze()
