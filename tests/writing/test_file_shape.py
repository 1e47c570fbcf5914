"""The encoding and compression of columns, which are the same in files of ingests and of compactions."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dormouse.data.datafusion_session import sorted_session, table_file
from dormouse.writing import parquet_file
from dormouse.writing.parquet_file import SAMPLE_ROWS, FileShape, LeafFiles
from tests.standard import OF_K
from tests.support.model import (
    BOOLEAN,
    DOUBLE,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    TIMESTAMP,
    Field,
    Schema,
    TableProperties,
)
from tests.support.objects import open_store
from tests.support.reading import arrow_schema
from tests.support.writing import merge_sorted

SCHEMA = Schema(
    [Field("id", LONG)],
    values=[
        Field("noise", DOUBLE),
        Field("price", DOUBLE, nullable=True),
        Field("few", INT),
        Field("many", INT, nullable=True),
        Field("large", LONG, nullable=True),
        Field("at", TIMESTAMP),
        Field("word", STRING),
        Field("text", STRING),
        Field("nothing", DOUBLE, nullable=True),
        Field("flag", BOOLEAN),
        Field("list", LIST(STRING)),
        Field("map", MAP(STRING, LIST(LONG))),
    ],
)
PUSHED_DOWN = {"datafusion.execution.parquet.pushdown_filters": "true"}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Write = Callable[[Path, pa.Table, TableProperties], Path]


def _number(chance: Random, bits: int) -> int | None:
    """Returns a number below a million. Rarely, returns None, or a number whose difference needs one more
    bit.
    """
    if chance.random() < 0.002:
        return chance.choice([None, -(1 << bits), (1 << bits) - 1])
    return chance.randrange(10**6)


def _rows(count: int) -> pa.Table:
    chance = Random(1)
    rows = [
        {
            "id": number,
            "noise": chance.random(),
            "price": chance.choice([None, 1.0, float("nan"), 0.25]),
            "few": chance.randrange(50),
            "many": _number(chance, 31),
            "large": _number(chance, 63),
            "at": EPOCH + timedelta(microseconds=chance.randrange(10**12)),
            "word": chance.choice(["rail", "ship", "truck"]),
            "text": f"the quick brown fox number {chance.randrange(10**9)} jumps over the lazy dog",
            "nothing": None,
            "flag": chance.random() < 0.5,
            "list": ["x"] * (number % 3),
            "map": [("a", [number])],
        }
        for number in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SCHEMA))


def _ingested(folder: Path, rows: pa.Table, properties: TableProperties) -> Path:
    store = open_store(folder / "objects")
    files = LeafFiles(store, SCHEMA, properties, pa.array(["root"]), lambda _: "data/one.v2.parquet")
    with files.sorter(1 << 30) as sorter:
        for batch in rows.to_batches():
            sorter.add(batch, pa.array([0] * batch.num_rows, pa.int32()))
        [file] = files.write(sorter)
    path = store.local_path(file.filename)
    assert path is not None
    return path


def _merged(folder: Path, rows: pa.Table, properties: TableProperties) -> Path:
    pq.write_table(rows, folder / "input")
    merge_sorted([str(folder / "input")], SCHEMA, folder / "output", properties=properties, now_ms=0)
    return folder / "output"


@pytest.fixture(params=[_ingested, _merged], ids=["ingested", "merged"])
def write(request: pytest.FixtureRequest) -> Write:
    chosen: Write = request.param
    return chosen


@pytest.mark.few(1)
@pytest.mark.parametrize("compression", ["zstd", "snappy", "lz4", "none"])
def test_only_repeated_values_get_dictionaries_and_only_compressible_ones_a_codec(
    write: Write, tmp_path: Path, compression: str
) -> None:
    rows = _rows(5_000)
    path = write(tmp_path, rows, TableProperties(compression=compression))
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    has_dictionary = {name for name, column in columns.items() if column.has_dictionary_page}
    assert {"few", "word", "price"} < has_dictionary
    assert not {"id", "noise", "text", "many", "large", "at"} & has_dictionary
    differences = {name for name, column in columns.items() if "DELTA_BINARY_PACKED" in column.encodings}
    assert {"many", "large", "at"} <= differences <= {"id", "many", "large", "at"}
    codec = {"none": "UNCOMPRESSED"}.get(compression, compression.upper())
    compressed = {name for name, column in columns.items() if column.compression == codec}
    assert {"text", "list.list.element", "map.key_value.key"} < compressed
    if compression != "none":
        assert not {"noise", "few", "word", "many", "large", "at"} & compressed
    bounded = {name for name, column in columns.items() if (s := column.statistics) and s.has_min_max}
    assert {"id", "few", "word", "text"} <= bounded
    assert not {"noise", "price", "nothing"} & bounded
    assert str(pq.read_table(path).to_pylist()) == str(rows.to_pylist())
    sums = "select count(*), sum(id), sum(few), max(text), count(price), bool_or(flag), sum(len(list)) from "
    assert duckdb.sql(f"{sums} read_parquet('{path}')").fetchall() == duckdb.sql(f"{sums} rows").fetchall()


@pytest.mark.slow
@pytest.mark.parametrize(
    "condition",
    [
        "many between 500000 and 501000",
        "large is null",
        "large > 1000000 or many < 0",
        "\"at\" < '1970-01-01 01:00:00+00'",
        "id % 1000 = 7 and many is not null",
        "id = 19999",
    ],
)
def test_every_reader_finds_rows_in_delta_encoded_columns(differences: Path, condition: str) -> None:
    """The conditions match few rows, so that readers skip most values."""
    rows = duckdb.from_arrow(_rows(20_000))  # noqa: F841 DuckDB sees it
    select = f'select id, many, large, "at" from {{}} where {condition} order by id'
    wanted = duckdb.sql(select.format("rows")).fetchall()
    assert 0 < len(wanted) < 2_000
    assert duckdb.sql(select.format(f"read_parquet('{differences}')")).fetchall() == wanted
    context = sorted_session(options=PUSHED_DOWN)
    context.register_table("found", table_file(context, SCHEMA, str(differences)))
    by_datafusion = context.sql(select.format("found")).to_arrow_table()
    assert [tuple(row.values()) for row in by_datafusion.to_pylist()] == wanted


@pytest.fixture(params=[_ingested, _merged], ids=["ingested", "merged"], scope="module")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with delta-encoded columns of several pages, some with NULL."""
    found: Path = request.param(tmp_path_factory.mktemp("file"), _rows(20_000), TableProperties())
    return found


@pytest.mark.slow
def test_a_look_up_reads_few_bytes_of_a_wide_column(write: Write, tmp_path: Path) -> None:
    context = sorted_session(options=PUSHED_DOWN)
    path = write(tmp_path, _rows(40_000), TableProperties())
    context.register_table("found", table_file(context, SCHEMA, str(path)))

    def scanned(condition: str) -> float:
        plan = str(context.sql(f"explain analyze select text from found where {condition}").to_pydict())
        [kilobytes] = re.findall(r"bytes_scanned=([\d.]+) K", plan)
        return float(kilobytes)

    assert scanned("id = 20000") < scanned("text > 'the'") / 4


def test_a_file_of_few_rows_has_the_default_codec(write: Write, tmp_path: Path) -> None:
    group = pq.read_metadata(write(tmp_path, _rows(10), TableProperties())).row_group(0)
    assert {group.column(n).compression for n in range(group.num_columns)} == {"ZSTD"}


def test_only_columns_whose_values_repeat_are_tried_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, rows = Random(1), 2 * SAMPLE_ROWS
    columns = {
        "k": pa.array(range(rows)),
        "distinct": pa.array([chance.random() for _ in range(rows)]),
        "repeated": pa.array([f"{chance.randrange(40_000):032x}" for _ in range(rows)]),
    }
    kinds = [Field("distinct", DOUBLE), Field("repeated", STRING)]
    tried: list[tuple[str, int]] = []
    sizes = parquet_file._sizes

    def noted(given: pa.Table, *args: Any, **options: Any) -> Any:
        tried.extend((name, given.num_rows) for name in given.column_names)
        return sizes(given, *args, **options)

    monkeypatch.setattr(parquet_file, "_sizes", noted)
    shape = FileShape.like(pa.table(columns), Schema([Field("k", LONG)], [], kinds), TableProperties())
    assert {name for name, count in tried if count == SAMPLE_ROWS} == {"repeated"}
    assert "distinct" in shape.plain_columns


@pytest.mark.slow
def test_the_sample_of_rows_is_spread_over_all_rows() -> None:
    schema = Schema([Field("id", LONG)], values=[Field("v", STRING)])
    count = 2 * SAMPLE_ROWS
    # a sample of the first rows alone would show repeated values
    values = ["same"] * SAMPLE_ROWS + [f"{Random(n).getrandbits(128):x}" for n in range(SAMPLE_ROWS)]
    rows = pa.table([range(count), values], schema=arrow_schema(schema))
    assert "v" in FileShape.like(rows, schema, TableProperties()).plain_columns
    assert "v" not in FileShape.like(rows.slice(0, SAMPLE_ROWS), schema, TableProperties()).plain_columns


def test_row_groups_grow_so_that_a_file_has_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "GROUPS_OF_A_SIZE", 4)
    schema, path = OF_K, tmp_path / "groups.parquet"
    properties, exact = TableProperties(row_group_bytes=65_536), arrow_schema(schema)
    rows = 65_536 // 8
    batches = (pa.RecordBatch.from_pydict({"k": [n] * rows}, schema=exact) for n in range(16))
    parquet_file.write_groups(
        path, batches, schema, properties, lambda first: FileShape.like(first, schema, properties)
    )
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        assert groups == [rows] * 4 + [2 * rows] * 4 + [4 * rows]
        assert file.read()["k"].to_pylist() == [n for n in range(16) for _ in range(rows)]
