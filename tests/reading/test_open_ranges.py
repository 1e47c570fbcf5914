"""Ranges that are open at both ends: "not null" in a query, refused where rows are changed."""

from __future__ import annotations

from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery
from dormouse.reading.table_view import key_bounds
from tests.support.api import Instance
from tests.support.reading import KeyRanges
from tests.support.state import NewDeletion
from tests.writing.test_deletes import NAN, SCHEMA, add, keys, made, row, seen

OPEN: list[Any] = [
    {"v": dm.Range()},
    {"k": dm.Range()},
    {"k": 1, "v": dm.Range()},
    {"k": [1, dm.Range()]},
    {"k": [dm.Range(max=5), dm.Range(min=5)]},
    {"v": [dm.Range(max=5), dm.Range(min=3)]},
    {"d": [NAN, dm.Range(max=5.0), dm.Range(min=5.0)]},
    {"v": [None, dm.Range()]},
    dm.Region(k=dm.Range()),
]


def test_a_condition_that_bounds_nothing_changes_no_rows(instance: Instance) -> None:
    """An open range often comes from two variables that are not set."""
    table = made(instance)
    add(table, row(1), row(2, v=None))
    for where in OPEN:
        for change in (table.delete, table.erase):
            for dry_run in (False, True):
                with pytest.raises(InvalidQuery, match=r"bounds nothing.*dm\.ALL \(--all\)"):
                    change(where, dry_run=dry_run)
    assert keys(table) == [1, 2]
    assert table.deletions(pending_only=False) == []


@pytest.mark.slow
def test_a_range_in_a_query_gives_no_nulls(instance: Instance) -> None:
    table = made(instance)
    add(table, row(1), row(2, v=None, d=NAN), row(3, v=7, d=None), row(4, v=None, d=None))
    expected: list[tuple[Any, list[int]]] = [
        ({"v": dm.Range()}, [1, 3]),
        ({"d": dm.Range()}, [1, 2]),
        ({"v": [dm.Range(), None]}, [1, 2, 3, 4]),
        ({"v": [dm.Range(max=5), dm.Range(min=5)]}, [1, 3]),
        ({"v": dm.Range(), "k": dm.Range(2, 5)}, [3]),
        ({"k": dm.Range()}, [1, 2, 3, 4]),
    ]
    for where, found in expected:
        assert keys(table, where) == found, where
        assert table.count(where) == len(found), where
        assert [r["k"] for r in table.query(where, descending=True).read_all().to_pylist()] == found[::-1]
        with instance.duckdb(where={"t": where}) as opened:
            assert opened.sql("select k from t order by k").fetchall() == [(k,) for k in found], where


def test_an_open_range_of_an_earlier_release_still_deletes_nulls(
    instance: Instance,
) -> None:
    table = made(instance)
    add(table, row(1), row(2, v=None))
    condition = '{"v": [{"min": null, "max": null, "min_inclusive": true, "max_inclusive": false}]}'
    bounds = key_bounds(SCHEMA, KeyRanges())
    table.context.deletions.record(NewDeletion(condition, bounds, by_values=True))
    assert seen(table, instance) == []
    table.compact()
    assert seen(table, instance) == []
