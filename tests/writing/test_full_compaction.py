"""Full compactions, which make one file of each leaf even where the strategy would not."""

from __future__ import annotations

from collections import Counter

import pytest
from keyed_tables import keyed, seen, upsert

from dormouse.errors import NotWhole
from tests.support.api import Instance
from tests.support.state import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_compaction_makes_one_file_of_each_leaf(instance: Instance, layout: str) -> None:
    table = keyed(
        instance, layout=layout, compaction_strategy="size_ratio", compaction_batch_files=4,
        split_threshold_rows=400, split_min_rows=2,
    )  # fmt: skip
    upsert(table, *((key, 0) for key in range(1_000)))
    table.split()
    table.compact()
    for number in range(1, 6):
        upsert(table, (number, number), (999 - number, number))
    table.compact()
    assert max(files_of_leaves(instance, table.name).values()) > 1
    expected = seen(table, instance)
    report = table.compact(full=True)
    assert (report.given_up, report.jobs_failed) == (0, 0)
    assert set(files_of_leaves(instance, table.name).values()) == {1}
    assert table.status().row_count == 1_000
    assert seen(table, instance) == expected
    assert table.compact(full=True).jobs_created == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_that_share_one_file_can_be_merged_after_a_full_compaction(
    instance: Instance, layout: str
) -> None:
    table = keyed(instance, layout=layout, split_threshold_rows=100, split_min_rows=2)
    upsert(table, *((key, 0) for key in range(150)))
    table.split()
    assert list(files_of_leaves(instance, table.name).values()) == [1, 1]
    expected = seen(table, instance)
    partitions = instance.table(table.name).context.partitions
    leaves = [leaf.partition_id for leaf in partitions.leaves()]
    with pytest.raises(NotWhole, match=f"run 'dormouse compact {table.name} --full' first"):
        partitions.merge(leaves)
    assert table.compact(full=True).jobs_created == 2
    partitions.merge(leaves)
    assert len(partitions.leaves()) == 1
    assert seen(table, instance) == expected


@pytest.mark.slow
def test_a_leaf_of_a_keyed_table_becomes_one_file_now_and_then(instance: Instance) -> None:
    """Full merges must be rare: compactions write at most five rows for each upserted row."""
    table = keyed(instance, compaction_strategy="size_ratio", compaction_batch_files=12)
    upsert(table, *((key, 0) for key in range(400)))
    written, upserted, single = 0, 400, 0
    for number in range(1, 60):
        upsert(table, *((key % 400, number) for key in range(number * 7, number * 7 + 10)))
        upserted += 10
        written += table.compact().rows_written
        single += list(files_of_leaves(instance, table.name).values()) == [1]
    assert 2 <= single <= 8
    assert written <= 5 * upserted
    assert seen(table, instance) == {
        key: max((n for n in range(1, 60) for at in range(10) if (n * 7 + at) % 400 == key), default=0)
        for key in range(400)
    }


def files_of_leaves(instance: Instance, name: str) -> Counter[str]:
    references = instance.table(name).context.store.file_references()
    return Counter(reference.partition_id for reference in references)
