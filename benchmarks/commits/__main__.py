"""How many commits can the state store apply? In batches, one by one, over many tables, through the queue.

On an embedded PostgreSQL with its durable defaults. One by one, the same SQL is run by pgbench in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_plot
from benchmarks.commits import kinds, queueing, replacing, spread
from benchmarks.commits.bench import QUICK, Bench, Plan
from benchmarks.commits.profiling import profile
from benchmarks.commits.report import plot, table
from benchmarks.harness import orderly_end
from benchmarks.state_tables import open_tables, own_database
from dormouse.files.layout import LAYOUTS

PARTS: dict[str, Callable[[Bench], Mapping[str, Any]]] = {
    "batches": replacing.by_batch,
    "alone": replacing.alone,
    "adding": kinds.adding,
    "assigning": kinds.assigning,
    "creating_jobs": kinds.creating_jobs,
    "idle_latency": queueing.idle_latency,
    "queue": queueing.through_queue,
    "tables": spread.over_tables,
}


def main(given: list[str] | None = None) -> None:
    orderly_end()
    arguments = parse(given)
    if arguments.profile:
        plan = QUICK if arguments.quick else Plan()
        with opened(plan, arguments.layout) as bench:
            print(profile(bench, batch=500, batches=plan.profiled_batches))
        return
    found = run(QUICK if arguments.quick else Plan(), arguments.only or list(PARTS), arguments.layout)
    if arguments.plot:
        plot(found, arguments.plot)
    print(json.dumps(found) if arguments.json else table(found))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same figures in under a minute")
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part; may be repeated")
    parser.add_argument("--layout", choices=LAYOUTS, default="file_table", help="of the tables [file_table]")
    parser.add_argument("--profile", action="store_true", help="instead: where the time of a batch goes")
    arguments = parser.parse_args(given)
    check_plot(parser, arguments.plot)
    if arguments.plot and arguments.only and "batches" not in arguments.only:
        parser.error("--plot draws the part batches: add --only batches")
    return arguments


def run(plan: Plan, parts: list[str], layout: str) -> dict[str, Any]:
    """Every figure, by name."""
    found: dict[str, Any] = {}
    with opened(plan, layout) as bench:
        for part in parts:
            began = time.monotonic()
            found |= PARTS[part](bench)
            found[f"seconds_{part}"] = round(time.monotonic() - began, 1)
    return found


@contextmanager
def opened(plan: Plan, layout: str) -> Iterator[Bench]:
    """A server of its own, gone at the end."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    with (
        tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        EmbeddedPostgres(Path(folder) / "server") as server,
        own_database(server.dsn) as dsn,
        open_tables(dsn, str(Path(folder) / "objects")) as tables,
    ):
        yield Bench(dsn, Path(folder), tables, plan, layout)


if __name__ == "__main__":
    main()
