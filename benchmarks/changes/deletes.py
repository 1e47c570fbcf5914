"""Deletes: their duration, and the slowdown of later look-ups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import perf_counter

from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import PEERS, Dormouse, Rows, Side, fill, opened, seconds_of
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio, percentile, turns

DELETIONS = 1_000
LOOKUPS = 40
KINDS = {"key": "one key", "range": "a range of 1,000 keys", "value": "1 % of the rows by a value"}
Times = dict[tuple[str, str], list[float]]


def deletes(plan: Plan, tell: Tell) -> Figures:
    """Measures deletes by key, by range and by value.

    It measures the time until a delete is acknowledged, and the time until a new reader sees the delete.
    """
    found: Figures = {}
    with opened(Dormouse, *PEERS) as sides:
        for side in sides:
            tell(f"{side.label}: loading")
            fill(side, "t", plan.rows)
        acknowledged, seen = _deleted(sides, plan, tell)
    for times, suffix in ((acknowledged, "ms"), (seen, "seen_ms")):
        for (kind, name), seconds in times.items():
            found[f"{kind}_{suffix}_{name}"] = round(percentile(seconds, 50) * 1_000, 3)
    for peer in PEERS:
        ratios = {
            kind: median_ratio(acknowledged[kind, peer.name], acknowledged[kind, "dormouse"])
            for kind in KINDS
        }
        found[f"delete_vs_{peer.name}"] = round(min(ratios.values()), 3)
        found |= {f"{kind}_vs_{peer.name}": round(ratio, 3) for kind, ratio in ratios.items()}
    return found


def _deleted(sides: Sequence[Side], plan: Plan, tell: Tell) -> tuple[Times, Times]:
    """Returns two tables of seconds, by kind of delete and compared system.

    The first is until the delete is acknowledged, the second until a new reader has seen the delete.
    """
    acknowledged: Times = {}
    seen: Times = {}
    for kind, what in KINDS.items():
        for number, side in turns(sides, plan.rounds):
            tell(f"{side.label}: delete {what}")
            rows = chosen(kind, number, plan.rows)
            began = perf_counter()
            side.delete("t", rows)
            acknowledged.setdefault((kind, side.name), []).append(perf_counter() - began)
            if left := side.count("t", rows):
                raise RuntimeError(f"{side.label} still has {left} rows that it deleted")
            seen.setdefault((kind, side.name), []).append(perf_counter() - began)
    return acknowledged, seen


def chosen(kind: str, number: int, rows: int) -> Rows:
    """Returns a condition for rows to delete, which exist and which no other round deletes."""
    start = rows // 40 * (number + 1)
    if kind == "value":
        return Rows(value=number)
    return Rows(start, start + 1) if kind == "key" else Rows(start + 10, start + 1_010)


def lookups(plan: Plan, tell: Tell) -> Figures:
    """Measures the ratio of the look-ups per second with a thousand pending deletions to those without."""
    tell("look-ups")
    with opened(Dormouse) as [side]:
        for name in ("without", "with"):
            fill(side, name, plan.rows // 4)
        keys = random.Random(1).sample(range(plan.rows // 4), plan.rounds * LOOKUPS + DELETIONS)
        deleted, sought = keys[:DELETIONS], keys[DELETIONS:]
        deleted_from = side.instance.table("with")
        for key in deleted:
            deleted_from.delete({"k": key})
        times: dict[str, list[float]] = {"without": [], "with": []}
        for number, name in turns(("without", "with"), plan.rounds + 1):
            some = sought[number % plan.rounds * LOOKUPS :][:LOOKUPS]
            times[name].append(seconds_of(_look_up, side, name, some))
    # the first round fills the caches and does not count
    ratio = median_ratio(times["without"][1:], times["with"][1:])
    return {"lookup_with_1000_deletions_vs_none": round(ratio, 3)}


def _look_up(side: Dormouse, name: str, keys: Sequence[int]) -> None:
    table = side.instance.table(name)
    for key in keys:
        if table.query({"k": key}).read_all().num_rows != 1:
            raise RuntimeError(f"table {name!r} does not have exactly one row of key {key}")
