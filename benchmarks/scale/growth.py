"""Commits per second as an instance grows: by the number of references, tables, writers and earlier commits.

A committer's batches are always alike: compactions of ten files each, which were added and claimed just
before. Only the commits themselves are timed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from statistics import median
from uuid import uuid4

from benchmarks.committers import apply_all, rate
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio
from benchmarks.state_tables import StateTable, Tables, keys_between, new_file
from dormouse.model.file_reference import AssignJobIdRequest, FileWithReferences
from dormouse.postgres import ConnectionSupplier
from dormouse.state.commits import apply
from dormouse.state.commits.requests import Envelope, ReplaceFileReferences
from dormouse.state.files.operations import Commit
from dormouse.state.files.store import FileReferenceStore

FILES = 10
"""The number of files that a compaction merges, and the number of files of a leaf."""
BATCH = 100
TABLES_MEASURED = 10
_WARMING_BATCHES = 3
_AGED_AT_ONCE = 1_000


class Cycles:
    """A maker of batches of compactions. It adds and claims the files of each batch just before."""

    def __init__(self, supplier: ConnectionSupplier, tables: Sequence[StateTable]) -> None:
        self._tables = tables
        self._stores = [FileReferenceStore(supplier, table.record) for table in tables]
        self._known = apply.Tables(supplier)
        self._known.named((table.record.table_id, "") for table in tables)
        self._random = random.Random(23)

    def per_second(self, commits: int) -> float:
        """Commits batches to one table after another; returns the commits per second, after a warm-up."""
        warming = _WARMING_BATCHES * len(self._tables)
        seconds = [self._batch(number % len(self._tables)) for number in range(warming + commits // BATCH)]
        return BATCH * len(seconds[warming:]) / sum(seconds[warming:])

    def age(self, commits: int, tell: Tell) -> None:
        """Commits `commits` compactions of a single file each to the first table."""
        for done in range(0, commits, _AGED_AT_ONCE):
            tell(f"{done:,} of {commits:,} commits before")
            apply_all(self._known, self._made(0, min(_AGED_AT_ONCE, commits - done), files=1))

    def _batch(self, number: int) -> float:
        """Prepares and commits one batch to a table; returns the seconds of the commit alone."""
        made = self._made(number, BATCH, FILES)
        began = time.monotonic()
        apply_all(self._known, made)
        return time.monotonic() - began

    def _made(self, number: int, commits: int, files: int) -> list[Envelope]:
        """Adds files to random leaves and claims them; returns the commit requests that replace them."""
        table, store = self._tables[number], self._stores[number]
        leaves = [self._random.randrange(table.leaves) for _ in range(commits)]
        inputs = [[_file(table, leaf) for _ in range(files)] for leaf in leaves]
        store.add_files_with_references([file for files_of_leaf in inputs for file in files_of_leaf])
        jobs = [str(uuid4()) for _ in leaves]
        claims = [
            AssignJobIdRequest(
                job_id=job,
                partition_id=table.partition_id(leaf),
                filenames=tuple(file.filename for file in files_of_leaf),
            )
            for job, leaf, files_of_leaf in zip(jobs, leaves, inputs, strict=True)
        ]
        store.apply("assign_job_ids", [Commit([claim]) for claim in claims])
        return [
            Envelope(
                ReplaceFileReferences(
                    commit_id=claim.job_id,
                    table=table.record.name,
                    requests=(table.request(leaf, claim.job_id, claim.filenames),),
                ),
                table.record.table_id,
            )
            for leaf, claim in zip(leaves, claims, strict=True)
        ]


def _file(table: StateTable, leaf: int) -> FileWithReferences:
    partition = table.partition_id(leaf)
    name = f"{table.record.object_prefix}{uuid4()}/{partition}.parquet"
    return new_file(name, partition, keys_between(leaf, leaf + 1))


def by_references(
    tables: Tables, sizes: Sequence[int], commits: int, rounds: int, layout: str, tell: Tell
) -> Figures:
    """Measures commits for several numbers of references in the table.

    The sizes alternate in each round, because the machine's speed varies.
    """
    found: dict[int, list[float]] = {size: [] for size in sizes}
    with closing(ConnectionSupplier(tables.dsn, connections_max=1)) as supplier:
        made = {}
        for size in sizes:
            tell(f"a table of {size:,} references")
            table = tables.make(f"references_{size}", size // FILES, layout, files_per_leaf=FILES)
            made[size] = Cycles(supplier, [table])
        for _ in range(rounds):
            for size, cycles in made.items():
                tell(f"commits to {size:,} references")
                found[size].append(cycles.per_second(commits))
    return _figures("references", found)


def by_tables(tables: Tables, counts: Sequence[int], commits: int, layout: str, tell: Tell) -> Figures:
    """Measures commits for several numbers of tables. The commits go to at most ten of the tables."""
    found: dict[int, list[float]] = {}
    there: list[StateTable] = []
    with closing(ConnectionSupplier(tables.dsn, connections_max=1)) as supplier:
        for count in counts:
            tell(f"{count:,} tables")
            names = [f"of_{number}" for number in range(len(there), count)]
            there += tables.several(names, BATCH, layout, files_per_leaf=FILES)
            cycles = Cycles(supplier, [there[-1 - n % len(there)] for n in range(TABLES_MEASURED)])
            found[count] = [cycles.per_second(commits)]
    return _figures("tables", found)


def by_writers(tables: Tables, counts: Sequence[int], commits: int, layout: str, tell: Tell) -> Figures:
    """Measures commits for several numbers of writers. Each commits one by one, without a committer."""
    found: dict[int, list[float]] = {}
    table = tables.make("writers", commits * len(counts), layout, claimed_leaves=commits * len(counts))
    jobs = iter(random.Random(23).sample(range(table.leaves), table.leaves))
    for writers in counts:
        tell(f"{writers} writers")
        processes = min(writers, 2)
        found[writers] = [
            rate(tables.dsn, table, list(islice(jobs, commits)), 0, writers // processes, processes)
        ]
    return _figures("writers", found)


def after_commits(tables: Tables, before: int, commits: int, layout: str, tell: Tell) -> Figures:
    """Measures commits before and after many others, which leave entries in the indexes and the log."""
    table = tables.make("aged", 1_000, layout, files_per_leaf=FILES)
    with closing(ConnectionSupplier(tables.dsn, connections_max=1)) as supplier:
        cycles = Cycles(supplier, [table])
        fresh = cycles.per_second(commits)
        cycles.age(before, tell)
        aged = cycles.per_second(commits)
    return {
        "commits_before": before,
        "commits_per_s_fresh": round(fresh, 1),
        "commits_per_s_aged": round(aged, 1),
        "commits_aged_vs_fresh": round(aged / fresh, 3),
    }


def _figures(of: str, measured: dict[int, list[float]]) -> Figures:
    """Returns the median rate of each size, and the ratio of the largest size's rate to the smallest's.

    The ratio is the median of the rounds' ratios, because the runs of one round share the machine's noise.
    """
    first, *_, last = measured
    rates = {str(size): round(median(of_rounds), 1) for size, of_rounds in measured.items()}
    return {
        f"commits_per_s_by_{of}": rates,
        f"{of}_most": last,
        f"commits_most_{of}_vs_least": round(median_ratio(measured[last], measured[first]), 3),
    }
