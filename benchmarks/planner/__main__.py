"""The time to plan a query of tables with 1,000, 10,000 and 132,000 leaves with 10 files each.

The plans are of one key, of the keys of ten leaves, and of the whole table, in new and in warm instances.
They are measured alone, and while another process compacts 1,000 times a second, ingests and splits. The
plans alternate with a look-up of the same partitions in plain SQL, and with `select 1`. The benchmark also
checks that plans contain commits as soon as these are acknowledged. The server is an embedded PostgreSQL with
its durable defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.processes import FORKSERVER, Remote, remote
from benchmarks.harness.report import Grid, Pane, median_ratio, percentile
from benchmarks.planner.load import load
from benchmarks.planner.planning import planning
from benchmarks.state_tables import StateTable, Tables, open_tables

COMMITS_PER_S = 1_000
LEAVES = {"1k": 1_000, "10k": 10_000, "132k": 132_000}


@dataclass(frozen=True)
class Plan:
    """The amounts of work; times in seconds."""

    files_per_leaf: int = amount(10, 2)
    keys_seconds: float = amount(20, 1.5)
    keys_min: int = amount(1_000, 100)
    ranges_seconds: float = amount(10, 1)
    ranges_min: int = amount(200, 20)
    instances: int = amount(10, 3)
    scans: int = amount(3, 1)
    scanned: Sequence[str] = amount(tuple(LEAVES), ("1k",))
    under_load: Sequence[str] = amount(tuple(LEAVES), ("132k",))
    only: Sequence[str] = amount(
        tuple(LEAVES),
        ("1k", "132k"),
        action="append",
        choices=tuple(LEAVES),
        help="leaves of the tables; may be repeated",
    )


def measure(plan: Plan, tell: Tell) -> Figures:
    """Makes and measures a table of each size, one after another."""
    found: Figures = {"stale_reads": 0, "probes": 0, "files_per_leaf": plan.files_per_leaf}
    with own_place() as place, open_tables(place.dsn, place.objects) as tables:
        for size in plan.only:
            leaves = LEAVES[size]
            tell(f"making {leaves:,} leaves")
            table = tables.make(
                f"leaves_{size}", leaves, files_per_leaf=plan.files_per_leaf, claimed_leaves=leaves
            )
            of_size = _measure_size(tables, plan, size, table, tell)
            for name in ("stale_reads", "probes"):
                found[name] += of_size.pop(name)
            found |= {_named(name, size): value for name, value in of_size.items()}
            tables.drop(table)
    return found


def _named(name: str, size: str) -> str:
    """Returns the key of a figure with the size, for example `plan_p99_ms_1k_under_load`."""
    stem = name.removesuffix("_under_load")
    return f"{stem}_{size}{name[len(stem) :]}"


def _measure_size(tables: Tables, plan: Plan, size: str, table: StateTable, tell: Tell) -> Figures:
    here, there = FORKSERVER.Pipe()
    stop = FORKSERVER.Event()
    found: Figures = {"stale_reads": 0, "probes": 0}
    with remote(planning, tables.dsn, tables.objects, table, here) as planner:
        tell(f"{table.leaves:,} leaves, idle")
        found["rss_mb_before"] = _mb(planner.call("memory")["now"])
        found["plan_first_ms"] = round(planner.call("new_instances", 1)[0], 3)
        found["plan_cold_ms"] = round(median(planner.call("new_instances", plan.instances)), 3)
        tree = planner.call("load_tree")
        found |= {"tree_load_ms": round(tree["milliseconds"], 1), "tree_mb": _mb(tree["bytes"])}
        found |= _warm(planner, plan)
        if size in plan.under_load:
            tell(f"{table.leaves:,} leaves, with commits")
            with remote(load, tables.dsn, tables.objects, table, there, stop) as committer:
                committer.call("batch")  # warms up the process
                committer.begin("run", COMMITS_PER_S)
                under_load = _warm(planner, plan)
                stop.set()
                done = committer.result()
            found |= {f"{name}_under_load": value for name, value in under_load.items()}
            found["commits_per_s"] = round(done["commits"] / done["seconds"], 1)
            found["splits_per_s"] = round(done["splits"] / done["seconds"], 2)
            probes, stale = planner.call("probed")
            found["probes"], found["stale_reads"] = done["probes"] + probes, done["stale"] + stale
        found["rss_mb"] = _mb(planner.call("memory")["most"])
        if size in plan.scanned:
            tell(f"{table.leaves:,} leaves, the whole table")
            found |= _scans(planner, plan)
    return found


def _warm(planner: Remote, plan: Plan) -> dict[str, float]:
    keys = planner.call("keys", plan.keys_seconds, plan.keys_min)
    ranges = planner.call("ranges", plan.ranges_seconds, plan.ranges_min)
    return {
        **_percentiles("plan", keys["plan"]),
        **_percentiles("look_up", keys["look_up"]),
        **_percentiles("select_1", keys["select_1"]),
        **_percentiles("range_plan", ranges),
        # throughput, ours ÷ theirs: pairs of neighbours share the machine's noise
        "plan_vs_look_up": round(median_ratio(keys["look_up"], keys["plan"]), 3),
        "plan_vs_select_1": round(median_ratio(keys["select_1"], keys["plan"]), 3),
    }


def _scans(planner: Remote, plan: Plan) -> Figures:
    scans = planner.call("scans", plan.scans)
    return {
        "scan_first_ms": round(median(scans["first"]), 2),
        "scan_all_ms": round(median(scans["whole"]), 1),
        "scan_scans": scans["scans"],
        "scan_rss_mb": _mb(planner.call("memory")["most"]),
    }


def _percentiles(name: str, milliseconds: Sequence[float]) -> Mapping[str, float]:
    return {f"{name}_p{percent}_ms": round(percentile(milliseconds, percent), 3) for percent in (50, 99)}


def _mb(size: float) -> float:
    return round(size / 1e6, 1)


_WHAT = {
    "plan": "one key",
    "range_plan": "the keys of ten leaves",
    "look_up": "  bare SQL: the files of the key",
    "select_1": "  bare SQL: select 1",
}
_WHEN = {"": "alone", "_under_load": "with commits"}
_RATIO = {
    "plan_vs_look_up": "one key, time of bare SQL ÷ ours",
    "plan_vs_select_1": "one key, time of `select 1` ÷ ours",
}
_SINGLE = {
    "plan_first_ms": "one key, the first plan of a process: ms",
    "plan_cold_ms": "one key, the first plan of an instance: ms",
    "scan_first_ms": "the whole table, until the first files: ms",
    "scan_all_ms": "the whole table, until the last files: ms",
    "scan_scans": "  scans of files",
    "scan_rss_mb": "  peak resident memory: MB",
    "rss_mb_before": "resident memory before the table is opened: MB",
    "rss_mb": "peak resident memory before plans of the whole table: MB",
    "tree_load_ms": "loading the whole partition tree: ms",
    "tree_mb": "the partition tree: MB",
    "commits_per_s": "commits/s during the plans",
    "splits_per_s": "splits/s during the plans",
}


def _rows(of: Mapping[str, str]) -> dict[Any, str]:
    return {(name, end): f"{what}, {when}" for end, when in _WHEN.items() for name, what in of.items()}


def _lines(which: str, end: str) -> dict[str, str]:
    return {f"{name}_{which}_ms_{{}}{end}": f"{what}, {_WHEN[end]}" for name, what in _WHAT.items()}


_SIZES = {f"{{}}_{size}": f"{leaves:,} leaves" for size, leaves in LEAVES.items()}
_PERCENTILES = {
    f"{{}}_{percentile}_ms_{size}{{}}": f"{leaves:,}: p50" if percentile == "p50" else "p99"
    for size, leaves in LEAVES.items()
    for percentile in ("p50", "p99")
}

BENCHMARK = Benchmark(
    "planner",
    __doc__,
    Plan,
    measure,
    [
        "Planning tables with {files_per_leaf} files in each leaf, by the number of leaves",
        Grid(_rows(_WHAT), _PERCENTILES, "milliseconds"),
        Grid(_rows(_RATIO), {f"{key}{{}}": head for key, head in _SIZES.items()}),
        Grid(_SINGLE, _SIZES),
        "stale plans: {stale_reads} of {probes:,}",
    ],
    panes=[
        Pane(
            which,
            "leaves",
            "milliseconds",
            LEAVES,
            _lines(which, ""),
            _lines(which, "_under_load"),
            yscale="log",
        )
        for which in ("p50", "p99")
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
