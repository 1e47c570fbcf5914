"""The processor time of a round of maintenance over tables without work.

- `maintain_500_idle_cpu_s`: processor seconds of this process for a round over 500 tables without work.
  `maintain_500_idle_postgres_cpu_s` are the seconds of PostgreSQL.
- `maintain_500_all_cpu_s`, `maintain_500_all_postgres_cpu_s`: the same for a round that examines each of
  these tables by itself.

The two rounds alternate. With fewer than 500 tables, the figures are extrapolated in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, turns
from dormouse.state.history.due import KINDS

OF_TABLES = 500
SCHEMA = dm.Schema([dm.Field("k", dm.LONG)])
_SIDES = {"idle": "tables without work are skipped", "all": "each table is examined"}


@dataclass(frozen=True)
class Plan:
    tables: int = amount(OF_TABLES, 50, help="tables without work [500]")
    rounds: int = amount(3, 2, help="counted rounds of each side [3]")


def measure(plan: Plan, tell: Tell) -> Figures:
    spent: dict[str, list[tuple[float, float]]] = {side: [] for side in _SIDES}
    with own_place() as place, dm.connect(place.dsn, place.objects) as instance:
        for number in range(plan.tables):
            tell(f"table {number + 1} of {plan.tables}")
            instance.create_table(f"t{number}", SCHEMA).ingest({"k": list(range(10))})
        while instance.maintain(once=True).tables_idle < plan.tables:
            tell("the tables have work")
        for number, side in turns([*_SIDES], plan.rounds):
            tell(f"round {number + 1}, {side}")
            spent[side].append(_spent(instance, place.folder, side, plan.tables))
    scale = OF_TABLES / plan.tables
    found: Figures = {"tables": plan.tables, "rounds": plan.rounds}
    for side, seconds in spent.items():
        for kind, each in zip(("", "postgres_"), zip(*seconds, strict=True), strict=True):
            found[f"maintain_500_{side}_{kind}cpu_s"] = round(scale * median(each), 2)
    return found


def _spent(instance: dm.Instance, folder: Path, side: str, tables: int) -> tuple[float, float]:
    """Runs a round; returns the processor seconds of this process and of PostgreSQL."""
    looks = patch("dormouse.durability.maintaining.due_kinds", _all_kinds) if side == "all" else nullcontext()
    with looks:
        own, server = process_time(), _server_seconds(folder)
        done = instance.maintain(once=True)
        spent = process_time() - own, _server_seconds(folder) - server
    if done.failed or done.tables_idle != (tables if side == "idle" else 0):
        raise RuntimeError(f"the round was not as planned: {done}")
    return spent


def _all_kinds(_: Any, tables: Sequence[Any]) -> Iterator[frozenset[str]]:
    return (KINDS for _ in tables)


def _server_seconds(folder: Path) -> float:
    """Returns the processor seconds of the server in a folder and of all its sessions so far."""
    import psutil

    [path] = folder.glob("server/**/postmaster.pid")
    server = psutil.Process(int(path.read_text().splitlines()[0]))
    ended = server.cpu_times()
    running = [each.cpu_times() for each in (server, *server.children())]
    return float(
        sum(each.user + each.system for each in running) + ended.children_user + ended.children_system
    )


BENCHMARK = Benchmark(
    "maintenance",
    __doc__,
    Plan,
    measure,
    [
        "{tables} tables, medians of {rounds} rounds",
        Grid(
            _SIDES,
            {"maintain_500_{}_cpu_s": "processor s", "maintain_500_{}_postgres_cpu_s": "PostgreSQL's"},
            "A round of maintenance over 500 tables without work",
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
