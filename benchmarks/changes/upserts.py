"""Upserts: their duration, and their cost for later scans, look-ups and compactions."""

from __future__ import annotations

from math import inf
from time import perf_counter

from benchmarks.changes.plan import Plan
from benchmarks.changes.sides import PEERS, Dormouse, Keyed, Side, fill, opened, rows_of, seconds_of
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio, percentile, turns
from benchmarks.peers.peer import Refused

COUNTS = (1, 1_000, 100_000)
EACH = 1_000
UPSERTS_SECONDS_MAX = 30.0
"""The longest time that one system upserts before its table is read. Slow systems make fewer upserts."""


def upserts(plan: Plan, tell: Tell) -> Figures:
    """Measures upserts of existing keys.

    The keys of one upsert are adjacent, so a system that rewrites files must rewrite only a few.
    """
    found: Figures = {"largest": largest(plan)}
    with opened(Keyed, *PEERS) as sides:
        for side in sides:
            tell(f"{side.label}: loading")
            fill(side, "t", plan.rows)
        for count in COUNTS:
            times: dict[str, list[float]] = {}
            for number, side in turns(sides, plan.rounds):
                tell(f"{side.label}: upsert of {count:,}")
                rows = rows_of(start_of(count, number, plan), min(count, largest(plan)))
                times.setdefault(side.name, []).append(seconds_of(side.upsert, "t", rows))
            for side in sides:
                found[f"upsert_{count}_ms_{side.name}"] = round(percentile(times[side.name], 50) * 1_000, 3)
            for peer in PEERS:
                ratio = median_ratio(times[peer.name], times["dormouse"])
                found[f"upsert_{count}_vs_{peer.name}"] = round(ratio, 3)
        for side in sides:
            if (rows_left := side.scan("t")) != plan.rows:
                raise RuntimeError(f"{side.label} has {rows_left:,} rows after upserts, not {plan.rows:,}")
    return found


def largest(plan: Plan) -> int:
    """Returns the number of rows of the largest upsert."""
    return min(max(COUNTS), plan.rows // 10)


def start_of(count: int, number: int, plan: Plan) -> int:
    """Returns the first key of an upsert, a different one in each round."""
    return (plan.rows - min(count, largest(plan))) // (plan.rounds + 1) * (number + 1)


def reading(plan: Plan, tell: Tell) -> Figures:
    """Measures scans of a table after many upserts of 1,000 rows, before and after a compaction.

    The table has a tenth of the plan's rows.
    """
    found: Figures = {}
    sides: tuple[type[Side], ...] = (Keyed, *PEERS)
    for made in sides:
        with opened(made) as [side]:
            tell(f"{side.label}: reading after upserts")
            found[f"upserts_{side.name}"] = _upserted(side, "t", plan.rows // 10, plan, UPSERTS_SECONDS_MAX)
            found[f"read_ms_{side.name}"] = _scanned_ms(side, plan)
            try:
                _compact(side, "t")
            except Refused:
                continue  # it has no compaction
            found[f"read_compacted_ms_{side.name}"] = _scanned_ms(side, plan)
    return found


def _scanned_ms(side: Side, plan: Plan) -> float:
    times = [seconds_of(side.scan, "t") for _ in range(plan.rounds)]
    return round(percentile(times, 50) * 1_000, 3)


def _upserted(side: Side, table: str, rows: int, plan: Plan, seconds_max: float = inf) -> int:
    """Loads a table, then upserts keys spread over the existing ones; returns the number of upserts."""
    fill(side, table, rows)
    change = side.upsert if isinstance(side, Keyed) or not isinstance(side, Dormouse) else side.load
    began = perf_counter()
    for number in range(plan.upserts):
        if perf_counter() - began > seconds_max:
            return number
        change(table, rows_of((rows - EACH) // plan.upserts * number, EACH))
    return plan.upserts


def _compact(side: Side, table: str) -> None:
    """Compacts a table. Dormouse repeats this until a round merges no more files."""
    if isinstance(side, Dormouse):
        opened_table = side.instance.table(table)
        while opened_table.compact(engine="local").jobs_run:
            pass
    else:
        side.compact(table)


def keyed(plan: Plan, tell: Tell) -> Figures:
    """Compares compactions and scans of a keyed table with those of a plain table of the same rows."""
    compactions: dict[str, list[float]] = {}
    scans: dict[str, list[float]] = {}
    with opened(Dormouse, Keyed) as sides:
        of_kinds = {"plain": sides[0], "keyed": sides[1]}
        for pair, (kind, side) in turns([*of_kinds.items()], plan.pairs):
            tell(f"a {kind} table: loading")
            _upserted(side, f"{kind}{pair}", plan.rows, plan)
        for kind, side in of_kinds.items():
            scans[f"{kind}_before"] = [seconds_of(side.scan, f"{kind}0") for _ in range(plan.rounds)]
        for pair, (kind, side) in turns([*of_kinds.items()], plan.pairs):
            tell(f"a {kind} table: compaction")
            compactions.setdefault(kind, []).append(seconds_of(_compact, side, f"{kind}{pair}"))
        for number, (kind, side) in turns([*of_kinds.items()], plan.rounds):
            name = f"{kind}{number % plan.pairs}"
            scans.setdefault(kind, []).append(seconds_of(side.scan, name))
    return {
        "keyed_compaction_vs_plain": round(median_ratio(compactions["plain"], compactions["keyed"]), 3),
        "keyed_scan_vs_plain": round(median_ratio(scans["plain"], scans["keyed"]), 3),
        "keyed_scan_before_vs_plain": round(median_ratio(scans["plain_before"], scans["keyed_before"]), 3),
    }


def upserted(plan: Plan, tell: Tell) -> Figures:
    """Compares reads of a keyed table after upserts with reads of a plain table.

    One keyed table has a large file and one upsert of 2 rows. A second has ten more upserts of 1,000 rows.
    """
    found: Figures = {}
    with opened(Dormouse, Keyed) as (plain, few):
        plain.load("plain", rows_of(0, plan.rows))
        for name, upserts_of in (("few", [2]), ("many", [2, *[EACH] * 10])):
            tell(f"a keyed table: {len(upserts_of)} upserts")
            few.load(name, rows_of(0, plan.rows))
            for number, count in enumerate(upserts_of):
                few.upsert(name, rows_of(plan.rows // len(upserts_of) * number, min(count, plan.rows // 20)))
        kinds = {"plain": plain, "few": few, "many": few}
        for read in ("sums", "scan", "looked_up"):
            times: dict[str, list[float]] = {}
            for _, (name, side) in turns([*kinds.items()], plan.rounds):
                times.setdefault(name, []).append(seconds_of(getattr(side, read), name))
            for name in ("few", "many"):
                found[f"{read}_with_{name}_upserts_vs_plain"] = round(
                    median_ratio(times[name], times["plain"]), 3
                )
    return found
