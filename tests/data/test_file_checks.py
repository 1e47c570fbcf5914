"""Checks of files: they compare Parquet's statistics with the rows, and test the order of rows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dormouse.data import file_checks
from dormouse.data.arrow_schema import is_ascending
from dormouse.data.file_checks import FileReader, Recorded, _coded_texts, _Columns
from dormouse.data.object_access import parquet_object
from dormouse.errors import ObjectNotFound
from tests.standard import OF_KEYS
from tests.support.model import STRING, Field, Schema
from tests.support.objects import open_store

KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [1, 2, 3]),
    (pa.int32(), [-1, 0, 1]),
    (pa.string(), ["a", "b", "c"]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "c"]),
    (pa.binary(), [b"a", b"b", b"\xff"]),
    (pa.float64(), [-1.5, 0.0, 1.5]),
    (pa.timestamp("us", "UTC"), [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)]),
]


def wrong(kind: pa.DataType, written: list[Any], there: list[Any], ascending: str = "") -> list[str]:
    """Returns the differences that a check finds between statistics of `written` and the values `there`."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": pa.array(written, kind)}), sink)
    seen = _Columns(pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0), [])
    seen.add(pa.RecordBatch.from_pydict({"a": pa.array(there, kind)}), ascending)
    return list(seen.wrong())


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
def test_values_outside_of_statistics_are_reported(kind: pa.DataType, values: list[Any]) -> None:
    low, middle, high = values
    assert wrong(kind, values, values) == []
    assert wrong(kind, values, [middle]) == []
    for written in ([low, middle], [middle, high]):
        for ascending in ("", "a"):
            found = wrong(kind, written, values, ascending)
            assert found == ["values of a lie outside of its statistics' bounds"]
    assert wrong(kind, values, [low, None, high]) == ["a has 1 nulls, its statistics say 0"]


def test_dictionary_encoded_texts_are_compared_with_statistics(tmp_path: Path) -> None:
    """Unused values of a dictionary are ignored. An index outside of the dictionary is an error."""
    table = pa.table({"key": [1, 2, 3], "coded": ["b", "c", "b"], "plain": ["x", "y", "z"]})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=["coded"])
    with parquet_object(open_store(tmp_path), "x.parquet") as file:
        assert _coded_texts(file, OF_KEYS) == ["coded"]
        assert _coded_texts(file, Schema([Field("coded", STRING)])) == []
        seen = _Columns(file.metadata.row_group(0), [])
    for indices in ([1, 2], [3]):
        values = pa.DictionaryArray.from_arrays(pa.array(indices), ["a", "b", "c"], safe=False)
        batch = pa.RecordBatch.from_pydict({"coded": values})
        if indices == [1, 2]:
            seen.add(batch)
        else:
            with pytest.raises(pa.ArrowIndexError):
                seen.add(batch)
    assert (seen.bounds["coded"], list(seen.wrong())) == (("b", "c"), [])


@pytest.mark.parametrize(("keys", "kinds"), [([1, 2, 3, 4], []), ([3, 4, 1, 2], ["not_sorted"])])
def test_the_order_is_checked_across_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[int], kinds: list[str]
) -> None:
    monkeypatch.setattr(file_checks, "READ_ROWS", 2)
    pq.write_table(pa.table({"key": keys}), tmp_path / "x.parquet")
    schema, written = OF_KEYS, Recorded(4, None, None, None)
    found = file_checks.file_problems(open_store(tmp_path), "x.parquet", schema, written)
    assert [kind for kind, _ in found] == kinds


@pytest.mark.slow
def test_unexpected_contents_are_reported_as_damage(tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": pa.array([None, 1])}), tmp_path / "x.parquet")
    reader, schema = FileReader(), OF_KEYS
    for _ in range(2):
        found = reader.problems(open_store(tmp_path), "x.parquet", schema, Recorded(2, None, None, None))
        assert [kind for kind, _ in found] == ["object_unreadable"]
    with pytest.raises(ObjectNotFound):
        reader.problems(open_store(tmp_path), "y.parquet", schema, Recorded(2, None, None, None))
    assert reader.close() == 0


@pytest.mark.parametrize(
    ("rows", "ascends"),
    [
        ([("b", 1)], True),
        ([("a", 2), ("a", 2), ("b", 1)], True),
        ([("a", 2), ("a", 1)], False),
        ([("b", 1), ("a", 2)], False),
        ([("a", 1), ("b", 2), ("b", 1)], False),
        ([("\U00010000", 1), ("\ue000", 1)], False),
    ],
)
def test_rows_ascend_by_all_keys(rows: list[tuple[str, int]], ascends: bool) -> None:
    names, numbers = [name for name, _ in rows], [number for _, number in rows]
    columns = {"name": pa.array(names, pa.string()), "number": pa.array(numbers, pa.int64())}
    assert is_ascending(pa.RecordBatch.from_pydict(columns)) is ascends
