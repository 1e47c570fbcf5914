"""Parquet files that were joined from others, read by every reader and page by page."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext

from dormouse.data.arrow_schema import data_type
from dormouse.errors import JobFailed
from dormouse.objects.fault import digest_of_file
from dormouse.reading import page_index
from dormouse.reading.page_index import Reading, written
from dormouse.writing.divided_compaction import join_files
from dormouse.writing.parquet_file import FileShape
from tests.flipped_bits import flipped
from tests.support.model import LONG, Field, Schema

ROWS = 9_000


def rows(first: int, count: int = ROWS) -> pa.Table:
    keys = np.arange(first, first + count)
    return pa.table(
        {
            "k": pa.array(keys),
            "s": pa.array([f"value {key % 77}" for key in keys.tolist()]),
            "n": pa.array([None if key % 3 else key for key in keys.tolist()], pa.int64()),
            "l": pa.array([[key, key + 1] for key in keys.tolist()]),
            "f": pa.array(np.sqrt(keys)),
        }
    )


def by_arrow(path: Path, table: pa.Table, **options: Any) -> Path:
    filters = {"k": {"ndv": 2_500, "fpp": 0.01}}
    given = {"write_page_index": True, "bloom_filter_options": filters, "data_page_size": 3_000, **options}
    pq.write_table(table, path, row_group_size=2_500, store_schema=False, **given)
    return path


def by_datafusion(path: Path, table: pa.Table) -> Path:
    """Writes the rows of a table to a file, in the way of a compaction."""
    context = SessionContext()
    frame = context.from_arrow(table)
    shape = FileShape(group_rows=2_500, bloom_columns=("k",))
    values = [
        Field(one.name, data_type(one.type) or LONG, nullable=True) for one in table.schema if one.name != "k"
    ]
    schema = Schema([Field("k", LONG)], values=values)
    frame.write_parquet_with_options(str(path), shape.of_datafusion(schema))
    return path


def joined(paths: list[Path], target: Path) -> list[bytes]:
    files = [path.open("rb") for path in paths]
    try:
        return join_files(files, target)
    finally:
        for file in files:
            file.close()


@pytest.mark.parametrize("write", [by_arrow, by_datafusion])
def test_every_reader_gets_all_rows_of_a_joined_file(tmp_path: Path, write: Any) -> None:
    tables = [rows(number * ROWS) for number in range(3)]
    paths = [write(tmp_path / f"{number}.parquet", table) for number, table in enumerate(tables)]
    target = tmp_path / "joined.parquet"
    assert joined(paths, target) == [digest_of_file(path) for path in paths]
    expected = pa.concat_tables(tables)
    found = pq.read_table(target)
    assert found.cast(expected.schema).equals(expected)
    assert duckdb.sql(f"select count(*), sum(k), sum(f) from '{target}'").fetchall() == [
        (3 * ROWS, sum(range(3 * ROWS)), pytest.approx(float(np.sqrt(np.arange(3 * ROWS)).sum())))
    ]
    # uses the bloom filters and the page index
    assert duckdb.sql(f"select s from '{target}' where k = {2 * ROWS + 5}").fetchall() == [
        (f"value {(2 * ROWS + 5) % 77}",)
    ]
    context = SessionContext()
    context.register_parquet("t", str(target))
    near = context.sql(f"select k from t where k between {ROWS - 2} and {ROWS + 2} order by k")
    assert near.to_pydict() == {"k": list(range(ROWS - 2, ROWS + 3))}


@pytest.mark.parametrize("write", [by_arrow, by_datafusion])
def test_the_page_index_of_a_joined_file_has_the_right_offsets(tmp_path: Path, write: Any) -> None:
    names = ["k", "s", "n"]
    paths = [write(tmp_path / f"{number}.parquet", rows(number * ROWS).select(names)) for number in range(2)]
    joined(paths, tmp_path / "joined.parquet")
    data = (tmp_path / "joined.parquet").read_bytes()
    length = page_index.footer_bytes(data[-8:])
    groups = page_index.row_groups(data[-8 - length : -8])
    seen = 0
    for group in groups:
        for name in names:
            start, size = group.chunks[name].offset_index
            pages = page_index.pages(data[start : start + size], group.row_count)
            for offset, size in zip(pages.offsets, pages.sizes, strict=True):
                header, at = page_index.page_header(data[offset : offset + size])
                assert at + header[3] == size
            seen += len(pages.offsets)
    assert sum(group.row_count for group in groups) == 2 * ROWS
    assert seen >= len(groups) * len(names)


def test_joining_one_file_copies_it(tmp_path: Path) -> None:
    path = by_arrow(tmp_path / "a.parquet", rows(0))
    joined([path], tmp_path / "joined.parquet")
    assert (tmp_path / "joined.parquet").read_bytes() == path.read_bytes()


def test_files_without_page_index_and_filters_are_joined(tmp_path: Path) -> None:
    tables = [rows(number * 10, 10) for number in range(20)]
    paths = [
        by_arrow(tmp_path / f"{n}", table, write_page_index=False, bloom_filter_options=None)
        for n, table in enumerate(tables)
    ]
    joined(paths, tmp_path / "joined.parquet")
    assert pq.read_table(tmp_path / "joined.parquet").equals(pa.concat_tables(tables))


def test_files_with_other_columns_or_damage_are_not_joined(tmp_path: Path) -> None:
    one, other = by_arrow(tmp_path / "a", rows(0)), by_arrow(tmp_path / "b", rows(0).select(["k", "s"]))
    target = tmp_path / "joined.parquet"
    with pytest.raises(JobFailed, match="have different columns"):
        joined([one, other], target)
    whole = one.read_bytes()
    for broken in (b"", whole[:-4], whole[:100] + whole[-8:], b"PAR1" * 4, whole[: len(whole) // 2]):
        with pytest.raises(JobFailed, match="is damaged"):
            join_files([BytesIO(whole), BytesIO(broken)], target)
    assert not target.exists()


def test_a_file_whose_footer_has_flipped_bits_is_joined_or_refused(tmp_path: Path) -> None:
    whole = by_arrow(tmp_path / "a", rows(0, 10).select(["k"])).read_bytes()
    start = len(whole) - 8 - page_index.footer_bytes(whole[-8:])
    refused = 0
    for bit in range(8 * start, 8 * len(whole), 3):
        try:
            join_files([BytesIO(whole), BytesIO(flipped(whole, bit))], tmp_path / "joined.parquet")
        except JobFailed:
            refused += 1
    assert refused


def test_a_footer_read_and_written_again_is_the_same(tmp_path: Path) -> None:
    for number, path in enumerate(
        [by_arrow(tmp_path / "a", rows(0)), by_datafusion(tmp_path / "b.parquet", rows(0))]
    ):
        data = path.read_bytes()
        footer = data[-8 - page_index.footer_bytes(data[-8:]) : -8]
        assert written(Reading(footer).kept()) == footer, number
