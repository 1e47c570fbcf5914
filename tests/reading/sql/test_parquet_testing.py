"""Files of apache/parquet-testing with DECIMAL, STRUCT and TIMESTAMP columns are read back as loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.cli.parsing import parse_schema

FILES = Path(__file__).parents[2] / "parquet_testing"


def keyed(source: Path, folder: Path) -> Path:
    """Writes a copy of the file with an added key column, and returns its path."""
    rows = pq.read_table(source)
    numbers = pa.field("k", pa.int64(), nullable=False)
    path = folder / source.name
    pq.write_table(rows.append_column(numbers, pa.array(range(rows.num_rows), pa.int64())), path)
    return path


def plain(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("int32_decimal", "decimal(4,2)"),
        ("int64_decimal", "decimal(10,2)"),
        ("fixed_length_decimal", "decimal(25,2)"),
        ("fixed_length_decimal_legacy", "decimal(13,2)"),
        ("byte_array_decimal", "decimal(4,2)"),
        ("nulls.snappy", "struct<b_c_int:int?>"),
        ("nullable.impala", None),
    ],
)
def test_a_file_is_loaded_and_read_back(
    instance: dm.Instance, tmp_path: Path, name: str, kind: str | None
) -> None:
    path = keyed(FILES / f"{name}.parquet", tmp_path)
    schema = parse_schema(None, path, ["k"], [], [])
    if kind is not None:
        assert str(schema.values[0].type).replace(" ", "") == kind
    table = instance.create_table("t", schema)
    expected = pq.read_table(path)
    assert table.ingest(str(path)).rows == expected.num_rows
    assert plain(table.query().read_all().to_pylist()) == plain(expected.to_pylist())
    assert instance.sql("select * from t").read_all().num_rows == expected.num_rows
    table.delete({"k": 0})
    table.compact()
    assert plain(table.query().read_all().to_pylist()) == plain(expected.slice(1).to_pylist())


def test_timestamps_of_int96_are_whole_microseconds_or_refused(instance: dm.Instance, tmp_path: Path) -> None:
    path = FILES / "alltypes_plain.parquet"
    table = instance.create_table("t", parse_schema(None, path, ["id"], [], []))
    assert table.schema.field("timestamp_col").type == dm.TIMESTAMP
    table.ingest(str(path))
    times = [row["timestamp_col"].isoformat() for row in table.query().read_all().to_pylist()]
    assert times[0] == "2009-01-01T00:00:00+00:00"
    assert len(times) == 8
