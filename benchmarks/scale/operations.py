"""The time and memory of operations on a table's state, for tables of different sizes.

Each operation runs in a separate process, whose peak resident memory is read at the end. It includes the
pages of libraries that the process uses. The amount of work is the same at every size, except for first looks
and the stream of all references. The comparison is a count of all references in SQL, which grows with the
table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.processes import remote, resident_bytes
from benchmarks.state_tables import KEYS_PER_LEAF, StateTable, Tables, spread
from dormouse.model.file_reference import AssignJobIdRequest, FileReference, ReplaceFileReferencesRequest
from dormouse.state.context import TableAddress, TableContext
from dormouse.state.files.store import FileReferenceStore

Sizes = tuple[tuple[int, int], ...]
"""The sizes of the tables: the number of leaves, and the number of files in each leaf."""
FULL_LEAVES, ABOVE_LEAVES, CHANGED_LEAVES, GARBAGE_FILES = 10, 100, 500, 5_000
TAKEN_JOBS, TAKEN_AT_ONCE = 100, 10


Operation = Callable[[TableContext], object]


def look_for_splits(context: TableContext) -> object:
    """Looks for full leaves and counts divided partitions with references, like the maintenance lambda."""
    return context.partitions.look_for_full_leaves(), context.partitions.count_above_leaves()


def split_leaves(context: TableContext) -> object:
    """Splits full leaves like a round of splits, but in the middle, because there are no sketches."""
    partitions, divided = context.partitions, 0
    for leaf in partitions.full_leaves():
        keys: Any = partitions.partitions_in([leaf.partition_id])[leaf.partition_id].region["key"]
        partitions.split(
            leaf.partition_id,
            KEYS_PER_LEAF // 2 + (keys.max - KEYS_PER_LEAF if keys.min is None else keys.min),
        )
        partitions.settle(leaf.marks)
        divided += 1
    return divided


def push_down(context: TableContext) -> object:
    requests = context.partitions.references_above_leaves()
    pushed = 0
    while batch := list(islice(requests, 1_000)):
        context.store.split_file_references(batch)
        pushed += len(batch)
    return pushed


def take_jobs(context: TableContext) -> object:
    taken = 0
    while taken < TAKEN_JOBS:
        taken += len(context.jobs.take(TAKEN_AT_ONCE))
    return taken


def measured() -> dict[str, Operation]:
    """Returns the operations in the order in which they run."""
    return {
        "references_counted_in_sql": _count,
        "describe_first": lambda c: c.store.totals.bring_forward(),
        "jobs_first": lambda c: c.jobs.create(),
        "splits_first": look_for_splits,
        "describe": lambda c: c.store.totals.read(),
        "jobs_nothing_due": lambda c: c.jobs.create(),
        "splits_nothing_new": look_for_splits,
        "garbage_nothing": lambda c: c.garbage.collect().deleted,
        "jobs_due": lambda c: c.jobs.create(),
        "jobs_count_due": lambda c: c.jobs.due(),
        "jobs_take": take_jobs,
        "split_leaves": split_leaves,
        "push_down": push_down,
        "garbage_due": lambda c: c.garbage.collect().deleted,
        "garbage_metrics": lambda c: (c.store.orphaned(), c.jobs.count()),
        "describe_changed": lambda c: c.store.totals.read(),
        "stream_references": lambda c: sum(1 for _ in c.store.file_references()),
    }


WITH_SIZE = ("references_counted_in_sql", "describe_first", "jobs_first", "splits_first", "stream_references")
"""The operations whose work grows with the table, because they count, read or return all of it."""


def _count(context: TableContext) -> int:
    name = context.store.own.layout.tables(context.table.table_id)["file_reference"]
    with context.supplier.connection() as conn:
        conn.execute("set enable_seqscan = on")
        row = conn.execute(f"select count(*) from {name}").fetchone()
    return int(row[0]) if row else 0


def prepare(name: str, tables: Tables, table: StateTable) -> None:
    """Makes work for an operation: new files for `jobs_due`, removed references for `garbage_due`."""
    work = {"jobs_due": _add_files, "garbage_due": _remove_references}.get(name)
    if work is not None:
        with TableAddress(tables.dsn, tables.objects, {}, table.record).open() as context:
            work(context.store, table)


def _add_files(store: FileReferenceStore, table: StateTable) -> None:
    """Adds a file to some leaves, which are then due for a compaction."""
    leaves = [table.partition_id(n) for n in spread(table.leaves, CHANGED_LEAVES)]
    store.add_files(
        FileReference(filename=f"{table.record.object_prefix}new/{leaf}", partition_id=leaf, row_count=1)
        for leaf in leaves
    )


def _remove_references(store: FileReferenceStore, table: StateTable) -> None:
    """Removes references, like compactions that filter out all rows."""
    references = islice(store.unassigned_file_references(), GARBAGE_FILES)
    for partition_id, group in groupby(list(references), key=attrgetter("partition_id")):
        job = {"job_id": f"filter {partition_id}", "partition_id": partition_id}
        names = tuple(reference.filename for reference in group)
        store.assign_job_ids([AssignJobIdRequest(**job, filenames=names)])
        store.replace_file_references(
            [ReplaceFileReferencesRequest(**job, input_filenames=names, new_reference=None)]
        )


class Alone:
    """One operation that runs alone in a process."""

    def __init__(self, context: TableContext) -> None:
        self._context = context

    def run(self, name: str) -> dict[str, Any]:
        started = time.perf_counter()
        answer = measured()[name](self._context)
        seconds = time.perf_counter() - started
        return {
            "seconds": round(seconds, 4),
            "rss_mb": round(resident_bytes() / 2**20, 1),
            "answer": str(answer),
        }


@contextmanager
def alone(dsn: str, objects: str, table: StateTable) -> Iterator[Alone]:
    with TableAddress(dsn, objects, {}, table.record).open() as context:
        yield Alone(context)


def measure(tables: Tables, sizes: Sizes, layout: str, tell: Tell) -> Figures:
    """Measures every operation on every table, one after another."""
    found: dict[str, dict[str, Any]] = {name: {} for name in measured()}
    for leaves, files in sizes:
        tell(f"a table of {leaves:,} leaves with {files} files each")
        table = _table(tables, leaves, files, layout)
        for name, figures in found.items():
            tell(f"{leaves:,} leaves, {files} files each: {name}")
            prepare(name, tables, table)
            with remote(alone, tables.dsn, tables.objects, table) as process:
                figures[f"{leaves}x{files}"] = process.call("run", name)
        tables.drop(table)
    return summary(found, sizes)


def _table(tables: Tables, leaves: int, files: int, layout: str) -> StateTable:
    """Makes a table whose leaves are due for a compaction after one more file."""
    return tables.make(
        f"scale_{leaves}_{files}",
        leaves,
        layout,
        files_per_leaf=files,
        full_leaves=FULL_LEAVES,
        above_leaves=ABOVE_LEAVES,
        compaction_strategy="basic",
        compaction_batch_files=files + 1,
        gc_delay_seconds=0,
        history_retention_seconds=0,
    )


def summary(by_operation: dict[str, dict[str, Any]], sizes: Sizes) -> Figures:
    """Returns the figures with the growth of each operation's time.

    Growth is the time for the largest table with 10 files in each leaf, divided by the time for the smallest
    table.
    """
    keys = [f"{leaves}x{files}" for leaves, files in sizes]
    first, last = keys[0], [key for key in keys if key.endswith("x10")][-1]

    def growth(name: str) -> float:
        before, after = (float(by_operation[name][key]["seconds"]) for key in (first, last))
        return round(after / max(before, 1e-4), 2)

    return {
        "rss_mb_max": max(
            figure["rss_mb"] for figures in by_operation.values() for figure in figures.values()
        ),
        "references_counted_growth": growth("references_counted_in_sql"),
        "growth_max_of_the_rest": max(growth(name) for name in by_operation if name not in WITH_SIZE),
        "growth": {name: growth(name) for name in by_operation},
        "growth_from": first,
        "growth_to": last,
        "operations": by_operation,
    }
