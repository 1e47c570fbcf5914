"""The sorted merge of real Parquet files."""

from __future__ import annotations

import datetime
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from data_files import merge_plan, write_object
from trees import Quantiles, quantile

from dormouse.data.arrow_schema import conform
from dormouse.errors import InvalidData, JobFailed, ObjectNotFound
from dormouse.writing import merge
from dormouse.writing.parquet_file import FileFacts
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DOUBLE,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    TIMESTAMP,
    Field,
    Range,
    Region,
    Schema,
    TableProperties,
    encode_key,
)
from tests.support.objects import open_store
from tests.support.reading import arrow_schema
from tests.support.writing import FileSketches, merge_sorted

SCHEMA = Schema(
    [Field("name", STRING), Field("id", LONG)],
    [Field("time", LONG)],
    [Field("count", LONG), Field("price", DOUBLE, nullable=True)],
)
WORDS = Schema([Field("id", LONG)], values=[Field("word", STRING)])
ORDER = [(name, "ascending") for name in SCHEMA.key_names]
NAMES = ["", "\x00", "a", "a\x00", "ab", "b'", "ß", "\uffff", "\U0001f42d"]
SUMS = TableProperties(aggregate="sum(count), max(price)")


def _rows(count: int, seed: int = 0) -> pa.Table:
    """Returns rows in random order with repeated keys; only `price` differs between such rows."""
    randomly = random.Random(seed)
    return pa.table(
        {
            "name": [randomly.choice(NAMES) for _ in range(count)],
            "id": [randomly.choice([-(1 << 63), -1, 0, 1, (1 << 63) - 1]) for _ in range(count)],
            "time": [randomly.randrange(10) for _ in range(count)],
            "count": [randomly.randrange(100) for _ in range(count)],
            "price": [seed + i / count for i in range(count)],
        },
        schema=arrow_schema(SCHEMA),
    )


def _files(folder: Path, *tables: pa.Table, schema: Schema = SCHEMA) -> list[str]:
    """Writes each table to a sorted file below the folder; returns the paths."""
    objects = open_store(folder / "in")
    names = [f"{number}.parquet" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write_object(objects, schema, name, table)
    return [str(folder / "in" / name) for name in names]


def _merge(inputs: list[str], output: Path, schema: Schema = SCHEMA, **options: Any) -> FileFacts:
    return merge_sorted(inputs, schema, output, **{"now_ms": 0, **options})


def _sorted(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: tuple(row.values()))


def _keys(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in SCHEMA.key_names) for row in table.to_pylist()]


@pytest.mark.slow
def test_files_become_one_sorted_file_with_all_their_rows(tmp_path: Path) -> None:
    tables = [_rows(5_000, 1), _rows(3, 2), _rows(20_000, 3)]
    output = tmp_path / "out"
    facts = _merge(_files(tmp_path, *tables), output)
    merged = pq.read_table(output)
    assert _keys(merged) == sorted(_keys(merged))
    assert _sorted(merged) == _sorted(pa.concat_tables(tables))
    assert merged.schema == arrow_schema(SCHEMA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert facts.row_count == 25_003
    assert facts.byte_count == output.stat().st_size


def test_the_facts_have_the_smallest_and_largest_key_and_the_sketches(tmp_path: Path) -> None:
    tables = [_rows(2_000, 1), _rows(2_000, 2)]
    facts = _merge(_files(tmp_path, *tables), tmp_path / "out")
    keys = sorted((row["name"], row["id"]) for row in pa.concat_tables(tables).to_pylist())
    assert facts.min_key == encode_key(SCHEMA.row_keys, keys[0])
    assert facts.max_key == encode_key(SCHEMA.row_keys, keys[-1])
    quantiles = Quantiles(SCHEMA, [FileSketches.from_bytes(facts.sketches)])
    assert quantiles.row_count("name") == 4_000
    assert quantiles.ends("id") == [-(1 << 63), (1 << 63) - 1]
    assert quantile(quantiles, "name", 0.5) == keys[2_000][0]


def test_the_merge_streams_and_sorts_nothing(tmp_path: Path) -> None:
    """The plan must have one sorted stream for each file and one merge, but no sort and no buffer of a whole
    input.
    """
    inputs = _files(tmp_path, *(_rows(100, seed) for seed in range(3)))
    for path in inputs:
        pq.write_table(pq.read_table(path), path)  # the files themselves do not declare their order
    plan = merge_plan(inputs, SCHEMA, region=Region(name=Range("a", "z")))
    assert plan.count("SortPreservingMergeExec") == 1
    assert plan.count("file_groups={1 group: [[") == 3
    assert "SortExec" not in plan
    assert "Repartition" not in plan


def test_aggregation_streams_in_the_order_of_the_keys(tmp_path: Path) -> None:
    inputs = _files(tmp_path, *(_rows(100, seed) for seed in range(3)))
    for files in (inputs, inputs[:1]):
        plan = merge_plan(files, SCHEMA, properties=SUMS)
        aggregates = [line for line in plan.splitlines() if "AggregateExec" in line]
        assert aggregates
        assert all("ordering_mode=Sorted" in line for line in aggregates)
        assert "SortExec" not in plan
        assert "Repartition" not in plan


def test_rows_outside_the_region_are_left_out(tmp_path: Path) -> None:
    tables = [_rows(2_000, 1), _rows(2_000, 2)]
    inputs = _files(tmp_path, *tables)
    regions = [
        Region(name=Range("a\x00", "\uffff")),
        Region(name=Range("b'", None, min_inclusive=False), id=Range(None, 0, max_inclusive=True)),
        Region(id=Range(-(1 << 63), (1 << 63) - 1)),
        Region(name="\x00"),
    ]
    for number, region in enumerate(regions):
        output = tmp_path / f"out-{number}"
        _merge(inputs, output, region=region)
        inside = [row for table in tables for row in table.to_pylist() if region.contains(row)]
        assert _sorted(pq.read_table(output)) == _sorted(pa.Table.from_pylist(inside))


def test_rows_of_equal_keys_are_aggregated_as_duckdb_does(tmp_path: Path) -> None:
    tables = [_rows(3_000, 1), _rows(3_000, 2)]
    rows = pa.concat_tables(tables)
    _merge(_files(tmp_path, *tables), tmp_path / "out", properties=SUMS)
    expected = duckdb.sql(
        "select name, id, time, sum(count)::bigint count, max(price) price from rows group by all"
    ).to_arrow_table()
    merged = pq.read_table(tmp_path / "out")
    assert merged.num_rows < rows.num_rows
    assert _sorted(merged) == _sorted(expected)
    assert _keys(merged) == sorted(_keys(merged))
    assert merged.schema == arrow_schema(SCHEMA)


def test_aggregates_ignore_nulls_and_keep_the_types_of_all_fields(tmp_path: Path) -> None:
    values = [
        Field("a", LONG, nullable=True),
        Field("b", INT),
        Field("c", TIMESTAMP),
        Field("d", BYTES),
        Field("e", STRING),
        Field("f", BOOLEAN),
        Field("g", DOUBLE),
    ]
    schema = Schema([Field("k", INT)], [], values)
    moments = [datetime.datetime(2024, 1, day, tzinfo=datetime.UTC) for day in (1, 2, 3)]
    columns = [
        [1, 1, 2],
        [None, 4, None],
        [3, -3, 0],
        moments,
        [b"\x80", b"\x7f", b""],
        ["b", "a", ""],
        [True, False, True],
        [0.5, 1.5, -1.0],
    ]
    table = pa.table(columns, schema=arrow_schema(schema))
    properties = TableProperties(aggregate="sum(a), min(b), max(c), max(d), min(e), min(f), sum(g)")
    _merge(_files(tmp_path, table, schema=schema), tmp_path / "out", schema, properties=properties)
    merged = pq.read_table(tmp_path / "out")
    assert merged.schema == arrow_schema(schema)
    assert [tuple(row.values()) for row in merged.to_pylist()] == [
        (1, 4, -3, moments[1], b"\x80", "a", False, 2.0),
        (2, None, 0, moments[2], b"", "", True, -1.0),
    ]


def test_old_rows_age_off_before_the_rest_is_aggregated(tmp_path: Path) -> None:
    rows = _rows(1_000, 1)
    properties = TableProperties(aggregate=SUMS.aggregate, filter="age_off(time, 4)")
    _merge(_files(tmp_path, rows), tmp_path / "out", properties=properties, now_ms=9)
    expected = duckdb.sql(
        "select name, id, time, sum(count)::bigint count, max(price) price from rows "
        "where time > 5 group by all"
    ).to_arrow_table()
    assert _sorted(pq.read_table(tmp_path / "out")) == _sorted(expected)


def test_timestamps_age_off_and_rows_of_unknown_age_stay(tmp_path: Path) -> None:
    schema = Schema([Field("k", INT)], [], [Field("seen", TIMESTAMP, nullable=True)])
    table = pa.table([[1, 2, 3], [999_000, 1_001_000, None]], schema=arrow_schema(schema))
    properties = TableProperties(filter="age_off(seen, 500)")
    _merge(
        _files(tmp_path, table, schema=schema), tmp_path / "out", schema, properties=properties, now_ms=1_500
    )
    assert pq.read_table(tmp_path / "out")["k"].to_pylist() == [2, 3]


def test_a_merge_that_leaves_no_rows_writes_no_file(tmp_path: Path) -> None:
    inputs = _files(tmp_path, _rows(100))
    assert _merge(inputs, tmp_path / "out", region=Region(name="unused")) == FileFacts(0)
    assert not list(tmp_path.glob("out*"))


def test_values_of_every_type_are_kept_and_read_by_other_engines(tmp_path: Path) -> None:
    values = [
        Field("d", DOUBLE, nullable=True),
        Field("t", TIMESTAMP),
        Field("o", BOOLEAN, nullable=True),
        Field("l", LIST(LIST(STRING)), nullable=True),
        Field("m", MAP(STRING, LONG), nullable=True),
    ]
    schema = Schema([Field("b", BYTES), Field("i", INT)], [Field("s", STRING)], values)
    moment = datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999, datetime.UTC)
    rows = [
        (b"", -(1 << 31), "x", math.nan, moment, None, [["a", None], None, []], [("k", 1)]),
        (b"\x7f", 0, "", None, moment, True, None, None),
        (b"\x80", (1 << 31) - 1, "\U0001f42d", -0.0, moment, False, [], []),
    ]
    tables = [pa.table([[c] for c in row], schema=arrow_schema(schema)) for row in reversed(rows)]
    output = tmp_path / "out.parquet"
    _merge(_files(tmp_path, *tables, schema=schema), output, schema)
    merged = pq.read_table(output)
    expected = pa.concat_tables(reversed(tables))
    assert str(merged.to_pylist()) == str(expected.to_pylist())
    assert conform(merged, schema).schema == arrow_schema(schema)
    found = duckdb.sql(f"select b, i, s, epoch_us(t), l, m['k'] from '{output}'").fetchall()
    assert found[0] == (b"", -(1 << 31), "x", -1, [["a", None], None, []], 1)


def test_the_file_declares_its_order_and_has_statistics(tmp_path: Path) -> None:
    _merge(_files(tmp_path, _rows(1_000)), tmp_path / "out")
    group = pq.ParquetFile(tmp_path / "out").metadata.row_group(0)
    assert [(c.column_index, c.descending) for c in group.sorting_columns] == [
        (0, False),
        (1, False),
        (2, False),
    ]
    assert group.column(1).statistics.min == -(1 << 63)
    assert group.column(1).has_column_index


def test_row_groups_and_compression_follow_the_properties(tmp_path: Path) -> None:
    inputs = _files(tmp_path, _rows(20_000))
    properties = TableProperties(row_group_bytes=64 * 1024, compression="snappy")
    _merge(inputs, tmp_path / "out", properties=properties)
    metadata = pq.ParquetFile(tmp_path / "out").metadata
    assert metadata.num_row_groups > 3
    found = {metadata.row_group(0).column(n).compression for n in range(metadata.num_columns)}
    assert found == {"SNAPPY", "UNCOMPRESSED"}


def _worded(count: int, first: int, width: int) -> pa.Table:
    words = [f"{number:0{width}}" for number in range(first, first + count)]
    return pa.table({"id": range(first, first + count), "word": words}, schema=arrow_schema(WORDS))


def test_row_groups_keep_their_size_when_later_rows_are_wider(tmp_path: Path) -> None:
    inputs = _files(tmp_path, _worded(8_000, 0, 5), _worded(2_000, 8_000, 1_000), schema=WORDS)
    properties = TableProperties(row_group_bytes=256 * 1024)
    _merge(inputs, tmp_path / "out", WORDS, properties=properties)
    metadata = pq.read_metadata(tmp_path / "out")
    sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    assert max(sizes) < 2 * 256 * 1024
    assert metadata.num_row_groups < 60


def test_no_file_has_more_row_groups_than_parquet_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "ROW_GROUPS_MAX", 3)
    inputs = _files(tmp_path, _worded(1_000, 0, 1_000), _worded(8_000, 1_000, 4), schema=WORDS)
    _merge(inputs, tmp_path / "out", WORDS, properties=TableProperties(row_group_bytes=64 * 1024))
    metadata = pq.read_metadata(tmp_path / "out")
    assert (metadata.num_row_groups, metadata.num_rows) == (3, 9_000)


def test_a_corrupt_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    inputs = _files(tmp_path, _rows(3_000, 1), _rows(3_000, 2))
    whole = Path(inputs[1]).read_bytes()
    broken = {"empty": b"", "cut": whole[:-50], "text": b"hello, this is not Parquet", "page": whole}
    broken["page"] = whole[:40] + bytes(2_000) + whole[2_040:]
    for name, content in broken.items():
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(InvalidData, match=str(bad)) as caught:
            _merge([inputs[0], str(bad)], tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("out*"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match=r"gone\.parquet"):
        _merge([str(tmp_path / "gone.parquet")], tmp_path / "out")


def test_a_file_of_another_schema_is_named(tmp_path: Path) -> None:
    pq.write_table(_rows(3).drop(["price"]), tmp_path / "other.parquet")
    with pytest.raises(InvalidData, match=r"other\.parquet.*'price'.*missing"):
        _merge([str(tmp_path / "other.parquet")], tmp_path / "out")


def test_a_file_that_is_not_sorted_is_refused(tmp_path: Path) -> None:
    pq.write_table(_rows(1_000), tmp_path / "unsorted.parquet")
    with pytest.raises(InvalidData, match=r"not in the order of 'name'.*unsorted\.parquet"):
        _merge([str(tmp_path / "unsorted.parquet")], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_file_without_rows_and_a_single_file_are_merged(tmp_path: Path) -> None:
    pq.write_table(_rows(0), tmp_path / "none.parquet")
    inputs = [str(tmp_path / "none.parquet"), *_files(tmp_path, _rows(10))]
    assert _merge(inputs, tmp_path / "out").row_count == 10
    assert _merge(inputs[:1], tmp_path / "nothing") == FileFacts(0)
    assert _merge([], tmp_path / "nothing") == FileFacts(0)
    assert not (tmp_path / "nothing").exists()


def test_odd_characters_in_a_path_have_no_meaning(tmp_path: Path) -> None:
    folder = tmp_path / "a [1]*?%41 ü';drop"
    folder.mkdir()
    assert _merge(_files(folder, _rows(10)), folder / "o'ut*").row_count == 10
    assert (folder / "o'ut*").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    inputs = _files(tmp_path, _rows(10))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(JobFailed):
        _merge(inputs, tmp_path / "file" / "out")


_PEAK = """
import re, sys, glob
from pathlib import Path
from dormouse.writing.merge import merge_sorted
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG, STRING
schema = Schema([Field("name", STRING), Field("id", LONG)], [], [Field("v", LONG)])
def peak():  # of this process alone: the value of getrusage begins with the peak of the parent
    return int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
merge_sorted(sorted(glob.glob(sys.argv[1] + "/in-*")), schema, Path(sys.argv[1]) / "out", now_ms=0)
print((peak() - before) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length_of_the_files(tmp_path: Path) -> None:
    """The limit is 100 MB more for eight times the rows. All these rows in memory would take about 200 MB."""
    schema = Schema([Field("name", STRING), Field("id", LONG)], [], [Field("v", LONG)])
    peaks = []
    names = pa.array([f"name {i:020d}" for i in range(3_200)])
    for rows in (100_000, 800_000):
        folder = tmp_path / str(rows)
        folder.mkdir()
        for number in range(4):
            ids = pa.array(np.arange(number, 4 * rows, 4))
            columns = [names.take(pc.divide(ids, 1_000)), ids, ids]
            pq.write_table(pa.table(columns, schema=arrow_schema(schema)), folder / f"in-{number}.parquet")
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, str(folder)], check=True, capture_output=True, text=True
        )
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 100
