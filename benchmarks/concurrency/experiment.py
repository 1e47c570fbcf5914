"""Look-ups of an idle table, then while it is written, compacted and collected; then all of its rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import dormouse as dm
from benchmarks.concurrency.clients import Clients, Lookups, Target, clients
from benchmarks.concurrency.ledger import Ledger, row, rows_of
from benchmarks.concurrency.upkeep import Counts, prepare, upkeep


@dataclass(frozen=True)
class Plan:
    """`at_least` has happened before the end, up to `seconds_max`; `warm_seconds` are not timed."""

    clients: int = 100
    processes: int = 4
    leaves: int = 1_000
    gc_delay_seconds: float = 2
    warm_seconds: float = 5
    idle_seconds: float = 20
    seconds: float = 60
    seconds_max: float = 300
    at_least: dict[str, int] = field(default_factory=lambda: {"ingests": 10, "jobs": 10, "collected": 10})


QUICK = Plan(warm_seconds=3, idle_seconds=5, seconds=12)


@dataclass(frozen=True)
class Outcome:
    """`lost_rows` were acknowledged, and are not there in the end, or not once."""

    idle: Lookups
    busy: Lookups
    counts: Counts
    failures: list[str]
    lost_rows: int


def measure(target: Target, plan: Plan, tell: Callable[[str], None]) -> Outcome:
    """Makes the table, and measures."""
    ledger, counts = Ledger(plan.leaves), Counts()
    tell(f"a table of {plan.leaves:,} leaves")
    prepare(target, ledger, plan.gc_delay_seconds)
    with clients(target, ledger, plan.clients, plan.processes) as them:
        tell(f"{plan.clients} clients look up keys, and nothing else goes on")
        warm = them.measure(_over(plan.warm_seconds))
        idle = them.measure(_over(plan.idle_seconds))
        idle.add(replace(warm, seconds=[]))
        tell("now with ingest, compaction and collection")
        with upkeep(target, ledger, counts) as stop:
            busy = _busy(them, plan, counts)
            failures = stop()
    return Outcome(idle, busy, counts, failures, _lost(target, ledger))


def _busy(them: Clients, plan: Plan, counts: Counts) -> Lookups:
    over, too_late = _over(plan.seconds), _over(plan.seconds_max)

    def done() -> bool:
        happened = all(counts[name] >= number for name, number in plan.at_least.items())
        return too_late() or (over() and happened)

    return them.measure(done)


def _over(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _lost(target: Target, ledger: Ledger) -> int:
    """How many rows are missing, too many, or not as they were sent, when everything has come to rest."""
    wanted = Counter(
        row(key, version) for key in range(ledger.keys) for version in range(1, ledger.acknowledged[key] + 1)
    )
    with dm.connect(target.dsn, target.objects, read_only=True) as instance:
        found = Counter(rows_of(instance.table(target.table).query()))
    return sum(((wanted - found) + (found - wanted)).values())


def figures(outcome: Outcome, plan: Plan, *, through: str) -> dict[str, Any]:
    """Every figure, by name; failures first."""
    idle, busy = outcome.idle, outcome.busy
    found: dict[str, Any] = {
        "errors": busy.errors + idle.errors + len(outcome.failures),
        "wrong_rows": busy.wrong + idle.wrong + outcome.lost_rows,
        "stale_reads": busy.stale + idle.stale,
        "clients": plan.clients,
        "leaves": plan.leaves,
        "through": through,
        "lookups": len(busy.seconds),
    }
    for name, side in (("", busy), ("_idle", idle)):
        found |= {f"p{percent}_ms{name}": round(side.percentile_ms(percent), 1) for percent in (50, 99)}
        found[f"lookups_per_second{name}"] = round(side.per_second, 1)
    for name in ("p99", "lookups_per_second"):
        key = "p99_ms" if name == "p99" else name
        found[f"{name}_vs_idle"] = (
            round(found[key] / found[f"{key}_idle"], 2) if found[f"{key}_idle"] else None
        )
    found |= {name: outcome.counts[name] for name in plan.at_least}
    if examples := [*outcome.failures, *idle.examples, *busy.examples][:10]:
        found["examples"] = examples
    return found
