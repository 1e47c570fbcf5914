"""The garbage lambda: it collects table after table within its time, and does nothing without work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.aws.schedules.garbage import FAILED_AGAIN_SECONDS, collect
from dormouse.aws.schedules.work import Record, Schedule, Turn, utc_now
from dormouse.durability import checking
from dormouse.objects import store as store_module
from dormouse.state.files import removal_log
from dormouse.state.files.garbage import GarbageCollector
from lambdas.garbage import handler
from lambdas.services import MARGIN_SECONDS
from tests.aws_lambda import Context, metrics_in
from tests.standard import OF_KEYS
from tests.stored import file, query, wait_until
from tests.support.api import Instance
from tests.support.state import LAYOUTS

SCHEMA = OF_KEYS


@pytest.fixture
def instance(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    url = (tmp_path / "objects").as_uri()
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", url)
    with dm.connect(dsn, url) as instance:
        yield instance


def table_with_garbage(instance: Instance, name: str, files: int = 2, **properties: Any) -> dm.Table:
    """Creates a table with objects that no partition refers to."""
    layout = properties.pop("layout", "file_table")
    made = instance.create_table(
        name, SCHEMA, layout=layout, properties=dm.TableProperties(**{"gc_delay_seconds": 0, **properties})
    )
    for number in range(files):
        instance._objects.put(f"data/{name}/{number}", b"x")
        made.files.add_files_with_references([file(f"data/{name}/{number}", byte_count=100)])
    return made


def left(instance: Instance) -> list[str]:
    return sorted(name for name, _ in instance._objects.list("data"))


def noted(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_noted", {})
    store_module.note_activity(instance._objects)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unreferenced_files_are_deleted(
    instance: Instance, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table_with_garbage(instance, "t", layout=layout)
    table_with_garbage(instance, "u", layout=layout, gc_delay_seconds=3_600)
    assert handler({}, Context()) == {"skipped": False, "tables": 2, "deleted_files": 2}
    assert left(instance) == ["data/u/0", "data/u/1"]
    assert metrics_in(capsys.readouterr().out) == {
        "FilesDeleted": 2, "OrphanedBytes": 200, "RoundsFailing": 0,
    }  # fmt: skip


def test_failing_rounds_of_every_kind_are_counted(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        table_with_garbage(instance, name)
    with pytest.raises(dm.DormouseError), instance.table("b").context.last_rounds.round("split"):
        raise dm.DormouseError("bad")
    with monkeypatch.context() as broken:
        broken.setattr(GarbageCollector, "_forget_commits", lambda self: self._store.of_no_such_name)
        handler({}, Context())
    assert metrics_in(capsys.readouterr().out)["RoundsFailing"] == 3
    noted(instance, monkeypatch)
    handler({}, Context())
    assert metrics_in(capsys.readouterr().out)["RoundsFailing"] == 1


@pytest.mark.objects
def test_a_share_of_the_tables_is_checked_once_a_day(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking, "SHARES", 1)  # every table is in today's share
    table = instance.create_table("t", SCHEMA)
    table.ingest(pa.table({"key": [1]}))
    handler({}, Context())
    assert metrics_in(capsys.readouterr().out)["RoundsFailing"] == 0
    [lost] = [name for name in left(instance) if name.endswith(".parquet")]
    instance._objects.delete([lost])
    for days, failing in ((0, 0), (1, 1)):
        text = "update instance_round set ended_at = ended_at - make_interval(days => %s) returning 1"
        query(instance._supplier, text, days)
        noted(instance, monkeypatch)
        handler({}, Context())
        assert metrics_in(capsys.readouterr().out)["RoundsFailing"] == failing
    errors = {last.kind: last.error for last in instance.rounds()}
    assert errors.keys() == {"check 0", "check rest"}
    assert errors["check rest"] is None
    assert lost in str(errors["check 0"])


def test_without_activity_the_database_is_left_asleep(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler({}, Context())
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    capsys.readouterr()
    assert handler({}, Context()) == {"skipped": True}
    assert metrics_in(capsys.readouterr().out) == {}


def test_activity_starts_another_round(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    handler({}, Context())
    table_with_garbage(instance, "t")
    noted(instance, monkeypatch)
    assert handler({}, Context())["deleted_files"] == 2


def test_files_that_wait_for_their_delay_make_the_next_round_due(instance: Instance) -> None:
    table_with_garbage(instance, "t", gc_delay_seconds=900, history_retention_seconds=1_000)
    handler({}, Context())
    later = utc_now() + timedelta(seconds=1_001)
    turn = Schedule(instance._objects, "garbage", lambda: later).turn()
    assert turn is not None and turn.why == "due"
    sooner = utc_now() + timedelta(seconds=900)
    assert Schedule(instance._objects, "garbage", lambda: sooner).turn() is None


def test_a_round_without_time_left_is_continued_by_the_next(instance: Instance) -> None:
    for name in ("a", "b", "c"):
        table_with_garbage(instance, name)
    # the clock is read before each table, and before each of its batches
    clock = itertools.chain([1.0] * 2, itertools.repeat(0.0))
    first = collect(instance._supplier, instance._objects, new_turn(), seconds_left=lambda: next(clock))
    assert (first.tables, first.tables_left, first.deleted_files) == (1, 2, 2)
    assert first.due_at is not None and first.due_at <= utc_now()
    assert left(instance) == ["data/b/0", "data/b/1", "data/c/0", "data/c/1"]

    clock = itertools.chain([1.0] * 2, itertools.repeat(0.0))
    turn = new_turn(memory=first.memory)
    second = collect(instance._supplier, instance._objects, turn, seconds_left=lambda: next(clock))
    assert left(instance) == ["data/c/0", "data/c/1"] and second.deleted_files == 2


def test_a_large_table_ends_between_two_batches(instance: Instance) -> None:
    table_with_garbage(instance, "t", files=5, gc_batch_files=2)
    clock = itertools.chain([1.0] * 2, itertools.repeat(0.0))
    done = collect(instance._supplier, instance._objects, new_turn(), seconds_left=lambda: next(clock))
    assert (done.deleted_files, done.orphaned_files, len(left(instance))) == (2, 3, 3)
    assert done.due_at is not None and done.due_at <= utc_now()


def test_without_time_no_table_is_collected(instance: Instance) -> None:
    table_with_garbage(instance, "t")
    assert handler({}, Context(seconds=MARGIN_SECONDS)) == {"skipped": False, "tables": 0, "deleted_files": 0}
    assert handler({}, Context())["deleted_files"] == 2  # the rest is due


def test_a_round_rolls_the_log_of_removals_once(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        table_with_garbage(instance, name)
    rolled: list[object] = []
    monkeypatch.setattr(removal_log, "roll", rolled.append)
    assert handler({}, Context())["tables"] == 2
    assert len(rolled) == 1


def test_a_failing_table_does_not_stop_the_others(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        table_with_garbage(instance, name)
    real = GarbageCollector.collect

    def collect_or_fail(self: GarbageCollector, *more: Any, **options: Any) -> Any:
        if self._store.table.name == "a":
            raise RuntimeError("broken")
        return real(self, *more, **options)

    monkeypatch.setattr(GarbageCollector, "collect", collect_or_fail)
    done = collect(instance._supplier, instance._objects, new_turn(), seconds_left=lambda: 60)
    assert (done.tables_failed, done.deleted_files) == (1, 2)
    assert "no garbage of table a in this round" in caplog.text
    assert done.due_at is not None
    assert abs((done.due_at - utc_now()).total_seconds() - FAILED_AGAIN_SECONDS) < 60


def test_a_table_dropped_meanwhile_is_no_failure(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    table_with_garbage(instance, "t")
    real = GarbageCollector.collect

    def drop_first(self: GarbageCollector, *more: Any, **options: Any) -> Any:
        instance.drop_table("t")
        return real(self, *more, **options)

    monkeypatch.setattr(GarbageCollector, "collect", drop_first)
    done = collect(instance._supplier, instance._objects, new_turn(), seconds_left=lambda: 60)
    assert (done.tables_failed, done.due_at) == (0, None)


def test_objects_of_dropped_tables_are_deleted(instance: Instance) -> None:
    """A writer may write objects even after its table was dropped. Only this lambda deletes them."""
    table = table_with_garbage(instance, "t", files=0)
    instance._objects.put(f"{table.context.table.object_prefix}late/0-root.parquet", b"x")
    instance.drop_table("t")
    instance._objects.put(f"{table.context.table.object_prefix}later/0-root.parquet", b"x")
    handler({}, Context())
    assert left(instance) == []


def test_no_connection_outlives_the_call(instance: Instance) -> None:
    table_with_garbage(instance, "t")
    handler({}, Context())
    text = "select count(*) from pg_stat_activity where application_name = 'dormouse-garbage'"
    wait_until(lambda: query(instance._supplier, text) == [(0,)], seconds_max=60)


def new_turn(memory: dict[str, int] | None = None) -> Turn:
    record = None if memory is None else Record(utc_now(), None, memory)
    return Turn("activity", utc_now(), record, ())
