"""Published sequences of small inserts, updates and deletes around flushes, compactions and schema changes.

In other systems, each sequence returned wrong rows, or none, because small inserts had a storage of their own
or a flush rewrote the past. Here each runs on files in PostgreSQL and on objects. After each step, all ways
to read return the same rows, also for all earlier moments.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from tests.stored import at_once
from tests.support.api import Instance, Table
from tests.support.reading import arrow_schema
from tests.tiers import by_tier, sampled

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG, nullable=True)])
INLINED = {"inlined": {"inline_bytes_max": 65_536}, "objects": {"inline_bytes_max": 0}}
Row = tuple[Any, ...]
NewTable = Callable[..., "Sequence"]


class Sequence:
    """A table with the rows that it should have now, and those that it had at earlier moments."""

    def __init__(self, instance: Instance, table: Table) -> None:
        self.instance, self.table = instance, table
        self.rows: list[Row] = []
        self._moments: list[tuple[dm.Cut, list[Row]]] = []

    @property
    def is_keyed(self) -> bool:
        return self.table.properties.keep == "newest_row"

    def add(self, *rows: Row) -> None:
        """Adds rows, each of (k, v), in one commit."""
        given = pa.table({"k": [row[0] for row in rows], "v": pa.array([row[1] for row in rows], pa.int64())})
        self.table.ingest(given)
        kept = {row[0] for row in rows} if self.is_keyed else set()
        self.expect([row for row in self.rows if row[0] not in kept] + list(rows))

    def delete(self, **where: Any) -> None:
        self.table.delete(where)
        names = ["k", "v"]
        self.expect(
            [row for row in self.rows if any(row[names.index(n)] != value for n, value in where.items())]
        )

    def expect(self, rows: list[Row]) -> None:
        """Checks the present rows and those of all earlier moments, and remembers this moment."""
        self.rows = sorted(rows, key=repr)
        self._moments.append((self.table.history.record_cut(), self.rows))
        self.check()

    def flush(self) -> None:
        """Merges all files of each leaf into one, and checks that no answer has changed."""
        self.table.compact(full=True, engine="local")
        self.check()

    def check(self) -> None:
        name = self.table.name
        assert read(self.table.query()) == self.rows
        assert read(self.instance.sql(f"select * from {name}")) == self.rows
        assert self.table.count() == len(self.rows)
        assert self.instance.sql(f"select count(*) from {name}").read_all().to_pydict() == {
            "count_star()": [len(self.rows)]
        }
        for key in {row[0] for row in self.rows}:
            assert read(self.table.query({"k": key})) == [row for row in self.rows if row[0] == key]
        for cut, rows in sampled(self._moments, 3):
            assert read(self.table.query(as_of=cut)) == rows
            assert self.table.count(as_of=cut) == len(rows)


def read(answer: Any) -> list[Row]:
    return sorted((tuple(row.values()) for row in answer.read_all().to_pylist()), key=repr)


@pytest.fixture(params=["inlined", pytest.param("objects", marks=pytest.mark.slow)])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return INLINED[request.param]


@pytest.fixture
def new(instance: Instance, options: dict[str, Any]) -> NewTable:
    def create(name: str = "t", points: Any = (), **properties: Any) -> Sequence:
        given = dm.TableProperties(**{**options, **properties})
        return Sequence(instance, instance.create_table(name, SCHEMA, split_points=points, properties=given))

    return create


def test_a_flush_keeps_the_moments_before_a_delete(new: NewTable) -> None:
    t = new()
    t.add((1, 1), (2, 2), (3, 3))
    t.delete(k=2)
    t.flush()


@pytest.mark.slow
def test_deletes_by_value_between_small_inserts_of_equal_rows(new: NewTable) -> None:
    t = new()
    t.add((1, 1), (2, 1), (3, 1), (1, 1), (2, 1), (3, 1), (5, 1), (6, 1))
    for key in (2, 1, 5, 6):
        t.delete(k=key)
    t.add((1, 1))
    t.flush()
    t.delete(k=1, v=1)


def test_rows_in_objects_and_in_small_files_are_deleted_while_the_limit_changes(new: NewTable) -> None:
    t = new(inline_bytes_max=0)
    t.add(*((n, n) for n in range(10)))
    for number, limit in enumerate((65_536, 0, 65_536)):
        t.delete(k=number)
        t.table.set_properties(inline_bytes_max=limit)
        t.add((number, -number))
        t.delete(k=number + 5)
    t.flush()


@pytest.mark.few(1)
@pytest.mark.parametrize("points", [(3,), ()], ids=["two leaves", "one leaf"])
def test_the_last_of_several_upserts_of_a_key_survives_a_flush(new: NewTable, points: Any) -> None:
    t = new(points=points, keep="newest_row")
    t.add((1, 100), (2, 200), (3, 300), (4, 400))
    for version in (1, 2, 3):
        t.add((1, 100 + version))
        t.add((2, 200 + version), (4, 400 + version))
    t.flush()
    t.add((1, 0))


@pytest.mark.slow
def test_a_small_upsert_replaces_a_row_of_an_object(new: NewTable) -> None:
    t = new(keep="newest_row", inline_bytes_max=0)
    t.add((1, 1), (2, 2))
    t.table.set_properties(inline_bytes_max=65_536)
    t.add((1, 11))
    t.add((2, None))
    t.flush()


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", ["newest_row", "every_row"])
def test_the_same_key_is_deleted_and_added_again_between_flushes(new: NewTable, keep: str) -> None:
    t = new(keep=keep)
    for number in range(by_tier(2, 4)):
        t.add((1, number), (2, number))
        t.delete(k=1)
        t.add((1, -number))
        if number % 2:
            t.flush()
        t.delete(k=2)
    t.flush()


@pytest.mark.slow
def test_moments_before_a_rewrite_stay_when_later_small_files_are_flushed(new: NewTable) -> None:
    t = new()
    for number in range(3):
        t.add((number, number), (number + 10, number))
        t.delete(k=number)
    t.flush()
    for number in range(3):
        t.add((number, -number))
        t.delete(k=number + 10)
    t.flush()


@pytest.mark.slow
def test_a_delete_reaches_equal_rows_in_several_flushed_files(new: NewTable) -> None:
    t = new()
    for value in (1, 2, 3):
        t.add((7, value), (value, value))
        t.flush()
    t.add((7, 4))
    t.delete(k=7)


def test_small_files_before_and_after_each_change_of_columns_are_read_and_flushed(
    instance: Instance, options: dict[str, Any], dsn: str
) -> None:
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(**options))
    expected: list[dict[str, Any]] = []

    def check() -> None:
        with dm.connect(dsn, instance.objects.url) as fresh:  # has none of the columns cached
            for one in (instance, fresh):
                names = one.table("t").schema.names
                wanted = [tuple(row.get(name) for name in names) for row in expected]
                assert read(one.table("t").query()) == sorted(wanted, key=repr)
                assert read(one.sql("select * from t")) == sorted(wanted, key=repr)

    def add(**row: Any) -> None:
        table.ingest([row])
        expected.append(row)
        check()

    add(k=1, v=1)
    table.add_column(dm.Field("w", dm.STRING), default="x")
    expected[0]["w"] = "x"
    check()
    assert (
        table.count({"w": "x"})
        == instance.sql("select count(*) from t where w = 'x'").read_all()[0][0].as_py()
    )
    add(k=2, v=None, w="y")
    table.add_column(dm.Field("i", dm.INT, nullable=True))
    add(k=3, v=3, w="z", i=7)
    table.widen_column("i", dm.LONG)
    add(k=4, v=4, w="z", i=2**40)
    table.drop_column("v")
    for row in expected:
        del row["v"]
    add(k=5, w="u", i=None)
    table.rename_column("w", "v")
    for row in expected:
        row["v"] = row.pop("w")
    add(k=6, v="t", i=1)
    table = instance.rename_table("t", "other")
    table = instance.rename_table("other", "t")
    table.compact(full=True, engine="local")
    check()


def test_a_reader_that_was_open_before_flushes_goes_on(new: NewTable, dsn: str) -> None:
    t = new(gc_delay_seconds=0, history_retention_seconds=0)
    t.table.ingest(pa.table({"k": range(3), "v": range(3)}))
    with dm.connect(dsn, t.instance.objects.url) as other:
        reader = other.table("t")
        for number in range(3, 8):
            stream = reader.query()
            t.table.compact(full=True, engine="local")
            t.table.ingest([{"k": number, "v": number}])
            assert [row[0] for row in read(stream)] == list(range(number))
            t.table.collect_garbage()
            assert [row[0] for row in read(reader.query())] == list(range(number + 1))
            assert reader.count() == number + 1


def test_inserts_beside_flushes_are_neither_lost_nor_repeated(new: NewTable) -> None:
    t = new(compaction_strategy="basic", compaction_batch_files=2)

    def insert(writer: int) -> None:
        for number in range(15):
            t.table.ingest([{"k": number, "v": writer}])

    def flush() -> None:
        for _ in range(10):
            t.table.compact(engine="local", full=True)

    works = [lambda writer=writer: insert(writer) for writer in range(2)]
    assert at_once(*works, flush) == [None] * 3
    t.expect([(number, writer) for number in range(15) for writer in range(2)])
    t.flush()


@pytest.mark.slow
def test_small_and_large_batches_of_two_instances_alternate(new: NewTable, dsn: str) -> None:
    t = new()
    with dm.connect(dsn, t.instance.objects.url) as other:
        tables = (t.table, other.table("t"))
        large, texts = 40_000, random.Random(1)
        expected: Counter[int] = Counter()
        for number in range(6):
            rows = large if number % 3 == 0 else 1
            values = [texts.randrange(1 << 60) for _ in range(rows)]
            tables[number % 2].ingest(pa.table({"k": [number] * rows, "v": values}))
            expected[number] = rows
        counts = "select k, count(*), count(distinct v) from t group by k"
        for _ in range(2):
            assert read(t.instance.sql(counts)) == [(k, n, n) for k, n in sorted(expected.items())]
            t.table.compact(full=True, engine="local")


def test_the_changes_have_rows_of_small_files_before_and_after_a_flush(new: NewTable) -> None:
    t = new()
    start = t.table.history.record_cut()
    t.add((1, 1), (2, 2), (3, 3))
    t.delete(k=2)
    feed = [("delete", 2, 2), ("insert", 1, 1), ("insert", 2, 2), ("insert", 3, 3)]
    for _ in range(2):
        rows = t.table.changes(start).read_all().to_pylist()
        assert sorted((row["_change"], row["k"], row["v"]) for row in rows) == feed
        t.flush()


def test_columns_may_have_the_names_of_the_storage(instance: Instance, options: dict[str, Any]) -> None:
    names = ["file_id", "content", "row_id", "begin_snapshot", "filename", "file_row_number"]
    schema = dm.Schema([dm.Field("table_id", dm.LONG)], values=[dm.Field(name, dm.STRING) for name in names])
    table = instance.create_table("t", schema, properties=dm.TableProperties(**options))
    table.ingest([{"table_id": 1, **{name: name for name in names}}])
    for _ in range(2):
        assert read(table.query()) == read(instance.sql("select * from t")) == [(1, *names)]
        table.compact(full=True, engine="local")


VALUES: dict[str, tuple[Any, list[Any]]] = {
    "text": (dm.STRING, ["", "a\0b", "'; drop table t; --", "€\U0001f41d", "{1,2}"]),
    "raw": (dm.BYTES, [b"", b"\0\xff", b"\\x00"]),
    "double": (dm.DOUBLE, [-0.0, 0.0, float("inf"), float("-inf"), 5e-324, 1 / 3]),
    "float": (dm.FLOAT, [-0.0, float("inf"), 16_777_216.0]),
    "number": (dm.DECIMAL(38, 3), [Decimal("5.000"), Decimal("-0.005"), Decimal("9" * 35 + ".999")]),
    "time": (
        dm.TIMESTAMP,
        [datetime(1, 1, 1, tzinfo=UTC), datetime(2026, 2, 28, 23, 59, 59, 999_999, tzinfo=UTC)],
    ),
    "day": (dm.DATE, [date(1, 1, 1), date(9999, 12, 31)]),
    "map": (dm.MAP(dm.STRING, dm.TIMESTAMP), [[("a", datetime(2026, 1, 1, tzinfo=UTC)), ("b", None)], []]),
    "list": (dm.LIST(dm.LONG), [[], [None, 1], [2**62]]),
    "struct": (
        dm.STRUCT(
            [dm.Field(name, kind, nullable=True) for name, kind in (("at", dm.TIMESTAMP), ("n", dm.INT))]
        ),
        [{"at": datetime(2026, 5, 13, 4, 56, 37, tzinfo=UTC), "n": None}],
    ),
}


def shown(value: Any) -> str:
    """Returns a value as text, in which -0.0 differs from 0.0, and time zones of one name are equal."""
    return re.sub(r"zoneinfo.ZoneInfo\(key='UTC'\)", "datetime.timezone.utc", repr(value))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", VALUES)
def test_values_of_each_type_are_kept_exactly(instance: Instance, options: dict[str, Any], kind: str) -> None:
    type_, values = VALUES[kind]
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", type_, nullable=True)])
    table = instance.create_table("t", schema, properties=dm.TableProperties(**options))
    values = [*values, None]
    for number, value in enumerate(values):
        table.ingest(pa.Table.from_pylist([{"k": number, "v": value}], arrow_schema(schema)))
    for _ in range(2):
        for rows in (table.query(), instance.sql("select * from t order by k")):
            assert list(map(shown, rows.read_all().column("v").to_pylist())) == list(map(shown, values))
        for number, value in enumerate(values):
            [row] = table.query({"k": number}).read_all().to_pylist()
            assert shown(row["v"]) == shown(value)
        table.compact(full=True, engine="local")
