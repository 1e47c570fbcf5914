"""The history that a table has: between moments, under another name, of one that was made again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidCut, PartitionNotFound, TableNotFound
from dormouse.history.epochs import EpochRecord
from dormouse.instance import Instance

BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


def ids(partitions: Any) -> list[str]:
    return [one.partition_id for one in partitions]


def test_a_table_made_again_under_an_old_name_has_a_history_of_its_own(instance: Instance) -> None:
    first = instance.table("t")
    left, _ = first.partitions.split("root", 5)
    before = list(first.history.epochs())
    instance.drop_table("t")
    second = instance.create_table("t", dm.Schema(row_keys=[dm.Field("key", dm.LONG)]))
    [record] = second.history.epochs()
    assert (record.epoch, record.sealed, record.created) == (0, (), ("root",))
    assert record.created_at > before[-1].created_at
    assert second.history.epoch_at(before[-1].created_at) == 0
    with pytest.raises(PartitionNotFound, match="table 't' has no partition"):
        second.history.successors(left.partition_id)
    for read in (
        first.history.active_partitions,
        first.history.epochs,
        lambda: first.history.epoch_at(BEGAN),
        lambda: first.history.partitions_at(BEGAN),
        lambda: first.history.scale_metadata(BEGAN, BEGAN),
    ):
        with pytest.raises(TableNotFound, match="'t' does not exist any more"):
            read()


def test_between_two_moments_are_the_partitions_of_their_epochs(instance: Instance) -> None:
    table = instance.table("t")
    history = table.history
    history.record_cut("begun")
    left, right = table.partitions.split("root", 5)
    divided = history.record_cut()
    table.partitions.split(left.partition_id, 0)
    assert ids(history.partitions_between("begun", "begun")) == ["root"]
    assert ids(history.partitions_between("begun", divided)) == ["root", "1-0", "1-1"]
    assert ids(history.partitions_between(divided)) == ["1-0", "1-1", "2-0", "2-1"]
    assert ids(history.partitions_between()) == ["root", "1-0", "1-1", "2-0", "2-1"]
    assert right.partition_id in ids(history.partitions_between(divided, divided))
    with pytest.raises(InvalidCut, match="give the earlier moment first"):
        history.partitions_between(divided, "begun")


def test_a_history_outlives_a_new_name(instance: Instance) -> None:
    table = instance.table("t")
    table.partitions.split("root", 5)
    before = list(table.history.epochs())
    instance.rename_table("t", "u")
    assert list(instance.table("u").history.epochs()) == before
    assert isinstance(before[0], EpochRecord)
