"""Merges killed with SIGKILL before each of their statements. The table then has the old or the new epoch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dying import dies_at

from tests.stored import file, live, query, ref
from tests.support.model import Partition
from tests.support.state import LAYOUTS, FileChecks, PartitionStore, TableContext, tree_problems

STATEMENTS_MAX = 40


def merge_and_die(table: TableContext, leaves: list[str], statement: int) -> bool:
    """Merges leaves in another process, which dies just before its statement of this number.

    Returns False if the process ended normally, because it had fewer statements.
    """

    def merge(own: TableContext) -> None:
        PartitionStore(own.supplier, own.table).scale(leaves, [("key", 25)], "the same each time")

    return dies_at(table, merge, statement, "execute")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_merge_is_complete_or_absent(new_table: Callable[..., TableContext], layout: str) -> None:
    table = new_table(split_points=[10, 20, 30], layout=layout)
    leaves: tuple[Partition, ...] = table.partitions.leaves()
    names = [leaf.partition_id for leaf in leaves]
    table.store.add_files_with_references([file(name, ref(name, name), row_count=100) for name in names])
    before, deaths = live(table.store), 0
    for statement in range(1, STATEMENTS_MAX):
        if not merge_and_die(table, names, statement):
            break
        deaths += 1
        fresh = PartitionStore(table.supplier, table.table)
        assert tree_problems(table.supplier, table.table) == []
        assert FileChecks(table.store.own).problems() == []
        if fresh.tree().epoch:
            break
        assert (fresh.leaves(), live(table.store)) == (leaves, before)
    assert deaths > 10
    # a retry with the same id does no harm
    assert merge_and_die(table, names, STATEMENTS_MAX) is False
    halves = PartitionStore(table.supplier, table.table).leaves()
    assert [leaf.region.range("key").min for leaf in halves] == [None, 25]
    assert [name for _, name, _, _ in live(table.store)] == sorted(names)
    assert {partition_id for partition_id, *_ in live(table.store)} == {halves[0].parent_id}
    assert query(table.supplier, "select epoch from tables where table_id = %s", table.table.table_id) == [
        (1,)
    ]
    assert tree_problems(table.supplier, table.table) == []
    assert FileChecks(table.store.own).problems() == []
