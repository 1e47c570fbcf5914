"""Look-ups that read pages themselves return the engine's answers, from few bytes, for files of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.data.transform import Transform
from dormouse.reading import executor, file_cache, page_reads
from dormouse.reading.look_ups import looked_up
from dormouse.reading.page_reads import rows_of
from dormouse.reading.planner import Scan
from tests.flipped_bits import flipped
from tests.support.api import Instance
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    STRING,
    TIMESTAMP,
    Field,
    Range,
    Schema,
)
from tests.support.objects import ObjectStore, open_store
from tests.support.reading import KeyRanges, arrow_schema, query, question
from tests.tiers import by_tier

START = datetime(1999, 12, 31, tzinfo=UTC)
VALUES = [
    Field("price", DECIMAL(15, 2), nullable=True),
    Field("score", DOUBLE, nullable=True),
    Field("part", FLOAT),
    Field("text", STRING, nullable=True),
    Field("bytes", BYTES),
    Field("flag", BOOLEAN, nullable=True),
    Field("at", TIMESTAMP, nullable=True),
]
KEYS: dict[str, tuple[list[Field], Callable[[int], tuple[Any, ...]]]] = {
    "long": ([Field("k", LONG)], lambda n: (n * 3 - 900,)),
    "int, long": ([Field("k", INT), Field("l", LONG)], lambda n: (n // 7 - 50, n % 7)),
    "date": ([Field("k", DATE)], lambda n: (date(1969, 1, 1) + timedelta(days=n),)),
    "timestamp": ([Field("k", TIMESTAMP)], lambda n: (START + timedelta(microseconds=n * 7),)),
    # longer than the 64 bytes that bounds of pages have
    "long text": ([Field("k", STRING)], lambda n: ("é" * 40 + f"{n // 3:06}",)),
    "text, bytes": ([Field("k", STRING), Field("l", BYTES)], lambda n: (f"{n // 2}", bytes([n % 2]))),
    "bytes": ([Field("k", BYTES)], lambda n: (b"\xff" * 70 + n.to_bytes(3, "big"),)),
    # with more rows for each than a page has
    "few": ([Field("k", LONG)], lambda n: (n // 400,)),
}


def value_of(field: Field, chance: random.Random) -> Any:
    if field.nullable and chance.random() < 0.2:
        return None
    makers: dict[Any, Callable[[], Any]] = {
        DOUBLE: lambda: chance.choice([0.0, -0.0, float("nan"), float("inf"), chance.random()]),
        FLOAT: lambda: chance.choice([0.5, float("-inf"), -2.25]),
        STRING: lambda: chance.choice(["", "some words", "x" * chance.randrange(300)]),
        BYTES: lambda: chance.randbytes(chance.randrange(20)),
        BOOLEAN: lambda: chance.random() < 0.5,
        TIMESTAMP: lambda: START + timedelta(seconds=chance.randrange(10**6)),
    }
    return makers.get(field.type, lambda: Decimal(chance.randrange(-(10**6), 10**6)) / 100)()


def rows_for(schema: Schema, key_of: Callable[[int], tuple[Any, ...]], count: int, seed: int) -> pa.Table:
    chance = random.Random(seed)
    numbers = sorted(chance.sample(range(4 * count), count))
    rows = [
        dict(zip(schema.row_key_names, key_of(n), strict=True))
        | {field.name: value_of(field, chance) for field in schema.values}
        for n in numbers
    ]
    found = pa.Table.from_pylist(rows, schema=arrow_schema(schema))
    return found.sort_by([(name, "ascending") for name in schema.key_names])


def texts(table: pa.Table) -> list[str]:
    """Returns rows as sorted texts, which can be compared: NaN differs from itself, but its text does not."""
    return sorted(map(repr, table.to_pylist()))


def same(left: pa.Table, right: pa.Table) -> bool:
    return bool(left.schema == right.schema) and texts(left) == texts(right)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that gets one item for each file of a look-up.

    The item is true if the look-up read the file's pages, and false if it left the file to the engine.
    """
    found: list[bool] = []

    def spy(*args: Any, **how: Any) -> Any:
        rows = rows_of(*args, **how)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr("dormouse.reading.look_ups.rows_of", spy)
    return found


def by_engine(context: Any, *args: Any) -> pa.Table:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "looked_up", lambda *_: None)
        return query(context, *args).read_all()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    "how",
    [
        {"compression": "zstd", "data_page_size": 1_000, "row_group_size": 1_500},
        {"compression": "none", "use_dictionary": False, "data_page_size": 100_000},
        {"compression": "snappy", "data_page_version": "2.0", "data_page_size": 3_000},
        {"compression": {"k": "lz4"}, "max_rows_per_page": 97},
        # the writer gave the dictionary up in mid-column: some of its pages are plain
        {"compression": "zstd", "dictionary_pagesize_limit": 900, "data_page_size": 400},
    ],
)
def test_a_file_gives_the_rows_of_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
) -> None:
    """Covers pages of all sizes, with different rows in each column's pages, and files cached as a whole."""
    monkeypatch.setattr(file_cache, "WHOLE_MEMORY_BYTES_MAX", 4_000_000)
    keys, key_of = KEYS[kind]
    schema = Schema(keys, values=VALUES)
    table = rows_for(schema, key_of, 2_000, 5)
    store = open_store(tmp_path)
    pq.write_table(table, tmp_path / "f.parquet", write_page_index=True, store_schema=False, **how)
    size = store.size("f.parquet")
    chance = random.Random(1)
    stored = [tuple(row.values()) for row in table.select([f.name for f in keys]).to_pylist()]
    told = 0
    for n in [0, *(chance.randrange(8_010) for _ in range(40))]:
        wanted = dict(zip(keys, key_of(n), strict=True))
        alike = table.filter(pa.array([one == key_of(n) for one in stored]))
        for columns in (schema.names, ["text", keys[-1].name]):
            expected = alike.select(columns)
            as_texts = texts(expected)
            for bytes_max, is_likely in product((0, 1_000_000), (False, True)):
                monkeypatch.setattr(file_cache, "WHOLE_BYTES_MAX", bytes_max)
                found = rows_of(store, "f.parquet", size, wanted, columns, is_likely=is_likely)
                assert found is not None or not bytes_max
                if found is None:
                    continue
                told += 1
                assert [one.schema.types for one in found] == [expected.schema.types] * len(found)
                assert sorted(text for one in found for text in texts(one)) == as_texts
    assert told >= (160 if kind == "few" else 300)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["long", "int, long", "long text", "timestamp", "few"])
def test_ingested_tables_answer_as_the_engine_does(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, used: list[bool], kind: str
) -> None:
    """Covers several files of split leaves, written by both writers."""
    monkeypatch.setattr("dormouse.writing.parquet_file._PAGE_ROWS", 128)
    keys, key_of = KEYS[kind]
    schema = Schema(keys, values=VALUES)
    table = instance.create_table("looked_up", schema, split_points=[key_of(3_000)[0], key_of(6_000)[0]])
    every = [rows_for(schema, key_of, 1_500, seed) for seed in range(3)]
    for rows in every:
        table.ingest(rows)
    chance = random.Random(2)
    for round_number in range(2):
        for n in [3_000, 5_999, *(chance.randrange(6_000) for _ in range(15))]:
            where = dict(zip(schema.row_key_names, key_of(n), strict=True))
            monkeypatch.setattr(file_cache, "WHOLE_BYTES_MAX", n % 2 * 64_000)
            found = query(table.context, where).read_all()
            assert same(found, by_engine(table.context, where))
            assert same(found, pa.concat_tables(every).filter(_equals(where)))
        first = {schema.row_key_names[0]: key_of(100)[0]}
        assert same(query(table.context, first).read_all(), by_engine(table.context, first))
        if not round_number:
            table.compact()
    assert sum(used) > len(used) / 2
    assert query(table.context, where, ["score"], 1).read_all().num_rows <= 1


@pytest.mark.parametrize("small", [0, 65_536], ids=["objects", "inlined"])
def test_a_key_in_a_large_and_in_a_small_file_is_looked_up_in_both(
    instance: Instance, used: list[bool], small: int
) -> None:
    """Columns of a file that is decoded as a whole are not nullable, and those of pages are."""
    schema = Schema([Field("k", LONG)], values=[Field("v", STRING), Field("t", TIMESTAMP)])
    table = instance.create_table("both", schema, properties=dm.TableProperties(inline_bytes_max=small))
    rows = pa.table({"k": range(50_000), "v": [f"text {n}" for n in range(50_000)], "t": [START] * 50_000})
    for some in (rows, rows.slice(7, 1), rows.slice(7, 2)):
        table.ingest(some)
    assert table.query({"k": 7}).read_all().to_pylist() == rows.slice(7, 1).to_pylist() * 3
    assert table.query({"k": 8}).read_all().num_rows == 2
    assert used == [True] * 5


def _equals(where: dict[str, Any]) -> Any:
    import pyarrow.compute as pc

    found = pc.scalar(True)
    for name, value in where.items():
        found = found & (pc.field(name) == pc.scalar(value))
    return found


def test_look_ups_in_pages_are_not_used_if_rows_must_be_changed(instance: Instance, used: list[bool]) -> None:
    """Covers sums, changed columns, and queries for several keys."""
    schema = Schema([Field("k", LONG)], values=[Field("n", LONG)])
    rows = pa.table({"k": [1, 2, 3], "n": [10, 20, 30]}, schema=arrow_schema(schema))
    plain = instance.create_table("plain", schema)
    plain.ingest(rows)
    assert plain.query({"k": 2}).read_all().to_pylist() == [{"k": 2, "n": 20}]
    assert used == [True]
    assert plain.query({"k": 2, "n": 21}).read_all().num_rows == 0
    [file] = plain.files.all_files(0).files
    size = plain.context.objects.size(file.filename)
    scan = Scan(file.filename, (KeyRanges({"k": [Range(1, 1, True, True)]}),) * 2, "root", size)
    asked = question(schema, {"k": 1}, None, None)
    assert looked_up(plain.context, schema, asked, Transform(schema), [scan]) is None
    plain.add_column(Field("more", LONG, nullable=True))
    assert plain.query({"k": 3}).read_all().to_pylist() == [{"k": 3, "n": 30, "more": None}]
    assert plain.query({"k": 3, "n": 30}).read_all().num_rows == 1
    assert plain.query({"k": [1, 3]}).read_all().num_rows == 2
    sums = instance.create_table("sums", schema, properties=dm.TableProperties(aggregate="sum(n)"))
    for _ in range(2):
        sums.ingest(rows)
    assert sums.query({"k": 1}).read_all().to_pylist() == [{"k": 1, "n": 20}]
    lists = instance.create_table("lists", Schema([Field("k", LONG)], values=[Field("v", LIST(LONG))]))
    lists.ingest(pa.table({"k": [1, 1], "v": [[1], [2]]}, schema=arrow_schema(lists.schema)))
    assert lists.query({"k": 1}).read_all().num_rows == 2
    assert used == [True]


def test_the_newest_row_of_a_key_is_looked_up_in_pages(instance: Instance, used: list[bool]) -> None:
    """Covers several files, marks, and queries for all keys with the same first value."""
    schema = Schema([Field("k", LONG), Field("l", LONG)], values=[Field("n", LONG), Field("at", LONG)])
    newest = instance.create_table(
        "newest", schema, properties=dm.TableProperties(keep="newest_row", newest_by="at")
    )
    loads = [
        [(1, 1, 10, 1, False), (1, 2, 20, 5, False), (2, 1, 30, 1, False)],
        [(1, 1, 11, 2, False), (1, 2, 21, 4, False), (1, 3, 41, 4, False)],
        [(1, 1, 0, 3, True), (2, 1, 32, 0, False)],
    ]
    for load in loads:
        columns = zip((*schema.names, "gone"), zip(*load, strict=True), strict=True)
        newest.upsert(pa.table({name: list(values) for name, values in columns}), deletes="gone")
    assert newest.query({"k": 1, "l": 1}).read_all().num_rows == 0
    assert newest.query({"k": 1, "l": 2}, ["n"]).read_all().to_pylist() == [{"n": 20}]
    assert newest.query({"k": 1}, ["l", "n"]).read_all().to_pylist() == [{"l": 2, "n": 20}, {"l": 3, "n": 41}]
    assert newest.query({"k": 2}, limit=1).read_all().to_pylist() == [{"k": 2, "l": 1, "n": 30, "at": 1}]
    files = len(used)
    assert files >= 4
    assert all(used)
    newest.delete({"k": 2})
    assert newest.query({"k": 2}).read_all().num_rows == 0
    assert len(used) == files


def test_a_replaced_file_of_the_same_name_is_read_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    field = Field("k", LONG)
    for value in (1, 2):
        (tmp_path / "f.parquet").unlink(missing_ok=True)
        pq.write_table(
            pa.table({"k": pa.array([value], pa.int64())}), tmp_path / "f.parquet", write_page_index=True
        )
        size = store.size("f.parquet")
        [found] = rows_of(store, "f.parquet", size, {field: value}, ["k"]) or []
        assert found.to_pylist() == [{"k": value}]
    assert rows_of(store, "f.parquet", size + 1, {field: 2}, ["k"]) is None
    assert rows_of(store, "gone.parquet", size, {field: 2}, ["k"]) is None


@pytest.mark.objects
@pytest.mark.slow
@pytest.mark.parametrize("bytes_max", [0, 1_000_000], ids=["pages", "whole"])
def test_look_ups_in_damaged_pages_raise_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    """Any byte may differ. The look-up returns rows or nothing, and leaves errors to a reader that can name
    the file.
    """
    monkeypatch.setattr(file_cache, "WHOLE_BYTES_MAX", bytes_max)
    store = open_store(tmp_path)
    path = tmp_path / "f.parquet"
    field = Field("k", LONG)
    rows = pa.table({"k": pa.array(range(1_000)), "v": pa.array([f"{n % 10}" for n in range(1_000)])})
    pq.write_table(rows, path, write_page_index=True, data_page_size=500, compression="zstd")
    whole = path.read_bytes()
    chance = random.Random(9)
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[-chance.randrange(1, 2_500)] = chance.randrange(256)
        path.write_bytes(data)
        rows_of(store, "f.parquet", len(data), {field: 500}, ["k", "v"])


@pytest.mark.objects
@pytest.mark.parametrize(("compression", "version"), [("zstd", "1.0"), ("snappy", "2.0")])
def test_look_ups_in_pages_with_damaged_headers_raise_no_errors(
    tmp_path: Path, compression: str, version: str
) -> None:
    """A header may be of another structure, and say that a page or what it decompresses to has any size."""
    chance = random.Random(1)
    numbers = list(range(9_000))
    columns = {"k": numbers, "x": [chance.random() for _ in numbers], "c": [n % 50 for n in numbers]}
    columns["text"] = [f"text {n}" for n in numbers]
    made = BytesIO()
    pq.write_table(
        pa.table(columns),
        made,
        write_page_index=True,
        data_page_size=8_000,
        compression=compression,
        use_dictionary=["c"],
        data_page_version=version,
    )
    whole, store = made.getvalue(), open_store(tmp_path)
    group = pq.ParquetFile(made).metadata.row_group(0)
    starts = [group.column(number).data_page_offset for number in range(len(columns))]
    assert len(whole) > file_cache.WHOLE_BYTES_MAX
    for at, bit in product((start + n for start in starts for n in range(40)), (0, 3, 7)):
        name, content = f"{at}-{bit}.parquet", flipped(whole, 8 * at + bit)
        rows_of(store, name, len(whole), {Field("k", LONG): 3}, list(columns), content=content)


@pytest.mark.parametrize("bytes_max", [0, 1_000_000], ids=["pages", "whole"])
def test_the_cache_of_files_is_bounded_and_answers_hold_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    kept = file_cache.Kept()
    monkeypatch.setattr(page_reads, "KEPT", kept)
    monkeypatch.setattr(file_cache, "KEPT_BYTES_MAX", 200_000)
    monkeypatch.setattr(file_cache, "WHOLE_BYTES_MAX", bytes_max)
    store = open_store(tmp_path)
    rows = pa.table({"k": pa.array(range(4_000)), "v": ["some text"] * 4_000})
    for number in range(40):
        pq.write_table(rows, tmp_path / f"{number}.parquet", write_page_index=True)
        size = store.size(f"{number}.parquet")
        [found] = rows_of(store, f"{number}.parquet", size, {Field("k", LONG): 7}, ["k", "v"]) or []
        assert found.get_total_buffer_size() < 200
    assert len(kept._items) < 40
    assert kept._byte_count == sum(size for _, size in kept._items.values()) <= 200_000


def test_a_remote_look_up_takes_one_request(tmp_path: Path) -> None:
    """The first look-up also reads the footer."""
    folder = open_store(tmp_path)
    rows = pa.table(
        {
            "k": pa.array(range(40_000)),
            **{f"v{n}": [f"{n} {m % 50}" for m in range(40_000)] for n in range(8)},
        }
    )
    pq.write_table(
        rows, tmp_path / "f.parquet", write_page_index=True, max_rows_per_page=4_096, row_group_size=20_000
    )
    far = Far(folder)
    for n in (7, 39_999, 12_345, 25_000):
        far.requests = 0
        size = folder.size("f.parquet")
        [found] = rows_of(far, "f.parquet", size, {Field("k", LONG): n}, rows.column_names) or []  # type: ignore[arg-type]
        assert found.to_pylist() == rows.slice(n, 1).to_pylist()
        assert far.requests <= (2 if n == 7 else 1)


def test_a_small_remote_file_is_read_once_and_cached_as_a_whole(tmp_path: Path) -> None:
    folder = open_store(tmp_path)
    rows = pa.table({"k": pa.array(range(1_000)), "v": [f"text {n % 50}" for n in range(1_000)]})
    pq.write_table(rows, tmp_path / "small.parquet", write_page_index=True)
    size, far = folder.size("small.parquet"), Far(folder)
    for n in (7, 999, 500):
        [found] = rows_of(far, "small.parquet", size, {Field("k", LONG): n}, ["v", "k"]) or []  # type: ignore[arg-type]
        assert found.to_pylist() == [{"v": f"text {n % 50}", "k": n}]
    assert far.requests == 1


def test_a_small_file_of_many_equal_rows_is_not_cached_as_a_whole(tmp_path: Path) -> None:
    """Its rows would take much more memory than the file has bytes."""
    rows = pa.table({"k": pa.array(range(1_000)), "v": ["x" * 1_000] * 1_000})
    pq.write_table(rows, tmp_path / "f.parquet", write_page_index=True, compression="zstd")
    store = open_store(tmp_path)
    size = store.size("f.parquet")
    assert size < file_cache.WHOLE_BYTES_MAX
    with file_cache.opened(store, "f.parquet", size) as source:
        assert file_cache.KEPT.whole(source) is None
    [found] = rows_of(store, "f.parquet", size, {Field("k", LONG): 7}, ["v"]) or []
    assert found.to_pylist() == [{"v": "x" * 1_000}]


class Far:
    """A fake store without local paths, like a remote one."""

    url = "far://away"

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.requests = 0

    def local_path(self, name: str) -> None:
        return None

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self.requests += 1
        return self._store.get_range(name, start, length)


DELETED_BY: list[dict[str, Any]] = [
    {"price": Decimal("77.50")},
    {"score": float("nan")},
    {"score": -0.0, "flag": True},
    {"part": [-2.25, float("-inf")], "flag": None},
    {"text": None, "k": dm.Range(-500, 3_000)},
    {"text": ["", "some words"], "at": dm.Range(START, START + timedelta(hours=9))},
]


def test_look_ups_in_pages_leave_out_the_rows_of_pending_deletions(
    instance: Instance, used: list[bool]
) -> None:
    schema = Schema(*KEYS["long"][:1], values=VALUES)
    table = instance.create_table("deleted", schema)
    table.ingest(rows_for(schema, KEYS["long"][1], 3_000, 5))
    for where in DELETED_BY:
        table.delete(where)
    table.ingest(rows_for(schema, KEYS["long"][1], 300, 6))
    table.delete({"flag": False})
    every = by_engine(table.context)
    chance = random.Random(3)
    left = 0
    for n in range(count := by_tier(100, 400)):
        where = {"k": chance.randrange(4_000) * 3 - 900}
        columns = chance.choice([None, ["k"], ["text", "score"]])
        found = query(table.context, where, columns).read_all()
        assert same(found, every.filter(_equals(where)).select(columns or schema.names)), (n, where)
        left += found.num_rows
    assert left > count // 20
    assert len(used) >= count
    assert all(used)


def test_a_look_up_of_many_deleted_rows_is_left_to_the_engine(instance: Instance, used: list[bool]) -> None:
    table = instance.create_table("many", Schema([Field("k", LONG)], values=[Field("n", LONG)]))
    table.ingest(pa.table({"k": [1] * 300, "n": range(300)}))
    table.delete({"n": dm.Range(10, 300)})
    assert table.query({"k": 1}, ["n"]).read_all().to_pylist() == [{"n": n} for n in range(10)]
    assert used == [True]
    assert table.query({"k": 2}).read_all().num_rows == 0
