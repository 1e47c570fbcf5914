"""The speed of SQL, compared with DuckDB on Parquet files of the same sorted rows, one file for each table.

The statements are the 22 queries of TPC-H, and queries for sorted rows, single keys and ranges of keys. Some
of them also run on a table whose files were divided by splits, and on a table with an aggregate. Every answer
is compared with DuckDB's. Both sides use all processors. They alternate, each warm in a separate process,
with a warm page cache. The benchmark also measures planning with 132,000 leaves, the time that the query
service adds to a small answer, and the files that conditions on keys read for each file that they need.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import median

from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.processes import Remote, remotes
from benchmarks.harness.report import Grid, median_ratio, turned, values
from benchmarks.harness.service import served
from benchmarks.sql.lake import AGGREGATED, DIVIDED, MAIN, Lake, make
from benchmarks.sql.pruning import read_vs_needed
from benchmarks.sql.sides import dormouse, duckdb, resident_of_descendants, rows_of, same
from benchmarks.state_tables import KEYS_PER_LEAF, open_tables
from dormouse.client import connect
from dormouse.postgres import load

TPCH = {name: query.text for name, query in load(__file__, "tpch").items()}
KINDS = {
    "row_number": "select max(n), sum(n * l_linenumber)::double from (select l_linenumber, row_number() over "
    "(order by l_orderkey, l_linenumber) as n from lineitem) as numbered",
    "top10_key": "select * from lineitem order by l_orderkey, l_linenumber limit 10",
    "top10_value": "select * from lineitem order by l_extendedprice desc, l_orderkey, l_linenumber limit 10",
    "one_key": "select * from lineitem where l_orderkey = {key}",
    "key_range": "select * from lineitem where l_orderkey >= {key} and l_orderkey < {key} + 4000",
}
TABLES = {"dormouse": MAIN, "duckdb": MAIN, "divided": DIVIDED, "aggregated": AGGREGATED}
"""The table of each measured case. Dormouse runs all cases except `duckdb`."""
OF_ALL = ("q1", "q6", *KINDS)
"""The statements that run in all four cases. All others run only in the first two."""
_SMALL = "select * from nation where n_nationkey = 7"


@dataclass(frozen=True)
class Plan:
    """The amounts of work. `lookups` is the number of look-ups of one key in a round."""

    scale: float = amount(1.0, 0.05, type=float, help="scale factor of TPC-H [1]")
    leaves: int = amount(4)
    ingests: int = amount(2)
    rounds: int = amount(5, 3, help="counted rounds, after one that warms up [5]")
    lookups: int = amount(10, 5)
    plans: int = amount(100, 30)
    planned_leaves: int = amount(132_000)
    served: int = amount(300, 100)


Times = dict[tuple[str, str], list[float]]
"""Lists of seconds, by the statement and the case."""


def measure(plan: Plan, tell: Tell) -> Figures:
    with own_place() as place:
        lake = Lake(place, plan.scale, plan.leaves, plan.ingests)
        make(lake, tell)
        tell("counting files that are read")
        with lake.opened() as instance:
            files = read_vs_needed(instance)
        with remotes([partial(dormouse, lake), partial(duckdb, lake)]) as [ours, theirs]:
            times = _rounds(plan, ours, theirs, tell)
            peak = ours.call("peak_bytes")
            tell("through the service")
            found = _served(plan, lake, ours, theirs)
            tell(f"planning {plan.planned_leaves:,} leaves")
            found["plan_ms_132000_leaves"] = _planned(plan, lake, ours)
            peaks = {"peak_bytes": peak, "peak_bytes_duckdb": theirs.call("peak_bytes")}
    facts = {"scale": lake.scale, "rounds": plan.rounds, "threads": os.cpu_count()}
    return {**facts, **figures(times), **found, **files, **peaks}


def _rounds(plan: Plan, ours: Remote, theirs: Remote, tell: Tell) -> Times:
    """Runs the rounds. The first one warms up and compares the answers; it does not count."""
    found: Times = defaultdict(list)
    for number in range(plan.rounds + 1):
        for name, text in statements(number, plan.scale).items():
            tell(f"{name}, round {number} of {plan.rounds}")
            sides = TABLES if name in OF_ALL else ("dormouse", "duckdb")
            expected = None if number else theirs.call("rows", text)
            for side in turned(list(sides), number):
                engine, own_text = theirs if side == "duckdb" else ours, text.replace(MAIN, TABLES[side])
                if expected is None:
                    times = plan.lookups if name == "one_key" else 1
                    found[name, side].append(engine.call("seconds", own_text, times))
                elif not same(engine.call("rows", own_text), expected):
                    raise RuntimeError(f"{name}: {TABLES[side]} answered differently than DuckDB")
    return found


def statements(number: int, scale: float) -> dict[str, str]:
    """Returns the statements of a round. Every call returns the same ones."""
    of_order = int(1_500_000 * scale) * random.Random(number).random()
    key = int(of_order / 8) * 32 + 1  # of 32 order keys, the first 8 are used
    return {**TPCH, **{name: text.format(key=key) for name, text in KINDS.items()}}


def _served(plan: Plan, lake: Lake, ours: Remote, theirs: Remote) -> Figures:
    """Measures a small answer, the time that the service adds to it, and the memory of a service process."""
    there: list[float] = []
    times: dict[str, list[float]] = defaultdict(list)
    with served(lake.place.dsn, lake.place.objects) as service, connect(service.url) as client:
        expected = ours.call("rows", _SMALL)
        for number in range(plan.served):
            began = time.perf_counter()
            answer = client.sql(_SMALL).read_all()
            there.append(time.perf_counter() - began)
            if rows_of(answer) != expected:
                raise RuntimeError("the service answered differently")
            times[""].append(ours.call("seconds", _SMALL))
            times["_new"].append(ours.call("seconds", f"{_SMALL} -- {number}"))
            times["_plan"] += ours.call("plan_seconds", [_SMALL])
            times["_duckdb"].append(theirs.call("seconds", _SMALL))
        sizes = resident_of_descendants(service.process_id)
    found: Figures = {f"small_sql{part}_ms": _ms(seconds) for part, seconds in times.items()}
    return {
        **found,
        "small_sql_added_ms": round(_ms(times[""]) - _ms(times["_duckdb"]), 3),
        "served_overhead_ms": round(_ms(there) - _ms(times[""]), 3),
        "worker_rss_mb": round(max(sizes) / 1e6, 1) if sizes else None,
    }


def _planned(plan: Plan, lake: Lake, ours: Remote) -> float:
    """Returns the milliseconds to plan a statement of one key.

    The first three plans do not count, because they load the partition tree.
    """
    with open_tables(lake.place.dsn, lake.place.objects) as tables:
        tables.make("large", plan.planned_leaves, files_per_leaf=1)
    chance = random.Random(1)
    keys = [chance.randrange(plan.planned_leaves * KEYS_PER_LEAF) for _ in range(plan.plans + 3)]
    return _ms(ours.call("plan_seconds", [f"select * from large where key = {key}" for key in keys])[3:])


def figures(times: Mapping[tuple[str, str], Sequence[float]]) -> Figures:
    """Returns milliseconds, and ratios of speed: DuckDB's time divided by Dormouse's time.

    The other two ratios are Dormouse's time divided by the time of the divided or aggregated table.
    """
    found: Figures = {f"{name}_ms{_END[side]}": _ms(seconds) for (name, side), seconds in times.items()}
    ratios = {name: median_ratio(times[name, "duckdb"], times[name, "dormouse"]) for name in (*TPCH, *KINDS)}
    found |= {f"{name}_vs_duckdb": round(ratio, 3) for name, ratio in ratios.items()}
    for side, key in (("divided", "divided_vs_whole"), ("aggregated", "aggregated_vs_plain")):
        found[key] = _mean([median_ratio(times[name, "dormouse"], times[name, side]) for name in OF_ALL])
    return {
        **found,
        "tpch_vs_duckdb": _mean([ratios[name] for name in TPCH]),
        "tpch_worst": round(min(ratios[name] for name in TPCH), 3),
        "top10_vs_duckdb": round(min(ratios["top10_key"], ratios["top10_value"]), 3),
        "lookup_sql_ms": found["one_key_ms"],
    }


def _ms(seconds: Sequence[float]) -> float:
    return round(1_000 * median(seconds), 3)


def _mean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean of ratios."""
    return round(prod(ratios) ** (1 / len(ratios)), 3)


_END = {"dormouse": "", **{side: f"_{side}" for side in TABLES if side != "dormouse"}}
_LABELS = {
    "row_number": "row_number over the key",
    "top10_key": "top 10 by key",
    "top10_value": "top 10 by value",
    "one_key": "one key",
    "key_range": "a range of 4,000 keys",
}
_COLUMNS = {"{}_ms": "ms", "{}_ms_duckdb": "DuckDB", "{}_vs_duckdb": "ours ÷ DuckDB's"}

BENCHMARK = Benchmark(
    "sql",
    __doc__,
    Plan,
    measure,
    [
        "TPC-H at scale {scale}, {threads} threads; medians of {rounds} rounds",
        Grid(
            {name: _LABELS.get(name, name) for name in (*TPCH, *KINDS)},
            {**_COLUMNS, "{}_ms_divided": "divided", "{}_ms_aggregated": "aggregated"},
            "milliseconds, and speed",
        ),
        values(
            {
                "tpch_vs_duckdb": "TPC-H, ours ÷ DuckDB's (geometric mean)",
                "tpch_worst": "  the worst query",
                "top10_vs_duckdb": "top 10, the worse of the two",
                "divided_vs_whole": "divided ÷ whole files (geometric mean)",
                "aggregated_vs_plain": "with an aggregate ÷ plain (geometric mean)",
                "lookup_sql_ms": "one key: ms",
                "plan_ms_132000_leaves": "planning a look-up in 132,000 leaves: ms",
                "small_sql_ms": "a small answer: ms",
                "small_sql_duckdb_ms": "  DuckDB: ms",
                "small_sql_added_ms": "  what Dormouse adds: ms",
                "small_sql_plan_ms": "  to look its table up and plan it: ms",
                "small_sql_new_ms": "  of a statement that is new each time: ms",
                "files_read_vs_needed_max": "files read ÷ files needed, the worst case",
                "files_read_vs_needed_conditions_max": "  the worst condition on a key",
                "files_read_vs_needed_cases": "  statements that were looked at",
                "served_overhead_ms": "  what the service adds: ms",
                "worker_rss_mb": "an idle process of the service: MB",
                "peak_bytes": "peak resident memory: bytes",
                "peak_bytes_duckdb": "  DuckDB: bytes",
            }
        ),
    ],
    needed=("datafusion", "duckdb"),
)

if __name__ == "__main__":
    BENCHMARK.main()
