"""Large groups of a plan are read in parts: the next part is made while one is used."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.reading import executor, group_parts
from dormouse.reading.planner import Scan
from tests.support.api import Instance
from tests.support.reading import arrow_schema, query

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("l", dm.LONG)], values=[dm.Field("n", dm.LONG, nullable=True)]
)


def rows_of(seed: int, count: int, spread: int = 900) -> pa.Table:
    """Returns rows with many equal keys, so that some parts begin between equal keys."""
    chance = random.Random(seed)
    numbers = range(count)
    rows = [
        {"k": chance.randrange(-spread, spread), "l": chance.randrange(20), "n": seed * count + n}
        for n in numbers
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(SCHEMA))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of parts of each group that is read."""
    found: list[int] = []
    divide = group_parts._parts

    def counted(*args: Any) -> Any:
        made: list[tuple[Scan, ...]] = list(divide(*args))
        found.append(len(made))
        return made

    monkeypatch.setattr(group_parts, "_parts", counted)
    monkeypatch.setattr(group_parts, "PART_ROWS", 300)
    monkeypatch.setattr(group_parts, "PART_BYTES_MIN", 0)
    return found


def undivided(context: Any, *args: Any, **more: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "divided", lambda groups, *_: groups)
        rows: list[Any] = query(context, *args, **more).read_all().to_pylist()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_parts_return_the_rows_of_the_whole_group(instance: Instance, parts: list[int], keep: str) -> None:
    table = instance.create_table(
        "parts", SCHEMA, split_points=[100], properties=dm.TableProperties(keep=keep)
    )
    for seed in range(3):
        (table.ingest if keep == "every_row" else table.upsert)(rows_of(seed, 2_500))
    table.delete({"k": dm.Range(-50, -20)})
    order = ["k", "l", "n"]
    for where in (
        None,
        {"k": dm.Range(-300, 500)},
        {"k": [dm.Range(-900, -500), dm.Range(-450, -440), dm.Range(300)], "l": dm.Range(5, 15)},
        {"k": 7},
        {"k": dm.Range(1_000)},
        {"l": 3, "n": dm.Range(0, 4_000)},
    ):
        found = table.query(where).read_all().to_pylist()
        expected = undivided(table.context, where)
        assert [row["k"] for row in found] == [row["k"] for row in expected]
        by_all = [tuple(row[name] for name in order) for row in found]
        assert sorted(by_all) == sorted(tuple(row[name] for name in order) for row in expected)
        assert [row[:2] for row in by_all] == sorted(row[:2] for row in by_all)
    assert max(parts) > 2
    assert table.query({"k": dm.Range(-300, 500)}, limit=3).read_all().num_rows == 3


def test_a_look_up_of_a_key_is_read_in_one_part(instance: Instance, parts: list[int]) -> None:
    table = instance.create_table("whole", SCHEMA)
    table.ingest(rows_of(1, 2_500))
    parts.clear()
    table.query({"k": 7}).read_all()
    assert parts == [1]


def test_a_key_with_the_former_name_of_another_column_is_read_in_parts(
    instance: Instance, parts: list[int]
) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("note", dm.STRING)])
    table = instance.create_table("renamed", schema)
    for n in range(3):
        table.ingest(pa.table({"k": range(n, 2_400, 3), "note": [f"this is note {n}"] * 800}))
    table.drop_column("note")
    table.rename_column("k", "note")
    assert table.query().read_all()["note"].to_pylist() == list(range(2_400))
    assert max(parts) > 1


WIDE = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("text", dm.STRING, nullable=True)])


@pytest.mark.parametrize("length", [10, 1_100])
def test_batches_are_large_if_rows_are_narrow(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The file stores a repeated text once, but batches repeat it. The footer has the size of all rows."""
    monkeypatch.setattr(group_parts, "PART_BYTES_MIN", 0)
    table = instance.create_table("texts", WIDE)
    table.ingest(pa.table({"k": range(40_000), "text": ["x" * length] * 40_000}))
    # the first row comes alone, since the reader waits for it
    sizes = {batch.num_rows for batch, _ in zip(table.query(), range(3), strict=False)}
    assert max(sizes) > 8_192 if length == 10 else max(sizes) <= 8_192
    found = table.query(columns=["k"], limit=20_000)
    assert max(batch.num_rows for batch in found) <= 8_192  # a query for few rows waits for its first


def test_rows_with_a_column_added_later_have_small_batches(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_parts, "PART_BYTES_MIN", 0)
    table = instance.create_table("later", WIDE)
    table.ingest(pa.table({"k": range(40_000), "text": ["x"] * 40_000}))
    assert max(batch.num_rows for batch in table.query()) > 8_192
    table.add_column(dm.Field("more", dm.STRING, nullable=True))
    found = list(table.query())
    assert max(batch.num_rows for batch in found) <= 8_192
    assert sum(batch.num_rows for batch in found) == 40_000


@pytest.fixture
def two_files(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> dm.Table:
    """Returns a table of two files with many row groups. A small part of the rows has nearly all bytes."""
    monkeypatch.setattr(group_parts, "PART_BYTES_MIN", 0)
    table = instance.create_table("two", WIDE, properties=dm.TableProperties(row_group_bytes=1 << 20))
    for half, end in enumerate((160_000, 106_000)):
        for part in range(4):
            keys = range(2 * part + half, end, 8)
            texts = pa.array(["x" * 2_000 if key % 64 < 2 else "y" for key in keys])
            table.ingest(pa.table({"k": keys, "text": texts}))
        table.compact()
    assert table.explain().files == 2
    return table


@pytest.mark.slow
def test_merged_batches_are_sized_by_all_row_groups(
    two_files: dm.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of rows in a batch depends on the mean size of all row groups, and not on their number."""
    assert max(batch.num_rows for batch in two_files.query()) > 8_192
    monkeypatch.setattr(group_parts, "BATCHES_BYTES_MAX", 3_000_000)
    assert max(batch.num_rows for batch in two_files.query()) <= 8_192


@pytest.mark.slow
def test_a_condition_or_a_deletion_may_leave_the_wide_rows_alone(two_files: dm.Table) -> None:
    found = list(two_files.query({"text": dm.Range(min="x")}))
    assert sum(batch.num_rows for batch in found) == 133_000
    assert max(batch.num_rows for batch in found) <= 8_192
    assert max(batch.num_rows for batch in two_files.query({"k": dm.Range(min=10)})) > 8_192
    two_files.delete({"text": "z"})
    assert max(batch.num_rows for batch in two_files.query()) <= 8_192


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
@pytest.mark.parametrize(("seed", "spread"), [(0, 900), (1, 900), (2, 900), (3, 2), (4, 2)])
def test_the_first_rows_of_many_files_are_those_of_all(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, keep: str, seed: int, spread: int
) -> None:
    monkeypatch.setattr(group_parts, "FIRST_FILES_MIN", 2)
    monkeypatch.setattr(group_parts, "FIRST_FILES_GROWTH", 2)
    chance = random.Random(seed)
    table = instance.create_table(
        "first", SCHEMA, split_points=[-600, 100], properties=dm.TableProperties(keep=keep)
    )
    for number in range(20):
        rows = rows_of(seed * 100 + number, chance.choice([1, 2, 5, 40]), spread)
        (table.ingest if keep == "every_row" else table.upsert)(rows)
    if spread == 2:  # most first rows are deleted, so that later parts are read
        table.delete({"l": dm.Range(chance.randrange(3), 12)})
    else:
        table.delete({"k": dm.Range(chance.randrange(-900, -300), chance.randrange(-250, 300))})
    for where in (
        None,
        {"k": dm.Range(-300)},
        {"k": [dm.Range(-800, -500), dm.Range(0, 50)]},
        {"n": 4},
        {"l": dm.Range(5)},
    ):
        whole = table.query(where).read_all()
        for limit in (1, 3, 10, 60, 1_000):
            found = table.query(where, limit=limit).read_all()
            keys = ["k", "l"]
            assert found.select(keys).equals(whole.slice(0, limit).select(keys))
            assert found.num_rows == min(limit, whole.num_rows)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list to which each plan adds the number of its files."""
    counts: list[int] = []
    planned = executor.planned

    def counted(context: Any, scans: Any, *more: Any) -> Any:
        counts.append(len(scans))
        return planned(context, scans, *more)

    monkeypatch.setattr(executor, "planned", counted)
    return counts


@pytest.mark.objects  # inlined files are read as one
@pytest.mark.slow
def test_the_first_rows_need_few_files(instance: Instance, opened: list[int]) -> None:
    table = instance.create_table("small", SCHEMA)
    for number in range(40):
        rows = [{"k": k, "l": 0, "n": number} for k in (number, number + 500, 10_000)]
        table.ingest(pa.Table.from_pylist(rows, schema=arrow_schema(SCHEMA)))
    cut = table.history.record_cut("all")
    assert table.query({"n": 1_000}, limit=0, as_of=cut).read_all().num_rows == 0  # a limit of 0 ends, too
    opened.clear()
    assert table.head(3).column("k").to_pylist() == [0, 1, 2]
    assert opened == [3]
    opened.clear()
    assert table.query({"k": dm.Range(510)}, limit=5).read_all().column("k").to_pylist() == [
        510, 511, 512, 513, 514,
    ]  # fmt: skip
    assert opened == [40]  # any file may have the first wanted row


@pytest.mark.objects
@pytest.mark.slow
def test_the_first_rows_need_few_files_if_all_begin_with_one_value(
    instance: Instance, opened: list[int]
) -> None:
    table = instance.create_table("flights", SCHEMA)
    for number in range(20):
        rows = [{"k": k, "l": number, "n": number} for k in (1, 2)]
        table.ingest(pa.Table.from_pylist(rows, schema=arrow_schema(SCHEMA)))
    assert table.head(3).column("l").to_pylist() == [0, 1, 2]
    assert opened == [3]
