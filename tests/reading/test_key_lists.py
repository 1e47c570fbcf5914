"""Look-ups of lists of keys in pages return the engine's answers, of files and of tables of all kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.reading import executor, file_cache, key_lists
from dormouse.reading.key_lists import KeyList, rows_of_keys
from tests.reading.test_page_lookups import KEYS, VALUES, rows_for, texts
from tests.support.api import Instance
from tests.support.model import LONG, STRING, Field, Range, Schema
from tests.support.objects import open_store
from tests.support.reading import KeyRanges, query


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    "how",
    [
        {"compression": "zstd", "data_page_size": 1_000, "row_group_size": 1_500},
        {"compression": "snappy", "data_page_version": "2.0", "data_page_size": 3_000},
        {"compression": {"k": "lz4"}, "max_rows_per_page": 97, "dictionary_pagesize_limit": 900},
    ],
)
def test_a_file_gives_the_rows_of_lists_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
) -> None:
    """Covers several slices, pages in several pieces, and files cached as a whole."""
    monkeypatch.setattr(file_cache, "WHOLE_MEMORY_BYTES_MAX", 4_000_000)
    monkeypatch.setattr(key_lists, "_PIECE_BYTES", 5_000)
    keys, key_of = KEYS[kind]
    schema = Schema(keys, values=VALUES)
    table = rows_for(schema, key_of, 2_000, 5)
    store = open_store(tmp_path)
    pq.write_table(table, tmp_path / "f.parquet", write_page_index=True, store_schema=False, **how)
    size, chance, counts = store.size("f.parquet"), random.Random(1), []
    held = table.select(schema.row_key_names).to_pylist()
    for count in (1, 2, 40, 300):
        slices = []
        for _ in range(2):
            some = [key_of(chance.randrange(8_010)) for _ in range(count)]
            of = {f.name: [Range.exactly(key[n]) for key in some] for n, f in enumerate(keys)}
            slices.append(KeyRanges(of))
        wanted = KeyList.of(schema, slices)
        assert wanted is not None
        values = [{name: {one.min for one in each[name]} for name in each} for each in slices]
        flags = [any(all(row[n] in v for n, v in one.items()) for one in values) for row in held]
        for bytes_max in (0, 1_000_000):
            monkeypatch.setattr(file_cache, "WHOLE_BYTES_MAX", bytes_max)
            for columns in (schema.names, ["text", keys[-1].name], ["k"]):
                found = rows_of_keys(store, "f.parquet", size, wanted, columns)
                assert found is not None
                expected = table.filter(pa.array(flags)).select(columns)
                assert [one.schema.types for one in found] == [expected.schema.types] * len(found)
                assert sorted(text for one in found for text in texts(one)) == texts(expected)
        counts.append(sum(flags))
    assert counts[-1] > counts[0]
    assert rows_of_keys(store, "f.parquet", size + 1, wanted, ["k"]) is None
    assert rows_of_keys(store, "gone.parquet", size, wanted, ["k"]) is None


def test_ranges_and_long_lists_are_no_lists_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_lists, "KEYS_MAX", 3)
    schema = Schema([Field("k", LONG), Field("l", LONG)])
    one = [Range.exactly(1)]
    for ranges in ({}, {"l": one}, {"k": [Range(1, 5)]}, {"k": one, "l": [Range(1)]}):
        assert KeyList.of(schema, [KeyRanges(ranges)]) is None
    several = [KeyRanges({"k": [Range.exactly(n), Range.exactly(n + 1)]}) for n in (5, 1)]
    assert KeyList.of(schema, several) is None
    found = KeyList.of(schema, several[:1])
    assert found is not None and found.in_index == [5, 6]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that gets, for each group of leaves, whether it was read by a look-up."""
    found: list[bool] = []
    look_up = executor.list_looked_up

    def spied(*args: Any) -> Any:
        rows = look_up(*args)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr(executor, "list_looked_up", spied)
    return found


def _both(context: Any, where: dict[str, Any], columns: list[str] | None = None) -> Iterator[list[Any]]:
    yield query(context, where, columns).read_all().to_pylist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "list_looked_up", lambda *_: None)
        yield query(context, where, columns).read_all().to_pylist()


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_tables_answer_lists_of_keys_as_the_engine_does(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, used: list[bool], keep: str
) -> None:
    """Covers split leaves, newer files, marks, and deletions of listed rows and by values."""
    monkeypatch.setattr("dormouse.writing.parquet_file._PAGE_ROWS", 128)
    schema = Schema([Field("k", LONG), Field("l", LONG)], values=[Field("v", LONG), Field("s", STRING)])
    table = instance.create_table(
        "t",
        schema,
        split_points=[3_000],
        properties=dm.TableProperties(keep=keep),  # type: ignore[arg-type]
    )

    def rows(numbers: range, load: int) -> pa.Table:
        made = [{"k": n // 2 * 3, "l": n % 2, "v": load, "s": f"{n} " * 30} for n in numbers]
        return pa.Table.from_pylist(made, schema=pa.schema([(f.name, t) for f, t in _types(schema)]))

    table.ingest(rows(range(0, 4_000), 0), engine="local")
    table.ingest(rows(range(1, 4_000, 400), 1), engine="local")
    chance = random.Random(4)
    for number in range(4):
        some = sorted(chance.sample(range(2_000), 60))
        where = {"k": [3 * n + (n % 7 == 0) for n in some]}
        for columns in (None, ["v"], ["l", "k"]):
            found, expected = _both(table.context, where, columns)
            keys = [[(row.get("k"), row.get("l")) for row in rows] for rows in (found, expected)]
            assert keys[0] == keys[1]
            # rows of equal keys have no order
            assert sorted(map(str, found)) == sorted(map(str, expected))
        assert len(found) > 60
        assert query(table.context, {**where, "l": [1]}).read_all().num_rows > 30
        of = rows(range(0, 4_000, 90 + number), 5 + number)
        when = [dm.WhenMatched("t.l = 0", delete=True), dm.WhenMatched(update=["v"])]
        table.merge_into(of, ["k", "l"], when)
        if keep == "every_row":
            table.delete({"v": 5 + number, "k": dm.Range(1_000, 4_000)})
    assert used.count(True) > len(used) / 2
    every = query(table.context).read_all().num_rows
    assert [len(one) for one in _both(table.context, {"k": list(range(0, 6_000, 3))})] == [every, every]


def _types(schema: Schema) -> Any:
    kinds = {LONG: pa.int64(), STRING: pa.string()}
    return [(field, kinds[field.type]) for field in schema.fields]
