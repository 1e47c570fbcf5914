"""Rows so wide that only a few of them are read, sorted or merged at a time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dormouse.data import (
    datafusion_session,
    leaf_sorter,
)
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.sources import source, source_files
from dormouse.state.files.compaction_jobs import CompactionInput
from tests.standard import OF_K_AND_TEXTS
from tests.support.state import CompactionJob

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (source_files, "_BYTES_MAX"),
        (source, "_WIDE_ROWS_BYTES"),
        (leaf_sorter, "TAKEN_BYTES"),
        (datafusion_session, "_BATCH_BYTES"),
    ):
        monkeypatch.setattr(module, name, MEBIBYTE)


def batches(path: Path, rows_max: int = 65_536) -> list[pa.RecordBatch]:
    with pq.ParquetFile(path) as parquet:
        groups = range(parquet.metadata.num_row_groups)
        rows = source_files.batch_rows(path, parquet, groups, rows_max)
        return [*parquet.iter_batches(rows)]


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_a_long_value_repeated_in_many_rows_is_read_in_small_batches(
    tmp_path: Path, use_dictionary: bool
) -> None:
    path = tmp_path / "bomb.parquet"
    rows = pa.table({"k": range(2_000), "v": [None, "x" * 10_000] * 1_000})
    pq.write_table(rows, path, compression="zstd", use_dictionary=use_dictionary)
    assert path.stat().st_size < 40_000 < MEBIBYTE < rows.nbytes
    found = batches(path)
    assert max(batch.nbytes for batch in found) < 2 * MEBIBYTE
    assert pa.Table.from_batches(found) == rows


def test_ordinary_rows_are_read_in_full_batches(tmp_path: Path) -> None:
    path = tmp_path / "words.parquet"
    words = [f"{number % 5_000} is the word, and no other" for number in range(20_000)]
    pq.write_table(pa.table({"k": range(20_000), "v": words}), path)
    assert [batch.num_rows for batch in batches(path, 8_192)] == [8_192, 8_192, 3_616]


def test_wide_batches_are_not_combined() -> None:
    wide = pa.record_batch({"v": ["x" * 100_000] * 5})
    found = [*source.read_files(range(40), lambda _: iter([wide]), lambda _: 1)]
    assert max(batch.nbytes for batch in found) < 2 * MEBIBYTE
    assert sum(batch.num_rows for batch in found) == 200


@pytest.mark.parametrize("memory_bytes", [64 * MEBIBYTE, 3 * MEBIBYTE])
def test_wide_rows_are_sorted_in_small_batches(memory_bytes: int) -> None:
    schema = OF_K_AND_TEXTS
    with LeafSorter(schema, 1, memory_bytes=memory_bytes) as sorter:
        for first in range(0, 100, 5):
            keys = [(37 * number) % 100 for number in range(first, first + 5)]
            texts = [str(key).zfill(100_000) for key in keys]
            sorter.add(pa.record_batch({"k": keys, "v": texts}), pa.array([0] * 5, pa.int32()))
        found = [*sorter.sorted_batches()]
    assert max(batch.nbytes for batch in found) < 2 * MEBIBYTE
    assert [key for batch in found for key in batch["k"].to_pylist()] == list(range(100))
    assert [int(text[-9:]) for batch in found for text in batch["v"].to_pylist()] == list(range(100))


@pytest.mark.parametrize(("row_bytes", "most"), [(0.0, 500), (MEBIBYTE / 10, 10), (2.0 * MEBIBYTE, 1)])
def test_wide_rows_are_merged_in_small_batches(tmp_path: Path, row_bytes: float, most: int) -> None:
    path = tmp_path / "sorted.parquet"
    pq.write_table(pa.table({"k": range(500)}), path)
    session = datafusion_session.sorted_session(row_bytes=row_bytes)
    found = [*datafusion_session.sorted_file(session, path, ["k"]).execute_stream()]
    assert max(batch.to_pyarrow().num_rows for batch in found) == most


def test_a_job_estimates_the_bytes_of_a_row() -> None:
    def file(rows: int, byte_count: int | None, whole: bool = True) -> CompactionInput:
        return CompactionInput("f", rows, whole, True, byte_count)

    inputs = (file(10, 1_000), file(10, 5_000), file(1, 90_000, whole=False), file(10, None), file(0, 9))
    assert CompactionJob("job", "root", 1, inputs).row_bytes == 500
    assert CompactionJob("job", "root", 1, inputs[2:]).row_bytes == 0
