"""Checks of partition trees, of which each row can be lost or damaged; and the order of a check's listing."""

from __future__ import annotations

import pytest

import dormouse as dm
from dormouse.durability import listing
from dormouse.durability.listing import by_file
from dormouse.instance import Instance
from dormouse.model.text import narrow_id
from dormouse.objects.names import SKETCHES_SUFFIX
from tests.state import query

SCHEMA = dm.Schema(row_keys=[dm.Field("key", dm.LONG), dm.Field("name", dm.STRING)])


@pytest.mark.parametrize(
    "damage",
    [
        "delete from partition where parent_id is null",
        "delete from partition where ctid = (select max(ctid) from partition where sealed_epoch is null)",
        "update partition set max_keys[1] = '\\x8000000000000001'"
        " where partition_id = (select min(left_id) from partition)",
        "update partition set min_keys[2] = '\\x41'"
        " where partition_id = (select min(right_id) from partition)",
        "update partition set split_point = '\\x8000000000000001' where parent_id is null",
        "update partition set parent_id = 'nobody' where sealed_epoch is null",
        "update partition set created_epoch = created_epoch + 7, sealed_epoch = sealed_epoch + 7"
        " where parent_id is not null",
        "delete from epoch where epoch = 0",
        "delete from epoch where epoch = 1",
        "delete from epoch",
        "update epoch set created = '{}' where epoch = 1",
        "update epoch set sealed = created where epoch = 1",
    ],
)
def test_a_tree_that_is_not_whole_is_found(instance: Instance, damage: str) -> None:
    """Each partition, and each epoch."""
    table = instance.create_table("u", SCHEMA, split_points=[1_000])
    table.partitions.split(table.partitions.leaves()[0].partition_id, 100)
    table.partitions.split(table.partitions.leaves()[0].partition_id, "m", "name")
    assert instance.check().problems == ()
    instance.drop_table("t")
    query(instance._supplier, damage.replace("%", "%%"))
    problems = instance.check(table="u").problems
    assert {problem.kind for problem in problems} == {"partitions"}


def test_files_in_any_number_are_listed_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "RUN_OBJECTS", 7)
    objects = [(f"data/{number} é\n{SKETCHES_SUFFIX * (number % 2)}", number) for number in range(100)]
    listed = list(by_file(objects))
    assert sorted((one.name, one.byte_count) for one in listed) == sorted(objects)
    ids = [narrow_id(one.name.removesuffix(SKETCHES_SUFFIX)).hex for one in listed]
    assert ids == sorted(ids) == [one.file_id for one in listed]
