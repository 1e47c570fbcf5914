"""A profile of a batch of compaction commits: CPU time by step, and the plan of the statement."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import psutil
import psycopg
from psycopg import sql

from benchmarks.commits.bench import Bench
from benchmarks.commits.pgbench import as_script, statement_of, values_of
from benchmarks.committers import apply_all
from benchmarks.state_tables import StateTable
from dormouse.postgres import ConnectionSupplier
from dormouse.state.commits.apply import Tables
from dormouse.state.commits.requests import Envelope, decode, encode

T = TypeVar("T")

_CLOCKS = ("Python's CPU", "PostgreSQL's CPU", "elapsed")
_MICROSECONDS = 1_000_000


def profile(bench: Bench, batch: int, batches: int) -> str:
    """Returns a text with the CPU microseconds per commit, and EXPLAIN (ANALYZE, BUFFERS, WAL) of one batch.

    CPU time is comparable even on a busy machine. An idle machine applies about as many commits per second as
    its number of cores, divided by the CPU seconds of a commit.
    """
    table, jobs = bench.claimed("profile", batch * (batches + 2))
    spent: dict[str, float] = defaultdict(float)
    with bench.supplier() as supplier:
        tables = Tables(supplier)
        with supplier.connection() as conn:
            server = psutil.Process(conn.info.backend_pid)
        wal = 0.0
        for number in range(batches + 1):
            some = [table.envelope(job).request for job in islice(jobs, batch)]
            bodies = [encode(request, table_id=table.record.table_id) for request in some]
            envelopes = _spend(spent, "decode", server, partial(_decoded, bodies))
            _spend(spent, "apply", server, partial(apply_all, tables, envelopes))
            if number == 0:  # the first batch connects and plans, so it does not count
                spent.clear()
                wal = _wal(supplier)
        wal = _wal(supplier) - wal
        commits = batch * batches
        lines = [f"{name:34}{used / commits * _MICROSECONDS:10.1f}" for name, used in spent.items()]
        lines.append(f"{'WAL bytes a commit':34}{wal / commits:10.0f}")
        lines += _explained(supplier, table, bench, [*islice(jobs, batch)])
    return "\n".join([f"Microseconds a commit, in batches of {batch}", *lines])


def _decoded(bodies: Sequence[str]) -> list[Envelope]:
    return [decode(body) for body in bodies]


def _spend(spent: dict[str, float], what: str, server: psutil.Process, call: Callable[[], T]) -> T:
    """Makes the call, adds its CPU and elapsed seconds to `spent` under `what`, and returns its result."""

    def clocks() -> tuple[float, ...]:
        used = server.cpu_times()
        return time.process_time(), used.user + used.system, time.monotonic()

    before = clocks()
    done = call()
    for clock, now, earlier in zip(_CLOCKS, clocks(), before, strict=True):
        spent[f"{what}: {clock}"] += now - earlier
    return done


def _wal(supplier: ConnectionSupplier) -> float:
    with supplier.connection() as conn:
        row = conn.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
    return float(row[0]) if row else 0.0


def _explained(supplier: ConnectionSupplier, table: StateTable, bench: Bench, jobs: list[int]) -> list[str]:
    """Explains the store's statement with a batch's values, and rolls it back; returns EXPLAIN's lines."""
    (values,) = values_of(bench.dsn, table, [jobs])
    text, names = statement_of(table)
    numbered = as_script(text, lambda name: f"${names.index(name) + 1}")
    with supplier.connection() as conn, conn.transaction(force_rollback=True):
        conn.execute(f"prepare profiled as {numbered.rstrip().rstrip(';')}".encode(), prepare=False)
        explain = sql.SQL("explain (analyze, buffers, wal) execute profiled ({})").format(
            sql.SQL(", ").join(sql.Literal(values[name]) for name in names)
        )
        rows = psycopg.ClientCursor(conn).execute(explain).fetchall()
        conn.execute("deallocate profiled", prepare=False)
    return [row[0] for row in rows]
