"""Bundles of inlined files of tables whose leaves are divided, merged and compacted."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest

import dormouse as dm
from dormouse.errors import FileReferenceAssignedToJob, InvalidRange, PartitionError
from dormouse.reading import bundles
from tests.reading.test_inlined_content import new_table
from tests.support.api import Instance, Table

KEYS = 100


def keys_of(table: Table, where: dict[str, object] | None = None) -> list[int]:
    keys: list[int] = table.query(where).read_all().column("key").to_pylist()
    return keys


def test_a_bundle_of_one_leaf_has_no_rows_that_were_compacted_in_another(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    table = new_table(
        instance,
        ingest_file_writing="one_reference_per_leaf",
        compaction_strategy="basic",
        compaction_batch_files=3,
    )
    table.partitions.split("root", 50)

    def ingest(*keys: int) -> None:
        table.ingest([{"key": key, "value": "a"} for key in keys])

    for key in range(2):
        ingest(key, 50 + key)
    ingest(52)
    assert table.compact(engine="local").jobs_run == 1, "only the right leaf has enough files"
    for key in range(3, 6):
        ingest(key, 50 + key)
    for _ in range(2):
        assert keys_of(table) == [0, 1, 3, 4, 5, 50, 51, 52, 53, 54, 55]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
@pytest.mark.parametrize("writing", ["one_file_per_leaf", "one_reference_per_leaf"])
def test_rows_are_read_once_while_leaves_change(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, writing: str, keep: str, seed: int
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    table = new_table(
        instance,
        keep=keep,
        ingest_file_writing=writing,
        compaction_strategy="basic",
        compaction_batch_files=3,
        split_threshold_rows=20,
        split_min_rows=2,
        merge_threshold_rows=8,
    )
    rng, model = random.Random(seed), Counter[int]()
    past = []
    for _ in range(60):
        match rng.randrange(9):
            case 0 | 1 | 2 | 3:
                keys = rng.sample(range(KEYS), rng.randint(1, 4))
                table.ingest([{"key": key, "value": "a"} for key in keys])
                model.update(keys)
                if keep == "newest_row":
                    model = Counter({*model})
            case 4:
                low = rng.randrange(KEYS)
                table.delete({"key": dm.Range(low, low + 3)})
                model = Counter({key: n for key, n in model.items() if not low <= key < low + 3})
            case 5:
                with suppress(PartitionError, InvalidRange, FileReferenceAssignedToJob):
                    leaf = rng.choice(table.partitions.leaves()).partition_id
                    table.partitions.split(leaf, rng.randrange(KEYS))
            case 6:
                table.compact(engine="local")
            case 7:
                table.split()
            case _:
                table.merge()
        if rng.random() < 0.1:
            past.append((table.history.record_cut(), sorted(model.elements())))
        low = rng.randrange(KEYS)
        for where, span in ((None, range(KEYS)), ({"key": dm.Range(low, low + 20)}, range(low, low + 20))):
            right = sorted(key for key in model.elements() if key in span)
            assert keys_of(table, where) == right
        assert table.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": model.total()}]
        if past:
            cut, keys = rng.choice(past)
            assert table.query(as_of=cut).read_all().column("key").to_pylist() == keys
