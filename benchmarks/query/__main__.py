"""The time of queries by a key and by ranges of keys: Dormouse, DuckDB, Polars and PyIceberg.

DuckDB and Polars read the folder of the table's Parquet files. PyIceberg reads a table of the same files with
its SQL catalog. Dormouse is also queried in SQL. The table has 16 columns and 16 leaves. All engines return
all columns in key order, of the newest state of the table. The page cache is warm. Each engine runs in a
separate process and has looked up many keys before, as a service has. The engines alternate. The benchmark
also measures the first look-ups of a process, and the requests to S3 of one look-up.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.processes import Remote, remotes
from benchmarks.harness.report import Grid, Pane, median_ratio, turned
from benchmarks.query.lake import Lake, make
from benchmarks.query.requests import requests_of_a_lookup
from benchmarks.query.sides import SIDES, Wanted, opened_engine

KINDS = {"lookup": 1, "range_1000": 1_000, "range_1000000": 1_000_000}
_KINDS = {
    "lookup": "one key",
    "range_1000": "1,000 rows",
    "range_1000000": "1,000,000 rows",
}
_LABELS = {
    "dormouse": "Dormouse",
    "sql": "Dormouse, SQL",
    "duckdb": "DuckDB",
    "polars": "Polars",
    "pyiceberg": "PyIceberg",
}


@dataclass(frozen=True)
class Plan:
    """The amounts of work. `repeats` has the number of queries in a round, for each kind."""

    leaves: int = amount(16, 4)
    ingests: int = amount(1)
    rows: int = amount(12_000_000, 2_000_000)
    rounds: int = amount(7, 3)
    repeats: tuple[int, ...] = amount((20, 10, 2), (10, 5, 1))
    warming: int = amount(400, 60, help="look-ups of each engine before the first round [400]")


Times = dict[tuple[str, str], list[float]]
"""Lists of seconds, by the kind of query and the engine."""


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures rounds in which every engine answers the same queries, one engine after another."""
    rounds: Times = defaultdict(list)
    singles: Times = defaultdict(list)
    with own_place() as place:
        lake = Lake(place, plan.leaves, plan.ingests, plan.rows)
        make(lake, tell)
        with remotes([partial(opened_engine, name, lake) for name in SIDES]) as processes:
            engines = dict(zip(SIDES, processes, strict=True))
            tell("comparing answers")
            _compare(engines, plan)
            tell(f"{plan.warming} look-ups of each engine")
            first = {name: warmed(engines[name], plan) for name in SIDES}
            # the first round warms everything up and is not counted
            for number in range(plan.rounds + 1):
                for kind in KINDS:
                    tell(f"{kind}, round {number} of {plan.rounds}")
                    wanted = queries(plan, kind, number)
                    for name in turned(list(engines), number):
                        seconds = engines[name].call("seconds", wanted)
                        if number:
                            rounds[kind, name].append(sum(seconds))
                            singles[kind, name] += seconds
            peaks = {name: engine.call("peak_bytes") for name, engine in engines.items()}
        tell("counting requests to S3")
        requests = requests_of_a_lookup(place)
    return {
        "rows": lake.rows,
        "files": lake.files,
        "leaves": lake.leaves,
        "rounds": plan.rounds,
        "warming": plan.warming,
        **figures(rounds, singles),
        **{_ms("first_lookups", name): round(1_000 * median(seconds), 3) for name, seconds in first.items()},
        **requests,
        **{f"peak_memory_bytes_{name}": size for name, size in peaks.items()},
    }


def warmed(engine: Remote, plan: Plan) -> list[float]:
    """Warms an engine up by many look-ups.

    It leaves out the very first look-up, and returns the seconds of the next ones, as many as in a round.
    """
    repeats, most = plan.repeats[0], plan.warming
    found: list[float] = engine.call("seconds", queries(plan, "lookup", -2, most + 1))
    return found[1 : repeats + 1]


def queries(plan: Plan, kind: str, number: int, repeats: int | None = None) -> list[Wanted]:
    """Returns a round's queries of a kind at random keys. Every call returns the same queries."""
    rows = KINDS[kind]
    repeats = repeats or plan.repeats[list(KINDS).index(kind)]
    seeded = random.Random(f"{kind} {number}")
    return [Wanted(seeded.randrange(plan.rows - rows), rows, kind == "lookup") for _ in range(repeats)]


def figures(
    rounds: Mapping[tuple[str, str], Sequence[float]], singles: Mapping[tuple[str, str], Sequence[float]]
) -> Figures:
    """Returns the milliseconds of a query, and the ratios of Dormouse's queries per second to the others'."""
    found: Figures = {}
    for (kind, name), seconds in singles.items():
        found[_ms(kind, name)] = round(1_000 * median(seconds), 3)
        if name != "dormouse":
            found[f"{kind}_vs_{name}"] = round(median_ratio(rounds[kind, name], rounds[kind, "dormouse"]), 3)
    return found


def _ms(kind: str, name: str) -> str:
    """Returns the key of a figure in milliseconds."""
    return f"{kind}_ms" if name == "dormouse" else f"{kind}_ms_{name}"


def _compare(engines: Mapping[str, Remote], plan: Plan) -> None:
    """Raises RuntimeError unless all engines return the same rows in the same order."""
    for kind in KINDS:
        wanted = queries(plan, kind, -1)[0]
        digests = {name: engine.call("digest", wanted) for name, engine in engines.items()}
        others = [name for name, digest in digests.items() if digest != digests["dormouse"]]
        if others:
            raise RuntimeError(f"{kind}: {', '.join(others)} answered differently than dormouse")


_ENGINES = {(f"_{name}".removesuffix("_dormouse"), name): label for name, label in _LABELS.items()}
_OTHERS = {name: label for name, label in _LABELS.items() if name != "dormouse"}

BENCHMARK = Benchmark(
    "query",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows in {files:,} files of {leaves:,} leaves",
        "medians of {rounds} rounds, after {warming} look-ups by each engine",
        Grid(
            _ENGINES,
            {f"{kind}_ms{{}}": f"{label}: ms" for kind, label in _KINDS.items()}
            | {"first_lookups_ms{}": "first look-ups: ms"}
            | {"peak_memory_bytes_{1}": "peak bytes"},
        ),
        Grid(_OTHERS, {f"{kind}_vs_{{}}": label for kind, label in _KINDS.items()}, "ours ÷ theirs"),
        "S3 requests of a warm look-up in one file: {head_requests} HEAD, {get_requests} GET",
    ],
    panes=[
        Pane(
            "An answer in key order",
            "query",
            "milliseconds",
            _KINDS,
            {f"{{}}_ms{end}": label for (end, _), label in _ENGINES.items()},
            yscale="log",
        )
    ],
    needed=("datafusion", "duckdb", "polars", "pyiceberg", "psycopg2", "moto"),
)

if __name__ == "__main__":
    BENCHMARK.main()
