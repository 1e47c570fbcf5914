"""The committer adds no files that are not their table's."""

from __future__ import annotations

import pytest

import dormouse as dm
from dormouse.instance import Instance
from tests.commits import add, assignment, drained, files_of, replacement, states

SCHEMA = dm.Schema(row_keys=[dm.Field("key", dm.LONG)])


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "s3://b/x", "instance.json", "data/t{victim}/x.parquet"]
)
def test_a_request_that_adds_a_file_of_others_is_rejected(instance: Instance, name: str) -> None:
    victim = instance.create_table("victim", SCHEMA).files.table
    name = name.format(victim=victim.table_id)
    outcomes = drained(
        instance,
        add("t", name, "add"),
        *(add("t", "old"), assignment("t", "j", "old"), replacement("t", "j", ["old"], name, "replace")),
        add("victim", f"{victim.object_prefix}own.parquet", "its own"),
    )
    assert {i for i, state in states(outcomes).items() if state == "rejected"} == {"add", "replace"}
    assert name in str(outcomes["add"].error)
    assert files_of(instance) == ["old"]
    assert files_of(instance, "victim") == [f"{victim.object_prefix}own.parquet"]
