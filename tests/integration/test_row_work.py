"""Jobs of row tables: each does what it was asked once, and answers as of what it was asked of."""

from __future__ import annotations

import pytest

import dormouse as dm
from dormouse import row_work
from dormouse.errors import SnapshotNotFound
from dormouse.instance import Instance
from dormouse.rows.row_table import RowTable

COLUMNS = [dm.Column("name", "STRING")]


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    made = instance.create_row_table("samples", COLUMNS)
    made.change([dm.Insert([{"name": "a"}])])
    return made


def test_a_query_of_a_snapshot_is_of_the_version_that_had_its_name(
    instance: Instance, rows: RowTable
) -> None:
    asked = {"table": "samples", "sql": "select * from samples", "snapshot": "s"}
    rows.snapshot("s")
    rows.change([dm.Insert([{"name": "b"}])])
    first = row_work.start_query(instance, asked, None)
    assert row_work.start_query(instance, asked, None) == first
    rows.drop_snapshot("s")
    with pytest.raises(SnapshotNotFound):
        row_work.start_query(instance, asked, None)
    rows.snapshot("s")
    other = row_work.start_query(instance, asked, None)
    assert [instance.jobs.request(one)["version"] for one in (first, other)] == [1, 2]
