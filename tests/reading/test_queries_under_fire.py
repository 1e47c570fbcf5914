"""Queries beside ingests, edits, compactions, splits, collections and conversions: every answer is right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import query_storm
from query_storm import (
    COLUMNS,
    COUNTED,
    LOSSES,
    SCHEMA,
    WRITERS_MAX,
    Asked,
    Storm,
    edit,
    in_order,
    maintain,
    read,
    write,
)

from dormouse.postgres import ConnectionSupplier
from tests.forks import FORKS
from tests.storming import IDLE_MS, failing_network, freeze
from tests.support.api import connect
from tests.support.model import TableProperties
from tests.support.objects import open_store
from tests.support.reading import query
from tests.support.state import LAYOUTS, Catalog, WriteAttempts

WAIT_SECONDS_MAX = 600.0
SMALL = {
    "compaction_strategy": "basic",
    "compaction_batch_files": 3,
    "split_threshold_rows": 100,
    "split_min_rows": 50,
    "row_group_bytes": 65_536,
}
DELAYS = (0.0, 1.0, 900.0)
"""The delay of collection in seconds, one for each table."""
BYTES_MEAN = {0: 250_000, 65_536: 2_000_000}
"""The mean number of bytes after which a connection breaks, by the size of the files that are inlined.

Most statements need fewer bytes. Those that read inlined files need 60 kB for each file.
"""
POINTS = ("a", "b", "c", "é")


@pytest.fixture(params=BYTES_MEAN, ids=["objects", "inlined"])
def storm(
    request: pytest.FixtureRequest, dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> Iterator[Storm]:
    given = {**SMALL, "inline_bytes_max": request.param}
    objects = open_store(tmp_path / "objects")
    connect(dsn, str(tmp_path / "objects")).close()  # the editor opens an instance
    catalog = Catalog(supplier, WriteAttempts(supplier, objects))
    tables = tuple(
        catalog.create(
            f"t{n}",
            SCHEMA,
            TableProperties(**given, gc_delay_seconds=delay, history_retention_seconds=delay),
            layout,
            POINTS,
        )
        for n, (delay, layout) in enumerate(zip(DELAYS, LAYOUTS, strict=True))
    )
    places = len(tables) * WRITERS_MAX
    with failing_network(dsn, random.Random(29), BYTES_MEAN[request.param]) as (proxy, reached):
        yield Storm(
            reached,
            str(tmp_path / "objects"),
            tables,
            FORKS.Array("q", places),
            FORKS.Array("q", places),
            FORKS.Array("q", len(tables)),
            FORKS.Array("q", LOSSES + 1),
            FORKS.Event(),
            FORKS.Queue(),
        )
        print(f"{proxy.broken} connections broke, {proxy.vanished} of them vanished")
        assert proxy.broken, "no connection was cut"


@pytest.mark.slow
def test_answers_are_right_while_everything_changes(storm: Storm, supplier: ConnectionSupplier) -> None:
    blow(storm, [(write, 1), (edit, 1), (maintain, 1), (read, 1)], at_least=3)
    check_end(storm, supplier)


@pytest.mark.slow
def test_answers_are_right_in_a_long_storm(storm: Storm, supplier: ConnectionSupplier) -> None:
    blow(storm, [(write, 2), (edit, 1), (maintain, 2), (read, 3)], at_least=12)
    check_end(storm, supplier)


def blow(storm: Storm, crowd: list[tuple[Callable[..., None], int]], at_least: int) -> None:
    """Runs the crowd's processes, and freezes random ones for a while.

    `crowd` has (work, number of processes). Runs until each kind of work was done `at_least` times. Fails
    with the failures that the processes reported.
    """
    processes = [
        FORKS.Process(target=query_storm.run, args=(storm, work, number), daemon=True)
        for work, times in crowd
        for number in range(times)
    ]
    for process in processes:
        process.start()
    began, rng = time.monotonic(), random.Random(29)
    try:
        while not is_enough(storm, at_least):
            assert time.monotonic() - began < WAIT_SECONDS_MAX, done(storm)
            if storm.stop.wait(rng.uniform(0.5, 3)):
                break
            freeze(rng.choice(processes), rng.choice([0.1, 0.5, 2 * IDLE_MS / 1_000]))
        storm.stop.set()
        for process in processes:
            process.join(WAIT_SECONDS_MAX)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = []
    while not storm.failures.empty():
        failures.append(storm.failures.get(timeout=10))
    assert not failures, "\n".join(failures)


def done(storm: Storm) -> dict[str, int]:
    return dict(zip(COUNTED, storm.counts, strict=False))


def is_enough(storm: Storm, at_least: int) -> bool:
    return all(number >= (1 if name == "conversions" else at_least) for name, number in done(storm).items())


def check_end(storm: Storm, supplier: ConnectionSupplier) -> None:
    """Checks each table: all rows exist, and the totals equal a new count.

    Also checks that looks at the whole tables find no work that looks at changes have missed.
    """
    for number, context in enumerate(storm.contexts(supplier)):
        asked = Asked(storm, number)
        asked.check(in_order(query(context, columns=COLUMNS)), lambda row: True)
        while context.jobs.create():
            pass
        above = context.partitions.count_above_leaves()
        totals = context.store.totals.bring_forward()
        assert context.store.totals.read() == totals
        with supplier.connection() as conn:
            conn.execute("delete from watermark where table_id = %s", [context.table.table_id])
        assert context.store.totals.read() == totals
        assert context.jobs.create() == 0
        assert context.partitions.count_above_leaves() == above
