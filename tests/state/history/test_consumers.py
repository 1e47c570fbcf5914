"""Consumers read each row once, with two readers, readers that die, and consumers that expire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import (
    ConsumerExpired,
    ConsumerOvertaken,
    CutExpired,
    InstanceReadOnly,
    InvalidCut,
    InvalidInput,
)
from dormouse.reading.changes import Consumer
from dormouse.state.files import holds
from tests.standard import OF_KEYS
from tests.support.api import Instance, Table, connect
from tests.support.state import LAYOUTS, record_cut

SCHEMA = OF_KEYS


def new_table(instance: Instance, **properties: Any) -> Table:
    given = {"compaction_strategy": "basic", "compaction_batch_files": 2, **properties}
    return instance.create_table("t", SCHEMA, properties=dm.TableProperties(**given))


def add(table: Table, *keys: int) -> None:
    table.ingest(pa.table({"key": list(keys)}), engine="local")


def rows(consumer: Consumer) -> list[int]:
    return sorted(consumer.read().read_all()["key"].to_pylist())


def test_a_new_consumer_begins_now(instance: Instance) -> None:
    table = new_table(instance)
    add(table, 1)
    consumer = table.consumer("etl")
    assert rows(consumer) == []
    add(table, 2)
    assert rows(consumer) == [2]


def test_a_new_consumer_begins_at_a_cut_and_an_existing_one_keeps_its_position(instance: Instance) -> None:
    table = new_table(instance)
    add(table, 1)
    cut = record_cut(table.context, "start")
    add(table, 2)
    assert rows(table.consumer("etl", from_="start")) == [2]
    table.consumer("etl").read()
    add(table, 3)
    later = record_cut(table.context)
    assert rows(table.consumer("etl", from_=later)) == [2, 3]
    assert cut < later


def test_unacknowledged_rows_are_read_again_with_later_rows(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    add(table, 1)
    assert rows(consumer) == [1]
    add(table, 2)
    table.compact(engine="local")
    assert rows(consumer) == [1, 2]
    consumer.acknowledge()
    assert rows(consumer) == []
    consumer.acknowledge()
    add(table, 3)
    assert rows(table.consumer("etl")) == [3]


def test_acknowledging_moves_the_position_to_the_moment_of_the_read(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    add(table, 1)
    reader = consumer.read()
    add(table, 2)
    assert reader.read_all()["key"].to_pylist() == [1]
    consumer.acknowledge()
    assert rows(consumer) == [2]


def test_rows_that_were_not_read_to_the_end_cannot_be_acknowledged(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    with pytest.raises(InvalidInput, match="nothing was read"):
        consumer.acknowledge()
    add(table, 1)
    reader = consumer.read()
    with pytest.raises(InvalidInput, match="not all rows of the last read were taken"):
        consumer.acknowledge()
    reader.read_all()
    consumer.acknowledge()
    with pytest.raises(InvalidInput, match="nothing was read"):
        consumer.acknowledge()
    assert rows(consumer) == []


def test_of_two_readers_one_is_overtaken(instance: Instance) -> None:
    table = new_table(instance)
    one, other = table.consumer("etl"), table.consumer("etl")
    add(table, 1)
    assert rows(other) == [1]
    add(table, 3)
    assert rows(one) == [1, 3]
    one.acknowledge()
    with pytest.raises(ConsumerOvertaken, match="another reader of consumer 'etl' of table 't'"):
        other.acknowledge()
    assert rows(other) == []
    other.acknowledge()
    add(table, 2)
    assert rows(one) == [2]


def test_an_acknowledgement_whose_answer_was_lost_can_be_repeated(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    add(table, 1)
    rows(consumer)
    read = consumer._read
    consumer.acknowledge()
    consumer._read = read
    consumer.acknowledge()
    assert rows(consumer) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_consumer_keeps_its_files_through_collection(instance: Instance, layout: str) -> None:
    properties = dm.TableProperties(gc_delay_seconds=0, compaction_batch_files=2, compaction_strategy="basic")
    table = instance.create_table("t", SCHEMA, layout=layout, properties=properties)
    consumer = table.consumer("etl")
    for key in range(4):
        add(table, key)
        table.compact(engine="local")
        table.collect_garbage()
        table.collect_garbage()
    assert rows(consumer) == [0, 1, 2, 3]
    consumer.acknowledge()
    let_margin_pass(instance)
    table.collect_garbage()
    assert table.collect_garbage().deleted or not list(table.garbage_ready())
    add(table, 9)
    assert rows(consumer) == [9]
    table.drop_consumer("etl")
    table.compact(engine="local")
    table.collect_garbage()
    assert table.status().unreferenced_files == 0


def let_margin_pass(instance: Instance) -> None:
    """Moves the holds of consumers ten minutes forward, to the consumers' positions."""
    execute(instance, "update hold set since = since + interval '10 minutes'")


def execute(instance: Instance, statement: str) -> None:
    with instance._supplier.connection() as conn:
        conn.execute(statement)  # type: ignore[call-overload]


def expire(instance: Instance) -> None:
    execute(instance, "update hold set until = clock_timestamp()")


def test_an_expired_consumer_raises_and_skips_nothing(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    add(table, 1)
    rows(consumer)
    expire(instance)
    said = r"consumer 'etl' of table 't' is expired.*To go on: table.drop_consumer\('etl'\)"
    with pytest.raises(ConsumerExpired, match=said):
        consumer.acknowledge()
    with pytest.raises(ConsumerExpired, match=said):
        consumer.read()
    with pytest.raises(ConsumerExpired, match=said):
        table.consumer("etl").read()
    [status] = table.consumers()
    assert (status.is_expired, status.rows_behind, status.expires_at) == (True, None, None)
    table.drop_consumer("etl")
    assert rows(table.consumer("etl")) == []


def test_a_longer_expiry_does_not_revive_an_expired_consumer(instance: Instance) -> None:
    table = new_table(instance, consumer_expiry_seconds=0)
    consumer = table.consumer("etl")
    table.set_properties(consumer_expiry_seconds=1_000)
    with pytest.raises(ConsumerExpired):
        table.consumer("etl").read()
    table.drop_consumer("etl")
    assert rows(table.consumer("etl")) == []
    with pytest.raises(InvalidInput, match="nothing was read"):
        consumer.acknowledge()


def test_acknowledging_renews_the_hold(instance: Instance) -> None:
    table = new_table(instance, consumer_expiry_seconds=1_000)
    consumer = table.consumer("etl")
    execute(instance, "update hold set until = clock_timestamp() + interval '100 seconds'")
    rows(consumer)
    [before] = table.consumers()
    consumer.acknowledge()
    [after] = table.consumers()
    assert before.expires_at and after.expires_at
    assert (after.expires_at - before.expires_at).total_seconds() > 800
    assert (after.expires_at - after.acknowledged_at).total_seconds() == 1_000
    # files from before its position are no longer held
    [held] = holds.holds(instance._supplier)
    assert after.position_at > before.position_at
    assert (after.position_at - held.since).total_seconds() == holds.MARGIN_SECONDS


def test_a_handle_of_a_dropped_consumer_is_not_one_of_its_successor(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    add(table, 1)
    rows(consumer)
    table.drop_consumer("etl")
    table.consumer("etl")
    with pytest.raises(InvalidInput, match="no consumer 'etl'"):
        consumer.acknowledge()
    table.drop_consumer("etl")
    with pytest.raises(InvalidInput, match="it has none"):
        consumer.read()
    with pytest.raises(InvalidInput, match="no consumer 'etl'"):
        table.drop_consumer("etl")


def test_lag_is_reported_in_rows_and_seconds(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    [status] = table.consumers()
    assert (status.rows_behind, status.seconds_behind) == (0, 0)
    add(table, 1, 2)
    add(table, 3)
    table.compact(engine="local")
    [status] = table.consumers()
    assert status.rows_behind == 3
    assert status.seconds_behind and 0 < status.seconds_behind < 600
    rows(consumer)
    consumer.acknowledge()
    assert table.consumers()[0].rows_behind == 0


@pytest.mark.parametrize("name", ["", "a\nb", 7, None, "x" * 256])
def test_invalid_names_of_consumers_are_refused(instance: Instance, name: Any) -> None:
    with pytest.raises(InvalidInput):
        new_table(instance).consumer(name)


def test_a_read_only_instance_reads_but_acknowledges_nothing(
    instance: Instance, dsn: str, tmp_path: Path
) -> None:
    table = new_table(instance)
    table.consumer("etl")
    add(table, 1)
    with connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reading:
        consumer = reading.table("t").consumer("etl")
        assert rows(consumer) == [1]
        with pytest.raises(InstanceReadOnly):
            consumer.acknowledge()
        with pytest.raises(InstanceReadOnly):
            reading.table("t").consumer("other")


def test_a_consumer_of_a_cleared_table_cannot_go_on(instance: Instance) -> None:
    table = new_table(instance)
    consumer = table.consumer("etl")
    add(table, 1)
    table.files.clear()
    with pytest.raises(ConsumerExpired):
        consumer.read()


def test_a_consumer_goes_on_over_a_restore(instance: Instance) -> None:
    table = new_table(instance)
    table.history.record_cut("before")
    etl = table.consumer("etl")
    add(table, 1)
    assert rows(etl) == [1]
    etl.acknowledge()
    table.restore(to="before")
    assert etl.read().read_all().to_pylist() == [{"key": 1, "_change": "delete"}]
    etl.acknowledge()
    assert rows(etl) == []


def test_a_consumer_cannot_begin_at_an_unreadable_moment(instance: Instance) -> None:
    table = new_table(instance, gc_delay_seconds=0)
    with pytest.raises(InvalidCut, match="no cut 'never'"):
        table.consumer("etl", from_="never")
    cut = record_cut(table.context)
    add(table, 1)
    add(table, 2)
    expire(instance)
    table.compact(engine="local")
    assert table.collect_garbage().deleted == 2
    with pytest.raises(CutExpired):
        table.consumer("etl", from_=cut)
    assert table.consumers() == []
    with pytest.raises(CutExpired):
        table.changes(after=cut)
    with pytest.raises(CutExpired, match="does not reach back"):
        table.changes(after=None)


def test_status_lists_the_cuts_and_consumers_that_keep_the_history(instance: Instance) -> None:
    table = new_table(instance)
    record_cut(table.context, "release")
    table.consumer("etl")
    add(table, 1)
    status = table.status()
    assert [str(holder) for holder in status.history_held_by] == ["cut 'release'", "consumer 'etl'"]
    assert [(one.name, one.rows_behind) for one in status.consumers] == [("etl", 1)]
    assert status.history_since and status.history_since < status.consumers[0].position_at
    expire(instance)
    again = table.status()
    assert [str(holder) for holder in again.history_held_by] == ["cut 'release'"]
    assert [one.is_expired for one in again.consumers] == [True]


@pytest.mark.slow
def test_maintenance_applies_retention_and_measures_consumers(instance: Instance, tmp_path: Path) -> None:
    table = new_table(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 1)
    first = record_cut(table.context)
    table.consumer("etl")
    add(table, 2, 3)
    metrics = tmp_path / "metrics.prom"
    assert instance.maintain(once=True, metrics=metrics).failed == 0
    text = metrics.read_text()
    assert 'dormouse_consumer_rows_behind{consumer="etl",table="t"} 2.0' in text
    assert 'dormouse_consumer_expired{consumer="etl",table="t"} 0.0' in text
    assert first not in list(table.history.cuts()), "retention went up to it"
    assert sorted(table.changes(after=first).read_all()["key"].to_pylist()) == [2, 3]
