"""The history of a table between moments, after a rename, and after the table was made again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import CutExpired, InvalidCut, PartitionNotFound, TableNotFound
from dormouse.reading import executor
from dormouse.state.files.shapes import Shapes
from dormouse.state.history.epochs import EpochRecord
from tests.standard import OF_KEYS
from tests.support.api import Instance
from tests.support.reading import arrow_schema

pytestmark = pytest.mark.usefixtures("table_t")

BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


def ids(partitions: Any) -> list[str]:
    return [one.partition_id for one in partitions]


def test_a_table_made_again_under_an_old_name_has_a_history_of_its_own(instance: Instance) -> None:
    first = instance.table("t")
    left, _ = first.partitions.split("root", 5)
    before = list(first.history.epochs())
    instance.drop_table("t")
    second = instance.create_table("t", OF_KEYS)
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
        with pytest.raises(TableNotFound, match="'t' no longer exists"):
            read()


def test_partitions_between_two_moments_are_those_of_their_epochs(instance: Instance) -> None:
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


def test_a_history_survives_a_rename(instance: Instance) -> None:
    table = instance.table("t")
    table.partitions.split("root", 5)
    before = list(table.history.epochs())
    instance.rename_table("t", "u")
    assert list(instance.table("u").history.epochs()) == before
    assert isinstance(before[0], EpochRecord)


def test_a_cut_is_cached_after_its_first_read_until_it_is_dropped_or_truncated(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process changes columns, truncates the history, and drops the cut."""
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("n", dm.LONG, nullable=True)])
    table = instance.create_table("cuts", schema)
    rows = pa.table({"k": [1, 2], "n": [10, 20]}, schema=arrow_schema(schema))
    table.ingest(rows)
    cut, other = table.history.record_cut(), instance.table("cuts")
    then = [{"k": 1, "n": 10}]
    assert table.query({"k": 1}, as_of=cut).read_all().to_pylist() == then
    with monkeypatch.context() as patch:
        patch.setattr(executor, "position_of", None)
        patch.setattr("dormouse.state.history.moments.position_of", None)
        patch.setattr(Shapes, "at", None)
        assert table.query({"k": 1}, as_of=cut).read_all().to_pylist() == then
    table.ingest(rows)
    other.rename_column("n", "number")
    assert table.query({"k": 1}, as_of=cut).read_all().to_pylist() == then
    assert table.query({"k": 1}).read_all().column_names == ["k", "number"]
    assert table.query({"k": 1}, as_of=cut).read_all().to_pylist() == then
    other.history.truncate(other.history.record_cut())
    with pytest.raises(CutExpired):
        table.query({"k": 1}, as_of=cut)
    named = table.history.record_cut("named")
    assert table.query({"k": 1}, as_of=named).read_all().num_rows == 2
    other.history.drop_cut("named")
    with pytest.raises(InvalidCut):
        table.query({"k": 1}, as_of=named)
