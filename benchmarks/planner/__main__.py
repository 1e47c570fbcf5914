"""How long does it take to plan a query, of tables of 1,000, 10,000 and 132,000 leaves with 10 files each?

Plans of one key, of the keys of ten leaves, and of the whole table; in new instances and warm; alone, and
while another process compacts 1,000 times a second, ingests and splits. In turns with the look-up of the
same partitions in bare SQL, and with `select 1`. Right after commits are acknowledged, plans are checked
for them. On an embedded PostgreSQL with its durable defaults.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_plot
from benchmarks.harness import orderly_end
from benchmarks.planner.experiment import LEAVES, QUICK, Place, Plan, measure
from benchmarks.planner.report import plot, table
from benchmarks.state_tables import open_tables, own_database


def main(given: list[str] | None = None) -> None:
    orderly_end()
    arguments = parse(given)
    plan = QUICK if arguments.quick else Plan()
    found = run(replace(plan, sizes=tuple(arguments.only or plan.sizes)), verbose=not arguments.json)
    if arguments.plot:
        plot(found, arguments.plot)
    print(json.dumps(found) if arguments.json else table(found))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="under a minute: without 10,000 leaves, whole tables of 1,000 only",
    )
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    parser.add_argument(
        "--only", action="append", choices=list(LEAVES), help="leaves of the tables; may be repeated"
    )
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
    ):
        objects = str(Path(folder) / "objects")
        with open_tables(dsn, objects) as tables:
            tell = _tell if verbose and sys.stderr.isatty() else _tell_nobody
            return measure(Place(dsn, objects, tables), plan, tell)


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _tell_nobody(_: str) -> None:
    pass


if __name__ == "__main__":
    main()
