"""A steady load of one-row commits beside maintenance: what it leaves in PostgreSQL, and what others lose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import Any

import psycopg
import pyarrow as pa

import dormouse as dm
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.place import Place
from benchmarks.peers.peer import Steps, refused_on, tiny_rows
from benchmarks.peers.together import Result, Task, run_together, summary
from benchmarks.small.sides import INLINED, SCHEMA
from dormouse.errors import CommitFailed

ALONE_SECONDS = 5.0
_GRACE_SECONDS = 20.0
_LOOK_SECONDS = 1.0
STEADY = {
    "steady_commits_per_s": "steady load: commits/s",
    "steady_failed": "refused or unfinished commits",
    "steady_lost_rows": "lost or surplus rows at the end",
    "steady_inlined_bytes_max": "largest content of inlined files, bytes",
    "steady_inlined_bytes_limit": "its limit",
    "steady_bytes_max": "largest size of all of PostgreSQL's tables, bytes",
    "steady_bytes_at_half": "the same after half of the time",
    "steady_bytes_at_end": "the same at the end",
    "steady_dead_share": "dead tuples ÷ tuples at the end, the largest of all tables",
    "steady_wal_bytes_per_row": "bytes of WAL a row",
    "other_commits_beside_vs_alone": "commits/s to another table beside the load ÷ alone",
    "other_commits_after_vs_alone": "commits/s to another table after the load ÷ alone",
}


def steady(place: Place, seconds: int, writers: int, tell: Tell) -> Figures:
    """Runs the load, and commits to another table before, beside and after it."""
    dsn, objects = place.create_database("steady"), f"file://{place.folder}/steady"
    short = INLINED.model_copy(update={"gc_delay_seconds": 5, "history_retention_seconds": 5})
    with dm.connect(dsn, objects) as instance:
        for name in ("load", "other"):
            instance.create_table(name, SCHEMA, properties=short)
    other = Task(partial(_appender, dsn, objects, "other", 0))
    tell("another table, alone")
    alone = _others(other)
    wal = _wal(dsn)
    tell(f"{writers} writers for {seconds} s")
    with _watched(dsn, objects) as (sizes, inlined):
        load = [Task(partial(_appender, dsn, objects, "load", writer)) for writer in range(writers)]
        upkeep = Task(partial(_upkeep, dsn, objects))
        tallies = run_together([*load, other, upkeep], seconds, _GRACE_SECONDS)
    result, beside = summary(tallies[:writers], seconds), summary([tallies[writers]], seconds)
    added = sum(step.commits for tally in tallies[:writers] for step in tally.done)
    with dm.connect(dsn, objects) as instance:
        rows = instance.table("load").query().read_all().num_rows
    tell("another table, after the load")
    after = _others(other)
    return {
        "steady_commits_per_s": round(result.per_second, 1),
        "steady_failed": result.refused + result.unfinished,
        "steady_lost_rows": abs(rows - added) if not result.unfinished else max(added - rows, 0),
        "steady_inlined_bytes_max": max(inlined),
        "steady_inlined_bytes_limit": short.inline_total_bytes_max,
        "steady_bytes_max": max(sizes),
        "steady_bytes_at_half": sizes[len(sizes) // 2],
        "steady_bytes_at_end": sizes[-1],
        "steady_dead_share": _dead_share(dsn),
        "steady_wal_bytes_per_row": round((_wal(dsn) - wal) / max(1, added)),
        "other_commits_beside_vs_alone": round(beside.per_second / alone.per_second, 3),
        "other_commits_after_vs_alone": round(after.per_second / alone.per_second, 3),
    }


def _others(task: Task) -> Result:
    return summary(run_together([task], ALONE_SECONDS, _GRACE_SECONDS), ALONE_SECONDS)


@contextmanager
def _appender(dsn: str, objects: str, table: str, writer: int) -> Iterator[Steps]:
    rows: pa.Table = tiny_rows(-1 - writer)
    with dm.connect(dsn, objects) as instance:
        opened = instance.table(table)

        def step(_: int) -> int:
            with refused_on(CommitFailed):
                opened.ingest(rows)
            return 1

        yield Steps(step)


@contextmanager
def _upkeep(dsn: str, objects: str) -> Iterator[Steps]:
    """Opens a worker that maintains the instance again and again, as `dormouse maintain` does."""
    with dm.connect(dsn, objects) as instance:

        def step(_: int) -> int:
            instance.maintain(once=True)
            return 1

        yield Steps(step)


@contextmanager
def _watched(dsn: str, objects: str) -> Iterator[tuple[list[int], list[int]]]:
    """Yields two lists to which a thread adds every second the sizes of the database and of inlined files."""
    over, sizes, inlined = Event(), list[int](), list[int]()

    def watch(table: dm.Table) -> None:
        while not over.wait(_LOOK_SECONDS):
            look(table)

    def look(table: dm.Table) -> None:
        sizes.append(_size(dsn))
        inlined.append(table.context.store.inlined.total()[1])

    with dm.connect(dsn, objects, read_only=True) as instance:
        table = instance.table("load")
        look(table)
        watching = Thread(target=watch, args=(table,))
        watching.start()
        try:
            yield sizes, inlined
        finally:
            over.set()
            watching.join()


def _value(dsn: str, query: str) -> Any:
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(query).fetchone()
    return row[0] if row else None


def _size(dsn: str) -> int:
    return int(_value(dsn, "select pg_database_size(current_database())"))


def _wal(dsn: str) -> int:
    return int(_value(dsn, "select pg_current_wal_lsn() - '0/0'::pg_lsn"))


def _dead_share(dsn: str) -> float:
    """Returns the largest share of dead tuples of a table that autovacuum should have cleaned by now."""
    query = """
        select coalesce(max(n_dead_tup::float / (n_live_tup + n_dead_tup)), 0)
        from pg_stat_user_tables
        where n_live_tup + n_dead_tup > 10000
    """
    return round(float(_value(dsn, query)), 3)
