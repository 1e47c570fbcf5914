"""How do operations on a table's state grow with the table, in time and in memory?

Tables of 1,000, 10,000 and 132,000 leaves with 10 files each, and of 132,000 with 50, as metadata only. Each
operation runs in a process of its own, whose resident memory at its highest is read at its end. What there is
to do is the same at every size, but for first looks and the stream of all references; beside it, as the
measure of what grows with the table, all references are counted in SQL. On an embedded PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_plot
from benchmarks.harness import orderly_end
from benchmarks.metadata_tables import MetadataTable, metadata_table, spread
from benchmarks.state_tables import Tables, open_tables, own_database
from dormouse.context import TableContext
from dormouse.files.layout import LAYOUTS
from dormouse.files.store import FileReferenceStore
from dormouse.model.file_reference import AssignJobIdRequest, FileReference, ReplaceFileReferencesRequest
from dormouse.objects import open_store
from dormouse.postgres import ConnectionSupplier

SIZES = ((1_000, 10), (10_000, 10), (132_000, 10), (132_000, 50))
"""Leaves, and the files of each."""
QUICK_SIZES = SIZES[:2]
FULL_LEAVES, ABOVE_LEAVES, CHANGED_LEAVES, GARBAGE_FILES = 10, 100, 500, 5_000
TAKEN_JOBS, TAKEN_AT_ONCE = 100, 10
Operation = Callable[[TableContext], object]


def look_for_splits(context: TableContext) -> object:
    """As the maintenance lambda asks."""
    return context.partitions.look_for_full_leaves(), context.partitions.count_above_leaves()


def split_leaves(context: TableContext) -> object:
    """As a round of splits, but for the sketches: nobody has written any."""
    partitions, divided = context.partitions, 0
    for leaf in partitions.full_leaves():
        keys: Any = partitions.partitions_in([leaf.partition_id])[leaf.partition_id].region["key"]
        partitions.split(leaf.partition_id, 500 + (keys.max - 1_000 if keys.min is None else keys.min))
        partitions.settle(leaf)
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
    """The operations, in the order in which they run."""
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
"""What grows with the table: what is counted or looked at whole, once a day at most, or returned."""


def _count(context: TableContext) -> int:
    name = context.store._layout.tables(context.table.table_id)["file_reference"]
    with context.supplier.connection() as conn:
        conn.execute("set enable_seqscan = on")
        row = conn.execute(f"select count(*) from {name}").fetchone()
    return int(row[0]) if row else 0


def prepare(name: str, tables: Tables, table: MetadataTable) -> None:
    """What an operation is to find."""
    work = {"jobs_due": _add_files, "garbage_due": _remove_references}.get(name)
    if work is None:
        return
    supplier = ConnectionSupplier(tables.dsn)
    work(TableContext(tables.dsn, supplier, open_store("/nowhere"), table.record).store, table)
    supplier.close()


def _add_files(store: FileReferenceStore, table: MetadataTable) -> None:
    """To some leaves, which are then due for a job."""
    leaves = [table.partition_id(n) for n in spread(table.leaves, CHANGED_LEAVES)]
    store.add_files(
        FileReference(filename=f"{table.record.object_prefix}new/{leaf}", partition_id=leaf, row_count=1)
        for leaf in leaves
    )


def _remove_references(store: FileReferenceStore, table: MetadataTable) -> None:
    """As compactions do whose rows are all filtered out."""
    references = islice(store.unassigned_file_references(), GARBAGE_FILES)
    for partition_id, group in groupby(list(references), key=attrgetter("partition_id")):
        job = {"job_id": f"filter {partition_id}", "partition_id": partition_id}
        names = tuple(reference.filename for reference in group)
        store.assign_job_ids([AssignJobIdRequest(**job, filenames=names)])
        store.replace_file_references(
            [ReplaceFileReferencesRequest(**job, input_filenames=names, new_reference=None)]
        )


def run_one(name: str, dsn: str, objects: str, table: str) -> dict[str, Any]:
    """One operation, in this process."""
    from dormouse.catalog import Catalog
    from dormouse.files.attempts import WriteAttempts

    supplier, store = ConnectionSupplier(dsn), open_store(objects)
    context = TableContext(dsn, supplier, store, Catalog(supplier, WriteAttempts(supplier, store)).get(table))
    started = time.perf_counter()
    answer = measured()[name](context)
    seconds = time.perf_counter() - started
    [peak] = [
        line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM")
    ]
    supplier.close()
    return {
        "seconds": round(seconds, 4),
        "rss_mb": round(int(peak.split()[1]) / 1024, 1),
        "answer": str(answer),
    }


def run(sizes: tuple[tuple[int, int], ...], layout: str, tell: Callable[[str], object]) -> dict[str, Any]:
    """Every figure, by name."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    found: dict[str, dict[str, Any]] = {name: {} for name in measured()}
    with (
        tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        EmbeddedPostgres(Path(folder) / "server") as server,
        own_database(server.dsn) as dsn,
        open_tables(dsn, f"{folder}/objects") as tables,
    ):
        for leaves, files in sizes:
            tell(f"a table of {leaves:,} leaves with {files} files each")
            table = _table(tables, leaves, files, layout)
            for name, figures in found.items():
                tell(f"{leaves:,} leaves, {files} files each: {name}")
                prepare(name, tables, table)
                figures[f"{leaves}x{files}"] = _in_a_process(name, dsn, f"{folder}/objects", table)
            tables.drop(table)
    return summary(found, sizes)


def _table(tables: Tables, leaves: int, files: int, layout: str) -> MetadataTable:
    """With a batch so large that a leaf is due when a file is added, and no sooner."""
    return metadata_table(
        tables,
        f"scale_{leaves}_{files}",
        leaves,
        files,
        layout,
        full_leaves=FULL_LEAVES,
        above_leaves=ABOVE_LEAVES,
        compaction_strategy="basic",
        compaction_batch_files=files + 1,
        gc_delay_seconds=0,
        history_retention_seconds=0,
    )


def _in_a_process(name: str, dsn: str, objects: str, table: MetadataTable) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--operation", name, dsn, objects, table.record.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def summary(found: dict[str, dict[str, Any]], sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """With how much longer each takes in the largest table of 10 files a leaf than in the smallest."""
    keys = [f"{leaves}x{files}" for leaves, files in sizes]
    first, last = keys[0], [key for key in keys if key.endswith("x10")][-1]

    def growth(name: str) -> float:
        before, after = (float(found[name][key]["seconds"]) for key in (first, last))
        return round(after / max(before, 1e-4), 2)

    return {
        "rss_mb_max": max(figure["rss_mb"] for figures in found.values() for figure in figures.values()),
        "references_counted_growth": growth("references_counted_in_sql"),
        "growth_max_of_the_rest": max(growth(name) for name in found if name not in WITH_SIZE),
        "growth": {name: growth(name) for name in found},
        "growth_from": first,
        "growth_to": last,
        "operations": found,
    }


def table_text(found: dict[str, Any]) -> str:
    operations = found["operations"]
    keys = list(next(iter(operations.values())))
    lines = [f"{'seconds (MB resident)':28}" + "".join(f"{key:>20}" for key in keys) + f"{'growth':>9}"]
    for name, figures in operations.items():
        cells = [f"{figures[key]['seconds']:.3f} ({figures[key]['rss_mb']:.0f})" for key in keys]
        lines.append(f"{name:28}" + "".join(f"{cell:>20}" for cell in cells) + f"{found['growth'][name]:>9}")
    lines.append(f"growth: {found['growth_to']} / {found['growth_from']}; rss_mb_max {found['rss_mb_max']}")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Seconds of each operation over the references of the table."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, figures in found["operations"].items():
        sizes = [int(key.split("x")[0]) * int(key.split("x")[1]) for key in figures]
        style = "--" if name in WITH_SIZE else "-"
        axes.plot(sizes, [item["seconds"] for item in figures.values()], style, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="references", ylabel="seconds")
    axes.legend(fontsize="x-small")
    figure.savefig(path, bbox_inches="tight")


def main(given: list[str] | None = None) -> None:
    orderly_end()
    arguments = parse(given)
    if arguments.operation:
        print(json.dumps(run_one(*arguments.operation)))
        return
    shown = sys.stderr.isatty() and not arguments.json
    tell = (lambda text: print(text, file=sys.stderr)) if shown else (lambda _: None)
    found = run(QUICK_SIZES if arguments.quick else SIZES, arguments.layout, tell)
    if arguments.plot:
        plot(found, arguments.plot)
    print(json.dumps(found) if arguments.json else table_text(found))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes, in under a minute")
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    parser.add_argument("--layout", choices=LAYOUTS, default="file_table", help="of the tables [file_table]")
    parser.add_argument("--operation", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    check_plot(parser, arguments.plot)
    return arguments


if __name__ == "__main__":
    main()
