"""Tables as they were: by the API, in SQL, whatever is ingested, compacted, split and collected since."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from state import query

import dormouse as dm
from dormouse.errors import CutExpired, InvalidCut, ObjectNotFound
from dormouse.files import holds
from dormouse.files.layout import LAYOUTS
from dormouse.history import cuts, moments
from dormouse.instance import Instance, connect
from dormouse.model.cut import Cut
from dormouse.table import Table

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
SMALL = {"compaction_strategy": "basic", "compaction_batch_files": 2, "split_threshold_rows": 60}


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with connect(dsn, f"file://{tmp_path}/objects") as opened:
        yield opened


def made(instance: Instance, name: str = "t", layout: str = "file_table", **properties: Any) -> Table:
    given = dm.TableProperties(**{**SMALL, "split_min_rows": 2, **properties})
    return instance.create_table(name, SCHEMA, layout=layout, properties=given)


def add(table: Table, first: int, rows: int = 20, v: int = 0) -> None:
    keys = range(first, first + rows)
    table.ingest(pa.table({"k": keys, "v": [v] * rows}))


def keys(table: Table, as_of: Any = None) -> list[int]:
    return [row["k"] for batch in table.query(columns=["k"], as_of=as_of) for row in batch.to_pylist()]


def summed(instance: Instance, statement: str, as_of: Any = None) -> Any:
    return instance.sql(statement, as_of=as_of).read_all().to_pylist()


def clock(instance: Instance) -> datetime:
    found: datetime = query(instance._supplier, "select clock_timestamp()")[0][0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moment_has_the_same_rows_whatever_comes_later(instance: Instance, layout: str) -> None:
    table = made(instance, layout=layout)
    seen: list[tuple[Any, list[int]]] = []
    for round_ in range(6):
        add(table, 7 * round_)
        table.split()
        table.compact()
        table.collect_garbage()
        seen += [(cuts.record_cut(table._context), keys(table)), (clock(instance), keys(table))]
        for when, rows in seen:
            assert keys(table, when) == rows
            assert summed(instance, "select count(*) as n from t", when) == [{"n": len(rows)}]
            assert table.explain(as_of=when).files > 0
    assert table.partitions.tree().epoch > 0, "there were splits"
    assert len(list(table.query({"k": 3}, as_of=seen[0][0]).read_all().to_pylist())) == 1
    with instance.duckdb(as_of=seen[1][0]) as opened:
        assert opened.execute("select count(*) from t").fetchall() == [(20,)]


def test_tables_are_read_as_of_one_moment(instance: Instance) -> None:
    flights, other = made(instance, "flights"), made(instance, "other")
    add(flights, 0)
    add(other, 0)
    cut = cuts.record_cut(flights._context, "monday")
    at = clock(instance)
    add(flights, 100)
    add(other, 100)
    both = "select (select count(*) from flights) as a, (select count(*) from other) as b"
    assert summed(instance, both, at) == [{"a": 20, "b": 20}]
    assert summed(instance, "select count(*) as a from flights", cut) == [{"a": 20}]
    with pytest.raises(InvalidCut, match=r"a cut is of one table, .*'flights', 'other'.*"):
        summed(instance, both, cut)
    with pytest.raises(InvalidCut, match="table 'other' has no cut 'monday'; none of its cuts has a name"):
        summed(instance, both, "monday")
    cuts.record_cut(other._context, "monday")
    assert summed(instance, both, "monday") == [{"a": 20, "b": 40}]
    made(instance, "young")
    with pytest.raises(InvalidCut, match=r"table 'young' was made at .*, after"):
        summed(instance, "select * from young", at)
    with instance.duckdb(as_of=at) as opened, pytest.raises(Exception, match="table 'young' was made at"):
        opened.execute("select * from young")


def test_what_is_collected_cannot_be_read_and_says_so_before_the_first_row(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0)
    kept, lost = cuts.record_cut(table._context, "kept"), cuts.record_cut(table._context)
    at = clock(instance)
    add(table, 10)
    table.compact()
    table.collect_garbage()
    assert keys(table, "kept") == keys(table, lost) == keys(table, at) == list(range(20)), "kept holds all"
    cuts.drop_cut(table._context, "kept")
    table.collect_garbage()
    for when in (lost, at):
        with pytest.raises(
            CutExpired, match="cannot be read any more; the oldest moment that can is"
        ) as error:
            table.query(as_of=when)
        assert error.value.oldest is not None and error.value.oldest > at
        with pytest.raises(CutExpired):
            instance.sql("select * from t", as_of=when)
    with pytest.raises(InvalidCut, match="'t' has no cut 'kept'"):
        table.query(as_of=kept)
    assert keys(table) == sorted([*range(20), *range(10, 30)])


def test_a_reader_holds_the_files_of_a_moment_that_may_end_meanwhile(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0)
    at = clock(instance)
    add(table, 10)
    reader = table.query(as_of=at)
    batches = [reader.read_next_batch()]
    table.compact()
    table.collect_garbage()
    [hold] = holds.holds(instance._supplier)
    assert (hold.holder.split()[0], hold.since) == ("reader", at)
    batches += list(reader)
    assert sum(batch.num_rows for batch in batches) == 20
    assert holds.holds(instance._supplier) == []
    table.collect_garbage()
    with pytest.raises(CutExpired):
        table.query(as_of=at)


def test_a_collection_between_plan_and_read_is_told(instance: Instance) -> None:
    """It comes before the reader holds what it reads."""
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0)
    at = clock(instance)
    add(table, 10)
    context = table._context
    position = moments.position_of(context, at)
    table.compact()
    table.collect_garbage()
    with pytest.raises(CutExpired), moments.kept(context, position):
        pass


def test_a_file_that_is_lost_is_no_matter_of_time(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    add(table, 0)
    cut = cuts.record_cut(table._context)
    [name] = [one.filename for one in table.files.file_references()]
    (tmp_path / "objects" / name).unlink()
    for read in (lambda: keys(table, cut), lambda: summed(instance, "select * from t", cut)):
        with pytest.raises(ObjectNotFound, match="it is lost, not collected"):
            read()


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (datetime(2026, 1, 1), "has no zone"),
        (datetime(1970, 1, 1, tzinfo=UTC), "table 't' was made at"),
        (datetime.now(UTC) + timedelta(days=1), "in the future"),
        ("nothing", "table 't' has no cut 'nothing'; its named cuts are 'a'"),
        ("", "has no cut ''"),
        ("nul\0", "is a cut, a cut's name, or a time"),
        (7.5, "is a cut, a cut's name, or a time"),
        (-1, "has no cut -1"),
        (1 << 70, "has no cut"),
        (Cut(1, None, datetime.now(UTC), 0, 10**6), "the cut 1 is of another table"),
    ],
)
def test_a_moment_that_cannot_be_is_refused_in_one_line(instance: Instance, when: Any, said: str) -> None:
    table = made(instance)
    cuts.record_cut(table._context, "a")
    for read in (
        lambda: table.query(as_of=when),
        lambda: table.explain(as_of=when),
        lambda: instance.sql("select * from t", as_of=when),
    ):
        with pytest.raises(InvalidCut) as error:
            read()
        assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["", " a", "a\n", "a\0", "x" * 300, "2026-11-20", "20261120", "2026-11-20 14:00", 5, "\ud800"]
)
def test_a_cut_needs_a_name_that_can_be_told(instance: Instance, name: Any) -> None:
    table = made(instance)
    with pytest.raises(InvalidCut) as error:
        cuts.record_cut(table._context, name)
    assert "\n" not in str(error.value)
    assert list(cuts.cuts(table._context)) == []


def test_a_name_is_taken_once_and_free_when_its_cut_is_dropped(instance: Instance) -> None:
    context = made(instance)._context
    first = cuts.record_cut(context, "a")
    with pytest.raises(InvalidCut, match="has a cut 'a' already"):
        cuts.record_cut(context, "a")
    assert (
        list(cuts.cuts(context)) == [first]
        and cuts.cut(context, "a") == cuts.cut(context, first.cut_id) == first
    )
    assert len(holds.holds(instance._supplier)) == 1
    cuts.drop_cut(context, "a")
    assert holds.holds(instance._supplier) == []
    second = cuts.record_cut(context, "a")
    assert cuts.compare(context, second, second) == "equal"
    third = cuts.record_cut(context)
    assert [cuts.compare(context, *pair) for pair in ((second, third), (third, "a"))] == ["before", "after"]
    instance.drop_table("t")
    again = made(instance)._context
    with pytest.raises(InvalidCut, match="of another table"):
        cuts.compare(again, third, third)
    assert holds.holds(instance._supplier) == []
