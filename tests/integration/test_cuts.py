"""Cuts and moments: what a table was, told the same whenever it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from state import at_once, case, query, ref, remove, split, wait_until

from dormouse.context import TableContext
from dormouse.errors import CutExpired, InvalidCut, TableNotFound
from dormouse.files.layout import LAYOUTS
from dormouse.history import cuts, moments
from dormouse.model.cut import Cut, Position

NewTable = Callable[..., TableContext]


def files_at(table: TableContext, position: Position) -> set[tuple[str, str]]:
    """(partition, file) of each reference at a position."""
    with table.supplier.connection() as conn:
        rows = table.store.planned_at(_ids(table), position.snapshot, conn)
    assert all(row[-1] for row in rows), "all files are known"
    return {(row[0], row[1]) for row in rows}


def _ids(table: TableContext) -> list[str]:
    found = query(
        table.supplier, "select partition_id from partition where table_id = %s", table.table.table_id
    )
    return [row[0] for row in found]


def at(table: TableContext, when: Any) -> set[tuple[str, str]]:
    return files_at(table, moments.position_of(table, when))


def clock(table: TableContext) -> datetime:
    found: datetime = query(table.supplier, "select clock_timestamp()")[0][0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moment_has_the_same_files_whatever_comes_later(new_table: NewTable, layout: str) -> None:
    table = new_table(layout=layout)
    seen: list[tuple[Any, set[tuple[str, str]], int]] = []

    def note(name: str | None = None) -> None:
        files = {(r.partition_id, r.filename) for r in table.store.file_references()}
        epoch = table.partitions.tree().epoch
        seen.extend([(clock(table), files, epoch), (cuts.record_cut(table, name), files, epoch)])

    note()
    table.store.add_files([ref("a"), ref("b")])
    note("first")
    left, right = table.partitions.split("root", 10)
    note()
    table.store.split_file_references([split(ref("a"), left.partition_id, right.partition_id)])
    note("divided")
    remove(table.store, "b")
    remove(table.store, "a", partition_id=left.partition_id)
    table.garbage.collect()
    note()
    table.store.add_files([ref("c", right.partition_id)])
    table.garbage.collect()
    for when, files, epoch in seen:
        with case(when):
            assert at(table, when) == files
            assert moments.position_of(table, when).epoch == epoch
    assert at(table, "divided") == seen[7][1]
    assert files_at(table, moments.now(table)) == {
        (right.partition_id, "a"), (right.partition_id, "c"),
    }  # fmt: skip
    recorded = [when for when, _, _ in seen if isinstance(when, Cut)]
    assert list(cuts.cuts(table)) == recorded == sorted(recorded)
