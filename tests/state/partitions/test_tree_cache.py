"""Tests of the cache of trees: which trees it keeps, and for how long."""

from __future__ import annotations

import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

from dormouse.model.partition_tree import PartitionRow
from tests.large_tree import balanced_arrays
from tests.support.model import TreeArrays
from tests.support.state import TreeCache

SMALL = balanced_arrays(1).byte_size


def grow(arrays: TreeArrays, partitions: int) -> None:
    epoch = arrays.epoch + 1
    arrays.extend([PartitionRow(f"{epoch}-{n}", epoch) for n in range(partitions)], epoch)


def test_the_least_recently_used_tree_is_evicted_first() -> None:
    cache = TreeCache(3 * SMALL)
    trees = [balanced_arrays(1) for _ in range(4)]
    for table_id in range(3):
        cache.put(table_id, trees[table_id])
    assert cache.get(0) is trees[0]
    cache.put(3, trees[3])
    assert cache.get(1) is None
    assert [cache.get(table_id) for table_id in (0, 2, 3)] == [trees[0], trees[2], trees[3]]
    assert (len(cache), cache.byte_size) == (3, 3 * SMALL)


def test_a_tree_that_grew_counts_with_its_current_size() -> None:
    one, two, like_two = balanced_arrays(1), balanced_arrays(1), balanced_arrays(1)
    grow(like_two, 100)
    cache = TreeCache(like_two.byte_size + SMALL - 1)
    cache.put(1, one)
    cache.put(2, two)
    assert cache.byte_size == 2 * SMALL
    grow(two, 100)
    cache.put(2, two)
    assert (cache.get(1), cache.get(2)) == (None, two)
    assert cache.byte_size == two.byte_size


def test_a_tree_larger_than_the_cache_is_not_kept_and_evicts_no_others() -> None:
    small, large = balanced_arrays(1), balanced_arrays(500)
    cache = TreeCache(2 * SMALL)
    cache.put(1, small)
    cache.put(2, large)
    assert (cache.get(1), cache.get(2)) == (small, None)
    cache.put(1, large)
    assert (cache.get(1), len(cache), cache.byte_size) == (None, 0, 0)


def test_a_dropped_table_is_forgotten() -> None:
    cache = TreeCache(10 * SMALL)
    cache.put(1, balanced_arrays(1))
    cache.drop(1)
    cache.drop(1)
    assert (cache.get(1), len(cache), cache.byte_size) == (None, 0, 0)


def test_threads_share_the_cache_of_trees() -> None:
    cache = TreeCache(5 * SMALL)
    trees = {table_id: balanced_arrays(1) for table_id in range(10)}

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2_000):
            table_id = rng.randrange(10)
            if rng.random() < 0.1:
                cache.drop(table_id)
            elif cache.get(table_id) not in (None, trees[table_id]):
                raise AssertionError("another table's tree")
            else:
                cache.put(table_id, trees[table_id])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    kept = [table_id for table_id in trees if cache.get(table_id)]
    assert 0 < len(kept) == len(cache) <= 5
    assert cache.byte_size == len(kept) * SMALL


def test_a_forked_child_has_a_cache_of_its_own() -> None:
    cache = TreeCache(10 * SMALL)
    cache.put(1, balanced_arrays(1))
    with warnings.catch_warnings(), cache.loading(1):
        warnings.simplefilter("ignore", DeprecationWarning)  # later Python versions warn of threads
        child = os.fork()
        if child == 0:
            free = cache.loading(1).acquire(timeout=60)
            os._exit(0 if free and cache.get(1) is None and cache.byte_size == 0 else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert cache.get(1) is not None
