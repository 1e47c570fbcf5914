"""How many commits can the state store apply? In batches, one by one, over many tables, through the queue.

On an embedded PostgreSQL with its durable defaults. One by one, the same SQL is run by pgbench in turns.
"""

from __future__ import annotations

import time
from argparse import Namespace

from benchmarks.commits import kinds, queueing, replacing
from benchmarks.commits.bench import BATCHES, QUICK, Bench, Plan
from benchmarks.commits.profiling import profile
from benchmarks.commits.replacing import TWO
from benchmarks.committers import PRELOAD
from benchmarks.harness.command import LAYOUT, Benchmark, Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Line, Pane, columns, grid, lines
from benchmarks.making import open_tables

PARTS = {
    "batches": replacing.by_batch,
    "alone": replacing.alone,
    "adding": kinds.adding,
    "assigning": kinds.assigning,
    "creating_jobs": kinds.creating_jobs,
    "idle_latency": queueing.idle_latency,
    "queue": queueing.through_queue,
    "tables": kinds.over_tables,
}


def measure(arguments: Namespace, tell: Tell) -> Figures:
    """The parts that are wanted; or instead the profile of a batch, as text."""
    plan = QUICK if arguments.quick else Plan()
    found: Figures = {}
    with own_place() as place, open_tables(place.dsn, place.objects) as tables:
        bench = Bench(place, tables, plan, arguments.layout)
        if arguments.profile:
            return {"profile": profile(bench, batch=500, batches=plan.profiled_batches)}
        for part in arguments.only or PARTS:
            tell(part)
            began = time.monotonic()
            found |= PARTS[part](bench)
            found[f"seconds_{part}"] = round(time.monotonic() - began, 1)
    return found


def text(found: Figures) -> str:
    """What was measured, in lines; all of it when only parts were."""
    if "profile" in found:
        return str(found["profile"])
    blocks = []
    if "replace_commits_per_s" in found:
        heads = {label: f"replace_commits_per_s_{{}}{end}" for end, label in _ENDS.items()}
        blocks += [
            "Compaction commits a second (11 files by 1), by the size of the batch",
            grid(found, {batch: f"{batch:,}" for batch in BATCHES}, heads),
            "",
        ]
    known = [(label, found[key]) for key, label in _LINES.items() if key in found]
    return "\n".join([*blocks, columns(*known)] if known else blocks)


def panes(found: Figures) -> list[Pane]:
    """Commits a second by the size of the batch."""
    drawn = lines(found, _ENDS, "replace_commits_per_s_{1}{0}", BATCHES)
    if "pgbench_tps" in found:
        drawn.append(Line("pgbench, one by one", dict.fromkeys(BATCHES, found["pgbench_tps"]), "--"))
    return [Pane("Compaction commits", "commits a batch", "commits a second", drawn)]


_ENDS = {"": "one committer"} | {f"_{name}": name.replace("_", " ") for name in TWO}
_LINES = {
    "replace_commits_per_s": "compaction commits/s, at best",
    "replace_single_per_s": "one by one, 1 client: commits/s",
    "pgbench_tps": "  the same SQL by pgbench",
    "replace_single_vs_pgbench": "  ours ÷ pgbench's",
    "replace_single_per_s_8": "one by one, 8 clients: commits/s",
    "pgbench_tps_8": "  the same SQL by pgbench",
    "replace_8_vs_pgbench": "  ours ÷ pgbench's",
    "queue_commits_per_s": "through the queue, end to end: commits/s",
    "idle_latency_ms": "one request on an idle system, median ms",
    "idle_latency_p99_ms": "  p99 ms",
    "files_added_per_s": "files added/s, 10,000 a commit",
    "assign_per_s": "references assigned/s",
    "assign_commits_per_s": "  commits/s, of 11 references each",
    "jobs_created_per_s": "jobs created/s",
    "jobs_65536_seconds": "  seconds for 65,536",
    "commits_per_s_1_tables": "commits/s in batches of 1,000, to 1 table",
    "commits_per_s_10_tables": "  evenly to 10",
    "commits_per_s_1000_tables": "  evenly to 1,000",
    "tables_1000_vs_1": "  1,000 ÷ 1",
}

BENCHMARK = Benchmark(
    "commits",
    __doc__,
    measure,
    text,
    panes,
    options={
        "--only": {"action": "append", "choices": list(PARTS), "help": "a part; may be repeated"},
        "--layout": LAYOUT,
        "--profile": {"action": "store_true", "help": "instead: where the time of a batch goes"},
    },
    preload=PRELOAD,
    refusal=lambda given: (
        "--plot draws the part batches: add --only batches"
        if given.plot and (given.profile or (given.only and "batches" not in given.only))
        else None
    ),
)

if __name__ == "__main__":
    BENCHMARK.main()
