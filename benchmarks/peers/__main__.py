"""The rate of commits to one table by Dormouse, DuckLake, delta-rs and PyIceberg, on the same machine.

The cases are appends of one small file by 1, 8 and 32 processes, the same on a table with a history, and
compactions of one table by 1, 2 and 8 processes while another process appends. One durable PostgreSQL holds
Dormouse's state and the catalogs of DuckLake and PyIceberg; Delta's log is a folder. The systems alternate,
with their documented retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

import psycopg

from benchmarks.harness.command import Benchmark, Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, Pane, median_ratio
from benchmarks.peers.delta import Delta
from benchmarks.peers.ducklake import DuckLake
from benchmarks.peers.experiments import AT_WRITERS, COMPACTORS, WRITERS, Measured, Plan, measure
from benchmarks.peers.iceberg import Iceberg
from benchmarks.peers.own import Dormouse, DormouseCommitter, DormouseWaiting
from benchmarks.peers.peer import Peer
from benchmarks.peers.together import NEEDED, PRELOAD, Result

_SIDES: tuple[type[Peer], ...] = (Dormouse, DormouseCommitter, DormouseWaiting, DuckLake, Delta, Iceberg)
_COMPACTING = (Dormouse, DuckLake, Delta)
_CONNECTIONS = {"max_connections": "300"}  # DuckLake opens up to four for each writer


def run(plan: Plan, tell: Tell) -> Figures:
    """Measures all systems in alternation; returns the figures and the versions of the packages."""
    with own_place(_CONNECTIONS) as place:
        peers = {side: side(place) for side in _SIDES}
        for peer in peers.values():
            peer.set_up()
        sides = measure([*peers.values()], [peers[side] for side in _COMPACTING], plan, tell)
        return {**figures(sides), "versions": _versions(), "postgres": _postgres_version(place.dsn)}


def _versions() -> dict[str, str]:
    return {side.name: ", ".join(f"{name} {version(name)}" for name in side.packages) for side in _SIDES}


def _postgres_version(dsn: str) -> str:
    query = "select format('%s, fsync %s', current_setting('server_version'), current_setting('fsync'))"
    with psycopg.connect(dsn) as conn:
        row = conn.execute(query).fetchone()
    return str(row[0]) if row else ""


Rounds = Sequence[Result]


def _sum(counts: Iterable[int | None]) -> int | None:
    """Returns the sum of the counts that are not None, or None if there are none."""
    counted = [count for count in counts if count is not None]
    return sum(counted) if counted else None


def _median(figure: Callable[[Result], float]) -> Callable[[Rounds], float]:
    """Returns a function that takes the median of a figure over the rounds."""
    return lambda rounds: round(median(map(figure, rounds)), 1)


def _refused(rounds: Rounds) -> int:
    return sum(result.refused for result in rounds)


_RATE = _median(lambda result: result.per_second)
_Meanings = Mapping[str, tuple[str, Callable[[Rounds], Any]]]
"""A map from the key of a figure to its column's heading and the function that computes it from the rounds.

The two `{}` in a key are replaced by the compared system and the number of workers.
"""

_FIGURES: dict[str, _Meanings] = {
    "appends": {
        "commits_per_s_{}_{}": ("commits/s", _RATE),
        "p50_ms_{}_{}": ("p50 ms", _median(lambda result: result.percentile_ms(50))),
        "p99_ms_{}_{}": ("p99 ms", _median(lambda result: result.percentile_ms(99))),
        "retries_{}_{}": ("retries", lambda rounds: _sum(result.retries for result in rounds)),
        "failed_{}_{}": ("failed", _refused),
        "unfinished_{}_{}": ("unfinished", lambda rounds: _sum(result.unfinished for result in rounds)),
    },
    "new": {"commits_per_s_{}_new": ("commits/s when new", _RATE)},
    "grown": {"commits_per_s_{}_grown": ("later", _RATE)},
    "history": {"grown_commits_{}": ("after commits", lambda rounds: _sum(r.commits for r in rounds))},
    "compactors": {
        "compactions_per_s_{}_{}": ("compactions/s", _RATE),
        "compaction_failures_{}_{}": ("failures", _refused),
    },
    "beside": {
        "appends_per_s_beside_{}_{}": ("appends/s", _RATE),
        "failed_appends_beside_{}_{}": ("failed", _refused),
    },
}


def figures(sides: Mapping[str, Measured]) -> Figures:
    """Returns Dormouse's ratios and failures first, then the figures of each system."""
    found: Figures = {}
    for ours, end in _OURS.items():
        for other in _OTHERS:
            found[f"vs_{other}_{AT_WRITERS}{end}"] = _ratio("appends", sides[ours], sides[other])
        found[f"failed{end}"] = _failed("appends", sides[ours])
    for other in _OTHERS[:2]:
        key = f"compactions_vs_{other}_{AT_WRITERS}"
        found[key] = _ratio("compactors", sides["dormouse"], sides[other])
    found[WAITING] = _ratio("appends", sides["waiting"], sides["dormouse"], WRITERS[-1])
    found["compaction_failures"] = _failed("compactors", sides["dormouse"])
    for name, side in sides.items():
        for (kind, workers), rounds in side.items():
            for key, (_, figure) in _FIGURES[kind].items():
                found[key.format(name, workers)] = figure(rounds)
    return found


def _ratio(kind: str, ours: Measured, theirs: Measured, writers: int = AT_WRITERS) -> float:
    """Returns the median over the rounds of the ratio of our rate to theirs.

    If they made no commit in a round, one commit counts.
    """
    at = kind, writers
    rates = [max(them.per_second, 1 / them.seconds) for them in theirs[at]]
    return round(median_ratio([us.per_second for us in ours[at]], rates), 2)


def _failed(kind: str, side: Measured) -> int:
    return sum(_refused(rounds) for (of, _), rounds in side.items() if of == kind)


WAITING = f"committer_{WRITERS[-1]}_vs_sync"
_OURS = {"dormouse": "", "committer": "_committer"}
_OTHERS = ("ducklake", "delta", "pyiceberg")
_RATIOS = {
    f"vs_{other}_{AT_WRITERS}{end}": f"{ours}: commits/s ÷ those of {other}, {AT_WRITERS} writers"
    for ours, end in _OURS.items()
    for other in _OTHERS
} | {
    f"compactions_vs_{other}_{AT_WRITERS}": f"compactions/s ÷ those of {other}, {AT_WRITERS} compactors"
    for other in _OTHERS[:2]
}
_RATIOS[WAITING] = f"{WRITERS[-1]} writers: commits/s of Instance.commit ÷ of synchronous writers"


def _grid(title: str, kinds: Sequence[str], sides: Sequence[type[Peer]], workers: Sequence[int]) -> Grid:
    rows = {(side.name, n): f"{side.label}, {n}" for side in sides for n in workers}
    return Grid(rows, {key: head for kind in kinds for key, (head, _) in _FIGURES[kind].items()}, title)


def _pane(title: str, key: str, sides: Sequence[type[Peer]], workers: Sequence[int]) -> Pane:
    lines = {key.format(side.name, "{}"): side.label for side in sides}
    return Pane(title, "workers", "a second", {n: n for n in workers}, lines, yscale="log")


BENCHMARK = Benchmark(
    "peers",
    __doc__,
    Plan,
    run,
    [
        _grid(
            "Appends to one table, by writers: medians of the rounds; retries, failures and unfinished steps "
            "are sums\n(through the queue, a writer's latency is that of submitting)",
            ["appends"],
            _SIDES,
            WRITERS,
        ),
        _grid("\nThe same table later, by writers", ["new", "grown", "history"], _SIDES, [AT_WRITERS]),
        _grid(
            "\nCompactions of four small files each, by compactors, while a writer appends to the same table",
            ["compactors", "beside"],
            _COMPACTING,
            COMPACTORS,
        ),
        Grid(_RATIOS, {"{}": ""}, "\nOurs ÷ theirs"),
        "failures of Dormouse: {failed} appends, {failed_committer} through the queue, "
        "{compaction_failures} compactions",
        Grid({side.name: side.label for side in _SIDES}, {"versions.{}": ""}, "\nPostgreSQL and versions"),
        "PostgreSQL {postgres}",
    ],
    panes=[
        _pane("Appends to one table", "commits_per_s_{}_{}", _SIDES, WRITERS),
        _pane("Compactions beside appends", "compactions_per_s_{}_{}", _COMPACTING, COMPACTORS),
    ],
    needed=NEEDED,
    preload=PRELOAD,
)

if __name__ == "__main__":
    BENCHMARK.main()
