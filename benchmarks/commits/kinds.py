"""Commits other than compactions: added files, assigned references, created jobs, commits to many tables."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any
from uuid import uuid4

from benchmarks.commits.bench import Bench, shuffled
from benchmarks.committers import apply_all, batches
from benchmarks.state_tables import FILES_PER_JOB, StateTable, new_file
from dormouse.model.file_reference import AssignJobIdRequest
from dormouse.model.table import TableRecord
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.connection import Supplier
from dormouse.state.commits.apply import Tables
from dormouse.state.commits.committer import limit_of_batch
from dormouse.state.commits.outcomes import CommitOutcome, settle
from dormouse.state.commits.requests import AddFiles, AssignJobIds, Envelope
from dormouse.state.files.compaction_jobs import CompactionJobs
from dormouse.state.files.store import FileReferenceStore

_LEAVES = 1_024
_BATCH = 500
_JOBS_WANTED = 65_536
_KEYS = (bytes(9), bytes(9))


def adding(bench: Bench, name: str = "adding") -> dict[str, Any]:
    """Measures files added per second. Each batch is one commit of many files with one reference each."""
    table = bench.tables.empty(name, bench.layout)
    commits, files = bench.plan.add_commits, bench.plan.files_per_commit
    rates = []
    for threads in (1, 2):
        work = [[_addition(table, files)] for _ in range(commits)]
        rates.append(commits * files / _timed(bench, work, threads))
    return {
        "files_added_per_s": round(max(rates), 1),
        "files_added_per_s_one_thread": round(rates[0], 1),
        "files_added_per_s_two_threads": round(rates[1], 1),
        "add_commits_per_s": round(max(rates) / files, 2),
        "files_per_commit": files,
    }


def assigning(bench: Bench) -> dict[str, Any]:
    """Measures references assigned to jobs per second. Each commit of a batch assigns eleven references."""
    jobs = bench.plan.assignments
    table = bench.tables.make("assigning", jobs, bench.layout)
    commits = [_assignment(table, job) for job in shuffled(table)]
    seconds = _timed(bench, batches(commits, _BATCH))
    return {
        "assign_per_s": round(jobs * FILES_PER_JOB / seconds, 1),
        "assign_commits_per_s": round(jobs / seconds, 1),
    }


def creating_jobs(bench: Bench, name: str = "creating") -> dict[str, Any]:
    """Measures compaction jobs created per second. One call creates a job of eleven files on each leaf."""
    table = bench.tables.make(
        name,
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
    """Measures commits that are spread evenly over 1, 10 and 1,000 tables, in batches like a committer's."""
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
    """Returns two rates in commits per second: for the first commit to each table, and for later commits.

    A table's first commit is slower, because its statement is not prepared yet.
    """
    orders = [shuffled(table) for table in tables]
    rounds = [
        [table.envelope(order[number]) for table, order in zip(tables, orders, strict=True)]
        for number in range(tables[0].leaves)
    ]
    first, later = rounds[0], [envelope for each in rounds[1:] for envelope in each]
    # as in a committer: hurried sessions do not wait for the disk, so `settle` flushes after each batch
    with bench.supplier() as supplier, closing(supplier.hurried()) as hurried:
        known = Tables(hurried)
        known.named((table.record.table_id, "") for table in tables)
        settled = partial(settle, since=time.monotonic())
        seconds = [
            _seconds(known, batches(some, limit_of_batch(_BATCH, len(tables))), behind=settled)
            for some in (first, later)
        ]
    return len(first) / seconds[0], len(later) / seconds[1]


def _assignment(table: StateTable, job: int) -> Envelope:
    request = AssignJobIdRequest(
        job_id=table.job_id(job), partition_id=table.partition_id(job), filenames=table.inputs(job)
    )
    commit = AssignJobIds(commit_id=table.commit_id(job), table=table.record.name, requests=(request,))
    return Envelope(commit, table.record.table_id)


def _addition(table: TableRecord, files: int) -> Envelope:
    partitions = [f"0-{number % _LEAVES}" for number in range(files)]
    added = tuple(
        new_file(f"{table.object_prefix}{uuid4()}/{partition}.parquet", partition, _KEYS)
        for partition in partitions
    )
    return Envelope(AddFiles(commit_id=str(uuid4()), table=table.name, files=added), table.table_id)


def _timed(bench: Bench, work: Sequence[Sequence[Envelope]], threads: int = 1) -> float:
    """Returns the seconds that one committer with `threads` threads takes for batches of one table."""
    with closing(ConnectionSupplier(bench.dsn, connections_max=threads)) as supplier:
        tables = Tables(supplier)
        tables.named([(work[0][0].table_id, "")])
        return _seconds(tables, work, threads)


def _seconds(
    tables: Tables,
    work: Sequence[Sequence[Envelope]],
    threads: int = 1,
    behind: Callable[[Supplier, list[CommitOutcome]], object] = lambda supplier, outcomes: None,
) -> float:
    """Returns the seconds to apply the batches, including a call of `behind` after each batch."""

    def do(batch: Sequence[Envelope]) -> None:
        behind(tables.supplier, apply_all(tables, batch))

    # freeze the prepared requests, so that garbage collections during the measurement do not scan them
    gc.collect()
    gc.freeze()
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(do, batch) for batch in work]:
                done.result()
        return time.monotonic() - began
    finally:
        gc.unfreeze()
