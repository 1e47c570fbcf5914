"""The current partitions to which a restore moves the references of an earlier time."""

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
    """Returns the tree at the restored time, and the current tree.

    - at the restored time: the leaves ll (below 5), lr (from 5 to 10) and r (from 10)
    - current: the leaves m, merged from ll and lr, and r
    """
    root, left, right = split_partition(OF_KEYS, Partition(ROOT, None, Region()), Split("key", 10), "l", "r")
    divided, low, high = split_partition(OF_KEYS, left, Split("key", 5), "ll", "lr")
    now = split_partition(OF_KEYS, Partition(ROOT, None, Region()), Split("key", 10), "m", "r")
    return tree_of(OF_KEYS, [root, divided, low, high, right]), tree_of(OF_KEYS, now)


def part(filename: str, partition_id: str, rows: int, *, approximate: bool = False) -> FileReference:
    more = {"only_contains_data_for_this_partition": False, "count_approximate": approximate}
    return ref(filename, partition_id, rows, **more)


def test_references_of_existing_partitions_stay_there(trees: Trees) -> None:
    back = [ref("a", "r", 7), part("b", "r", 8), part("c", ROOT, 9)]
    assert placed(back, *trees) == back


def test_parts_of_one_file_in_merged_partitions_become_one(trees: Trees) -> None:
    """Two references to a file become one, whose count is the sum; it is approximate if either count is."""
    [found] = placed([part("a", "ll", 30), part("a", "lr", 12, approximate=True)], *trees)
    assert found == part("a", "m", 42, approximate=True)
    [found] = placed([part("a", "ll", 30), part("a", "lr", 12)], *trees)
    assert found == part("a", "m", 42)


def test_whole_files_of_merged_partitions_stay_separate_and_whole(trees: Trees) -> None:
    found = placed([ref("a", "ll", 30), ref("b", "lr", 12), ref("c", "l", 5)], *trees)
    assert found == [ref("a", "m", 30), ref("b", "m", 12), ref("c", "m", 5)]


def test_a_file_of_the_parent_of_merged_partitions_goes_to_the_merged_one(trees: Trees) -> None:
    assert placed([part("a", "l", 30)], *trees) == [part("a", "m", 30)]


@pytest.mark.parametrize("place", ["ll", "lr"])
def test_a_part_of_a_merged_partition_without_the_other_part_is_refused(trees: Trees, place: str) -> None:
    with pytest.raises(NotWhole, match=f"partition {place!r} was merged since, and its file 'a'"):
        placed([part("a", place, 30), part("b", "ll", 1), part("b", "lr", 1)], *trees)
