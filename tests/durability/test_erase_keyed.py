"""Erasures of keyed tables, including rows of loads that began before the erasure."""

from __future__ import annotations

from typing import Any

import pytest
from keyed_tables import begun, delete_keys, keyed, seen, upsert

from dormouse.durability.erasing import _Erasing
from tests.stored import query
from tests.support.api import Instance
from tests.support.state import Erasure


@pytest.mark.few(1)
@pytest.mark.parametrize("seconds", [0, 60], ids=["before", "before the deletion was committed"])
def test_rows_of_a_load_that_ends_during_an_erasure_are_erased(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """The load counts as earlier than the deletion: no reader returns its rows, although its file has
    them.
    """
    table = keyed(instance)
    upsert(table, (1, 1), (3, 1))
    commit = begun(table, (3, 2), (4, 2))
    query(
        instance._supplier,
        "update write_attempt set started_at = started_at + make_interval(secs => %s) returning 1",
        seconds,
    )
    asked = Erasure.writers

    def meanwhile(self: Erasure) -> list[tuple[str, str]]:
        found = asked(self)
        if found:
            commit()
        return found

    monkeypatch.setattr(Erasure, "writers", meanwhile)
    report = table.erase({"k": 3}, wait_seconds=10.0)
    assert report.is_finished
    assert table.erase({"k": 3}, dry_run=True).rows == 0
    assert report.rows == 2
    assert seen(table, instance) == {1: 1, 4: 2}


@pytest.mark.slow
def test_with_newest_by_an_older_row_is_visible_when_it_comes_after_the_deletion(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file with the erased newer row still exists then, because the erasure has not rewritten it yet."""
    table, rewrite = keyed(instance, newest_by="v"), _Erasing.rewrite
    upsert(table, (1, 1), (3, 5))
    reported: list[dict[str, Any]] = []

    def after_an_upsert(self: _Erasing) -> None:
        monkeypatch.setattr(_Erasing, "rewrite", rewrite)
        cut = table.history.record_cut()
        upsert(table, (3, 2))
        assert seen(table, instance) == {1: 1, 3: 2}
        reported.extend(table.changes(after=cut).read_all().to_pylist())
        rewrite(self)

    monkeypatch.setattr(_Erasing, "rewrite", after_an_upsert)
    assert table.erase({"k": 3}).is_finished
    assert seen(table, instance) == {1: 1, 3: 2}
    assert reported == [{"k": 3, "v": 2, "s": None, "_change": "upsert"}]


@pytest.mark.slow
@pytest.mark.parametrize("compacts", [False, True])
def test_with_newest_by_an_erasure_leaves_nothing_of_a_key(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, *, compacts: bool
) -> None:
    """Not even a deletion mark is left, although a compaction may run before the erasure's own jobs."""
    table = keyed(instance, newest_by="v")
    upsert(table, (1, 1), (3, 1))
    upsert(table, (3, 5), (4, 2))
    delete_keys(table, 5, v=3)
    if compacts:
        looked = _Erasing.rewrite

        def after_a_round(self: _Erasing) -> None:
            table.compact()
            looked(self)

        monkeypatch.setattr(_Erasing, "rewrite", after_a_round)
    assert table.erase({"k": [3, 5]}).is_finished
    assert table.erase({"k": [3, 5]}, dry_run=True).rows == 0
    assert seen(table, instance) == {1: 1, 4: 2}
    upsert(table, (3, 2))
    assert seen(table, instance) == {1: 1, 3: 2, 4: 2}, "no mark hides an older row"
