"""Sorting of rows in little memory. Only runs that overlap are merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dormouse.data.leaf_sorter import LeafSorter
from dormouse.errors import JobFailed
from tests.support.model import LONG, STRING, Field, Schema

SCHEMA = Schema([Field("k", STRING)], [Field("n", LONG)], [Field("v", LONG)])
KEYS = ["", "a", "a\0", "b", "é", "\uffff", "\U00010000"]
"""Keys in sorted order."""


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each merge adds the number of its runs."""
    counted: list[int] = []
    merged = LeafSorter._merged

    def counting(self: LeafSorter, runs: list[Path], names: list[str]) -> Iterator[pa.RecordBatch]:
        counted.append(len(runs))
        return merged(self, runs, names)

    monkeypatch.setattr(LeafSorter, "_merged", counting)
    return counted


def given_back(batches: list[list[tuple[str, int]]], **more: Any) -> list[tuple[str, int]]:
    with LeafSorter(SCHEMA, 1, memory_bytes=1, **more) as sorter:
        for rows in batches:
            columns = [[k for k, _ in rows], [n for _, n in rows], [7] * len(rows)]
            types = (pa.string(), pa.int64(), pa.int64())
            arrays = [pa.array(values, kind) for values, kind in zip(columns, types, strict=True)]
            sorter.add(pa.record_batch(arrays, names=SCHEMA.names), pa.array([0] * len(rows), pa.int32()))
        found = [row for batch in sorter.sorted_batches() for row in batch.to_pylist()]
    assert all(list(row) == [*SCHEMA.names] and row["v"] == 7 for row in found)
    return [(row["k"], row["n"]) for row in found]


def test_runs_in_order_are_not_merged(merges: list[int]) -> None:
    rows = [(key, n) for key in KEYS for n in range(3)]
    batches = [rows[start : start + 2][::-1] for start in range(0, len(rows), 2)]
    assert given_back(batches) == rows
    assert merges == []


@pytest.mark.parametrize(
    "batches",
    [
        [[("b", 1)], [("a", 1)]],
        [[("a", 1), ("b", 1)], [("b", 1), ("c", 1)]],  # the order of equal keys is not known
        [[("a", 1), ("c", 1)], [("b", 1)], [("d", 1)]],
    ],
)
def test_overlapping_runs_are_merged(merges: list[int], batches: list[list[tuple[str, int]]]) -> None:
    assert given_back(batches) == sorted(row for rows in batches for row in rows)
    assert merges == [len(batches)]


def test_a_run_that_vanishes_before_it_is_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    chained = LeafSorter._chained

    def without_one(self: LeafSorter) -> Iterator[pa.RecordBatch]:
        self._runs[0].unlink()
        return chained(self)

    monkeypatch.setattr(LeafSorter, "_chained", without_one)
    with pytest.raises(JobFailed, match="cannot merge sorted runs"):
        given_back([[("a", 1)], [("b", 1)]])


@pytest.mark.slow
def test_memory_is_bounded_while_rows_are_read_and_sorted() -> None:
    """The limit is three times `memory_bytes`: sorting takes about twice as much, and one batch is
    held too.
    """
    random, held, found = np.random.default_rng(1), 8 << 20, 0
    before, most = pa.total_allocated_bytes(), 0
    with LeafSorter(SCHEMA, 1, memory_bytes=held) as sorter:
        for _ in range(40):
            keys = pa.array([f"{number:x}" for number in random.integers(0, 1 << 40, 20_000)])
            numbers = pa.array(random.integers(0, 1 << 40, 20_000))
            batch = pa.record_batch([keys, numbers, numbers], names=SCHEMA.names)
            sorter.add(batch, pa.array(np.zeros(20_000, np.int32)))
            most = max(most, pa.total_allocated_bytes() - before)
        assert len(sorter._runs) >= 3
        for rows in sorter.sorted_batches():
            found += rows.num_rows
            most = max(most, pa.total_allocated_bytes() - before)
    assert found == 40 * 20_000
    assert most <= 3 * held
