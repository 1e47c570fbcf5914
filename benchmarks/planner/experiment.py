"""What is measured of tables of each size, and the figures that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.commits.bench import median_of_ratios
from benchmarks.metadata_tables import MetadataTable, metadata_table
from benchmarks.planner.load import load
from benchmarks.planner.planning import planning
from benchmarks.remote import FORKSERVER, Remote, remote
from benchmarks.state_tables import Tables

FILES_PER_LEAF = 10
COMMITS_PER_S = 1_000
LEAVES = {"1k": 1_000, "10k": 10_000, "132k": 132_000}


@dataclass(frozen=True)
class Plan:
    """How much is done; times in seconds."""

    keys_seconds: float = 20
    keys_min: int = 1_000
    ranges_seconds: float = 10
    ranges_min: int = 200
    instances: int = 10
    scans: int = 3
    scanned: tuple[str, ...] = tuple(LEAVES)
    sizes: tuple[str, ...] = tuple(LEAVES)
    under_load: tuple[str, ...] = tuple(LEAVES)


QUICK = Plan(
    keys_seconds=2.5,
    keys_min=100,
    ranges_seconds=1,
    ranges_min=20,
    instances=3,
    scans=1,
    scanned=("1k",),
    sizes=("1k", "132k"),
    under_load=("132k",),
)


@dataclass(frozen=True)
class Place:
    dsn: str
    objects: str
    tables: Tables


def measure(place: Place, plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every figure, by name."""
    found: dict[str, Any] = {"stale_reads": 0, "probes": 0, "files_per_leaf": FILES_PER_LEAF}
    for size in plan.sizes:
        leaves = LEAVES[size]
        tell(f"making {leaves:,} leaves")
        table = metadata_table(place.tables, f"leaves_{size}", leaves, FILES_PER_LEAF, claimed_leaves=leaves)
        of_size = _measure_size(place, plan, size, table, tell)
        for name in ("stale_reads", "probes"):
            found[name] += of_size.pop(name)
        found |= {_named(name, size): value for name, value in of_size.items()}
        place.tables.drop(table)
    return found


def _named(name: str, size: str) -> str:
    """`plan_p99_ms` and `plan_p99_ms_under_load` of a size."""
    stem = name.removesuffix("_under_load")
    return f"{stem}_{size}{name[len(stem) :]}"


def _measure_size(
    place: Place, plan: Plan, size: str, table: MetadataTable, tell: Callable[[str], None]
) -> dict[str, Any]:
    here, there = FORKSERVER.Pipe()
    stop = FORKSERVER.Event()
    found: dict[str, Any] = {"stale_reads": 0, "probes": 0}
    with remote(planning, place.dsn, place.objects, table, here) as planner:
        tell(f"{table.leaves:,} leaves, idle")
        found["rss_mb_before"] = _mb(planner.call("memory")["now"])
        found["plan_first_ms"] = round(planner.call("new_instances", 1)[0], 3)
        found["plan_cold_ms"] = round(statistics.median(planner.call("new_instances", plan.instances)), 3)
        tree = planner.call("load_tree")
        found |= {"tree_load_ms": round(tree["milliseconds"], 1), "tree_mb": _mb(tree["bytes"])}
        found |= _warm(planner, plan)
        if size in plan.under_load:
            tell(f"{table.leaves:,} leaves, with commits")
            with remote(load, place.dsn, place.objects, table, there, stop) as committer:
                committer.call("batch")  # it has started, and is warm
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
            tell(f"{table.leaves:,} leaves, all of them")
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
        "plan_vs_look_up": round(median_of_ratios(keys["look_up"], keys["plan"]), 3),
        "plan_vs_select_1": round(median_of_ratios(keys["select_1"], keys["plan"]), 3),
    }


def _scans(planner: Remote, plan: Plan) -> dict[str, Any]:
    scans = planner.call("scans", plan.scans)
    return {
        "scan_first_ms": round(statistics.median(scans["first"]), 2),
        "scan_all_ms": round(statistics.median(scans["whole"]), 1),
        "scan_scans": scans["scans"],
        "scan_rss_mb": _mb(planner.call("memory")["most"]),
    }


def _percentiles(name: str, milliseconds: Sequence[float]) -> Mapping[str, float]:
    cuts = statistics.quantiles(milliseconds, n=100, method="inclusive")
    return {f"{name}_p50_ms": round(cuts[49], 3), f"{name}_p99_ms": round(cuts[98], 3)}


def _mb(size: float) -> float:
    return round(size / 1e6, 1)
