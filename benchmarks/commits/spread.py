"""Commits to one table, to ten and to a thousand: the same number in batches of the same size."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.commits.bench import Bench
from benchmarks.commits.kinds import timed
from benchmarks.commits.together import apply_all, batches
from benchmarks.state_tables import StateTable
from dormouse.commits.requests import Envelope
from dormouse.commits.table_cache import Tables
from dormouse.postgres import ConnectionSupplier

_BATCH = 1_000
_FEW, _MANY = 1, 1_000


def over_tables(bench: Bench) -> dict[str, Any]:
    """Each batch has as many commits to every table; one committer, after its first to each."""
    found: dict[str, Any] = {}
    for count in bench.plan.tables:
        jobs = max(1, bench.plan.jobs_over_tables // count)
        names = [f"of_{count}_{number}" for number in range(count)]
        tables = bench.tables.several(names, 1 + jobs, bench.layout)
        first, later = _rates(bench, tables)
        found[f"commits_per_s_{count}_tables"] = round(later, 1)
        found[f"first_commits_per_s_{count}_tables"] = round(first, 1)
    few, many = (found[f"commits_per_s_{count}_tables"] for count in (_FEW, _MANY))
    return {"tables_1000_vs_1": round(many / few, 3), **found}


def _rates(bench: Bench, tables: list[StateTable]) -> tuple[float, float]:
    """Of the first commit to each table, whose statement is not prepared yet; and of all the others."""
    orders = [list(bench.shuffled(table)) for table in tables]
    rounds = [
        [table.envelope(order[number]) for table, order in zip(tables, orders, strict=True)]
        for number in range(tables[0].jobs)
    ]
    first, later = rounds[0], [envelope for each in rounds[1:] for envelope in each]
    supplier = ConnectionSupplier(bench.dsn, connections_max=1)
    try:
        known = Tables(supplier)
        known.named((table.record.table_id, "") for table in tables)
        return _rate(known, first), _rate(known, later)
    finally:
        supplier.close()


def _rate(known: Tables, envelopes: list[Envelope]) -> float:
    return len(envelopes) / timed([partial(apply_all, known, batch) for batch in batches(envelopes, _BATCH)])
