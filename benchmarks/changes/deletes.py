"""Deletes: their duration, their refusals during compactions, and the slowdown of later look-ups."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from time import perf_counter

from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import (
    PEERS,
    Dormouse,
    DuckLake,
    Keyed,
    Rows,
    Side,
    fill,
    opened,
    rows_of,
    seconds_of,
)
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio, percentile, turns
from benchmarks.peers.peer import Refused

DELETIONS = 1_000
LOOKUPS = 40
BESIDE_SECONDS_MAX = 12.0
"""The longest time for one kind of change during compactions, in which slow changes are tried less often."""
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


def beside(plan: Plan, tell: Tell) -> Figures:
    """Counts the deletes, and the upserts of 1,000 rows, that are refused during compactions.

    The table has a twentieth of the plan's rows. PyIceberg has no compaction, so its thread only loads rows.
    """
    refused: dict[str, int] = {}
    tried: dict[str, int] = {}
    sides: tuple[type[Side], ...] = (Dormouse, Keyed, *PEERS)
    for made in sides:
        with opened(made) as [side]:
            tell(f"{side.label}: changes during compactions")
            fill(side, "t", plan.rows // 20)
            kinds = (_delete,) if made is Dormouse else (_delete, _upsert)
            for kind in kinds:
                found = _refused(side, plan, kind)
                for counted, count in zip((refused, tried), found, strict=True):
                    counted[side.name] = counted.get(side.name, 0) + count
    figures: Figures = {"failed": refused["dormouse"]}
    figures |= {f"failed_{name}": count for name, count in refused.items()}
    return figures | {f"tried_{name}": count for name, count in tried.items()}


def _delete(side: Side, number: int) -> None:
    side.delete("t", Rows(number * 100, number * 100 + 1))


def _upsert(side: Side, number: int) -> None:
    side.upsert("t", rows_of(number * 1_000, 1_000))


def _refused(side: Side, plan: Plan, change: Callable[[Side, int], None]) -> tuple[int, int]:
    """Makes changes while a thread compacts; returns the numbers of refused and of tried changes."""
    over, refused, tried = Event(), 0, 0

    def compact() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with suppress(Refused):
                # a connection of DuckDB may be used by one thread only
                if not isinstance(side, DuckLake):
                    side.load("t", rows_of(plan.rows + 1_000 * number, 1_000))
                side.compact("t")

    thread = Thread(target=compact)
    thread.start()
    began = perf_counter()
    try:
        while tried < plan.beside and perf_counter() - began < BESIDE_SECONDS_MAX:
            try:
                change(side, tried)
            except Refused:
                refused += 1
            tried += 1
    finally:
        over.set()
        thread.join()
    return refused, tried


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
