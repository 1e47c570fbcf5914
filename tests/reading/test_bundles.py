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


def test_a_process_that_edits_a_table_makes_bundles(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[int](), bundles.joined_rows
    monkeypatch.setattr(
        bundles, "joined_rows", lambda files, *given: made.append(len(files)) or make(files, *given)
    )
    table = new_table(instance)
    for key in range(3 * bundles.FILES_MIN):
        table.ingest([{"key": key, "value": "a"}])
        table.update({"key": key - 1}, {"value": "b"})
        assert keys_of(table) == [*range(key + 1)]
    assert made, "pending deletions do not keep remembered plans from bundles"


def test_deletions_of_some_files_of_a_bundle_spare_the_others(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    monkeypatch.setattr(bundles, "TESTS_MAX", 0)
    table = new_table(instance)

    def ingest(value: str, *keys: int) -> None:
        table.ingest([{"key": key, "value": value} for key in keys])

    for key in (1, 2, 20, 21):
        ingest("b", key)
    assert keys_of(table) == [1, 2, 20, 21]
    table.delete({"key": dm.Range(0, 10), "value": "a"})
    for some in ((5, 30), (31,), (32,)):
        ingest("a", *some)
    assert keys_of(table, {"key": dm.Range(15, 40)}) == [20, 21, 30, 31, 32]
    assert keys_of(table, {"key": dm.Range(0, 3)}) == [1, 2]
    assert keys_of(table) == [1, 2, 5, 20, 21, 30, 31, 32], "row 5 came after the deletion"


def test_a_bundle_knows_deletions_of_rows_that_no_plan_wanted(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    monkeypatch.setattr(bundles, "TESTS_MAX", 0)
    table = new_table(instance)
    for key in (1, 2, 20, 21):
        table.ingest([{"key": key, "value": "a"}])
    assert keys_of(table) == [1, 2, 20, 21]
    cut = table.history.record_cut()
    table.delete({"value": "a"})
    assert keys_of(table, {"key": dm.Range(15, 40)}) == []
    small = table.query({"key": dm.Range(0, 10)}, as_of=cut)
    assert small.read_all().column("key").to_pylist() == [1, 2]
    assert table.query(as_of=cut).read_all().column("key").to_pylist() == [1, 2, 20, 21]
    assert keys_of(table) == []


def test_bundles_with_equal_rows_in_another_order_are_different_files(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    value = dm.Field("value", dm.STRING, nullable=True)
    schema = dm.Schema([dm.Field("key", dm.LONG)], values=[value])
    table = instance.create_table("t", schema, properties=dm.TableProperties(inline_bytes_max=65_536))

    def ingest(value: str | None) -> None:
        table.ingest([{"key": 1, "value": value}] * 16)

    def values() -> Counter[str | None]:
        return Counter(table.query().read_all().column("value").to_pylist())

    ingest(None)
    ingest("a")
    assert values() == {None: 16, "a": 16}
    ingest(None)
    ingest(None)
    assert values() == {None: 48, "a": 16}, "the bundle has grown"
    bundles._bundles.clear()
    assert values() == {None: 48, "a": 16}, "the bundle was made of all files"


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
    monkeypatch.setattr(bundles, "TESTS_MAX", rng.choice([0, 16]))
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
