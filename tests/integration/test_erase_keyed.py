"""Erasures of keyed tables: also of rows that loads bring which began before."""

from __future__ import annotations

import pytest
from keyed_tables import begun, keyed, seen, upsert

from dormouse.files.erasures import Erasure
from dormouse.instance import Instance


def test_a_load_that_began_before_and_ends_while_it_is_waited_for(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its place before the deletion: no reader shows its rows, which are in its file."""
    table = keyed(instance)
    upsert(table, (1, 1), (3, 1))
    commit = begun(table, (3, 2), (4, 2))
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
