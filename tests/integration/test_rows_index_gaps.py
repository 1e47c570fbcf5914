"""Indexes of row tables where something happens between two steps, or is left over from before."""

from __future__ import annotations

from typing import Any

import pytest

import dormouse as dm
from dormouse.instance import Instance
from dormouse.rows.builds import Builds
from dormouse.rows.indexing import Indexing
from dormouse.rows.row_table import RowTable
from tests.row_indexes import COLUMNS, all_pages, asked, of_files, rows_of

TEXT = "select row_id, row_version, n from t"


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    rows = instance.create_row_table("t", COLUMNS)
    rows.change([dm.Insert(rows_of(200))])
    return rows


def of(instance: Instance) -> Indexing:
    return instance.row_indexes.indexing


@pytest.mark.parametrize("page_rows", [50, 1_000])
def test_an_index_that_overtakes_a_query_answers_as_of_its_own_version(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    """What was changed twice in between, it never had as it was after the first."""
    asked(rows, TEXT)
    changed, twice = [(1, None, {"n": 100}), (2, None, {"n": 100})], [(2, None, {"n": 101})]
    rows.change([dm.Patch(changed), dm.Remove([(3, 1)])])
    rows_at, is_overtaken = Builds.rows_at, []

    def overtaken(*given: Any) -> list[tuple[Any, ...]]:
        if not is_overtaken:
            is_overtaken.append(True)
            rows.change([dm.Patch(twice), dm.Remove([(4, 1)])])
            of(instance).bring(rows)
        return rows_at(*given)

    monkeypatch.setattr(Builds, "rows_at", overtaken)
    page = rows.query(TEXT, page_rows)
    found = [row for one in all_pages(rows, page) for row in one.rows]
    expected = [(row[0], row[1], row[3]) for row in of_files(rows, page.version)]
    assert (sorted(found), page.count) == (expected, len(expected))
    assert is_overtaken
