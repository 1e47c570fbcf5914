"""Edits beside other commits: an edit is computed again exactly if a commit changed what it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from keyed_tables import SCHEMA, begun, data

import dormouse as dm
from dormouse.errors import EditConflict, InvalidInput
from dormouse.state.files import garbage, removal_log
from tests.stored import at_once, query
from tests.support.api import Instance, Table
from tests.support.state import LAYOUTS
from tests.support.writing import Edit
from tests.tiers import by_tier, sampled

KEPT = ["newest_row", "every_row"]
Work = Callable[[Table], object]
ROWS = [(1, 1, "a"), (2, 2, "b"), (3, 3, "c"), (8, 8, None), (9, 9, "z")]


def made(instance: Instance, keep: str, name: str = "t", layout: str = "file_table", **more: Any) -> Table:
    """Returns a table of the rows ROWS, as two leaves with one file each."""
    given = {"keep": keep, "compaction_strategy": "basic", "compaction_batch_files": 2, **more}
    properties = dm.TableProperties(**{"split_threshold_rows": 4, "split_min_rows": 2, **given})
    table = instance.create_table(name, SCHEMA, layout=layout, split_points=[5], properties=properties)
    add(table, *ROWS)
    return table


def add(table: Table, *rows: tuple[Any, ...]) -> None:
    load = table.upsert if table.properties.keep == "newest_row" else table.ingest
    load(data(rows), engine="local")


def rows_of(table: Table) -> list[tuple[Any, ...]]:
    found = [(row["k"], row["v"], row["s"]) for row in table.query().read_all().to_pylist()]
    return sorted(found, key=repr)


class Between:
    """Commits that come between the reads of an edit and its commit; `tries` counts the edit's commits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._works: list[Callable[[], object]] = []
        self._commit, self._is_inside = Edit._committed, False
        self.tries = 0

        def committed(edit: Edit, *args: Any) -> bool:
            return self._later(edit, *args)

        patch.setattr(Edit, "_committed", committed)

    def do(self, *works: Callable[[], object]) -> None:
        """Does the first work before the next commit of an edit, the second before the one after that, …"""
        self._works, self.tries = [*works], 0

    def _later(self, edit: Edit, *args: Any) -> bool:
        if not self._is_inside:
            self.tries += 1
            self._is_inside = True
            try:
                if self._works:
                    self._works.pop(0)()
            finally:
                self._is_inside = False
        return self._commit(edit, *args)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    return Between(monkeypatch)


def plus_one(table: Table) -> Any:
    """Adds 1 to `v` where k < 5 and v is odd."""
    return table.update(dm.sql("k < 5 and v % 2 = 1"), {"v": dm.sql("v + 1")})


def merged(table: Table) -> Any:
    """Merges 1, 3 and 4: adds 10 to `v` of those that match, and inserts the others."""
    source = pa.table({"k": [1, 3, 4], "v": [10, 10, 10], "s": ["m", "m", "m"]})
    when = [dm.WhenMatched(update={"v": dm.sql("t.v + s.v")}), dm.WhenNotMatched(insert="*")]
    return table.merge_into(source, ["k"], when)


OTHERS: dict[str, tuple[Work, Work, bool]] = {
    "a row that meets the condition": (lambda t: add(t, (4, 7, "new")), plus_one, True),
    "a row that meets it now": (lambda t: add(t, (2, 5, "odd")), plus_one, True),
    "a new value of a row": (lambda t: add(t, (3, 33, "other")), plus_one, True),
    "a row that does not meet the condition": (lambda t: add(t, (4, 6, "even")), plus_one, False),
    "a row in another range": (lambda t: add(t, (7, 7, "far")), plus_one, False),
    "a deletion of a row": (lambda t: t.delete({"k": 3}), plus_one, True),
    "a deletion by value of a row": (lambda t: t.delete({"v": 3}), plus_one, True),
    "a deletion by value of no row": (lambda t: t.delete({"v": 77}), plus_one, False),
    "a deletion by value of another row": (lambda t: t.delete({"v": 2}), plus_one, False),
    "a deletion in another range": (lambda t: t.delete({"k": dm.Range(7)}), plus_one, False),
    "an erasure of a row": (lambda t: t.erase({"k": 1}, engine="local", wait_seconds=0.0), plus_one, True),
    "an update of a row": (lambda t: t.update({"k": 1}, {"v": 101}), plus_one, True),
    "an update of another row": (lambda t: t.update({"k": 2}, {"s": "B"}), plus_one, False),
    "an update of another range": (lambda t: t.update({"k": 8}, {"v": 1}), plus_one, False),
    "a replacement of a row": (lambda t: t.replace({"k": 3}, data([(3, 31, "r")])), plus_one, True),
    "the key of a merge's insert": (lambda t: add(t, (4, 4, "first")), merged, True),
    "a match of a merge": (lambda t: t.update({"k": 1}, {"v": 50}), merged, True),
    "a deleted match of a merge": (lambda t: t.delete({"k": 1}), merged, True),
    "a key that a merge lacks": (lambda t: add(t, (2, 20, "other"), (5, 5, "other")), merged, False),
    "the same merge": (merged, merged, True),
}


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("what", sampled([*OTHERS], 10))
def test_an_edit_is_computed_again_if_another_commit_changed_its_rows(
    instance: Instance, between: Between, what: str, keep: str
) -> None:
    other, edit, is_concerned = OTHERS[what]
    table, serial = made(instance, keep), made(instance, keep, "serial")
    start = table.history.record_cut("start")
    other(serial)
    expected = edit(serial)
    between.do(lambda: other(table))
    report = edit(table)
    assert report.attempts == (2 if is_concerned else 1)
    assert rows_of(table) == rows_of(serial)
    if edit is plus_one:
        assert report.rows == expected.rows
    else:
        assert (report.inserted, report.updated) == (expected.inserted, expected.updated)
    if "erasure" not in what:
        assert len(rows_of_changes(table, start)) == len(rows_of(table))


def rows_of_changes(table: Table, start: Any) -> list[tuple[Any, ...]]:
    """Returns the rows at a cut with all later changes applied; asserts that they are the table's rows."""
    kept = [(row["k"], row["v"], row["s"]) for row in table.query(as_of=start).read_all().to_pylist()]
    for change in table.changes(start).read_all().to_pylist():
        kind, row = change.pop("_change"), (change["k"], change["v"], change["s"])
        if table.properties.keep == "newest_row":
            kept = [one for one in kept if one[0] != row[0]]
        elif kind == "delete":
            kept.remove(row)
        if kind != "delete":
            kept.append(row)
    assert sorted(kept, key=repr) == rows_of(table)
    return kept


MAINTENANCE: dict[str, Work] = {
    "compaction": lambda t: t.compact(engine="local"),
    "full compaction": lambda t: t.compact(engine="local", full=True),
    "splits": lambda t: (t.split(), t.split()),
    "a split": lambda t: t.partitions.split(t.partitions.leaves()[0].partition_id, 2),
    "a merge of partitions": lambda t: (t.set_properties(merge_threshold_rows=100), t.merge()),
    "collection": lambda t: t.collect_garbage(),
    "a new column": lambda t: t.add_column(dm.Field("new", dm.LONG, nullable=True), default=5),
    "another layout": lambda t: t.convert_layout("salted_counts"),
    "other properties": lambda t: t.set_properties(split_threshold_rows=1_000),
}


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("edit", [plus_one, merged])
@pytest.mark.parametrize("what", MAINTENANCE)
def test_maintenance_does_not_disturb_an_edit(
    instance: Instance, between: Between, what: str, edit: Work, keep: str
) -> None:
    table, serial = made(instance, keep, gc_delay_seconds=0), made(instance, keep, "serial")
    add(table, (1, 1, "a"), (9, 9, "z"))
    add(serial, (1, 1, "a"), (9, 9, "z"))
    edit(serial)
    between.do(lambda: MAINTENANCE[what](table))
    report: Any = edit(table)
    assert report.attempts == 1
    # the condition of a deletion is one on the new columns: it is committed again, and nothing is computed
    assert between.tries == 1 + (what == "a new column" and keep == "every_row")
    assert rows_of(table) == rows_of(serial)
    while table.compact(engine="local", full=True).jobs_run:
        assert rows_of(table) == rows_of(serial)
    assert instance.check(deep=True).problems == ()


def collected(table: Table) -> None:
    """Replaces and collects each file of the table."""
    table.compact(engine="local", full=True)
    while table.collect_garbage().deleted:
        pass


def in_a_collected_file(table: Table) -> None:
    add(table, (3, 33, "other"))
    collected(table)


def by_a_forgotten_deletion(table: Table) -> None:
    table.delete({"k": 3})
    collected(table)
    table.delete({"k": 1_000})  # the last deletion is never forgotten
    table.collect_garbage()
    forgotten = "select count(*) = 0 from deletion where deletion_id = 1 and table_id = %s"
    assert query(table.context.supplier, forgotten, table.context.table.table_id) == [(True,)]


def in_a_dropped_day(table: Table) -> None:
    add(table, (3, 33, "other"))
    table.compact(engine="local", full=True)
    day = "update removal set removed_at = removed_at - interval '9 days' where table_id = %s returning 1"
    assert query(table.context.supplier, day, table.context.table.table_id)
    table.collect_garbage()
    removal_log.roll(table.context.supplier)


FORGOTTEN: dict[str, Work] = {
    "in a file that was collected": in_a_collected_file,
    "by a deletion that was forgotten": by_a_forgotten_deletion,
    "in a file whose day of the log was dropped": in_a_dropped_day,
    "by clearing the table": lambda t: t.files.clear(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("how", FORGOTTEN)
def test_an_edit_is_computed_again_if_a_change_of_its_rows_was_forgotten(
    instance: Instance, between: Between, monkeypatch: pytest.MonkeyPatch, how: str, keep: str, layout: str
) -> None:
    """The edit was frozen for longer than the table keeps its history."""
    monkeypatch.setattr(garbage, "HOLDS_MARGIN_SECONDS", 0.0)
    none = {"gc_delay_seconds": 0, "history_retention_seconds": 0}
    table = made(instance, keep, layout=layout, **none)
    serial = made(instance, keep, "serial", layout, **none)
    FORGOTTEN[how](serial)
    plus_one(serial)
    between.do(lambda: FORGOTTEN[how](table))
    assert plus_one(table).attempts == 2
    assert rows_of(table) == rows_of(serial)


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", KEPT)
def test_a_restore_disturbs_an_edit(instance: Instance, between: Between, keep: str) -> None:
    table = made(instance, keep)
    cut = table.history.record_cut("before")
    table.update({"k": 1}, {"v": 11})
    between.do(lambda: table.restore(to=cut))
    assert plus_one(table).attempts == 2
    assert rows_of(table)[:1] == [(1, 2, "a")]


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("attempts_max", [1, 3])
def test_an_edit_that_is_disturbed_each_time_changes_nothing(
    instance: Instance, between: Between, keep: str, attempts_max: int
) -> None:
    table = made(instance, keep, "accounts")
    between.do(*[lambda n=n: table.update({"k": 1}, {"v": 2 * n + 3}) for n in range(9)])
    with pytest.raises(EditConflict, match="accounts") as caught:
        table.update(dm.sql("v % 2 = 1"), {"v": 0}, attempts_max=attempts_max)
    assert "\n" not in str(caught.value)
    assert caught.value.table == "accounts"
    assert between.tries == attempts_max
    last = 2 * attempts_max + 1
    assert rows_of(table) == [(1, last, "a"), *ROWS[1:]]
    table.collect_garbage()
    assert instance.check(deep=True).problems == ()


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", KEPT)
def test_a_transaction_is_computed_again_as_a_whole(instance: Instance, between: Between, keep: str) -> None:
    one, other = made(instance, keep, "one"), made(instance, keep, "other")
    between.do(lambda: other.update({"k": 3}, {"v": 30}))
    with instance.transaction() as transaction:
        transaction.update("one", {"k": 3}, {"v": dm.sql("v + 1")})
        transaction.update("other", {"k": 3}, {"v": dm.sql("v + 1")})
    assert between.tries == 2
    assert (rows_of(one)[2], rows_of(other)[2]) == ((3, 4, "c"), (3, 31, "c"))


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", KEPT)
def test_changes_that_meet_only_when_they_are_computed_again_are_refused(
    instance: Instance, between: Between, keep: str
) -> None:
    table = made(instance, keep)
    between.do(lambda: table.update({"k": 3}, {"s": "moved"}))
    with pytest.raises(InvalidInput, match="one merge_into"), instance.transaction() as transaction:
        transaction.update("t", dm.sql("s = 'moved'"), {"v": dm.sql("v + 1")})
        transaction.update("t", {"k": 3}, {"v": dm.sql("v + 10")})
    assert rows_of(table)[2] == (3, 3, "moved")


@pytest.mark.parametrize("keep", KEPT)
def test_rows_that_no_source_row_matches_disturb_a_merge_that_changes_them(
    instance: Instance, between: Between, keep: str
) -> None:
    table = made(instance, keep)
    source = pa.table({"k": [1, 2, 3, 8, 9]})
    between.do(lambda: add(table, (20, 20, "later")))
    report = table.merge_into(source, ["k"], [dm.WhenNotMatchedBySource(delete=True)])
    assert (report.attempts, report.deleted) == (2, 1)
    assert rows_of(table) == ROWS


def test_a_row_that_was_moved_into_the_condition_disturbs_an_update(
    instance: Instance, between: Between
) -> None:
    table = made(instance, "every_row")
    between.do(lambda: table.update({"k": 8}, {"k": 4, "v": 7}))
    assert plus_one(table).attempts == 2
    assert (4, 8, None) in rows_of(table)


def test_an_upsert_that_began_before_an_edit_and_ends_after_it_is_not_lost(instance: Instance) -> None:
    """The two have an order: the upsert's row, or the upsert's row as the update changes it."""
    table = made(instance, "newest_row")
    commit = begun(table, (1, 100))
    table.update({"k": 1}, {"v": dm.sql("v + 1")})
    commit()
    assert rows_of(table)[0][1] in (100, 101)


@pytest.mark.parametrize("began_first", [True, False])
def test_an_edit_that_is_computed_again_is_newer_than_what_disturbed_it(
    instance: Instance, between: Between, began_first: bool
) -> None:
    table = made(instance, "newest_row")
    commits = [begun(table, (1, 41))] if began_first else []
    between.do(lambda: commits.pop()() if began_first else add(table, (1, 41)))
    report = plus_one(table)
    assert report.attempts == 2
    assert rows_of(table)[0][1] == 42


COUNTERS, TIMES = 4, by_tier(3, 6)


def _incremented(how: str, instance: Instance, name: str) -> None:
    if how == "update":
        instance.table(name).update({"k": 1}, {"v": dm.sql("v + 1")}, attempts_max=100)
    elif how == "merge":
        when = [dm.WhenMatched(update={"v": dm.sql("t.v + s.v")})]
        instance.table(name).merge_into({"k": [1], "v": [1]}, ["k"], when, attempts_max=100)
    elif how == "sql":
        instance.execute(f"update {name} set v = v + 1 where k = 1", attempts_max=100)
    else:
        _retried(lambda: _in_both(instance))


def _in_both(instance: Instance) -> None:
    with instance.transaction() as transaction:
        for name in ("newest_row", "every_row"):
            transaction.update(name, {"k": 1}, {"v": dm.sql("v + 1")})


def _retried(work: Callable[[], None]) -> None:
    while True:
        try:
            return work()
        except EditConflict:
            continue


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["update", "merge", "sql", "transaction"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_increment_of_a_counter_is_lost(instance: Instance, layout: str, how: str) -> None:
    tables = [made(instance, keep, keep, layout) for keep in KEPT]

    def work() -> None:
        for _ in range(TIMES):
            for name in KEPT if how != "transaction" else ["both"]:
                _incremented(how, instance, name)

    def maintain() -> None:
        for _ in range(TIMES):
            for table in tables:
                assert not table.compact(engine="local").errors

    outcomes = at_once(*[work] * COUNTERS, maintain)
    assert outcomes == [None] * (COUNTERS + 1)
    for table in tables:
        assert rows_of(table)[0] == (1, 1 + COUNTERS * TIMES, "a")
        assert len(rows_of(table)) == len(ROWS)
