"""Every layout and isolation level under more and more committers, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contention.storm import CONNECTIONS_MAX, PROCESSES, Committers, Storm
from benchmarks.state_tables import StateTable, Tables

COMMITTERS = (16, 64, 200, 500)
RETRIES_AT = 200
_ERRORS_MAX = 20
ISOLATIONS = {"read committed": "", "serializable": "_serializable"}
"""With what the names of their figures end."""


class Variant(NamedTuple):
    layout: str
    salts: int | None = None


VARIANTS = {
    "file_table": Variant("file_table"),
    "dummy_reference": Variant("dummy_reference"),
    "salted_counts": Variant("salted_counts", 128),
    "salted_counts_16": Variant("salted_counts", 16),
    "salted_counts_1": Variant("salted_counts", 1),
}


class Case(NamedTuple):
    variant: str
    isolation: str
    committers: int

    @property
    def name(self) -> str:
        """With which its figures end."""
        return f"{self.variant}_{self.committers}{ISOLATIONS[self.isolation]}"


CASES = [
    Case(variant, isolation, count)
    for isolation in ISOLATIONS
    for count in COMMITTERS
    for variant in VARIANTS
]


@dataclass(frozen=True)
class Plan:
    leaves: int = 1_024
    leaves_serializable: int = 1_024
    rounds: int = 3

    def leaves_for(self, isolation: str) -> int:
        return self.leaves if isolation == "read committed" else self.leaves_serializable


QUICK = Plan(leaves=256, leaves_serializable=256, rounds=1)


def measure(
    tables: Tables, committers: Committers, plan: Plan, tell: Callable[[str], None]
) -> dict[Case, list[Storm]]:
    """The storms of every case, by round."""
    storms: dict[Case, list[Storm]] = {case: [] for case in CASES}
    for number, case in turns(plan.rounds):
        tell(f"round {number + 1}: {case.variant}, {case.isolation}, {case.committers} committers")
        table = _table(tables, case, plan.leaves_for(case.isolation), f"round_{number}_{case.name}")
        storm = committers.storm(table, case.committers)
        _check(tables, table, storm)
        storms[case].append(storm)
        tables.drop(table)
    return storms


def turns(rounds: int) -> Iterator[tuple[int, Case]]:
    """Every case once a round; the order turns, so that nobody always follows the same neighbour."""
    for number in range(rounds):
        first = number * (len(VARIANTS) + 2) % len(CASES)
        for case in CASES[first:] + CASES[:first]:
            yield number, case


def figures(storms: Mapping[Case, Sequence[Storm]], plan: Plan) -> dict[str, Any]:
    """Failures and retries first, then rates and latencies: medians of the rounds; the former are sums."""
    everything = [storm for rounds in storms.values() for storm in rounds]
    found: dict[str, Any] = {"failed_jobs": sum(len(storm.errors) for storm in everything)}
    for isolation, suffix in ISOLATIONS.items():
        for variant in VARIANTS:
            rounds = storms[Case(variant, isolation, RETRIES_AT)]
            found[f"retries_{variant}{suffix}"] = sum(storm.retries for storm in rounds)
    for case, rounds in storms.items():
        found[f"commits_per_s_{case.name}"] = round(median(storm.per_second for storm in rounds), 1)
    for case, rounds in storms.items():
        found[f"p50_ms_{case.name}"] = round(median(storm.percentile_ms(50) for storm in rounds), 1)
        found[f"p99_ms_{case.name}"] = round(median(storm.percentile_ms(99) for storm in rounds), 1)
        found[f"retries_{case.name}"] = sum(storm.retries for storm in rounds)
        found[f"failed_{case.name}"] = sum(len(storm.errors) for storm in rounds)
    errors = {(case, error) for case, rounds in storms.items() for storm in rounds for error in storm.errors}
    return {
        **found,
        "errors": [f"{case.name}: {error}" for case, error in sorted(errors)][:_ERRORS_MAX],
        "leaves": plan.leaves,
        "leaves_serializable": plan.leaves_serializable,
        "rounds": plan.rounds,
        "processes": PROCESSES,
        "connections_max": CONNECTIONS_MAX,
    }


def _table(tables: Tables, case: Case, leaves: int, name: str) -> StateTable:
    variant = VARIANTS[case.variant]
    properties: dict[str, Any] = {"isolation": case.isolation}
    if variant.salts is not None:
        properties["salt_buckets"] = variant.salts
    return tables.with_leaves(name, leaves, variant.layout, one_file_per_ingest=True, **properties)


def _check(tables: Tables, table: StateTable, storm: Storm) -> None:
    """What the committers were told is what there is."""
    applied = tables.applied(table)
    if applied != len(storm.seconds) or applied + len(storm.errors) != table.jobs:
        raise RuntimeError(
            f"{len(storm.seconds)} commits were answered, {len(storm.errors)} failed, {applied} are applied"
        )
