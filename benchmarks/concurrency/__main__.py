"""Do many clients see exactly what is committed, while the table is written, compacted and collected?

100 clients look up keys of a table of 1,000 leaves by way of `dormouse serve`. A writer adds ever larger
versions of the keys, and publishes what was acknowledged: a look-up that begins afterwards must see it, each
version once. Compaction and collection (gc_delay_seconds 2) run meanwhile, each in a process of its own; the
same look-ups of the idle table, before, are what the figures are compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import dormouse as dm
from benchmarks.concurrency.clients import Target
from benchmarks.concurrency.experiment import QUICK, Plan, figures, measure
from benchmarks.concurrency.serving import served
from benchmarks.harness import orderly_end


def main(given: list[str] | None = None) -> None:
    from benchmarks.state_tables import own_database
    from dormouse.embedded.postgres import EmbeddedPostgres

    orderly_end()
    arguments = parse(given)
    plan = QUICK if arguments.quick else Plan()
    plan = replace(plan, clients=arguments.clients, leaves=arguments.leaves)
    with (
        tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        EmbeddedPostgres(Path(folder) / "server") as server,
        own_database(server.dsn) as dsn,
    ):
        target = Target(dsn, f"file://{folder}/objects")
        found = run(target, plan, through=arguments.through, verbose=not arguments.json)
    print(json.dumps(found) if arguments.json else table(found))
    if found["errors"] or found["wrong_rows"] or found["stale_reads"]:
        sys.exit(1)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seconds: the same figures in a minute")
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--clients", type=int, default=100, help="[100]")
    parser.add_argument("--leaves", type=int, default=1_000, help="[1000]")
    parser.add_argument(
        "--through",
        choices=("service", "library"),
        default="service",
        help="what is measured: `dormouse serve` and its client, or `table.query` in the clients' processes",
    )
    arguments = parser.parse_args(given)
    for name in ("clients", "leaves"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def run(target: Target, plan: Plan, *, through: str = "service", verbose: bool = False) -> dict[str, Any]:
    """Every figure, by name."""
    tell = _tell if verbose and sys.stderr.isatty() else _tell_nobody
    with dm.connect(target.dsn, target.objects):
        pass  # a service reads an instance, and makes none
    with served(target) if through == "service" else nullcontext(target) as asked:
        return figures(measure(asked, plan, tell), plan, through=through)


def table(found: Mapping[str, Any]) -> str:
    asked = "dormouse serve" if found["through"] == "service" else "table.query"
    lines = [
        f"{found['clients']} clients of {asked}, {found['leaves']:,} leaves; meanwhile {found['ingests']:,} "
        f"ingests, {found['jobs']:,} jobs of compaction, {found['collected']:,} files collected",
        f"{'':24}{'look-ups/s':>12}{'p50 ms':>10}{'p99 ms':>10}",
    ]
    for label, end in (("idle", "_idle"), ("all of it at once", "")):
        numbers = [found[f"{name}{end}"] for name in ("lookups_per_second", "p50_ms", "p99_ms")]
        lines.append(f"{label:24}{numbers[0]:>12,.0f}{numbers[1]:>10,.1f}{numbers[2]:>10,.1f}")
    wrong = f"{found['errors']} errors, {found['wrong_rows']} wrong rows, {found['stale_reads']} stale reads"
    lines.append(f"{wrong} in {found['lookups']:,} look-ups")
    return "\n".join([*lines, *found.get("examples", ())])


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _tell_nobody(_: str) -> None:
    pass


if __name__ == "__main__":
    main()
