"""Tests of the benchmark of the history: the history that it builds, its operations and its figures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from benchmarks.history import __main__ as module
from benchmarks.history.__main__ import BENCHMARK, EPOCHS, READ_AGAIN, _growth, _read, _usual
from benchmarks.history.blob import Blob
from benchmarks.history.build import BEGAN, LEAVES, build, bytes_on_disk
from benchmarks.history.operations import OPERATIONS, WRITES, Subject, pages, round_trips
from benchmarks.state_tables import open_tables
from dormouse.postgres import ConnectionSupplier

BUILT = 2_345


@pytest.fixture(scope="module")
def subject(databases: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with databases.lent() as dsn:  # type: ignore[attr-defined]
        objects = str(tmp_path_factory.mktemp("objects"))
        with open_tables(dsn, objects) as tables:
            table = build(tables, BUILT, lambda _: None)
        with closing(ConnectionSupplier(dsn, connections_max=1)) as supplier:
            yield Subject(dsn, supplier, objects, table, BUILT, random.Random(1))


def test_the_built_history_is_consistent(subject: Subject) -> None:
    """The leaves computed from the epochs' changes equal the active partitions, and cover all keys."""
    leaves = {leaf.partition_id for leaf in subject.epochs.active_partitions(0)}
    assert len(leaves) == LEAVES
    splits = merges = 0
    for record in subject.epochs.epochs(1):
        assert leaves.issuperset(record.sealed)
        leaves = (leaves - {*record.sealed}) | {*record.created}
        splits, merges = splits + record.splits, merges + record.merges
        if record.epoch % 97 and record.epoch != BUILT:
            continue
        found = subject.epochs.active_partitions(record.epoch)
        assert {leaf.partition_id for leaf in found} == leaves
        ends = [(leaf.region.range("key").min, leaf.region.range("key").max) for leaf in found]
        assert ends[0][0] is ends[-1][1] is None
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    assert min(splits, merges) > 0.4 * BUILT
    with subject.supplier.connection() as conn:
        chunks = conn.execute("select chunk, splits, merges from history_chunk order by chunk").fetchall()
        assert [chunk for chunk, *_ in chunks] == [1, 2]
        names = {name for (name,) in conn.execute("select indexname from pg_indexes").fetchall()}
        assert names >= {"partition_pkey", "epoch_pkey", "partition_leaves", "partition_by_end"}
        assert bytes_on_disk(conn) > 100 * BUILT
    until = subject.epochs.scale_metadata(BEGAN, BEGAN.replace(year=2026))
    assert (until.splits, until.merges, until.last) == (splits, merges, BUILT)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_has_an_answer_and_counts_its_round_trips(subject: Subject, name: str) -> None:
    for _ in range(6):  # afterwards, psycopg prepares no more statements
        # these answers may be empty: the epoch may be the first one, the partition a leaf
        assert OPERATIONS[name](subject)() or name in ("epoch_at", "successors")
    trips = round_trips(subject.supplier, OPERATIONS[name](subject))
    assert trips == 1 or (name in WRITES and trips > 1)
    counted = pages(subject.supplier, [OPERATIONS[name](subject) for _ in range(1 if name in WRITES else 3)])
    assert 3 < counted < 5_000


def test_forgetting_deletes_truncated_epochs(subject: Subject) -> None:
    rate, longest = subject.forget(60)
    assert rate > 0 < longest
    with subject.supplier.connection() as conn:
        [(left,)] = conn.execute("select count(*) from epoch").fetchall()
    assert left < LEAVES + 100
    assert len(subject.epochs.active_partitions()) >= LEAVES


def test_the_single_value_is_read_and_written_whole(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        blob = Blob(conn, 50, 3)
        assert blob.bytes_per_epoch() == 8 + 8 + 4 + 3 * 8
        chosen = random.Random(4)
        assert 0 <= blob.epoch_at(chosen)() < 50
        blob.split(chosen)()
        blob._epochs = 51
        assert blob.bytes_per_epoch() == 44


def test_growth_compares_the_shortest_history_with_the_longest_that_counts() -> None:
    found = {f"p99_ms_{name}_{size}": 1.0 for name in OPERATIONS for size in EPOCHS}
    found |= {"p99_ms_epoch_at_3.1m": 1.25, "p99_ms_split_31m": 9.0}
    grown = _growth(found, [*EPOCHS])
    assert (grown["p99_growth_max"], grown["p99_growth_most"]) == (1.25, "epoch_at")
    assert (grown["growth_from"], grown["growth_to"]) == (10_000, 3_100_000)
    assert _growth(found, ["10k"]) == {}
    shown = BENCHMARK.text({**found, **grown, "roundtrips_split": 9})
    assert "at most 1.25, of epoch_at" in shown
    assert grown.keys() | found.keys() <= BENCHMARK.keys


def test_a_percentile_ignores_a_short_slow_phase() -> None:
    """One slow phase does not change the percentile. Calls that are slow throughout the run do change it."""
    assert _usual([1.0] * 800 + [50.0] * 200, 99) == 1
    assert _usual(([1.0] * 19 + [50.0]) * 50, 99) == 50
    assert _usual([2.0], 99) == 2


def test_the_fastest_of_repeated_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_milliseconds", lambda call: call())
    calls: list[int] = []

    def make(subject: Any) -> Callable[[], float]:
        """Returns a call that is slow in some rounds and fast in one."""
        took = itertools.chain([50.0] * (len(calls) % 2), [subject], itertools.repeat(60.0))
        calls.append(1)
        return lambda: next(took)

    histories: Any = {"10k": 2.0, "310k": 3.0}
    assert _read(make, histories, 4) == {"10k": [2.0] * 4, "310k": [3.0] * 4}
    assert (len(calls), READ_AGAIN) == (8, 4)
