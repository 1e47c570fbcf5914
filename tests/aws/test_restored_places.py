"""Where a restore puts references of before among the partitions of now."""

from __future__ import annotations

import pytest
from trees import tree_of

from dormouse.errors import NotWhole
from dormouse.model.file_reference import FileReference
from dormouse.state.history.moments import placed
from tests.standard import OF_KEYS
from tests.stored import ref
from tests.support.model import (
    ROOT,
    Partition,
    PartitionTree,
    Region,
    Split,
    split_partition,
)

Trees = tuple[PartitionTree, PartitionTree]


@pytest.fixture
def trees() -> Trees:
    """Of then: ll …5… lr …10… r; of now, after a merge: m …10… r."""
    root, left, right = split_partition(OF_KEYS, Partition(ROOT, None, Region()), Split("key", 10), "l", "r")
    divided, low, high = split_partition(OF_KEYS, left, Split("key", 5), "ll", "lr")
    now = split_partition(OF_KEYS, Partition(ROOT, None, Region()), Split("key", 10), "m", "r")
    return tree_of(OF_KEYS, [root, divided, low, high, right]), tree_of(OF_KEYS, now)


def part(filename: str, partition_id: str, rows: int, *, approximate: bool = False) -> FileReference:
    more = {"only_contains_data_for_this_partition": False, "count_approximate": approximate}
    return ref(filename, partition_id, rows, **more)


def test_references_of_partitions_that_are_there_still_come_back_to_them(trees: Trees) -> None:
    back = [ref("a", "r", 7), part("b", "r", 8), part("c", ROOT, 9)]
    assert placed(back, *trees) == back


def test_parts_of_one_file_in_merged_partitions_become_one(trees: Trees) -> None:
    """It has the rows of both, about as many as one of them, and still others that are none of its."""
    [found] = placed([part("a", "ll", 30), part("a", "lr", 12, approximate=True)], *trees)
    assert found == part("a", "m", 42, approximate=True)
    [found] = placed([part("a", "ll", 30), part("a", "lr", 12)], *trees)
    assert found == part("a", "m", 42)


def test_whole_files_of_merged_partitions_stay_whole_and_apart(trees: Trees) -> None:
    found = placed([ref("a", "ll", 30), ref("b", "lr", 12), ref("c", "l", 5)], *trees)
    assert found == [ref("a", "m", 30), ref("b", "m", 12), ref("c", "m", 5)]


def test_a_file_that_was_a_partitions_above_those_that_were_merged_is_whole_there(trees: Trees) -> None:
    assert placed([part("a", "l", 30)], *trees) == [part("a", "m", 30)]


@pytest.mark.parametrize("place", ["ll", "lr"])
def test_a_part_whose_other_rows_were_none_of_the_table_is_refused(trees: Trees, place: str) -> None:
    with pytest.raises(NotWhole, match=f"partition {place!r} was merged since, and its file 'a'"):
        placed([part("a", place, 30), part("b", "ll", 1), part("b", "lr", 1)], *trees)
