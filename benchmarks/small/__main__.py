"""Small batches: one row a commit, durable and visible, by Dormouse, DuckLake, delta-rs and PyIceberg.

1 and 8 writers in processes add one row at a time. DuckLake inlines rows in its catalog, and Dormouse keeps
small files in PostgreSQL. Then a large table is read with and without 1,000 such files, and a compaction
turns many of them into objects. With `--steady`, writers go on for as long as you choose, beside maintenance
and commits to another table: then their content in PostgreSQL must stay bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import psycopg

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import Place, own_place
from benchmarks.harness.report import Grid, median_ratio, turns, values
from benchmarks.peers.peer import Peer
from benchmarks.peers.together import NEEDED, PRELOAD, Result, Task, run_together, summary
from benchmarks.small.reads import EDITS, FILES, READS, Amounts, edited, flush, reads
from benchmarks.small.sides import SIDES, Ingesting, warmed
from benchmarks.small.steady import STEADY, steady

WRITERS = (1, 8)
_CONNECTIONS = {"max_connections": "300"}  # DuckLake opens up to four for each writer


@dataclass(frozen=True)
class Plan:
    """The durations and counts. A worker that exceeds its time by more than `grace_seconds` is killed."""

    rounds: int = amount(3, 1)
    seconds: float = amount(5.0, 1.5)
    grace_seconds: float = amount(6.0, 1.0)
    rows: int = amount(1_000_000, 200_000, help="rows of the table that is read [1,000,000]")
    reads: int = amount(300, 60)
    flushed: int = amount(10_000, 1_000, help="one-row files that a compaction merges [10,000]")
    steady: int = amount(0, help="seconds of the steady load [0: none]")
    steady_writers: int = amount(8)


Measured = dict[int, list[Result]]
"""The results of one system for each round, by the number of writers."""


def run(plan: Plan, tell: Tell) -> Figures:
    """Measures all systems in alternation, and then what small batches cost Dormouse's readers."""
    with own_place(_CONNECTIONS) as place:
        peers = [side(place) for side in SIDES]
        for peer in peers:
            peer.set_up()
        sides, lost, stored = _ingests(place, peers, plan, tell)
        found = {**figures(sides), "lost_rows": lost, "bytes_per_row_in_postgres": stored}
        found["failed"] += lost
        with dm.connect(place.create_database("reads"), f"file://{place.folder}/reads") as instance:
            found |= reads(instance, Amounts(plan.rows), plan.reads, tell)
            found |= edited(instance, tell)
            found |= flush(instance, plan.flushed, tell)
        if plan.steady:
            found |= steady(place, plan.steady, plan.steady_writers, tell)
        return found


def _ingests(
    place: Place, peers: Sequence[Peer], plan: Plan, tell: Tell
) -> tuple[dict[str, Measured], int, int | None]:
    """Returns the results, our lost or surplus rows, and the bytes that a row of ours takes in PostgreSQL."""
    sides: dict[str, Measured] = {peer.name: defaultdict(list) for peer in peers}
    lost, stored = 0, list[float]()
    for writers in WRITERS:
        for number, peer in turns(peers, plan.rounds):
            tell(f"{peer.label}: {writers} writers, round {number + 1}")
            table = f"small_{writers}_{number}"
            peer.create(table)
            before = _database_bytes(peer)
            tasks = [Task(partial(warmed, peer, table, writer)) for writer in range(writers)]
            tallies = run_together(tasks, plan.seconds, plan.grace_seconds)
            sides[peer.name][writers].append(summary(tallies, plan.seconds))
            if isinstance(peer, Ingesting):
                added = writers + sum(step.commits for tally in tallies for step in tally.done)
                # a killed writer may have added one row more than it counted
                surplus = peer.count(table) - added
                lost += max(-surplus, surplus - sum(tally.unfinished for tally in tallies), 0)
                stored.append((_database_bytes(peer) - before) / max(1, added))
    return sides, lost, round(stored[-1]) if stored else None


def _database_bytes(peer: Peer) -> int:
    with psycopg.connect(peer.place.dsn, autocommit=True) as conn:
        row = conn.execute(
            "select pg_database_size(datname) from pg_database where datname = %s", [f"peer_{peer.name}"]
        ).fetchone()
    return int(row[0]) if row else 0


def figures(sides: dict[str, Measured]) -> Figures:
    """Returns the rates of all systems, our ratios to the others, and our failures."""
    found: Figures = {}
    for side in SIDES:
        for writers, rounds in sides[side.name].items():
            end = f"{side.name}_{writers}"
            found[f"small_ingests_per_s_{end}"] = _median(rounds, lambda result: result.per_second)
            found[f"p50_ms_{end}"] = _median(rounds, lambda result: result.percentile_ms(50))
            found[f"p99_ms_{end}"] = _median(rounds, lambda result: result.percentile_ms(99))
            found[f"failed_{end}"] = sum(result.refused + result.unfinished for result in rounds)
    ours = sides[Ingesting.name]
    for writers in WRITERS:
        found[f"small_ingests_per_s_{writers}"] = found[f"small_ingests_per_s_{Ingesting.name}_{writers}"]
    for other in SIDES[1:]:
        for writers in WRITERS:
            theirs = [max(them.per_second, 1 / them.seconds) for them in sides[other.name][writers]]
            ratio = median_ratio([us.per_second for us in ours[writers]], theirs)
            found[f"vs_{other.name}_{writers}"] = round(ratio, 2)
    found["failed"] = sum(found[f"failed_{Ingesting.name}_{writers}"] for writers in WRITERS)
    return found


def _median(rounds: Sequence[Result], figure: Callable[[Result], float]) -> float:
    return round(median(map(figure, rounds)), 1)


_NAMES = {side.name: side.label for side in SIDES}
_OTHERS = {side.name: side.label for side in SIDES[1:]}

BENCHMARK = Benchmark(
    "small",
    __doc__,
    Plan,
    run,
    [
        *(
            Grid(
                _NAMES,
                {
                    f"small_ingests_per_s_{{}}_{writers}": "commits/s",
                    f"p50_ms_{{}}_{writers}": "p50 ms",
                    f"p99_ms_{{}}_{writers}": "p99 ms",
                    f"failed_{{}}_{writers}": "failed",
                },
                f"one row a commit, {writers} writers",
            )
            for writers in WRITERS
        ),
        Grid(_OTHERS, {f"vs_{{}}_{n}": f"{n} writers" for n in WRITERS}, "commits/s: ours ÷ theirs"),
        Grid(
            {kind: kind.replace("_", "-", 1).replace("_", " ") for kind in READS},
            {
                "{}_ms_none": "ms without",
                f"{{}}_ms_with_{FILES}_inlined": f"ms with {FILES:,}",
                f"{{}}_with_{FILES}_inlined_vs_none": "speed with ÷ without",
            },
            "reads of a table with and without small files",
        ),
        values(
            {
                **{f"small_ingests_per_s_{n}": f"ours, {n} writers, commits/s" for n in WRITERS},
                f"query_ms_after_{EDITS}_edits": f"ms of a query after {EDITS} ingests and edits",
                "query_ms_of_one_file": "ms of a query of one file of these rows",
                "flush_rows_per_s": "rows/s of a compaction of one-row files",
                "bytes_per_row_in_postgres": "bytes of a one-row commit in PostgreSQL",
                "lost_rows": "lost or surplus rows",
                "failed": "failed commits, and lost rows",
            }
        ),
        values(STEADY),
    ],
    needed=NEEDED,
    preload=(*PRELOAD, "benchmarks.small.sides", "dormouse.writing.ingest", "dormouse.reading.executor"),
)

if __name__ == "__main__":
    BENCHMARK.main()
