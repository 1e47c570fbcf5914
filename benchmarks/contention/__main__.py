"""What happens when hundreds of compactions of one table commit at the same moment?

Eleven ingests wrote one file each, to which all leaves refer; a compaction job per leaf replaces its eleven
references by one. Committers at once, synchronous and one by one, for every layout and isolation level, on an
embedded PostgreSQL with its durable defaults.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_plot
from benchmarks.contention.experiment import QUICK, Plan, figures, measure
from benchmarks.contention.report import plot, table
from benchmarks.contention.storm import committers
from benchmarks.harness import orderly_end
from benchmarks.state_tables import open_tables, own_database


def main(given: list[str] | None = None) -> None:
    orderly_end()
    arguments = parse(given)
    found = run(QUICK if arguments.quick else Plan(), verbose=not arguments.json)
    if arguments.plot:
        plot(found, arguments.plot)
    print(json.dumps(found) if arguments.json else table(found))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contention", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer leaves: the same figures in under a minute"
    )
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    arguments = parser.parse_args(given)
    check_plot(parser, arguments.plot)
    return arguments


def run(plan: Plan, *, verbose: bool) -> dict[str, Any]:
    """Every figure, by name."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    with (
        tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        EmbeddedPostgres(Path(folder) / "server") as server,
        own_database(server.dsn) as dsn,
        open_tables(dsn, str(Path(folder) / "objects")) as tables,
        committers(dsn) as them,
    ):
        tell = _tell if verbose and sys.stderr.isatty() else _tell_nobody
        return figures(measure(tables, them, plan, tell), plan)


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _tell_nobody(_: str) -> None:
    pass


if __name__ == "__main__":
    main()
