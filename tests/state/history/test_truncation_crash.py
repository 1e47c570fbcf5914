"""Truncation, retention and collection are killed with SIGKILL before each exchange with the server.

Each is started again every time and reaches the same end. Nothing from the truncation on is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dying import dies_at
from histories import leaves_of, of, rows, scaled

from dormouse.errors import CutExpired
from dormouse.state.files import garbage
from dormouse.state.history.changes import references_at
from dormouse.state.history.epochs import Epochs
from dormouse.state.history.moments import cuts, position_of
from dormouse.state.history.retention import apply_retention, truncate
from tests.stored import file, ref
from tests.support.model import Cut
from tests.support.state import FileChecks, PartitionStore, TableContext, record_cut, tree_problems

NewTable = Callable[..., TableContext]
EXCHANGES_MAX = 200
HOUR = 3_600.0


@pytest.fixture
def table(new_table: NewTable, monkeypatch: pytest.MonkeyPatch) -> TableContext:
    """Returns a table whose leaves were split and merged.

    It has four cuts, dated 40, 30, 20 and 10 hours ago. Files were added after each cut.
    """
    monkeypatch.setattr(garbage, "PIECE_EPOCHS", 10)
    table = new_table()
    for number in range(4):
        scaled(table, 7, seed=number)
        record_cut(table)
        leaves = table.partitions.leaves()
        names = [f"{number}-{leaf.partition_id}" for leaf in leaves]
        table.store.add_files_with_references(
            [file(name, ref(name, leaf.partition_id)) for name, leaf in zip(names, leaves, strict=True)]
        )
    last = -1
    for number, cut in enumerate(list(cuts(table))):
        hours = 40 - 10 * number
        shift = "update {0} set {1} = {1} - make_interval(hours => %s) where {2} and table_id = %s"
        of(table, shift.format("cut", "recorded_at", f"cut_id = {cut.cut_id}"), hours)
        of(table, shift.format("hold", "since", f"holder like '%%/{cut.cut_id}'"), hours)
        of(table, shift.format("epoch", "created_at", f"epoch > {last} and epoch <= {cut.epoch}"), hours + 1)
        last = cut.epoch
    for column in ("history_since", "created_at"):
        of(table, f"update tables set {column} = {column} - interval '100 hours' where table_id = %s")
    return table


def files_at(table: TableContext, cut: Cut) -> list[Any]:
    return list(references_at(table, position_of(table, cut)))


class Kept:
    """The files, leaves and epochs of a table from a cut on, which must survive every kill."""

    def __init__(self, table: TableContext, cut: Cut) -> None:
        self._table, self._cut = table, cut
        self._had = self._has()

    def check(self) -> None:
        assert self._has() == self._had
        assert tree_problems(self._table.supplier, self._table.table) == []
        assert FileChecks(self._table.store.own).problems() == []

    def _has(self) -> Any:
        table, last = self._table, self._table.partitions.tree().epoch
        store, history = PartitionStore(table.supplier, table.table), Epochs(table.supplier, table.table)
        trees = [leaves_of(store.at(epoch)) for epoch in range(self._cut.epoch, last + 1)]
        return files_at(table, self._cut), trees, list(history.epochs(self._cut.epoch))


def killed_until_done(
    table: TableContext, work: Callable[[TableContext], object], check: Callable[[], None]
) -> int:
    """Runs the work again and again, each time killed one exchange with the server later, until it ends.

    Calls `check` after each kill. Returns the number of kills.
    """
    for exchange in range(1, EXCHANGES_MAX):
        if not dies_at(table, work, exchange):
            return exchange - 1
        check()
    raise AssertionError(f"not done in {EXCHANGES_MAX} exchanges")


@pytest.mark.slow
def test_a_killed_truncation_is_done_or_not(table: TableContext) -> None:
    before = list(cuts(table))
    kept = Kept(table, before[2])

    def check() -> None:
        kept.check()
        done = of(table, "select cut_id from truncation where table_id = %s")
        assert done in ([], [(before[2].cut_id,)])
        assert list(cuts(table)) == (before[2:] if done else before)
        assert done or files_at(table, before[1])

    assert killed_until_done(table, lambda own: truncate(own, before[2]), check) > 5
    check()
    assert list(cuts(table)) == before[2:]
    for gone in before[:2]:
        with pytest.raises(CutExpired):
            files_at(table, gone)
    assert not truncate(table, before[2])


@pytest.mark.slow
def test_a_killed_retention_is_done_or_not(table: TableContext) -> None:
    before = list(cuts(table))
    kept, ids = Kept(table, before[1]), {cut.cut_id for cut in before}

    def check() -> None:
        kept.check()
        done = of(table, "select cut_id from truncation where table_id = %s")
        assert done in ([], [(before[1].cut_id,)])
        there = list(cuts(table))
        assert [cut for cut in there if cut.cut_id in ids] == (before[2:] if done else before)
        assert len(there) - len([cut for cut in there if cut.cut_id in ids]) <= 1
        names = {f"cut {table.table.table_id}/{cut.cut_id}" for cut in there}
        assert {name for (name,) in of(table, "select holder from hold where table_id = %s")} <= names

    def work(own: TableContext) -> None:
        apply_retention(own, seconds=25 * HOUR)

    assert killed_until_done(table, work, check) > 8
    check()
    assert len(list(cuts(table))) == 3
    again = apply_retention(table, seconds=25 * HOUR)
    assert (again.truncated_at, again.recorded) == (None, None)


@pytest.mark.slow
def test_killed_forgetting_continues_where_it_stopped(table: TableContext) -> None:
    """Covers also a further truncation in between."""
    before, seen = list(cuts(table)), set[int]()
    truncate(table, before[1])
    kept = Kept(table, before[3])

    def check() -> None:
        kept.check()
        [(epoch,)] = of(table, "select forgotten_epoch from truncation where table_id = %s")
        assert not seen or epoch >= max(seen)
        seen.add(epoch)
        if epoch == before[1].epoch:
            truncate(table, before[3])

    def work(own: TableContext) -> None:
        for _ in garbage.forget_epochs(own.supplier, own.table):
            pass

    assert killed_until_done(table, work, check) > 8
    check()
    assert max(seen) == before[3].epoch
    assert len(seen) > 2
    partitions = of(table, "select partition_id from partition where merged_epoch <= %s and table_id = %s",
                    before[3].epoch)  # fmt: skip
    assert partitions == []
    assert {e for e in rows(table)[1] if e > before[3].epoch} == set(
        range(before[3].epoch + 1, table.partitions.tree().epoch + 1)
    )
