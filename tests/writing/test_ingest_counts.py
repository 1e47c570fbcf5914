"""Ingests that would lose or double rows. They fail, because rows are counted at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingested import check_untouched, flights, flights_table

from dormouse.data.leaf_sorter import LeafSorter
from dormouse.errors import InvalidData, JobFailed
from dormouse.postgres import ConnectionSupplier
from dormouse.writing import ingest as ingest_module
from dormouse.writing import parquet_file
from tests.support.state import TableContext
from tests.support.writing import ingest_in_process as ingest

pytestmark = pytest.mark.objects


@pytest.fixture(params=["one_file_per_leaf", "one_reference_per_leaf"])
def table(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, request: pytest.FixtureRequest
) -> TableContext:
    return flights_table(dsn, supplier, tmp_path, ingest_file_writing=request.param)


def check_refused(table: TableContext, message: str, kind: type[Exception] = JobFailed, **more: Any) -> None:
    with pytest.raises(kind, match=message):
        ingest(table, more.pop("data", flights(1_000)), **more)
    check_untouched(table)


@pytest.mark.parametrize("damage", [lambda run: run.unlink(), lambda run: run.write_bytes(b"")])
def test_a_sorted_run_that_vanishes_fails_the_ingest(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any]
) -> None:
    merged = LeafSorter._merged

    def without_one(self: LeafSorter, runs: list[Path], names: list[str]) -> Iterator[pa.RecordBatch]:
        damage(runs[0])
        return merged(self, runs, names)

    monkeypatch.setattr(LeafSorter, "_merged", without_one)
    batches = flights(1_000).to_batches(max_chunksize=100)
    check_refused(table, "rows were lost|cannot merge sorted runs", memory_bytes=1, data=batches)


@pytest.mark.parametrize(("rows", "message"), [(-1, "rows were lost"), (1, "more rows came out")])
def test_rows_lost_or_doubled_while_sorting_fail_the_ingest(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, rows: int, message: str
) -> None:
    def other(self: LeafSorter) -> Iterator[pa.RecordBatch]:
        [batch] = self._sorted(self._take_held(), self._names)
        yield batch.slice(0, batch.num_rows + min(rows, 0))
        yield batch.slice(0, max(rows, 0))

    monkeypatch.setattr(LeafSorter, "sorted_batches", other)
    check_refused(table, message)


def test_a_file_with_another_row_count_than_was_written_fails_the_ingest(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes_nothing(*given: Any, **options: Any) -> Any:
        writer = pq.ParquetWriter(*given, **options)
        writer.write_table = lambda *_, **__: None
        return writer

    forgetful = SimpleNamespace(**{**vars(pq), "ParquetWriter": writes_nothing})
    monkeypatch.setattr(parquet_file, "pq", forgetful)
    check_refused(table, "was to have .* rows, but has 0")


def test_a_source_with_another_row_count_than_announced_fails_the_ingest(
    table: TableContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(flights(1_000), tmp_path / "a.parquet")
    opened = ingest_module.open_source
    monkeypatch.setattr(
        ingest_module, "open_source", lambda *given: replace(opened(*given), rows_total=1_001)
    )
    message = "the data has 1,001 rows, but 1,000 were read"
    check_refused(table, message, InvalidData, data=tmp_path / "a.parquet")


def test_references_with_another_row_count_than_was_read_fail_the_ingest(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parquet_file.LeafFiles.write
    monkeypatch.setattr(parquet_file.LeafFiles, "write", lambda *given: list(write(*given))[:0])
    check_refused(table, "read 1,000 rows and wrote 0")
