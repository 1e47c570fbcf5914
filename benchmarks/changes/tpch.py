"""TPC-H on keyed tables after upserts, compared with DuckDB on plain files of the rows that were loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from re import sub
from time import process_time
from typing import Any

from benchmarks.changes.plan import Plan
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import median_ratio
from benchmarks.sql.lake import Lake, TpchRows, duckdb_connection, generate
from dormouse.postgres import load

QUERIES = ("q1", "q6", "q4", "q12")
TABLES = ("lineitem", "orders")
CASES = {"one_upsert": (10,), "five_upserts": (300,) * 5}
"""The numbers of rows of the upserts after which the statements run."""
_TEXTS = {name: query.text for name, query in load("benchmarks.sql", "tpch").items()}


def tpch(plan: Plan, tell: Tell) -> Figures:
    """Returns the ratios of CPU seconds, which other processes disturb less than the time that passes."""
    with own_place() as place, duckdb_connection() as duckdb:
        lake = Lake(place, plan.scale, leaves=1, ingests=1)
        tell("generating rows")
        generated = generate(lake, TABLES)
        duckdb.execute("set parquet_metadata_cache = true")
        with lake.opened() as instance:
            for name in TABLES:
                rows = TpchRows(duckdb, lake, name).convert(generated / f"{name}.parquet")
                for case, counts in CASES.items():
                    tell(f"loading {name}: {case}")
                    rows.load(instance, f"{name}_{case}", keep="newest_row")
                    for number, count in enumerate(counts, 1):
                        some = f"from '{lake.path(name)}' using sample reservoir({count} rows)"
                        changed = duckdb.execute(f"{some} repeatable ({number})").to_arrow_table()
                        instance.table(f"{name}_{case}").upsert(changed, engine="local")
                duckdb.execute(f"create view {name} as from '{lake.path(name)}'")
            found: Figures = {}
            for query in QUERIES:
                tell(f"TPC-H's {query}")
                found |= _ratios(plan, query, duckdb, instance)
            return found


def _ratios(plan: Plan, query: str, duckdb: Any, instance: Any) -> Figures:
    times: dict[str, list[float]] = {name: [] for name in ("duckdb", *CASES)}
    for number in range(plan.rounds + 1):
        for name, measured in times.items():
            text = sub(rf"\b({'|'.join(TABLES)})\b", rf"\1_{name}", _TEXTS[query])
            if name == "duckdb":
                taken = _cpu_seconds(partial(_fetch, duckdb, _TEXTS[query]))
            else:
                taken = _cpu_seconds(partial(_read, instance, text))
            if number:  # the first round warms up
                measured.append(taken)
    return {
        f"{query}_with_{case}_vs_duckdb": round(median_ratio(times[case], times["duckdb"]), 3)
        for case in CASES
    }


def _fetch(duckdb: Any, text: str) -> None:
    duckdb.execute(text).fetchall()


def _read(instance: Any, text: str) -> None:
    instance.sql(text).read_all()


def _cpu_seconds(action: Callable[[], object]) -> float:
    began = process_time()
    action()
    return process_time() - began
