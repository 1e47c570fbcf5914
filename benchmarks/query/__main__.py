"""How long does an answer take, by a key and by ranges of keys? Beside DuckDB, Polars and PyIceberg.

DuckDB and Polars read the folder of the table's Parquet files, PyIceberg a table of the same files with its
SQL catalog; Dormouse is also asked in SQL. All give all columns in key order, of the table as it is now. The
page cache is warm, and so is each engine, in a process of its own; rounds in turns.
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
from benchmarks.query.sides import SIDES, Wanted, asked

KINDS = {"lookup": 1, "range_10": 10, "range_10000": 10_000, "range_1000000": 1_000_000}
_KINDS = {
    "lookup": "one key",
    "range_10": "10 rows",
    "range_10000": "10,000 rows",
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
    """How much is done. `repeats` are queries of each kind in a round."""

    leaves: int = amount(100, 20)
    ingests: int = amount(10)
    rows: int = amount(20_000_000, 2_000_000)
    rounds: int = amount(7, 3)
    repeats: tuple[int, ...] = amount((20, 10, 5, 2), (5, 3, 2, 1))


Times = dict[tuple[str, str], list[float]]
"""Seconds by the kind of query and the engine."""


def measure(plan: Plan, tell: Tell) -> Figures:
    """Rounds in which every engine answers the same queries, in turns."""
    rounds: Times = defaultdict(list)
    singles: Times = defaultdict(list)
    with own_place() as place:
        lake = Lake(place, plan.leaves, plan.ingests, plan.rows)
        make(lake, tell)
        with remotes([partial(asked, name, lake) for name in SIDES]) as processes:
            engines = dict(zip(SIDES, processes, strict=True))
            tell("comparing answers")
            _compare(engines, plan)
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
    return {
        "rows": lake.rows,
        "files": lake.files,
        "leaves": lake.leaves,
        "rounds": plan.rounds,
        **figures(rounds, singles),
        **{f"peak_memory_bytes_{name}": size for name, size in peaks.items()},
    }


def queries(plan: Plan, kind: str, number: int) -> list[Wanted]:
    """Those of a kind in a round, at random keys; the same every time."""
    rows, repeats = KINDS[kind], plan.repeats[list(KINDS).index(kind)]
    seeded = random.Random(f"{kind} {number}")
    return [Wanted(seeded.randrange(plan.rows - rows), rows, kind == "lookup") for _ in range(repeats)]


def figures(
    rounds: Mapping[tuple[str, str], Sequence[float]], singles: Mapping[tuple[str, str], Sequence[float]]
) -> Figures:
    """Milliseconds a query, and ours ÷ theirs in queries a second."""
    found: Figures = {}
    for (kind, name), seconds in singles.items():
        found[_ms(kind, name)] = round(1_000 * median(seconds), 3)
        if name != "dormouse":
            found[f"{kind}_vs_{name}"] = round(median_ratio(rounds[kind, name], rounds[kind, "dormouse"]), 3)
    return found


def _ms(kind: str, name: str) -> str:
    """The name of a figure."""
    return f"{kind}_ms" if name == "dormouse" else f"{kind}_ms_{name}"


def _compare(engines: Mapping[str, Remote], plan: Plan) -> None:
    """RuntimeError when not all have the same rows, in the same order."""
    for kind in KINDS:
        wanted = queries(plan, kind, -1)[0]
        digests = {name: engine.call("digest", wanted) for name, engine in engines.items()}
        others = [name for name, found in digests.items() if found != digests["dormouse"]]
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
        "{rows:,} rows in {files:,} files of {leaves:,} leaves; medians of {rounds} rounds",
        Grid(
            _ENGINES,
            {f"{kind}_ms{{}}": f"{label}: ms" for kind, label in _KINDS.items()}
            | {"peak_memory_bytes_{1}": "peak bytes"},
        ),
        Grid(_OTHERS, {f"{kind}_vs_{{}}": label for kind, label in _KINDS.items()}, "ours ÷ theirs"),
    ],
    panes=[
        Pane(
            "An answer in key order",
            "what is asked for",
            "milliseconds",
            _KINDS,
            {f"{{}}_ms{end}": label for (end, _), label in _ENGINES.items()},
            yscale="log",
        )
    ],
    needed=("datafusion", "duckdb", "polars", "pyiceberg", "psycopg2"),
)

if __name__ == "__main__":
    BENCHMARK.main()
