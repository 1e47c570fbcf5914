"""Deletions that list rows: every reader leaves out the rows that are equal to a listed one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery, InvalidSchema, ObjectDamaged, ObjectNotFound
from tests.stored import query
from tests.support.api import Instance, Table
from tests.support.reading import arrow_schema, row_search
from tests.support.state import LAYOUTS
from tests.support.writing import listed_deletions
from tests.tiers import sampled

NAN = math.nan
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("s", dm.STRING)],
    [dm.Field("t", dm.TIMESTAMP)],
    [
        dm.Field("v", dm.INT, nullable=True),
        dm.Field("x", dm.DOUBLE, nullable=True),
        dm.Field("f", dm.FLOAT, nullable=True),
        dm.Field("c", dm.DECIMAL(12, 3), nullable=True),
        dm.Field("b", dm.BYTES, nullable=True),
        dm.Field("w", dm.STRING, nullable=True),
        dm.Field("z", dm.TIMESTAMP, nullable=True),
        dm.Field("o", dm.BOOLEAN, nullable=True),
        dm.Field("l", dm.LIST(dm.DOUBLE), nullable=True),
    ],
)
TIMES = [datetime(2026, 1, 1, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)]
VALUES: dict[str, list[Any]] = {
    "s": ["a", "é\0", "b" * 40],
    "t": TIMES,
    "v": [None, -1, 0, 7],
    "x": [None, NAN, 0.0, -0.0, 1.5],
    "f": [None, NAN, 0.0, -0.0, math.inf],
    "c": [None, Decimal("0.100"), Decimal("-1.500")],
    "b": [None, b"", b"\0", b"a"],
    "w": [None, "", "w" * 5_000],
    "z": [None, *TIMES],
    "o": [None, True, False],
    "l": [None, [], [NAN, None], [-0.0], [0.0]],
}
KEYS = ("k", "s", "t")
PROPERTIES = dm.TableProperties(
    compaction_strategy="basic", compaction_batch_files=2, split_threshold_rows=60, split_min_rows=20
)
Row = dict[str, Any]


def rows_of(chance: Random, number: int) -> list[Row]:
    """Returns rows of few keys, some of which are equal."""
    found = [
        {"k": chance.randrange(12)} | {name: chance.choice(some) for name, some in VALUES.items()}
        for _ in range(number)
    ]
    return [*found, *chance.sample(found, number // 4)]


def plain(value: Any) -> Any:
    """Returns a value in a form that is equal for the values that a deletion takes for equal."""
    if isinstance(value, list):
        return tuple(map(plain, value))
    return "NaN" if value != value else value + 0.0 if isinstance(value, float) else value


def place(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(plain(row[name]) for name in names)


def seen(rows: Any) -> list[str]:
    """Returns rows in an order of their own, as exact texts."""
    return sorted(repr([(name, exact(row[name])) for name in sorted(row)]) for row in rows)


def exact(value: Any) -> Any:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value


def data(rows: Sequence[Row], schema: dm.Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=arrow_schema(schema))


def listed(table: Table, rows: Sequence[Row], names: Sequence[str]) -> int:
    """Deletes rows that are equal to one of `rows` in the named columns; returns the number of deletions."""
    context = table.context.followed()
    batches = data(rows, context.schema).select(list(names)).to_batches(max_chunksize=7)
    made = listed_deletions.deletions_of_rows(context, iter(batches))
    for deletion in made:
        context.deletions.record(deletion)
    return len(made)


class Model:
    """A table, and a list of the rows that it should have."""

    def __init__(self, instance: Instance, layout: str = "file_table", name: str = "t") -> None:
        self.instance = instance
        self.table = instance.create_table(name, SCHEMA, layout=layout, properties=PROPERTIES)
        self.rows: list[Row] = []

    def ingest(self, rows: list[Row]) -> None:
        self.table.ingest(data(rows))
        self.rows += rows

    def delete(self, rows: Sequence[Row], names: Sequence[str]) -> None:
        assert listed(self.table, rows, names)
        gone = {place(row, names) for row in rows}
        self.rows = [row for row in self.rows if place(row, names) not in gone]

    def check(self) -> None:
        """Checks every reader."""
        expected = seen(self.rows)
        name = self.table.name
        assert seen(self.table.query().read_all().to_pylist()) == expected
        assert seen(self.instance.sql(f"select * from {name}").read_all().to_pylist()) == expected
        with self.instance.duckdb() as opened:
            opened.execute("set timezone = 'UTC'")
            assert seen(opened.execute(f"select * from {name}").to_arrow_table().to_pylist()) == expected
        for k in range(12):
            of_key = [row for row in self.rows if row["k"] == k]
            assert seen(self.table.query({"k": k}).read_all().to_pylist()) == seen(of_key)
            for s in VALUES["s"]:
                found = self.table.query({"k": k, "s": s}).read_all().to_pylist()
                assert seen(found) == seen(row for row in of_key if row["s"] == s)
        assert self.table.query(limit=10_000).read_all().num_rows == len(expected)
        [first] = self.instance.sql(f"select count(*) as n, count(x) as x from {name}").read_all().to_pylist()
        assert first == {"n": len(expected), "x": sum(row["x"] is not None for row in self.rows)}
        [few] = (
            self.instance.sql(f"select count(*) as n from {name} where k = 3 and v = 7")
            .read_all()
            .to_pylist()
        )
        assert few["n"] == sum((row["k"], row["v"]) == (3, 7) for row in self.rows)


def names_of(chance: Random) -> list[str]:
    """Returns the keys and maybe other columns, in any order."""
    names = [
        *KEYS,
        *chance.sample([name for name in VALUES if name not in KEYS], chance.choice([0, 1, 2, 4])),
    ]
    return chance.sample(names, len(names))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reader_leaves_out_listed_rows(instance: Instance, layout: str) -> None:
    chance, model = Random(layout), Model(instance, layout)
    cuts: list[tuple[Any, list[Row]]] = []
    for step in range(5):
        model.ingest(rows_of(chance, 60))
        model.ingest(rows_of(chance, 5))  # inlined
        cuts.append((model.table.history.record_cut(f"before {step}"), list(model.rows)))
        gone = [*chance.sample(model.rows, 15), *rows_of(chance, 10)]
        model.delete(gone, names_of(chance))
        cuts.append((model.table.history.record_cut(f"after {step}"), list(model.rows)))
        model.ingest(gone[:3])
        model.check()
        if step % 2:
            model.table.split()
            model.check()
            assert not model.table.compact(engine="local").errors
            model.check()
            model.table.collect_garbage()
        elif step == 2:
            leaves = model.table.partitions.leaves()
            assert len(leaves) > 1
            model.table.partitions.merge([leaf.partition_id for leaf in leaves])
            model.check()
    model.table.convert_layout(LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)])
    model.check()
    for cut, rows in cuts:
        assert seen(model.table.query(as_of=cut).read_all().to_pylist()) == seen(rows)
    for (first, before), (last, after) in pairwise(cuts):
        left = seen(before)
        for change in model.table.changes(first, last).read_all().to_pylist():
            kind, [row] = change.pop("_change"), seen([change])
            left.append(row) if kind == "insert" else left.remove(row)
        assert sorted(left) == seen(after)
    for cut, rows in (cuts[3], cuts[-1], cuts[0]):
        model.table.restore(to=cut)
        model.rows = list(rows)
        model.check()


def test_values_are_equal_as_in_sql(instance: Instance) -> None:
    model = Model(instance)
    one = {"k": 1, "s": "a", "t": TIMES[0], **dict.fromkeys(["v", "f", "c", "b", "w", "z", "o", "l"])}
    model.ingest(
        [one | {"x": x, "l": some} for x in (None, NAN, -0.0, 0.0, 1.0) for some in ([NAN], [-0.0], None)]
    )
    model.delete(
        [one | {"x": 0.0, "l": [0.0]}, one | {"x": NAN, "l": [NAN]}, one | {"x": None}], [*KEYS, "x", "l"]
    )
    left = model.table.query(columns=["x", "l"]).read_all().to_pylist()
    assert len(left) == 15 - 4, "-0.0 and 0.0 with [-0.0], NaN with [NaN], null with null"
    model.check()
    model.table.compact(full=True, engine="local")
    model.check()


@pytest.mark.parametrize("inline_bytes_max", [0, 65_536])
def test_look_ups_in_pages_leave_out_listed_rows(instance: Instance, inline_bytes_max: int) -> None:
    values = [dm.Field("x", dm.DOUBLE, nullable=True), dm.Field("v", dm.LONG, nullable=True)]
    schema = dm.Schema([dm.Field("k", dm.LONG), dm.Field("s", dm.STRING)], values=values)
    properties = dm.TableProperties(inline_bytes_max=inline_bytes_max)
    table = instance.create_table("t", schema, properties=properties)
    chance, model = Random(1), list[Row]()
    for low in (0, 10):
        rows = [
            {
                "k": low + n % 10,
                "s": "ab"[n % 2],
                "x": chance.choice(VALUES["x"]),
                "v": chance.choice(VALUES["v"]),
            }
            for n in range(120)
        ]
        table.ingest(data(rows, schema))
        model += rows
    for names in (["k", "s", "x"], ["s", "v", "k", "x"]):
        gone = chance.sample(model, 60)
        assert listed(table, gone, names) == 1
        keys = {place(row, names) for row in gone}
        model = [row for row in model if place(row, names) not in keys]
        for k in sampled(range(20), 6):
            for s in "ab":
                found = table.query({"k": k, "s": s}).read_all().to_pylist()
                assert seen(found) == seen(row for row in model if (row["k"], row["s"]) == (k, s))


def test_listed_rows_of_some_keys_stay_in_files_of_other_keys(instance: Instance) -> None:
    """The deletion has the bounds of its rows, so a file outside them is not read for it."""
    model = Model(instance)
    model.ingest([row | {"k": row["k"] + 100} for row in rows_of(Random(1), 30)])
    model.ingest(rows_of(Random(2), 30))
    gone = model.rows[40:50]
    model.delete(gone, KEYS)
    [one] = model.table.deletions()
    keys = [row["k"] for row in gone]
    condition = json.loads(one.condition)
    [bounds] = condition["k"]
    assert (bounds["min"], bounds["max"], bounds["max_inclusive"]) == (min(keys), max(keys), True)
    assert condition["__rows"]["count"] == len({place(row, KEYS) for row in gone})
    assert (condition["__rows"]["columns"], one.by_values) == ([*KEYS], False)
    model.check()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_are_listed_by_few_deletions(
    instance: Instance, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_deletions, "ROWS_MAX", 40_000)
    monkeypatch.setattr(listed_deletions, "_PIECE_ROWS", 10_000)
    monkeypatch.setattr(listed_deletions, "SORTED_BYTES", 1 << 20)
    schema = dm.Schema([dm.Field("k", dm.LONG)], [dm.Field("t", dm.LONG)], [dm.Field("v", dm.STRING)])
    table = instance.create_table("t", schema, layout=layout)
    keys = pa.array(range(300_000))
    rows = pa.table({"k": keys, "t": pa.array([k % 3 for k in range(300_000)]), "v": keys.cast(pa.string())})
    table.ingest(rows)
    gone = [k for k in range(300_000) if k % 3 == 1]
    Random(1).shuffle(gone)
    batch = rows.take(pa.array([*gone, *gone[:50_000]]))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from batch.to_batches(max_chunksize=10_000)

    for names, expected in ((["t", "k"], 200_000), (["k", "t", "v"], 200_000)):
        made = listed_deletions.deletions_of_rows(table.context, (one.select(names) for one in batches()))
        assert len(made) in (3, 4)
        ends = sorted((one.bounds.min_keys[0], one.bounds.max_keys[0]) for one in made)
        assert all(before[1] < after[0] for before, after in pairwise(ends)), "by key"
        for one in made:
            table.context.deletions.record(one)
        for _ in range(2):
            assert instance.sql("select count(*) from t").read_all().to_pylist() == [
                {"count_star()": expected}
            ]
            assert set(table.query(columns=["t"]).read_all()["t"].to_pylist()) == {0, 2}
        assert table.query({"k": dm.Range(7, 12)}).read_all()["k"].to_pylist() == [8, 9, 11]
        table.compact(full=True, engine="local")
        assert table.query().read_all().num_rows == expected
        table.ingest(rows.filter(pa.compute.equal(rows["t"], 1)))
        assert table.query().read_all().num_rows == 300_000


def test_no_rows_and_few_rows_need_no_file(instance: Instance) -> None:
    model = Model(instance)
    model.ingest(rows_of(Random(3), 60))
    assert listed(model.table, [], KEYS) == 0
    plain_ones = [row for row in model.rows if row["l"] is None and not row["w"]]
    model.delete([plain_ones[0]] * 3, [name for name in SCHEMA.names if name != "l"])
    schema = dm.Schema([dm.Field("k", dm.LONG)])
    single = instance.create_table("single", schema)
    single.ingest(pa.table({"k": range(2_000)}))
    assert listed(single, [{"k": k} for k in range(100)], ["k"]) == 1
    assert query(instance._supplier, "select count(*) from deletion_content") == [(0,)]
    assert listed(single, [{"k": k} for k in range(1_500)], ["k"]) == 1
    assert query(instance._supplier, "select count(*) from deletion_content") == [(1,)]
    assert single.query().read_all()["k"].to_pylist() == list(range(1_500, 2_000))
    model.check()


def test_a_deletion_follows_the_names_and_types_of_columns(instance: Instance) -> None:
    model = Model(instance)
    model.ingest(rows_of(Random(4), 60))
    names = [*KEYS, "v", "f"]
    gone = model.rows[:20]
    model.delete(gone, names)
    cut = model.table.history.record_cut("before")
    before = list(model.rows)
    table = model.table
    with pytest.raises(InvalidSchema, match="'v' of table 't' is used by pending deletion 1"):
        table.drop_column("v")
    table.rename_column("k", "key")
    table.rename_column("v", "k")
    table.widen_column("k", dm.LONG)
    table.widen_column("f", dm.DOUBLE)
    table.add_column(dm.Field("n", dm.LONG), default=5)
    # rows of files that lack the new column have its default
    left = [dict(zip(table.schema.names, [*row.values(), 5], strict=True)) for row in before]
    assert seen(table.query().read_all().to_pylist()) == seen(left)
    assert seen(instance.sql("select * from t").read_all().to_pylist()) == seen(left)
    assert seen(table.query(as_of=cut).read_all().to_pylist()) == seen(before)
    more = [left[0], left[1] | {"n": 6}, left[2]]
    assert listed(table, more, ["key", "s", "t", "k", "n"]) == 1
    gone_too = {place(row, ["key", "s", "t", "k", "n"]) for row in more}
    left = [row for row in left if place(row, ["key", "s", "t", "k", "n"]) not in gone_too]
    assert len(left) < len(before)
    for _ in range(2):
        assert seen(table.query().read_all().to_pylist()) == seen(left)
        assert seen(instance.sql("select * from t").read_all().to_pylist()) == seen(left)
        assert not table.compact(full=True, engine="local").errors
    table.collect_garbage()
    table.drop_column("k")
    assert table.query().read_all().num_rows == len(left)


def test_listed_rows_are_forgotten_with_their_deletion(instance: Instance) -> None:
    properties = PROPERTIES.model_copy(update={"gc_delay_seconds": 0, "history_retention_seconds": 0})
    model = Model(instance)
    model.table.set_properties(**properties.model_dump())
    model.ingest(rows_of(Random(5), 30))
    model.delete(model.rows[:5], [*KEYS, "x"])
    model.table.compact(full=True, engine="local")
    model.table.collect_garbage()
    assert model.table.deletions() == []
    query(instance._supplier, "update deletion set retired_at = '2000-01-01' returning 1")
    model.table.collect_garbage()
    kept = "select count(*) from deletion_content"
    assert query(instance._supplier, kept) == [(1,)], "the last number is kept, with its rows"
    model.delete(model.rows[:5], [*KEYS, "x"])
    model.table.collect_garbage()
    assert query(instance._supplier, kept) == [(1,)]
    model.check()
    instance.drop_table("t")
    assert query(instance._supplier, kept) == [(0,)]


def test_a_table_of_the_same_name_has_its_own_listed_rows(instance: Instance) -> None:
    for number in range(2):
        model = Model(instance)
        model.ingest(rows_of(Random(6), 40))
        for start in (10 * number, 20 + 10 * number):
            model.delete(model.rows[start : start + 10], [*KEYS, "x"])
        assert [one.deletion_id for one in model.table.deletions()] == [1, 2]
        model.check()
        instance.drop_table("t")


def test_damaged_or_lost_rows_are_reported(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(instance)
    model.ingest(rows_of(Random(7), 40))
    assert listed(model.table, model.rows[:10], [*KEYS, "x"])
    [(content,)] = query(instance._supplier, "select content from deletion_content")
    other = bytes(content[:-30]) + bytes([content[-30] ^ 1]) + bytes(content[-29:])
    with instance._supplier.connection() as conn:
        conn.execute("update deletion_content set content = %s", [other])
    with pytest.raises(ObjectDamaged, match="in the database differs from the rows that were deleted"):
        model.table.query().read_all()
    with instance._supplier.connection() as conn:
        conn.execute("delete from deletion_content")
    model.table.context.inlined._known.forget([*model.table.context.inlined._known._memory])
    with pytest.raises(ObjectNotFound, match="rows"):
        model.table.query().read_all()


def test_a_table_with_one_row_a_key_or_with_merged_rows_refuses(instance: Instance) -> None:
    keyed = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
    kept = instance.create_table("kept", keyed, properties=dm.TableProperties(keep="newest_row"))
    with pytest.raises(InvalidQuery, match="keeps one row of each key"):
        listed(kept, [{"k": 1, "v": 1}, {"k": 2, "v": 2}], ["k"])
    schema = dm.Schema([dm.Field("k", dm.LONG)], [dm.Field("t", dm.LONG)], [dm.Field("v", dm.LONG)])
    merged = instance.create_table("merged", schema, properties=dm.TableProperties(aggregate="sum(v)"))
    rows = [{"k": k, "t": t, "v": 1} for k in range(4) for t in range(3)] * 2
    merged.ingest(data(rows, schema))
    with pytest.raises(InvalidQuery, match="delete by row keys and sort keys"):
        listed(merged, rows, ["k", "t", "v"])
    assert listed(merged, rows[:4], ["k", "t"]) == 1
    found = merged.query().read_all().to_pylist()
    assert found == [{"k": k, "t": t, "v": 2} for k, t in [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]] + [
        {"k": 3, "t": t, "v": 2} for t in range(3)
    ]
    with pytest.raises(InvalidQuery, match="lack the key 't'"):
        listed(merged, rows, ["k"])


def test_files_for_other_readers_are_refused_until_a_compaction(instance: Instance) -> None:
    model = Model(instance)
    for number in range(2):
        model.ingest([row | {"l": None} for row in rows_of(Random(number), 2_000)])
    model.delete(model.rows[:10], [*KEYS, "x"])
    with pytest.raises(InvalidQuery, match="deletion 1 of table 't' lists rows, maybe of file"):
        model.table.live_files()
    model.table.compact(full=True, engine="local")
    assert model.table.live_files()


@pytest.mark.slow
def test_a_restored_backup_has_the_listed_rows(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        model = Model(instance)
        model.ingest(rows_of(Random(9), 60))
        model.delete(model.rows[:20], [*KEYS, "x"])
        instance.backup(tmp_path / "backups")
    (tmp_path / "new").mkdir()
    dm.restore(tmp_path / "backups", tmp_path / "new")
    row_search.KNOWN.__init__()  # type: ignore[misc]
    with dm.local(tmp_path / "new") as instance:
        model.instance, model.table = instance, instance.table("t")
        model.check()
        assert not instance.check().problems
        model.table.compact(full=True, engine="local")
        model.check()


@pytest.mark.slow
def test_spark_leaves_out_listed_rows(instance: Instance, spark: Any) -> None:
    from dormouse.spark import frames

    model = Model(instance)
    for number in range(3):
        model.ingest(rows_of(Random(number), 600))
    model.delete(model.rows[:100], [*KEYS, "x", "w"])
    found = frames.read(spark, model.table, columns=["k", "s", "v", "w"]).collect()
    names = ["k", "s", "v", "w"]
    assert seen(row.asDict() for row in found) == seen(
        {name: row[name] for name in names} for row in model.rows
    )
    report = model.table.compact(full=True, engine="spark")
    assert not report.errors
    model.check()
