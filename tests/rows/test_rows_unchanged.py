"""Rows that a change sends with equal values get no new version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import RowConflict
from tests.support.api import Instance
from tests.support.rows import RowTable

COLUMNS = [
    dm.Column("s", "STRING"),
    dm.Column("n", "INTEGER"),
    dm.Column("x", "DOUBLE"),
    dm.Column("d", "DATE"),
    dm.Column("j", "JSON"),
    dm.Column("b", "BOOLEAN"),
]
CELLS: list[dict[str, Any]] = [
    {"s": "", "n": 1, "x": float("nan"), "d": 1_700_000_000_123, "j": {"a": [1, None]}, "b": True},
    {"s": 'a "b",\n', "n": -(1 << 62), "x": -0.0, "j": [], "b": False},
    {"s": None, "x": float("-inf")},
    {},
]


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    made = instance.create_row_table("samples", COLUMNS)
    made.change([dm.Insert(CELLS * 25)])
    return made


def counts(inserted: int = 0, updated: int = 0, deleted: int = 0, unchanged: int = 0) -> dict[str, int]:
    return {"inserted": inserted, "updated": updated, "deleted": deleted, "unchanged": unchanged}


def test_a_download_that_is_uploaded_changes_nothing(rows: RowTable, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    rows.download_csv(first)
    rows.download_csv(second)
    for dry_run in (True, False):
        done = rows.upload_csv(first, dry_run=dry_run)
        assert (done.changed, list(done.versions)) == (counts(unchanged=100), [])
    assert rows.version() == 1
    rows.change([dm.Patch([(7, 1, {"n": 5}), (8, 1, {"n": None}), (9, 1, None)])])
    assert rows.version() == 2
    third = tmp_path / "third.csv"
    rows.download_csv(third)
    third.write_text(third.read_text().replace('""b""', '""c""', 1))
    assert rows.upload_csv(third).changed == counts(updated=1, unchanged=98)
    # rows 7 and 9 were changed since the second download, row 2 by the third; no other is in conflict
    with pytest.raises(RowConflict) as raised:
        rows.upload_csv(second)
    assert sorted(raised.value.rows) == [(2, 1, 3), (7, 1, 2), (9, 1, 2)]


def test_only_rows_with_changed_values_get_a_new_version(rows: RowTable) -> None:
    whole = {"ROW_ID": 3, "ROW_VERSION": 1, **CELLS[2]}
    done = rows.change([dm.Update([whole]), dm.Patch([(4, 1, {"n": None}), (1, 1, {"n": 1, "b": False})])])
    assert (done.changed, list(done.versions)) == (counts(updated=1, unchanged=2), [2])
    assert [rows.row(number)["ROW_VERSION"] for number in (1, 3, 4)] == [2, 1, 1]
    assert rows.changed(1, 2).read_all()["ROW_ID"].to_pylist() == [1]


def test_an_unchanged_row_has_the_current_columns(rows: RowTable) -> None:
    whole = {"ROW_ID": 3, "ROW_VERSION": 1, **CELLS[2]}
    added = dm.AddColumn(dm.Column("new", "INTEGER", default=7))
    done = rows.change([dm.Update([whole]), added, dm.Patch([(4, 1, {"new": 7}), (1, 1, {"new": 8})])])
    assert (done.changed, list(done.versions)) == (counts(updated=1, unchanged=2), [2, 3])
    done = rows.change([dm.Update([{**whole, "new": 7}]), dm.RetypeColumn("n", "STRING")])
    assert done.changed == counts(updated=100)
    assert [rows.row(number)["new"] for number in (1, 3, 4)] == [8, 7, 7]
