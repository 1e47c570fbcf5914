"""What does a change cost? The same rows and changes by Dormouse, delta-rs, DuckLake and PyIceberg.

Each deletes one key, a range of keys, and 1 % of the rows by a value: the time until it is acknowledged,
and until a reader that opens the table then has seen it. Beside compactions, deletes that are refused count.
Look-ups of Dormouse are asked of a table without deletions, and of one with a thousand that are pending.
Upserts are measured where tables have them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import perf_counter

import dormouse as dm
from benchmarks.changes.sides import SIDES, Dormouse, Rows, Side, rows_of
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import Place, own_place
from benchmarks.harness.report import Grid, median_ratio, percentile, turns, values
from benchmarks.peers.peer import Refused

DELETIONS = 1_000
FILES = 8
LOOKUPS = 40
UPSERTED = 1_000
KINDS = {"key": "one key", "range": "a range of 1,000 keys", "value": "1 % of the rows by a value"}
PEERS = [side.name for side in SIDES[1:]]


@dataclass(frozen=True)
class Plan:
    rows: int = amount(4_000_000, 160_000, help="in all [4,000,000]")
    rounds: int = amount(7, 3, help="of each kind of delete [7]")
    beside: int = amount(12, 4, help="deletes beside a compaction [12]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """One side after the other in each round, all in this process."""
    with own_place() as place, ExitStack() as stack:
        sides = [made(place) for made in SIDES]
        for side in sides:
            stack.callback(side.close)
            tell(f"{side.label}: loading")
            _fill(side, "t", plan.rows)
        found: Figures = {"rows": plan.rows, "files": FILES, "rounds": plan.rounds}
        acknowledged, seen = _deletes(sides, plan, tell)
        for times, suffix in ((acknowledged, "ms"), (seen, "seen_ms")):
            for (kind, name), seconds in times.items():
                found[f"{kind}_{suffix}_{name}"] = round(percentile(seconds, 50) * 1_000, 3)
        for peer in PEERS:
            ratios = [
                median_ratio(acknowledged[kind, peer], acknowledged[kind, "dormouse"]) for kind in KINDS
            ]
            found[f"delete_vs_{peer}"] = round(min(ratios), 3)
            found |= {f"{kind}_vs_{peer}": round(ratio, 3) for kind, ratio in zip(KINDS, ratios, strict=True)}
        tell("deletes beside a compaction")
        refused = {side.name: _refused(side, plan) for side in sides}
        found["failed"] = refused.pop("dormouse")
        found |= {f"failed_{name}": count for name, count in refused.items()}
        tell("look-ups")
        found["lookup_with_1000_deletions_vs_none"] = round(_lookups(place, plan), 3)
        if hasattr(dm.Table, "upsert"):
            tell("upserts")
            found |= _upserts(place, sides, plan)
    return found


def _fill(side: Side, table: str, rows: int) -> None:
    each = rows // FILES
    for number in range(FILES):
        side.load(table, rows_of(number * each, each))


def _deletes(
    sides: Sequence[Side], plan: Plan, tell: Tell
) -> tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], list[float]]]:
    """Seconds of each kind and side, until it was acknowledged, and until a new reader had seen it."""
    acknowledged: dict[tuple[str, str], list[float]] = {}
    seen: dict[tuple[str, str], list[float]] = {}
    for kind, what in KINDS.items():
        for number, side in turns(sides, plan.rounds):
            tell(f"{side.label}: delete {what}")
            rows = _chosen(kind, number, plan.rows)
            began = perf_counter()
            side.delete("t", rows)
            acknowledged.setdefault((kind, side.name), []).append(perf_counter() - began)
            if left := side.count("t", rows):
                raise RuntimeError(f"{side.label} has {left} rows that it deleted")
            seen.setdefault((kind, side.name), []).append(perf_counter() - began)
    return acknowledged, seen


def _chosen(kind: str, number: int, rows: int) -> Rows:
    """Other ones in each round, which are there."""
    start = rows // 40 * (number + 1)
    if kind == "value":
        return Rows(value=number)
    return Rows(start, start + 1) if kind == "key" else Rows(start + 10, start + 1_010)


def _refused(side: Side, plan: Plan) -> int:
    """How many deletes are refused while compactions run."""
    over, refused = Event(), 0
    _fill(side, "busy", plan.rows // 4)

    def compact() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with suppress(Refused):
                # DuckDB's connections are of one thread each
                if side.name != "ducklake":
                    side.load("busy", rows_of(plan.rows + 1_000 * number, 1_000))
                side.compact("busy")

    thread = Thread(target=compact)
    thread.start()
    try:
        for number in range(plan.beside):
            try:
                side.delete("busy", Rows(number * 100, number * 100 + 1))
            except Refused:
                refused += 1
    finally:
        over.set()
        thread.join()
    return refused


def _lookups(place: Place, plan: Plan) -> float:
    """Look-ups a second with a thousand pending deletions ÷ without."""
    side = Dormouse(place)
    try:
        for name in ("without", "with"):
            _fill(side, name, plan.rows // 4)
        keys = random.Random(1).sample(range(plan.rows // 4), plan.rounds * LOOKUPS + DELETIONS)
        deleted, asked = keys[:DELETIONS], keys[DELETIONS:]
        deleted_from = side.instance.table("with")
        for key in deleted:
            deleted_from.delete({"k": key})
        times: dict[str, list[float]] = {"without": [], "with": []}
        for number, name in turns(("without", "with"), plan.rounds + 1):
            opened = side.instance.table(name)
            began = perf_counter()
            for key in asked[number % plan.rounds * LOOKUPS :][:LOOKUPS]:
                if opened.query({"k": key}).read_all().num_rows != 1:
                    raise RuntimeError(f"table {name!r} has not one row of key {key}")
            times[name].append(perf_counter() - began)
        # the first round finds the files
        return median_ratio(times["without"][1:], times["with"][1:])
    finally:
        side.close()


def _upserts(place: Place, sides: Sequence[Side], plan: Plan) -> Figures:
    """Upserts of a thousand rows; and what a keyed table costs to read and to compact."""
    times: dict[str, list[float]] = {}
    ours = Dormouse(place)
    # the property comes with keyed tables
    ours.properties = dm.TableProperties.model_validate({"keep": "newest_row"})
    try:
        _fill(ours, "keyed", plan.rows)
        for number, side in turns([ours, *sides[1:]], plan.rounds):
            changed = rows_of(plan.rows // 2 + number * UPSERTED, UPSERTED)
            began = perf_counter()
            side.upsert("keyed" if side is ours else "t", changed)
            times.setdefault(side.name, []).append(perf_counter() - began)
        found: Figures = {
            f"upsert_1000_vs_{peer}": round(median_ratio(times[peer], times["dormouse"]), 3) for peer in PEERS
        }
        plain = Dormouse(place)
        _fill(plain, "plain", plan.rows)
        compaction = {name: _seconds(ours.compact, name) for name in ("plain", "keyed")}
        scans = {
            name: [_seconds(_scan, ours.instance.table(name)) for _ in range(plan.rounds)]
            for name in ("plain", "keyed")
        }
        plain.close()
        return {
            **found,
            "keyed_compaction_vs_plain": round(compaction["plain"] / compaction["keyed"], 3),
            "keyed_scan_vs_plain": round(median_ratio(scans["plain"], scans["keyed"]), 3),
        }
    finally:
        ours.close()


def _seconds(action: object, *given: object) -> float:
    began = perf_counter()
    action(*given)  # type: ignore[operator]
    return perf_counter() - began


def _scan(table: dm.Table) -> int:
    return sum(len(batch) for batch in table.query())


_NAMES = {side.name: side.label for side in SIDES}
_OF_PEERS = {peer: _NAMES[peer] for peer in PEERS}
BENCHMARK = Benchmark(
    "changes",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows in {files} files; medians of {rounds} rounds",
        *(
            Grid(
                _NAMES,
                {f"{kind}_ms_{{}}": "ms", f"{kind}_seen_ms_{{}}": "ms until it is seen"},
                f"delete {what}",
            )
            for kind, what in KINDS.items()
        ),
        Grid(
            _OF_PEERS,
            {
                **{f"{kind}_vs_{{}}": f"{kind}: theirs ÷ ours" for kind in KINDS},
                "delete_vs_{}": "the least",
                "failed_{}": "refused beside a compaction",
                "upsert_1000_vs_{}": "upsert of 1,000 rows",
            },
        ),
        values(
            {
                "failed": "deletes of ours that were refused beside a compaction",
                "lookup_with_1000_deletions_vs_none": "look-ups with 1,000 pending deletions ÷ without",
                "keyed_scan_vs_plain": "scan of a keyed table ÷ of a plain one",
                "keyed_compaction_vs_plain": "compaction likewise",
            }
        ),
    ],
    needed=("deltalake", "duckdb", "duckdb_extension_ducklake", "pyiceberg", "psycopg2"),
)

if __name__ == "__main__":
    BENCHMARK.main()
