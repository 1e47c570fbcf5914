"""Times around a jump of the database's clock: they include the commits made meanwhile, or are refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from dormouse.errors import InvalidCut
from dormouse.state.history import changes, moments
from tests.small_tables import add, clock, keys, made
from tests.stored import query
from tests.support.api import Instance, Table


class Ahead:
    """A simulated database clock, which is some days ahead while `adding` runs."""

    def __init__(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        self._table, self._patch = table, monkeypatch
        self._real = moments._QUERIES["committed_at"]

    def tell(self, before: str, after: str, days: int) -> None:
        """Shifts the commit times that Dormouse reads, of transactions with ids between two, by some days."""
        text = f"""
            select c.committed_at + interval '1 day' * case
                when h.added_xid between '{before}'::xid8 and '{after}'::xid8 then {days} else 0
            end as committed_at
            from ({self._real.text}) c
        """
        patched = {**moments._QUERIES, "committed_at": replace(self._real, text=text)}
        self._patch.setattr(moments, "_QUERIES", patched)

    def adding(self, first: int, days: int, cut: bool = False, split_at: int | None = None) -> None:
        """Adds a row while the clock is some days ahead, and optionally records a cut or splits the table."""
        supplier = self._table.context.supplier
        [(before,)] = query(supplier, "select pg_current_xact_id()::text")
        add(self._table, first, 1)
        if split_at is not None:
            self._table.partitions.split("root", split_at)
            shift = f"created_at = created_at + interval '{days} days'"
            query(
                supplier, f"update epoch set {shift} where epoch = (select max(epoch) from epoch) returning 1"
            )
        if cut:
            made_at = self._table.history.record_cut().cut_id
            shift = f"recorded_at = recorded_at + interval '{days} days'"
            query(supplier, f"update cut set {shift} where cut_id = %s returning 1", made_at)
        [(after,)] = query(supplier, "select pg_current_xact_id()::text")
        self.tell(before, after, days)


@pytest.mark.few(1)
@pytest.mark.parametrize("split_at", [None, 1])
@pytest.mark.parametrize("cut_then", [False, True])
def test_a_time_includes_commits_made_while_the_clock_was_ahead(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, cut_then: bool, split_at: int | None
) -> None:
    table = made(instance, split_threshold_rows=10**6)
    add(table, 0, 1)
    before = clock(instance)
    table.history.record_cut()
    idle = clock(instance)
    Ahead(table, monkeypatch).adding(1, 5, cut_then, split_at)
    add(table, 2, 1)
    for when in (idle, clock(instance)):
        with pytest.raises(InvalidCut, match="clock was set back"):
            keys(table, when)
    cut = table.history.record_cut()
    back = clock(instance)
    assert keys(table, back) == keys(table, cut) == [0, 1, 2]
    add(table, 3, 1)
    now = clock(instance)
    assert keys(table, back) == [0, 1, 2]
    assert keys(table, now) == [0, 1, 2, 3]
    assert keys(table, before) == [0], "before the last cut of the right clock"
    with pytest.raises(InvalidCut, match="clock was set back"):
        keys(table, idle)
    table.restore(now)
    assert keys(table) == [0, 1, 2, 3]


@pytest.mark.parametrize("cut_after", [False, True])
def test_portions_include_commits_made_while_the_clock_was_ahead(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, cut_after: bool
) -> None:
    table = made(instance)
    start = moments.now(table.context)
    add(table, 0, 1)
    ahead = Ahead(table, monkeypatch)
    ahead.adding(1, 5)
    monkeypatch.setattr(changes, "_COMMITTED_AT", moments._QUERIES["committed_at"])
    add(table, 2, 1)
    if cut_after:
        table.history.record_cut()
    seen = list[int]()
    for _ in range(3):
        till = changes.portion_since(table.context, start, 1)
        seen += table.changes(start, till, ["k"]).read_all()["k"].to_pylist()
        start = till
    assert sorted(seen) == [0, 1, 2]


def test_a_time_excludes_later_commits_made_while_the_clock_was_behind(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dormouse cannot know which clock was wrong, so it never returns rows that may not have existed."""
    table = made(instance, split_threshold_rows=10**6)
    add(table, 0, 1)
    then = clock(instance)
    first = table.history.record_cut()
    Ahead(table, monkeypatch).adding(1, -5)
    with pytest.raises(InvalidCut, match="clock was set back"):
        keys(table, then)
    second = table.history.record_cut()
    assert (keys(table, first), keys(table, second)) == ([0], [0, 1])
    assert keys(table, clock(instance)) == [0, 1]


@pytest.mark.parametrize("split_at", [None, 1])
def test_a_time_that_the_clock_reached_twice_is_refused(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, split_at: int | None
) -> None:
    """The clock has reached a time that it had before, so the time does not identify one moment."""
    table = made(instance, split_threshold_rows=10**6)
    add(table, 0, 1)
    ahead = Ahead(table, monkeypatch)
    ahead.adding(1, 5, True, split_at)
    table.history.record_cut()
    then = clock(instance)
    assert keys(table, then) == [0, 1]
    # as if five days had passed
    for name, columns, days in (
        ("cut", ("recorded_at", "clock_at"), 5),
        ("epoch", ("created_at", "clock_at"), 5),
        ("tables", ("created_at", "history_since"), 10),
    ):
        earlier = ", ".join(f"{column} = {column} - interval '{days} days'" for column in columns)
        query(table.context.supplier, f"update {name} set {earlier} returning 1")
    ahead.tell("0", "0", 0)
    with pytest.raises(InvalidCut, match="clock was set back"):
        keys(table, then - timedelta(days=5))
