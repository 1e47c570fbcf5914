"""Rows that readers leave out by their numbers or keys are exactly those that deletions match."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dormouse as dm
from tests.reading.test_compiled_deletions import is_of, listed
from tests.support.api import Instance, Table
from tests.support.reading import gone_rows, row_numbers, selects
from tests.tiers import by_tier

DAY = dt.date(2024, 1, 1)
KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "LONG": (pa.int64(), lambda n: n - 2),
    "STRING": (pa.string(), lambda n: chr(97 + n) * n),
    "BYTES": (pa.binary(), lambda n: bytes([n])),
    "DATE": (pa.date32(), lambda n: DAY + dt.timedelta(n - 2)),
    "TIMESTAMP": (pa.timestamp("us", "UTC"), lambda n: dt.datetime(2024, 1, 1 + n, tzinfo=dt.UTC)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    keys=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=20).map(sorted),
    gone=st.sets(st.integers(0, 19)),
    cuts=st.sets(st.integers(0, 20), max_size=4),
    other=st.sets(st.integers(0, 20), max_size=4),
    sizes=st.sampled_from([(64, 4_096), (64, 2), (1, 4_096)]),
)
@settings(max_examples=by_tier(15, 40), deadline=None)
def test_rows_are_found_and_left_out_in_batches_of_any_size(
    kind: str,
    keys: list[tuple[int, int]],
    gone: set[int],
    cuts: set[int],
    other: set[int],
    sizes: tuple[int, int],
) -> None:
    arrow, value = KINDS[kind]
    schema = pa.schema([pa.field("a", arrow, nullable=False), pa.field("b", pa.int64(), nullable=False)])
    rows = [{"a": value(a), "b": b, "n": n, "gone": n in gone} for n, (a, b) in enumerate(keys)]
    whole = pa.Table.from_pylist(rows, pa.schema([*schema, ("n", pa.int64()), ("gone", pa.bool_())]))
    batches = _cut(whole, cuts)
    flags = (batch.select(["a", "b", "gone"]) for batch in batches)
    found = gone_rows.matched(flags, schema, 7, 20, ())
    assert found is not None
    expected = [row for row in rows if row["gone"]]
    assert found.numbers.tolist() == [7 + row["n"] for row in expected]
    assert found.keys.to_pylist() == [{"a": row["a"], "b": row["b"]} for row in expected]
    dead = {(row["a"], row["b"]) for row in expected}
    left = [row for row in rows if not row["gone"]]
    assert found.has_whole_keys is dead.isdisjoint((row["a"], row["b"]) for row in left)
    if found.has_whole_keys:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(gone_rows, "SLICES_MAX", sizes[0])
            patched.setattr(gone_rows, "SLICE_ROWS_MIN", sizes[1])
            read = list(gone_rows.without(_cut(whole, other), ["a", "b"], [found]))
        assert [row for batch in read for row in batch.to_pylist()] == left
    assert (
        gone_rows.matched(
            (batch.select(["a", "b", "gone"]) for batch in batches), schema, 0, len(expected) - 1, ()
        )
        is None
        or not expected
    )


def _cut(rows: pa.Table, cuts: set[int]) -> list[pa.RecordBatch]:
    ends = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    table = rows.combine_chunks()
    return [
        batch
        for start, end in itertools.pairwise(ends)
        for batch in (
            table.slice(start, end - start).to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
        )
    ]


SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    [dm.Field("s", dm.STRING)],
    [dm.Field("v", dm.LONG, nullable=True), dm.Field("x", dm.DOUBLE, nullable=True), dm.Field("n", dm.LONG)],
)
ARROW = pa.schema(
    [
        pa.field("k", pa.int64(), nullable=False),
        pa.field("s", pa.string(), nullable=False),
        pa.field("v", pa.int64()),
        pa.field("x", pa.float64()),
        pa.field("n", pa.int64(), nullable=False),
    ]
)
NUMBERS = [None, -0.0, 0.0, 1.5, float("nan"), float("-inf")]
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    row_numbers.KNOWN.clear()
    yield
    row_numbers.KNOWN.clear()


@pytest.fixture(params=["as they are", "tiny"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sets limits so small that the forms for many rows and many files occur."""
    if request.param == "tiny":
        monkeypatch.setattr(selects, "NUMBERS_LISTED_MAX", 2)
        monkeypatch.setattr(selects, "SCANS_MAX", 2)
        monkeypatch.setattr(selects, "_ROWS_LEFT_OUT_MAX", 150)
        monkeypatch.setattr(row_numbers, "ROWS_MAX", 60)
        monkeypatch.setattr(row_numbers, "BY_VALUE_MIN", 1)
        monkeypatch.setattr(row_numbers, "FILES_MAX", 3)
    return str(request.param)


def rows_of(chance: Random, low: int, count: int, repeats: bool) -> list[Row]:
    keys = [low + (chance.randrange(count) if repeats else k) for k in range(count)]
    return [
        {
            "k": k,
            "s": chance.choice("ab"),
            "v": chance.choice([None, *range(20)]),
            "x": chance.choice(NUMBERS),
            "n": chance.randrange(1_000_000),
        }
        for k in keys
    ]


def where_of(chance: Random) -> dict[str, Any]:
    k, s, v, x = chance.randrange(200), chance.choice("ab"), chance.randrange(20), chance.choice(NUMBERS)
    few: list[dict[str, Any]] = [
        {"k": k},
        {"k": k, "s": s},
        {"k": [k, k + 7, *range(k + 20, 200, 13)]},
        {"k": dm.Range(k, k + 6)},
        {"k": dm.Range(k, k + 40), "v": v},
        {"v": v, "s": s},
        {"x": x, "v": [v, None]},
        {"n": dm.Range(v * 50_000, v * 50_000 + 3_000)},
    ]
    return chance.choice(few)


@pytest.mark.parametrize(
    ("limits", "repeats"),
    [
        ("tiny", True),
        pytest.param("as they are", False, marks=pytest.mark.slow),
        pytest.param("as they are", True, marks=pytest.mark.slow),
        pytest.param("tiny", False, marks=pytest.mark.slow),
    ],
    indirect=["limits"],
)
def test_readers_agree_with_a_list_of_rows(instance: Instance, limits: str, repeats: bool) -> None:
    chance, rows = Random(1), list[Row]()
    table = instance.create_table("t", SCHEMA)
    moments: list[tuple[Any, list[str]]] = []

    def load(low: int, count: int) -> None:
        made = rows_of(chance, low, count, repeats)
        table.ingest(pa.Table.from_pylist(made, ARROW), engine="local")
        rows.extend(made)

    def delete(count: int) -> None:
        for _ in range(count):
            where = where_of(chance)
            table.delete(where)
            rows[:] = [row for row in rows if not is_of(where, row)]

    for low in (0, 60, 120, 100):
        load(low, 60 if low < 120 else 40)
    for step in range(4):
        delete(6)
        check(instance, table, rows, chance)
        check(instance, table, rows, chance)
        moments.append((table.history.record_cut(), listed(rows)))
        if step == 0:
            load(30, 50)
        if step == 1:
            table.add_column(dm.Field("later", dm.LONG, nullable=True))
        if step == 1:
            table.rename_column("v", "w")
            table.rename_column("w", "v")
        if step == 2:
            where = {"k": dm.Range(90, 110)}
            moments.clear()  # they may have expired
            table.erase(where, engine="local", wait_seconds=0.0)
            rows[:] = [row for row in rows if not is_of(where, row)]
    for when, expected in chance.sample(moments, len(moments)):
        assert listed(table.query(as_of=when).read_all().to_pylist()) == expected
        assert listed(instance.sql("select * from t", as_of=when).read_all().to_pylist()) == expected
    table.compact(engine="local")
    check(instance, table, rows, chance)


def check(instance: Instance, table: Table, rows: list[Row], chance: Random) -> None:
    names = list(SCHEMA.names)
    k, v = chance.randrange(200), chance.randrange(20)
    for where, condition in (
        (None, "true"),
        ({"k": k}, f"k = {k}"),
        ({"k": dm.Range(k, k + 50)}, f"k >= {k} and k < {k + 50}"),
        ({"v": v}, f"v = {v}"),
    ):
        expected = [row for row in rows if where is None or is_of(where, row)]
        assert listed(table.query(where, names).read_all().to_pylist()) == listed(expected)
        told = instance.sql(f"select {', '.join(names)} from t where {condition}").read_all()
        assert listed(told.to_pylist()) == listed(expected)
        assert table.query(where, ["n"]).read_all().num_rows == len(expected)
    found = instance.sql("select count(*), count(v), sum(n) from t").read_all().to_pylist()[0]
    assert list(found.values()) == [
        len(rows),
        sum(row["v"] is not None for row in rows),
        sum(row["n"] for row in rows) if rows else None,
    ]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets an item for each file that is read to find rows: the number of deletions."""
    found: list[int] = []
    read = row_numbers.Finder._read

    def counted(self: Any, scan: Any, deletions: Any) -> Any:
        found.append(len(deletions))
        return read(self, scan, deletions)

    monkeypatch.setattr(row_numbers.Finder, "_read", counted)
    return found


def filled(instance: Instance, count: int = 100, **properties: Any) -> Table:
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(**properties))
    made = [{"k": k, "s": "a", "v": k % 7, "x": None, "n": k} for k in range(count)]
    table.ingest(pa.Table.from_pylist(made, ARROW), engine="local")
    return table


def numbers(instance: Instance, table: Table) -> list[int]:
    """Returns the sorted values of `n`, after checking that SQL and batches return the same."""
    found = table.query(None, ["n"]).read_all()["n"].combine_chunks().sort()
    assert instance.sql("select n from t").read_all()["n"].combine_chunks().sort() == found
    return list(found.to_pylist())


def test_a_file_is_read_once_for_each_deletion(instance: Instance, reads: list[int]) -> None:
    table = filled(instance)
    for k in range(5):
        table.delete({"k": k})
    assert numbers(instance, table) == list(range(5, 100))
    assert numbers(instance, table) == list(range(5, 100))
    assert reads == [5]
    table.delete({"k": 50})
    assert 50 not in numbers(instance, table)
    assert reads == [5, 1]
    table.delete({"n": 60})
    table.delete({"k": 61})
    assert len(numbers(instance, table)) == 92
    assert reads == [5, 1, 1, 1]


@pytest.mark.parametrize("bytes_max", [gone_rows.KEY_BYTES_MAX, 100_000])
def test_many_rows_are_left_out_by_number_as_long_as_their_keys_fit(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    monkeypatch.setattr(gone_rows, "KEY_BYTES_MAX", bytes_max)
    row_numbers.KNOWN.clear()
    table = instance.create_table("t", dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("n", dm.LONG)]))
    table.ingest(pa.table({"k": range(300_000), "n": range(300_000)}), engine="local")
    table.delete(dm.sql("n < 299990 and n % 1000 > 0"))
    assert len(numbers(instance, table)) == 310
    [known] = [one.rows for some in row_numbers.KNOWN._files.values() for one in some]
    assert (known is None) == (bytes_max == 100_000)


def test_look_ups_beside_deletions_by_values_read_pages(instance: Instance, reads: list[int]) -> None:
    table = filled(instance)
    for n in range(10):
        table.delete({"n": n})
    for k in (3, 30):
        assert table.query({"k": k}, ["n"]).read_all()["n"].to_pylist() == [30] * (k == 30)
    assert reads == [10]


def test_a_look_up_returns_the_other_rows_of_a_key(instance: Instance) -> None:
    table = instance.create_table("t", SCHEMA)
    made = [{"k": k // 2, "s": "a", "v": 0, "x": None, "n": k} for k in range(40)]
    table.ingest(pa.Table.from_pylist(made, ARROW), engine="local")
    for n in range(0, 30, 3):
        table.delete({"n": n})
    assert numbers(instance, table) == [n for n in range(40) if n >= 30 or n % 3]
    assert [table.query({"k": k}, ["n"]).read_all()["n"].to_pylist() for k in (0, 1, 18)] == [
        [1],
        [2],
        [36, 37],
    ]


def test_a_query_with_a_limit_reads_no_file_to_find_rows(instance: Instance, reads: list[int]) -> None:
    table = filled(instance)
    table.delete({"k": 1})
    assert table.head(3)["n"].to_pylist() == [0, 2, 3]
    assert not reads


def test_an_update_tests_few_deletions_without_reading_files_before(
    instance: Instance, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, of = list[str](), selects.Select.of

    def noted(self: selects.Select, scans: Any) -> str:
        texts.append(of(self, scans))
        return texts[-1]

    monkeypatch.setattr(selects.Select, "of", noted)
    table = filled(instance, inline_bytes_max=0)
    table.delete({"n": 1})
    assert table.update({"v": 1}, {"v": 8}).rows == 14
    assert table.update({"v": [1, 8]}, {"v": 9}).rows == 14
    assert not reads
    assert [one.count("read_parquet") for one in texts] == [1, 1], "one scan, though deletions differ"
    for n in range(2, 18):
        table.delete({"n": n})
    assert not reads
    assert table.update({"v": 9}, {"v": 10}).rows == 12
    assert reads
    assert numbers(instance, table) == [0, *range(18, 100)]


def test_rows_of_a_replaced_file_are_found_again(instance: Instance, tmp_path: Path) -> None:
    table = filled(instance)
    table.delete({"k": 1})
    assert len(numbers(instance, table)) == 99
    path = only_file(tmp_path)
    before = len(row_numbers.KNOWN._files)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert len(numbers(instance, table)) == 99
    assert len(row_numbers.KNOWN._files) == before + 1


@pytest.mark.parametrize("name", ["file_row_number", "FILE_INDEX"])
def test_columns_may_have_the_names_of_virtual_ones(instance: Instance, name: str) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field(name, dm.LONG)])
    table = instance.create_table("t", schema)
    kinds = pa.schema([pa.field(one, pa.int64(), nullable=False) for one in ("k", name)])
    table.ingest(pa.table({"k": range(10), name: range(9, -1, -1)}, schema=kinds), engine="local")
    table.delete({"k": 3})
    table.delete({name: 7})
    found = instance.sql(f'select "{name}" as n from t order by 1').read_all()["n"].to_pylist()
    assert found == [0, 1, 2, 3, 4, 5, 8, 9]


def test_a_deletion_while_a_query_runs_does_not_change_its_rows(instance: Instance) -> None:
    table = filled(instance, 200_000)
    table.delete({"k": 1})
    reader = table.query(None, ["n"])
    first = reader.read_next_batch()
    table.delete({"k": dm.Range(100_000, 150_000)})
    assert len(numbers(instance, table)) == 149_999
    assert first.num_rows + reader.read_all().num_rows == 199_999


def test_deletions_of_widened_columns_are_found_by_their_present_values(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("f", dm.FLOAT, nullable=True)])
    table = instance.create_table("t", schema)
    kinds = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("f", pa.float32())])

    def rows() -> list[tuple[int, float]]:
        found = instance.sql("select k, f from t").read_all()
        assert found.to_pylist() == table.query().read_all().to_pylist()
        return [tuple(row.values()) for row in found.to_pylist()]

    table.ingest(pa.table({"k": range(4), "f": [0.1, 0.5, None, 2.0]}, schema=kinds), engine="local")
    table.delete({"f": 0.1})
    at_first = rows()
    assert [k for k, _ in at_first] == [1, 2, 3]
    table.widen_column("f", dm.DOUBLE)
    assert rows() == at_first
    table.delete({"k": 3})
    assert rows() == [row for row in at_first if row[0] != 3]


@pytest.mark.few(1)
@pytest.mark.parametrize("each", [7_000, 1])
def test_row_groups_that_share_a_key_are_read_together(
    instance: Instance, reads: list[int], tmp_path: Path, each: int
) -> None:
    """The same key ends one row group and begins the next, if each key has 7,000 rows."""
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(row_group_bytes=64 * 1024))
    count = 300_000
    columns = {"k": [n // each for n in range(count)], "s": ["a"] * count, "n": range(count)}
    nothing = {"v": [None] * count, "x": [None] * count}
    table.ingest(pa.table({**columns, **nothing}).select(ARROW.names).cast(ARROW), engine="local")
    metadata = pq.ParquetFile(only_file(tmp_path)).metadata
    starts = list(accumulate(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))[:-1]
    ends = [0, *starts[:2], *(start - 1 for start in starts[-2:]), count - 1]
    assert len(set(ends)) == 6
    for n in ends:
        table.delete({"k": n // each, "n": n})
        assert n not in numbers(instance, table)
    table.delete({"k": 19})
    left = [n for n in range(count) if n not in ends and n // each != 19]
    assert numbers(instance, table) == left
    assert reads == [1] * 7


def only_file(folder: Path) -> Path:
    [found] = folder.rglob("*.parquet")
    return found


def test_a_query_of_some_keys_uses_rows_that_a_query_of_all_keys_found(
    instance: Instance, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(instance)
    for k in range(60):
        table.delete({"k": k})
    assert len(numbers(instance, table)) == 40
    settled, left = row_numbers._File.settled, list[int]()

    def noted(self: Any) -> Any:
        scan = settled(self)
        left.append(len(scan.deletions))
        return scan

    monkeypatch.setattr(row_numbers._File, "settled", noted)
    for low in (0, 20, 40):
        expected = [k for k in range(low, low + 30) if k >= 60]
        where = {"k": dm.Range(low, low + 30)}
        assert table.query(where, ["n"]).read_all()["n"].to_pylist() == expected
        found = instance.sql(f"select n from t where k >= {low} and k < {low + 30} order by n").read_all()
        assert found["n"].to_pylist() == expected
    assert left == [0] * 6
    assert reads == [60]


def test_a_moment_before_a_deletion_does_not_use_its_rows(instance: Instance) -> None:
    table = filled(instance)
    table.delete({"k": 10})
    before = table.history.record_cut()
    table.delete({"k": 11})
    table.delete({"v": 5, "k": dm.Range(20, 100)})
    assert len(numbers(instance, table)) == 87
    for where, count in ((None, 99), ({"k": dm.Range(5, 50)}, 44), ({"k": 11}, 1), ({"k": 10}, 0)):
        assert table.query(where, as_of=before).read_all().num_rows == count
    assert instance.sql("select count(*) as n from t", as_of=before).read_all()["n"].to_pylist() == [99]


def test_a_batch_is_compared_with_few_of_many_keys_of_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, listed_of = list[int](), gone_rows._listed

    def noted(rows: pa.RecordBatch, names: Any) -> Iterator[tuple[Any, ...]]:
        compared.append(rows.num_rows)
        return listed_of(rows, names)

    monkeypatch.setattr(gone_rows, "_listed", noted)
    day, count = pa.repeat(pa.scalar(DAY), 10_000), 10_000
    rows = pa.record_batch([day, pa.array(range(count))], names=["day", "id"])
    keys = rows.filter(pa.array([n % 3 == 0 for n in range(count)]))
    found = gone_rows.found_in((rows.slice(at, 100) for at in range(0, count, 100)), keys, ["day", "id"])
    assert found.numbers.tolist() == list(range(0, count, 3))
    assert max(compared) <= 100
