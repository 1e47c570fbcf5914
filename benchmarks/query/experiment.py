"""Rounds in which every engine answers the same queries, in turns."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Side, ratio
from benchmarks.query.lake import Lake
from benchmarks.query.sides import SIDES, Wanted, asked
from benchmarks.remote import Remote, remote

KINDS = {"lookup": 1, "range_10": 10, "range_10000": 10_000, "range_1000000": 1_000_000}


@dataclass(frozen=True)
class Plan:
    """How much is done. `repeats` are queries of each kind in a round."""

    leaves: int = 100
    ingests: int = 10
    rows: int = 20_000_000
    rounds: int = 7
    repeats: tuple[int, ...] = (20, 10, 5, 2)


QUICK = Plan(leaves=20, rows=2_000_000, rounds=3, repeats=(5, 3, 2, 1))


def queries(plan: Plan, kind: str, number: int) -> list[Wanted]:
    """Those of a kind in a round, at random keys; the same every time."""
    rows, repeats = KINDS[kind], plan.repeats[list(KINDS).index(kind)]
    seeded = random.Random(f"{kind} {number}")
    return [Wanted(seeded.randrange(plan.rows - rows), rows, kind == "lookup") for _ in range(repeats)]


def measure(lake: Lake, plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every figure, by name."""
    sides: dict[tuple[str, str], Side] = defaultdict(Side)
    singles: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(remote(asked, name, lake)) for name in SIDES}
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
                        sides[kind, name].seconds.append(sum(seconds))
                        singles[kind, name] += seconds
        peaks = {name: engine.call("peak_bytes") for name, engine in engines.items()}
    return {
        "rows": lake.rows,
        "files": lake.files,
        "leaves": lake.leaves,
        "rounds": plan.rounds,
        **figures(sides, singles),
        **{f"peak_memory_bytes_{name}": size for name, size in peaks.items()},
    }


def turned(names: Sequence[str], number: int) -> list[str]:
    """The order turns, so that nobody always follows the same neighbour."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def figures(
    sides: Mapping[tuple[str, str], Side], singles: Mapping[tuple[str, str], Sequence[float]]
) -> dict[str, Any]:
    """Milliseconds a query, and ours ÷ theirs in queries a second."""
    found: dict[str, Any] = {}
    for (kind, name), seconds in singles.items():
        end = "" if name == "dormouse" else f"_{name}"
        found[f"{kind}_ms{end}"] = round(1_000 * statistics.median(seconds), 3)
        if name != "dormouse":
            found[f"{kind}_vs{end}"] = round(ratio(sides[kind, "dormouse"], sides[kind, name]), 3)
    return found


def _compare(engines: Mapping[str, Remote], plan: Plan) -> None:
    """RuntimeError when not all have the same rows, in the same order."""
    for kind in KINDS:
        wanted = queries(plan, kind, -1)[0]
        digests = {name: engine.call("digest", wanted) for name, engine in engines.items()}
        others = [name for name, found in digests.items() if found != digests["dormouse"]]
        if others:
            raise RuntimeError(f"{kind}: {', '.join(others)} answered differently than dormouse")
