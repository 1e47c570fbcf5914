"""Contention: hundreds of compactions of one table that commit at the same moment.

Each of eleven ingests wrote one file, to which all leaves refer. A compaction job per leaf replaces its
eleven references by one. Many committers start together and commit synchronously, one job at a time. This is
measured for every layout and isolation level, on an embedded PostgreSQL with its durable defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from benchmarks.committers import PRELOAD, Storm, committers
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, Pane, turns
from benchmarks.state_tables import FILES_PER_JOB, StateTable, Tables, open_tables

PROCESSES = 4
CONNECTIONS_MAX = 8
"""The connections of each process: a supplier's default. All together suit the server."""

COMMITTERS = (16, 64, 200, 500)
RETRIES_AT = 200
ISOLATIONS = {"read committed": "", "serializable": "_serializable"}
"""The isolation levels, each with the suffix of its figures' names."""
_ERRORS_MAX = 20


class Variant(NamedTuple):
    label: str
    layout: str
    salts: int | None = None


VARIANTS = {
    "file_table": Variant("file_table", "file_table"),
    "dummy_reference": Variant("dummy_reference", "dummy_reference"),
    "salted_counts": Variant("salted_counts, 128 salts", "salted_counts", 128),
    "salted_counts_16": Variant("salted_counts, 16 salts", "salted_counts", 16),
    "salted_counts_1": Variant("salted_counts, 1 salt", "salted_counts", 1),
}


class Case(NamedTuple):
    variant: str
    isolation: str
    committers: int

    @property
    def name(self) -> str:
        """The suffix of the names of the case's figures."""
        return f"{self.variant}_{self.committers}{ISOLATIONS[self.isolation]}"


CASES = [
    Case(variant, isolation, count)
    for isolation in ISOLATIONS
    for count in COMMITTERS
    for variant in VARIANTS
]


@dataclass(frozen=True)
class Plan:
    leaves: int = amount(1_024, 256)
    rounds: int = amount(3, 1)


def measure(plan: Plan, tell: Tell) -> Figures:
    """Runs each case once in each round, in an order that rotates: all committers commit at the same time."""
    storms: dict[Case, list[Storm]] = {case: [] for case in CASES}
    with (
        own_place() as place,
        open_tables(place.dsn, place.objects) as tables,
        committers(place.dsn, PROCESSES, CONNECTIONS_MAX) as them,
    ):
        for number, case in turns(CASES, plan.rounds, step=len(VARIANTS) + 2):
            tell(f"round {number + 1}: {case.variant}, {case.isolation}, {case.committers} committers")
            table = _table(tables, case, plan.leaves, f"round_{number}_{case.name}")
            storm = them.storm(table, range(table.leaves), case.committers)
            _check(tables, table, storm)
            storms[case].append(storm)
            tables.drop(table)
    return figures(storms, plan)


def figures(storms: Mapping[Case, Sequence[Storm]], plan: Plan) -> Figures:
    """Returns the sums of failures and retries, and the medians over the rounds of rates and latencies."""
    everything = [storm for rounds in storms.values() for storm in rounds]
    found: Figures = {"failed_jobs": sum(len(storm.errors) for storm in everything)}
    for isolation, suffix in ISOLATIONS.items():
        for variant in VARIANTS:
            rounds = storms[Case(variant, isolation, RETRIES_AT)]
            found[f"retries_{variant}{suffix}"] = sum(storm.retries for storm in rounds)
    for case, rounds in storms.items():
        found[f"commits_per_s_{case.name}"] = round(median(storm.per_second for storm in rounds), 1)
        found[f"p50_ms_{case.name}"] = round(median(storm.percentile_ms(50) for storm in rounds), 1)
        found[f"p99_ms_{case.name}"] = round(median(storm.percentile_ms(99) for storm in rounds), 1)
        found[f"retries_{case.name}"] = sum(storm.retries for storm in rounds)
        found[f"failed_{case.name}"] = sum(len(storm.errors) for storm in rounds)
    errors = {(case, error) for case, rounds in storms.items() for storm in rounds for error in storm.errors}
    return {
        **found,
        "errors": [f"{case.name}: {error}" for case, error in sorted(errors)][:_ERRORS_MAX],
        "leaves": plan.leaves,
        "leaves_serializable": plan.leaves,
        "rounds": plan.rounds,
        "processes": PROCESSES,
        "connections_max": CONNECTIONS_MAX,
    }


def _table(tables: Tables, case: Case, leaves: int, name: str) -> StateTable:
    variant = VARIANTS[case.variant]
    properties: dict[str, Any] = {"isolation": case.isolation}
    if variant.salts is not None:
        properties["salt_buckets"] = variant.salts
    return tables.make(
        name, leaves, variant.layout, claimed_leaves=leaves, one_file_per_ingest=True, **properties
    )


def _check(tables: Tables, table: StateTable, storm: Storm) -> None:
    """Raises RuntimeError unless the answers to the committers match the commits in the database."""
    applied = tables.applied(table)
    if applied != len(storm.seconds) or applied + len(storm.errors) != table.leaves:
        raise RuntimeError(
            f"{len(storm.seconds)} commits were acknowledged, {len(storm.errors)} failed, "
            f"but {applied} are applied"
        )


_CASES = {
    Case(key, isolation, count).name: f"{variant.label}, {isolation}, {count} committers"
    for isolation in ISOLATIONS
    for key, variant in VARIANTS.items()
    for count in COMMITTERS
}
_STORMS = {
    "commits_per_s_{}": "commits/s",
    "p50_ms_{}": "p50 ms",
    "p99_ms_{}": "p99 ms",
    "retries_{}": "retries",
    "failed_{}": "failed",
}

BENCHMARK = Benchmark(
    "contention",
    __doc__,
    Plan,
    measure,
    [
        f"{{leaves:,}} jobs of {FILES_PER_JOB} files that all leaves share, one by one; "
        "medians of {rounds} rounds, sums of retries and failures",
        "committers are threads of {processes} processes with {connections_max} connections each",
        Grid(_CASES, _STORMS),
        "failed: {failed_jobs:,}",
        "{errors}",
    ],
    only_json=[
        "{leaves_serializable}",
        *(f"{{retries_{variant}{end}}}" for variant in VARIANTS for end in ISOLATIONS.values()),
    ],
    panes=[
        Pane(
            isolation,
            "committers at once",
            "commits a second",
            {count: count for count in COMMITTERS},
            {f"commits_per_s_{key}_{{}}{end}": variant.label for key, variant in VARIANTS.items()},
        )
        for isolation, end in ISOLATIONS.items()
    ],
    preload=PRELOAD,
)

if __name__ == "__main__":
    BENCHMARK.main()
