"""The commits that the state store applies in a second.

They come in batches, one by one, to many tables, and through the commit queue. The server is an embedded
PostgreSQL with its durable defaults. Commits one by one alternate with pgbench, which runs the same SQL.
"""

from __future__ import annotations

import time

from benchmarks.commits import kinds, layouts, queueing, replacing
from benchmarks.commits.bench import BATCHES, PARTS, Bench, Plan
from benchmarks.commits.profiling import profile
from benchmarks.commits.replacing import TWO
from benchmarks.committers import PRELOAD
from benchmarks.harness.command import Benchmark, Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, Pane, values
from benchmarks.state_tables import open_tables
from dormouse.state.files.layout import LAYOUTS

_MEASURED = (
    replacing.by_batch,
    replacing.alone,
    replacing.without_log,
    kinds.adding,
    kinds.assigning,
    kinds.creating_jobs,
    queueing.idle_latency,
    queueing.through_queue,
    kinds.over_tables,
    layouts.by_layout,
)


def measure(plan: Plan, tell: Tell) -> Figures:
    """Runs the selected parts of the plan. With `profile`, it only returns a batch's profile, as text."""
    measured = dict(zip(PARTS, _MEASURED, strict=True))
    found: Figures = {}
    with own_place() as place, open_tables(place.dsn, place.objects) as tables:
        bench = Bench(place, tables, plan)
        if plan.profile:
            return {"profile": profile(bench, batch=500, batches=plan.profiled_batches)}
        for part in plan.only:
            tell(part)
            began = time.monotonic()
            found |= measured[part](bench)
            found[f"seconds_{part}"] = round(time.monotonic() - began, 1)
    return found


_ENDS = {"": "one committer"} | {f"_{name}": name.replace("_", " ") for name in TWO}
_LINES = {
    "replace_commits_per_s": "compaction commits/s, best case",
    "replace_single_per_s": "one by one, 1 client: commits/s",
    "pgbench_tps": "  the same SQL by pgbench",
    "pgbench_tps_with_lookup": "    including the look-up of its values",
    "replace_single_vs_pgbench": "  ours ÷ pgbench's",
    "replace_single_per_s_8": "one by one, 8 clients: commits/s",
    "pgbench_tps_8": "  the same SQL by pgbench",
    "replace_8_vs_pgbench": "  ours ÷ pgbench's",
    "replace_logged_vs_not": "with the log of removals ÷ without, in batches",
    "replace_commits_per_s_logged": "  with: commits/s",
    "replace_commits_per_s_not_logged": "  without: commits/s",
    "queue_commits_per_s": "through the queue, end to end: commits/s",
    "idle_latency_ms": "one request on an idle system, median ms",
    "idle_latency_p99_ms": "  p99 ms",
    "idle_latencies": "  requests",
    "files_added_per_s": "files added/s",
    "files_added_per_s_one_thread": "  one thread",
    "files_added_per_s_two_threads": "  two threads",
    "add_commits_per_s": "  commits/s",
    "files_per_commit": "  files a commit",
    "assign_per_s": "references assigned/s",
    "assign_commits_per_s": "  commits/s, of 11 references each",
    "jobs_created_per_s": "jobs created/s",
    "jobs_65536_seconds": "  seconds for 65,536",
    "jobs_created": "  jobs",
    "commits_per_s_1_tables": "commits/s in a committer's batches, to 1 table",
    "commits_per_s_10_tables": "  evenly to 10",
    "commits_per_s_1000_tables": "  evenly to 1,000",
    "tables_1000_vs_1": "  1,000 ÷ 1",
    "first_commits_per_s_1_tables": "the first commits to each table/s, to 1 table",
    "first_commits_per_s_10_tables": "  to 10",
    "first_commits_per_s_1000_tables": "  to 1,000",
}

BENCHMARK = Benchmark(
    "commits",
    __doc__,
    Plan,
    measure,
    [
        Grid(
            {batch: f"{batch:,}" for batch in BATCHES},
            {f"replace_commits_per_s_{{}}{end}": label for end, label in _ENDS.items()},
            "Compaction commits a second (11 files by 1), by the size of the batch",
        ),
        values(_LINES),
        Grid(
            {layout: layout for layout in LAYOUTS},
            {f"{name}_{{}}": name for name in layouts.NAMES},
            "The layouts beside each other; commits in batches of 500 by one committer",
        ),
        "{profile}",
    ],
    only_json=[f"{{seconds_{part}}}" for part in PARTS],
    panes=[
        Pane(
            "Compaction commits",
            "commits a batch",
            "commits a second",
            {batch: batch for batch in BATCHES},
            {f"replace_commits_per_s_{{}}{end}": label for end, label in _ENDS.items()},
            {"pgbench_tps": "pgbench, one by one"},
        )
    ],
    preload=PRELOAD,
    refusal=lambda given: (
        "--plot draws only the part batches: add --only batches"
        if given.plot and (given.profile or (given.only and "batches" not in given.only))
        else None
    ),
)

if __name__ == "__main__":
    BENCHMARK.main()
