"""Lost epochs: a server that lost commits reuses epoch numbers. No process may use the lost epochs of
them.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from tests.support.reading import query
from tests.support.state import TableContext, TreeCache
from tests.support.writing import ingest

NewTable = Callable[..., TableContext]


def reopened(table: TableContext) -> TableContext:
    """Returns the same table with its own tree cache, like that of another process."""
    return TableContext(table.dsn, table.supplier, table.objects, table.table, trees=TreeCache())


def lose_epochs(table: TableContext) -> None:
    """Deletes epochs. This stands for a server restored in place, or for a lagging standby that takes
    over.
    """
    with table.supplier.connection() as conn, conn.transaction():
        for statement in (
            "delete from partition where table_id = %s and parent_id is not null",
            "update partition set sealed_epoch = null, split_key = null, split_point = null, left_id = null, "
            "right_id = null where table_id = %s",
            "delete from epoch where table_id = %s and epoch > 0",
            "update tables set epoch = 0 where table_id = %s",
        ):
            conn.execute(statement, [table.table.table_id])


def add(table: TableContext, *keys: int) -> None:
    data = pa.table({"key": pa.array(keys, pa.int64())})
    ingest(table, data, ingest_id=None, engine="local", progress=None)


def keys(table: TableContext, key: int) -> list[int]:
    found: list[int] = query(table, {"key": key}).read_all()["key"].to_pylist()
    return found


@pytest.mark.parametrize("further", [False, True], ids=["as many", "more"])
def test_cached_epochs_that_the_server_lost_are_not_used(new_table: NewTable, *, further: bool) -> None:
    reader, writer, other = (table := new_table()), reopened(table), reopened(table)
    table.partitions.split("root", 10)
    for one in (reader, writer):
        assert one.partitions.tree().leaf_count == 2
    lose_epochs(table)
    _, right = other.partitions.split("root", 50)
    if further:
        other.partitions.split(right.partition_id, 70)
    add(other, 5, 20, 60, 80)
    assert [keys(reader, key) for key in (5, 20, 60, 80)] == [[5], [20], [60], [80]]
    add(writer, 21)
    assert keys(reopened(table), 21) == [21]
