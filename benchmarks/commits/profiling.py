"""Where the time of a batch of compaction commits goes: CPU seconds, and the plan of the statement."""

from __future__ import annotations

import re
import time
from itertools import islice
from typing import Any

import psutil
import psycopg
from psycopg import sql

from benchmarks.commits.bench import Bench
from benchmarks.commits.pgbench import values_of
from benchmarks.state_tables import StateTable
from dormouse.commits.apply import apply
from dormouse.commits.requests import decode, encode
from dormouse.commits.table_cache import Tables
from dormouse.files.layout import layout
from dormouse.postgres import ConnectionSupplier

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
_MICROSECONDS = 1_000_000


def profile(bench: Bench, batch: int, batches: int) -> str:
    """CPU microseconds a commit, and EXPLAIN (ANALYZE, BUFFERS, WAL) of one batch, as text.

    CPU time tells on a busy machine too; one that does nothing else can take about as many commits a second
    as there are such times in the seconds of its cores.
    """
    table, jobs = bench.claimed("profile", batch * (batches + 2))
    with bench.supplier() as supplier:
        tables = Tables(supplier)
        with supplier.connection() as conn:
            server = psutil.Process(conn.info.backend_pid)
        _commit(tables, table, [*islice(jobs, batch)])
        spent = _Spent(server)
        wal = _wal(supplier)
        for _ in range(batches):
            _commit(tables, table, [*islice(jobs, batch)], spent)
        wal = _wal(supplier) - wal
        lines = [f"{name:34}{used / (batch * batches) * _MICROSECONDS:10.1f}" for name, used in spent]
        lines += [
            f"{'WAL bytes a commit':34}{wal / (batch * batches):10.0f}",
            *_explained(supplier, table, bench, [*islice(jobs, batch)]),
        ]
    return "\n".join([f"Microseconds a commit, in batches of {batch}", *lines])


class _Spent:
    """Seconds by what they were spent on."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._seconds: dict[str, float] = {}

    def __iter__(self) -> Any:
        return iter(self._seconds.items())

    def now(self) -> tuple[float, float, float]:
        used = self._server.cpu_times()
        return time.monotonic(), time.process_time(), used.user + used.system

    def add(self, what: str, before: tuple[float, float, float], *, database: bool = False) -> None:
        elapsed, ours, theirs = (now - earlier for now, earlier in zip(self.now(), before, strict=True))
        names = [(f"{what}: Python's CPU", ours)]
        if database:
            names += [(f"{what}: PostgreSQL's CPU", theirs), (f"{what}: elapsed", elapsed)]
        for name, seconds in names:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def _commit(tables: Tables, table: StateTable, jobs: list[int], spent: _Spent | None = None) -> None:
    bodies = [encode(table.envelope(job).request, table_id=table.record.table_id) for job in jobs]
    before = spent.now() if spent else (0.0, 0.0, 0.0)
    envelopes = [decode(body) for body in bodies]
    if spent:
        spent.add("decode", before)
        before = spent.now()
    outcomes = apply(tables, envelopes)
    if spent:
        spent.add("apply", before, database=True)
    if any(outcome.state != "applied" for outcome in outcomes):
        raise RuntimeError(f"a commit is not applied: {outcomes}")


def _wal(supplier: ConnectionSupplier) -> float:
    with supplier.connection() as conn:
        row = conn.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
    return float(row[0]) if row else 0.0


def _explained(supplier: ConnectionSupplier, table: StateTable, bench: Bench, jobs: list[int]) -> list[str]:
    """The plan that the store's prepared statement has, with the batch's values; rolled back."""
    (values,) = values_of(bench.dsn, table, [jobs])
    text = layout(table.record.layout).on("replace", table.record.table_id).as_string(None)
    names = list(dict.fromkeys(name for name in _PLACEHOLDER.findall(text) if name))
    numbered = _PLACEHOLDER.sub(lambda m: f"${names.index(m[1]) + 1}" if m[1] else "%", text)
    with supplier.connection() as conn, conn.transaction(force_rollback=True):
        conn.execute(f"prepare profiled as {numbered.rstrip().rstrip(';')}".encode(), prepare=False)
        explain = sql.SQL("explain (analyze, buffers, wal) execute profiled ({})").format(
            sql.SQL(", ").join(sql.Literal(values[name]) for name in names)
        )
        rows = psycopg.ClientCursor(conn).execute(explain).fetchall()
        conn.execute("deallocate profiled", prepare=False)
    return [row[0] for row in rows]
