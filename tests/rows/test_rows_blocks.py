"""Blocks of row tables: the rows of one version are bounded by their number and their bytes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from dormouse.rows import applying, csv_loads
from dormouse.rows.changes import LoadCsv
from tests.support.rows import Column

COLUMNS = (Column("n", "INTEGER", column_id=4), Column("j", "JSON", column_id=5))
TEXT_BYTES = 50_000


def test_a_file_of_long_cells_is_loaded_in_blocks_of_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_loads, "BLOCK_BYTES_MAX", 10 * TEXT_BYTES)
    path, cell = tmp_path / "rows.csv", f'"""{"x" * TEXT_BYTES}"""'
    path.write_text("n,j\n" + "".join(f"{n},{cell}\n" for n in range(100)))
    found = list(csv_loads.loads(LoadCsv(path), COLUMNS))
    assert [n for batch in found for n in batch.cells["n"].to_pylist()] == list(range(100))
    # Arrow parses 1 MB at once
    assert max(map(len, found)) < 50
    assert str(found[1].label(0)) == f"file '{path}', line {len(found[0]) + 2}"


def test_long_rows_are_rewritten_in_small_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applying, "BLOCK_ROWS_MAX", 100)
    monkeypatch.setattr(applying, "BLOCK_BYTES_MAX", 5_000)
    sizes = [10] * 250 + [1_000] * 30 + [10] * 5
    texts = [str(n).rjust(size) for n, size in enumerate(sizes)]
    batches = [pa.record_batch({"s": texts[start : start + 3]}) for start in range(0, len(texts), 3)]
    found = list(applying._in_blocks(batches))
    assert [text for batch in found for text in batch.column(0).to_pylist()] == texts
    assert max(batch.num_rows for batch in found) == 100
    assert max(batch.nbytes for batch in found) < 10_000
