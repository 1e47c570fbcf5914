"""Clients of a query service look up keys while ingest, compaction and collection run in other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.concurrency.__main__ import Plan, run
from benchmarks.concurrency.clients import Target
from benchmarks.concurrency.upkeep import COUNTS
from benchmarks.harness.command import quick

SMALL = Plan(
    clients=20,
    processes=1,
    leaves=50,
    gc_delay_seconds=1,
    warm_seconds=0,
    idle_seconds=0.2,
    seconds=1,  # and until each kind of work was done at least so often
    at_least=4,
)
# of the idle table, the benchmark only measures look-ups
LARGE = replace(quick(Plan), warm_seconds=0, idle_seconds=SMALL.idle_seconds)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SMALL, LARGE], ids=["small", "whole"])
def test_no_look_up_fails_or_is_wrong_or_stale(dsn: str, tmp_path: Path, plan: Plan) -> None:
    """A look-up sees all commits that were acknowledged before it, and each version of a key once."""
    found = run(Target(dsn, f"file://{tmp_path}/objects"), plan)
    assert verdict(found) == {"errors": 0, "wrong_rows": 0, "stale_reads": 0}, found
    assert found["lookups"] > 0
    assert {name: found[name] >= plan.at_least for name in COUNTS} == dict.fromkeys(COUNTS, True)


def verdict(counts: dict[str, Any]) -> dict[str, int]:
    return {name: counts[name] for name in ("errors", "wrong_rows", "stale_reads")}
