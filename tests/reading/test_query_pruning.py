"""Statistics on any column let queries skip parts of a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pruning import pruned
from query_lake import Lake

import dormouse as dm
from dormouse.postgres import ConnectionSupplier
from tests.standard import OF_K
from tests.support.model import INT, LONG, STRING, Field, Range, Schema

READINGS = Schema(
    [Field("site", STRING), Field("device", LONG)],
    [Field("time", INT)],
    [Field("level", LONG, nullable=True)],
)
_names = count()


@pytest.fixture
def new_lake(shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path) -> Callable[[int], Lake]:
    """Returns a function that makes a table of one site with 40 devices and 100 readings of each.

    Pages have 100 rows. The function's argument is the number of rows in a row group.
    """

    def make(row_group_rows: int) -> Lake:
        lake = Lake(*shared_supplier, tmp_path, READINGS, name=f"pruned_{next(_names)}")
        lake.row_group_rows = row_group_rows
        lake.add(
            [
                {"site": "s", "device": i // 100, "time": i, "level": None if i < 200 else i // 100}
                for i in range(4_000)
            ]
        )
        return lake

    return make


@pytest.mark.parametrize(
    ("where", "groups", "rows"),
    [
        ({"site": "r"}, 0, 0),
        ({"site": "s", "device": Range(7, 8)}, 1, 100),
        ({"device": Range(7, 9)}, 2, 200),
        ({"device": [7, 30]}, 2, 200),
        ({"device": list(range(5, 35))}, 30, 3_000),
        ({"device": Range(37, None, min_inclusive=False)}, 2, 200),
        ({"time": 712}, 1, 1),
        ({"time": Range(750, 850)}, 2, 100),
        ({"site": "s", "device": 7, "time": 12}, 0, 0),
        ({"level": 7}, 1, 100),
        ({"level": None}, 2, 200),
    ],
)
def test_row_groups_and_pages_are_skipped_on_any_column(
    new_lake: Callable[[int], Lake], monkeypatch: pytest.MonkeyPatch, where: Any, groups: int, rows: int
) -> None:
    """Covers files of 40 row groups, skipped by statistics, and of one row group with 40 pages."""
    found = pruned(new_lake(100).context, where, monkeypatch)
    assert found.rows == rows
    assert found.metrics.get("row_groups_pruned_statistics", (40, 0)) == (40, groups)
    found = pruned(new_lake(4_000).context, where, monkeypatch)
    assert found.rows == rows
    if groups and where != {"level": None}:  # nulls take no page
        assert found.metrics["page_index_pages_pruned"][1] == groups
        assert found.metrics["page_index_pages_pruned"][0] >= 40


def test_rows_are_filtered_while_they_are_decoded(
    new_lake: Callable[[int], Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pruned(new_lake(100).context, {"time": Range(750, 850)}, monkeypatch)
    assert found.numbers["pushdown_rows_pruned"] == 100
    assert found.numbers["pushdown_rows_matched"] == 100


@pytest.mark.slow
def test_the_work_per_key_does_not_grow_with_the_leaves(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query for a list of keys must not compare each key with each leaf."""
    looks = 0

    def counted(self: Range) -> bool:
        nonlocal looks
        looks += 1
        return is_exact(self)

    is_exact = Range.is_exact.fget  # type: ignore[attr-defined]
    leaves, keys = 40, list(range(0, 4_000, 2))
    with closing(dm.connect(dsn, tmp_path.as_uri())) as instance:
        schema = OF_K
        table = instance.create_table("t", schema, split_points=[n * 100 for n in range(1, leaves)])
        table.ingest(pa.table({"k": range(4_000)}))
        monkeypatch.setattr(Range, "is_exact", property(counted))
        for descending in (False, True):
            looks = 0
            assert table.query({"k": keys}, descending=descending).read_all().num_rows == len(keys)
            assert 0 < looks < 10 * len(keys)
