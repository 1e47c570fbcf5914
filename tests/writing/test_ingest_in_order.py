"""Files whose rows are in key order, which an ingest writes without sorting; otherwise it adds nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingested import PLAIN, check_holds, check_untouched, flights, flights_table

from dormouse.data.leaf_sorter import LeafSorter
from dormouse.errors import InvalidData
from dormouse.postgres import ConnectionSupplier
from dormouse.writing import ingest as ingest_module
from tests.support.model import BYTES, DATE, INT, LONG, STRING, TIMESTAMP, Field, Schema
from tests.support.state import TableContext
from tests.support.writing import ingest_in_process as ingest

pytestmark = pytest.mark.objects

KINDS = {
    "int": (INT, pa.array(range(-500, 500), pa.int32())),
    "long": (LONG, pa.array(range(-(1 << 40), -(1 << 40) + 1_000), pa.int64())),
    "string": (STRING, pa.array([*sorted(f"{n:x}\U00010000" for n in range(998)), "é", "\uffff"])),
    "bytes": (BYTES, pa.array(sorted(n.to_bytes(2, "little") for n in range(1_000)), pa.binary())),
    "timestamp": (TIMESTAMP, pa.array(range(-500, 500), pa.timestamp("us", "UTC"))),
    "date": (DATE, pa.array(range(-500, 500), pa.date32())),
}


@pytest.fixture(params=["one_file_per_leaf", "one_reference_per_leaf"])
def table(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, request: pytest.FixtureRequest
) -> TableContext:
    return flights_table(dsn, supplier, tmp_path, schema=PLAIN, ingest_file_writing=request.param)


@pytest.fixture
def sorted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each sort adds the number of its rows."""
    found: list[int] = []
    add = LeafSorter.add

    def counting(self: LeafSorter, batch: pa.RecordBatch, leaves: Any) -> None:
        found.append(batch.num_rows)
        add(self, batch, leaves)

    monkeypatch.setattr(LeafSorter, "add", counting)
    return found


def in_order(rows: int) -> pa.Table:
    names = [(name, "ascending") for name in PLAIN.key_names]
    return flights(rows, schema=PLAIN).sort_by(names)


def write(folder: Path, *tables: pa.Table) -> list[str]:
    paths = [folder / f"{number}.parquet" for number in range(len(tables))]
    for path, rows in zip(paths, tables, strict=True):
        pq.write_table(rows, path, row_group_size=300)
    return [str(path) for path in paths]


def test_files_in_order_are_not_sorted_again(
    table: TableContext, tmp_path: Path, sorted_rows: list[int]
) -> None:
    """There are equal keys on both sides of the end of a row group, and of a file."""
    rows = in_order(5_000)
    reports: list[tuple[int, int | None]] = []
    paths = write(tmp_path, rows.slice(0, 2_000), rows.slice(2_000, 0), rows.slice(2_000))
    report = ingest(table, paths, progress=lambda done, total: reports.append((done, total)))
    check_holds(table, rows)
    assert (report.rows, reports[-1], sorted_rows) == (5_000, (5_000, 5_000), [])


def out_of_order() -> Iterator[tuple[str, list[pa.Table]]]:
    rows = in_order(3_000)
    yield "the files", [rows.slice(1_500), rows.slice(0, 1_500)]
    yield "two rows of a row group", [rows.take(pa.array([*range(2_500), 2_501, *range(2_499, 2_501)]))]
    last_first = rows.take(pa.array([*range(100), 2_999, *range(100, 2_999)]))
    yield "a row", [last_first]
    shuffled = rows.take(pa.array(np.random.default_rng(1).permutation(3_000)))
    yield "all of one row group", [shuffled.slice(0, 250)]
    by_first = rows.sort_by([("carrier", "ascending"), ("flight", "descending")])
    yield "the second key", [by_first]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "tables"), list(out_of_order()), ids=lambda one: one if str(one) == one else ""
)
def test_files_out_of_order_are_sorted(
    table: TableContext, tmp_path: Path, sorted_rows: list[int], what: str, tables: list[pa.Table]
) -> None:
    ingest(table, write(tmp_path, *tables))
    check_holds(table, *tables)
    assert sum(sorted_rows) == sum(map(len, tables)), what


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_recognized_for_keys_of_each_type(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, sorted_rows: list[int], kind: str
) -> None:
    found, values = KINDS[kind]
    schema = Schema([Field("key", found)], [], [Field("n", LONG)])
    table = flights_table(dsn, supplier, tmp_path, schema=schema, split_points=[values[300].as_py()])
    rows = pa.table({"key": values, "n": range(1_000)})
    ingest(table, write(tmp_path, rows))
    check_holds(table, rows)
    assert sorted_rows == []


def test_a_file_that_changes_after_its_order_was_checked_is_refused(
    table: TableContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = ingest_module.leaf_counts
    rows = in_order(2_000)
    paths = write(tmp_path, rows)

    def changed(*given: Any, **more: Any) -> Any:
        found = counted(*given, **more)
        pq.write_table(rows.slice(0, 1_000).take(pa.array(range(999, -1, -1))), paths[0])
        return found

    monkeypatch.setattr(ingest_module, "leaf_counts", changed)
    with pytest.raises(InvalidData):
        ingest(table, paths)
    check_untouched(table)


def interrupt(done: int, _: int | None) -> None:
    if done >= 1_000:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "arranged", [lambda rows: rows, lambda rows: rows.take(pa.array(range(4_999, -1, -1)))]
)
def test_an_interrupted_ingest_leaves_no_files_and_no_threads(
    table: TableContext, tmp_path: Path, arranged: Callable[[pa.Table], pa.Table]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        ingest(table, write(tmp_path, arranged(in_order(5_000))), progress=interrupt)
    check_untouched(table)
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith(("dormouse-ahead", "dormouse-spill"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [1 << 28, 1], ids=["in memory", "spilled"])
def test_the_error_of_a_bad_row_names_its_file(
    table: TableContext, tmp_path: Path, memory_bytes: int
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(400):
        (folder / f"{number:03d}.csv").write_text(f"carrier,flight,time,delay\nUA,{number},1,\n")
    rows = ingest(table, folder, ingest_id="whole", memory_bytes=memory_bytes).rows
    assert rows == 400
    (folder / "250.csv").write_text("carrier,flight,time,delay\nUA,1,1,\nUA,many,1,\n")
    (folder / "251.csv").write_text("carrier,flight\n")
    with pytest.raises(InvalidData, match=r"250\.csv.*'flight'"):
        ingest(table, folder, memory_bytes=memory_bytes)
    assert table.store.is_applied("ingest:whole")
    assert sum(reference.row_count for reference in table.store.file_references()) == 400
