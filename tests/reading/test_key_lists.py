"""Look-ups of lists of keys in pages return the engine's answers, of files and of tables of all kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.reading import executor, file_cache, key_lists, look_ups
from dormouse.reading.key_lists import KeyList, rows_of_keys
from tests.reading.test_page_lookups import KEYS, VALUES, Far, rows_for, texts
from tests.support.api import Instance
from tests.support.model import LONG, STRING, Field, Range, Schema
from tests.support.objects import open_store
from tests.support.reading import Interruption, KeyRanges, query


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
    """Covers several slices, pages in several pieces, remote files, and files cached as a whole."""
    monkeypatch.setattr(file_cache, "WHOLE_MEMORY_BYTES_MAX", 4_000_000)
    monkeypatch.setattr(key_lists, "_PIECE_BYTES", 5_000)
    keys, key_of = KEYS[kind]
    schema = Schema(keys, values=VALUES)
    table = rows_for(schema, key_of, 2_000, 5)
    store = open_store(tmp_path)
    stores: list[Any] = [store, Far(store)]
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
        for bytes_max, of in product((0, 1_000_000), stores):
            monkeypatch.setattr(file_cache, "WHOLE_BYTES_MAX", bytes_max)
            for columns in (schema.names, ["text", keys[-1].name], ["k"]):
                found = rows_of_keys(of, "f.parquet", size, wanted, columns, interruption=Interruption())
                assert found is not None
                expected = table.filter(pa.array(flags)).select(columns)
                assert [one.schema.types for one in found] == [expected.schema.types] * len(found)
                assert sorted(text for one in found for text in texts(one)) == texts(expected)
        counts.append(sum(flags))
    assert counts[-1] > counts[0]
    for of in stores:
        assert rows_of_keys(of, "gone.parquet", size, wanted, ["k"], interruption=Interruption()) is None
    assert rows_of_keys(store, "f.parquet", size + 1, wanted, ["k"], interruption=Interruption()) is None


def test_pieces_of_columns_of_a_remote_file_keep_the_order_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last pieces of the columns have the same pages, and are decoded together."""
    count = 52_000
    monkeypatch.setattr(key_lists, "_PIECE_BYTES", 150_000)
    numbers = np.random.default_rng(1).integers(0, 1 << 62, count)
    rows = pa.table({"k": range(count), "wide": numbers, "narrow": pa.array(numbers % (1 << 30), pa.int32())})
    pq.write_table(
        rows,
        tmp_path / "f.parquet",
        write_page_index=True,
        max_rows_per_page=4_000,
        use_dictionary=False,
        compression="none",
    )
    store: Any = Far(open_store(tmp_path))
    wanted = KeyList.of(
        Schema([Field("k", LONG)]), [KeyRanges({"k": [Range.exactly(n) for n in range(0, count, 4_000)]})]
    )
    size = (tmp_path / "f.parquet").stat().st_size
    assert wanted is not None
    [found] = (
        rows_of_keys(store, "f.parquet", size, wanted, rows.column_names, interruption=Interruption()) or []
    )
    assert found.to_pylist() == rows.take(pa.array(range(0, count, 4_000))).to_pylist()


def test_bytes_between_pages_of_a_remote_file_count_as_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in one request with the pages, if they are few."""
    count, sizes = 100_000, [0]
    monkeypatch.setattr(key_lists, "_FAR_BYTES", 500_000)
    chance = np.random.default_rng(1)
    columns = {name: chance.integers(0, 1 << 62, count) for name in "abcd"}
    rows = pa.table({"k": range(count), **columns})
    how: dict[str, Any] = {"max_rows_per_page": 1_000, "use_dictionary": False, "compression": "none"}
    pq.write_table(rows, tmp_path / "f.parquet", write_page_index=True, **how)
    read = file_cache.OpenFile.read

    def counted(file: file_cache.OpenFile, spans: Any) -> Any:
        sizes.append(0)
        return read(file, spans)

    def ranged(far: Far, name: str, start: int, length: int) -> bytes:
        sizes[-1] += length
        return far._store.get_range(name, start, length)

    monkeypatch.setattr(file_cache.OpenFile, "read", counted)
    monkeypatch.setattr(Far, "get_range", ranged)
    store: Any = Far(open_store(tmp_path))
    some = [*range(0, count, 10_000)]
    wanted = KeyList.of(Schema([Field("k", LONG)]), [KeyRanges({"k": [Range.exactly(n) for n in some]})])
    size = (tmp_path / "f.parquet").stat().st_size
    assert wanted is not None
    [found] = (
        rows_of_keys(store, "f.parquet", size, wanted, rows.column_names, interruption=Interruption()) or []
    )
    assert found.to_pylist() == rows.take(pa.array(some)).to_pylist()
    assert 700_000 < max(sizes) < 1_500_000


def test_pages_whose_values_take_much_memory_are_decoded_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of equal texts has few bytes."""
    count, counts = 20_000, []
    monkeypatch.setattr(key_lists, "_VALUES_BYTES", 1_000_000)
    decoded = key_lists.decoded_pages

    def counted(parts: Any, row_count: int) -> Any:
        found = decoded(parts, row_count)
        counts.append(sum(column.nbytes for column in found.values()))
        return found

    monkeypatch.setattr(key_lists, "decoded_pages", counted)
    rows = pa.table({"k": range(count), "a": ["a" * 500] * count, "b": ["b" * 500] * count})
    pq.write_table(rows, tmp_path / "f.parquet", write_page_index=True, max_rows_per_page=1_000)
    store = open_store(tmp_path)
    wanted = KeyList.of(
        Schema([Field("k", LONG)]), [KeyRanges({"k": [Range.exactly(n) for n in range(0, count, 1_000)]})]
    )
    size = store.size("f.parquet")
    assert wanted is not None and size < 200_000
    [found] = (
        rows_of_keys(store, "f.parquet", size, wanted, rows.column_names, interruption=Interruption()) or []
    )
    assert found.to_pylist() == rows.take(pa.array(range(0, count, 1_000))).to_pylist()
    assert max(counts) < 2_000_000 < sum(counts)


def test_an_interruption_ends_a_look_up_of_many_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises an error rather than leave the rows to the engine, and reads no further pages."""
    count, interruption = 100_000, Interruption()
    monkeypatch.setattr(key_lists, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(key_lists, "_FAR_BYTES", 10_000)
    monkeypatch.setattr(file_cache, "_FAR_TAIL", 100_000)
    numbers = np.random.default_rng(1).integers(0, 1 << 62, count)
    rows = pa.table({"k": range(count), "v": numbers})
    how: dict[str, Any] = {"max_rows_per_page": 1_000, "use_dictionary": False, "compression": "none"}
    pq.write_table(rows, tmp_path / "f.parquet", write_page_index=True, **how)
    far = Far(open_store(tmp_path))
    store: Any = far
    wanted = KeyList.of(Schema([Field("k", LONG)]), [KeyRanges({"k": [Range(0, 9_000)]})])
    size = (tmp_path / "f.parquet").stat().st_size
    assert wanted is not None
    [found] = rows_of_keys(store, "f.parquet", size, wanted, ["k", "v"], interruption=interruption) or []
    assert found.num_rows == 9_000 and far.requests > 9
    ranged, far.requests = Far.get_range, 0

    def interrupting(self: Far, name: str, start: int, length: int) -> bytes:
        if far.requests == 2:
            interruption.set()
        return ranged(self, name, start, length)

    monkeypatch.setattr(Far, "get_range", interrupting)
    with pytest.raises(dm.DormouseError, match="interrupted"):
        rows_of_keys(store, "f.parquet", size, wanted, ["k", "v"], interruption=interruption)
    assert far.requests == 3


def test_long_ranges_and_lists_are_no_lists_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_lists, "KEYS_MAX", 3)
    schema = Schema([Field("k", LONG), Field("l", LONG)])
    one = [Range.exactly(1)]
    most = (1 << 63) - 1
    for long in (Range(1, 5), Range(1), Range(max=5), Range(-most - 1, most), Range()):
        assert KeyList.of(schema, [KeyRanges({"k": [long]})]) is None
    for ranges in ({}, {"l": one}, {"k": one, "l": [Range(1)]}, {"k": one, "l": [Range(1, 3)]}):
        assert KeyList.of(schema, [KeyRanges(ranges)]) is None
    assert KeyList.of(Schema([Field("k", STRING)]), [KeyRanges({"k": [Range("a", "b")]})]) is None
    short = [Range(-2, 0, min_inclusive=False), Range(most - 1, most, max_inclusive=True)]
    found = KeyList.of(schema, [KeyRanges({"k": short, "l": one})])
    assert found is not None and found.in_index == [-1, most - 1, most]
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
    """Covers ranges, split leaves, newer files, marks, and deletions of listed rows and by values."""
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
        where: dict[str, Any] = {"k": [3 * n + (n % 7 == 0) for n in some]}
        if number % 2:
            where = {"k": [dm.Range(30 * number, 700), dm.Range(2_990, 3_010), *where["k"]]}
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


def test_questions_that_no_look_up_answers_read_groups_ahead(instance: Instance, used: list[bool]) -> None:
    schema = Schema([Field("k", LONG)], values=[Field("v", LONG)])
    of = dm.TableProperties
    kinds = [of(), of(aggregate="sum(v)"), of(filter="age_off(v, 1000)")]
    for number, properties in enumerate(kinds):
        table = instance.create_table(f"t{number}", schema, split_points=[50], properties=properties)
        table.ingest(pa.table({"k": range(100), "v": [1 << 52] * 100}))
        assert table.query({"k": [7, 70], "v": 1 << 52}).read_all()["k"].to_pylist() == [7, 70]
        assert table.query({"k": [7, 70]}).read_all()["k"].to_pylist() == [7, 70]
    assert used == [True, True], "only of the plain table without conditions"


def test_many_bytes_of_rows_in_several_files_are_left_to_the_engine(
    instance: Instance, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema([Field("k", LONG)], values=[Field("s", STRING)])
    table = instance.create_table("t", schema, properties=dm.TableProperties(inline_bytes_max=0))
    for _ in range(8):
        table.ingest(pa.table({"k": range(100), "s": [f"{n} " * 500 for n in range(100)]}))
    where = {"k": [*range(0, 100, 3)]}
    for bytes_max, is_used in ((1_000_000, True), (100_000, False)):
        monkeypatch.setattr(look_ups, "LIST_BYTES_MAX", bytes_max)
        found, expected = _both(table.context, where)
        assert len(found) == 8 * 34
        assert sorted(map(str, found)) == sorted(map(str, expected))
        assert used == [is_used]
        used.clear()


def _types(schema: Schema) -> Any:
    kinds = {LONG: pa.int64(), STRING: pa.string()}
    return [(field, kinds[field.type]) for field in schema.fields]
