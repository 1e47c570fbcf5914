"""Schedules: notes of activity and records of runs show whether there is work, even in races."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.aws.schedules.work import Schedule
from dormouse.errors import ObjectStoreError
from dormouse.objects import store as store_module
from tests.commits import add
from tests.standard import OF_KEYS
from tests.support.objects import ObjectStore, open_store

MINUTE = timedelta(minutes=1)


class Clock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return open_store(tmp_path / "objects")
    store: ObjectStore = request.getfixturevalue("s3_store")
    return store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def schedule(objects: ObjectStore, clock: Clock) -> Schedule:
    return Schedule(objects, "garbage", clock)


def note(objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a note of activity at the clock's time, as another process would."""

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return clock.now

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "datetime", Frozen)
        patched.setattr(store_module, "_noted", {})
        store_module.note_activity(objects)


def run(schedule: Schedule, due_at: datetime | None = None) -> None:
    turn = schedule.turn()
    assert turn is not None
    schedule.done(turn, due_at=due_at)


def why(schedule: Schedule) -> str | None:
    turn = schedule.turn()
    return turn and turn.why


def test_the_first_run_has_work_and_the_next_has_none(schedule: Schedule) -> None:
    assert why(schedule) == "the first run"
    run(schedule)
    assert why(schedule) is None


def test_activity_since_the_last_run_is_work_once(
    schedule: Schedule, objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(schedule)
    clock.now += 20 * MINUTE
    assert why(schedule) is None
    note(objects, clock, monkeypatch)
    clock.now += 10 * MINUTE
    assert why(schedule) == "activity"
    run(schedule)
    clock.now += 10 * MINUTE
    assert why(schedule) is None


def test_activity_during_a_run_is_left_to_the_next(
    schedule: Schedule, objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = schedule.turn()
    assert turn is not None
    clock.now += 5 * MINUTE
    note(objects, clock, monkeypatch)
    clock.now += 5 * MINUTE
    schedule.done(turn)
    assert why(schedule) == "activity"


def test_a_note_covers_the_activity_of_its_process_in_the_minute_after_it(
    schedule: Schedule, objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process writes one note for all its commits of a minute. A run may end between two of them.

    So the note must also start a run that begins a minute after it.
    """
    clock.now = clock.now.replace(second=59)
    note(objects, clock, monkeypatch)
    clock.now += timedelta(seconds=58)
    run(schedule)
    assert why(schedule) == "activity"
    clock.now += 3 * MINUTE
    run(schedule)
    assert why(schedule) is None


def test_a_run_that_fails_leaves_its_work(
    schedule: Schedule, objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(schedule)
    clock.now += 10 * MINUTE
    note(objects, clock, monkeypatch)
    clock.now += 10 * MINUTE
    assert schedule.turn() is not None  # it never calls done()
    clock.now += 10 * MINUTE
    assert why(schedule) == "activity"


def test_due_work_starts_a_run_at_its_time(schedule: Schedule, clock: Clock) -> None:
    run(schedule, due_at=clock.now + 15 * MINUTE)
    clock.now += 14 * MINUTE
    assert why(schedule) is None
    clock.now += MINUTE
    assert why(schedule) == "due"
    run(schedule)
    assert why(schedule) is None


def test_a_run_keeps_the_due_time_of_a_concurrent_run(schedule: Schedule, clock: Clock) -> None:
    slow = schedule.turn()
    clock.now += MINUTE
    quick = schedule.turn()
    assert slow is not None and quick is not None
    schedule.done(slow, due_at=clock.now + 15 * MINUTE)
    clock.now += MINUTE
    schedule.done(quick)
    assert why(schedule) is None
    clock.now += 15 * MINUTE
    assert why(schedule) == "due"


def test_the_last_run_is_the_one_that_began_last(
    schedule: Schedule, objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs overlap. The one that ends last began before the note of activity; the other saw the note."""
    slow = schedule.turn()
    clock.now += 5 * MINUTE
    note(objects, clock, monkeypatch)
    clock.now += 5 * MINUTE
    quick = schedule.turn()
    assert slow is not None and quick is not None
    schedule.done(quick)
    schedule.done(slow)
    assert why(schedule) is None


def test_a_schedule_runs_at_least_once_a_day(schedule: Schedule, clock: Clock) -> None:
    run(schedule)
    clock.now += timedelta(hours=23, minutes=59)
    assert why(schedule) is None
    clock.now += MINUTE
    assert why(schedule) == "a day has passed"


def test_schedules_of_different_kinds_are_independent(objects: ObjectStore, schedule: Schedule) -> None:
    run(schedule)
    assert why(Schedule(objects, "maintenance")) == "the first run"


def test_the_memory_of_a_run_is_given_to_the_next(schedule: Schedule, clock: Clock) -> None:
    turn = schedule.turn()
    assert turn is not None and turn.last is None
    schedule.done(turn, memory={"after": "t"}, due_at=clock.now)
    turn = schedule.turn()
    assert turn is not None and turn.last is not None and turn.last.memory == {"after": "t"}


def test_a_process_writes_one_note_a_minute(objects: ObjectStore) -> None:
    for _ in range(3):
        store_module.note_activity(objects)
    assert len(list(objects.list("activity"))) == 1


def test_old_records_and_notes_are_deleted(
    schedule: Schedule, objects: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.now -= timedelta(days=4)
    for _ in range(4):
        note(objects, clock, monkeypatch)
        clock.now += timedelta(days=1)
        run(schedule)
    note(objects, clock, monkeypatch)
    assert len(list(objects.list("work"))) == 1
    assert len(list(objects.list("activity"))) == 3


def test_an_unreadable_record_is_ignored(schedule: Schedule, objects: ObjectStore) -> None:
    objects.put("work/garbage/20260101T000000000000Z-1.json", b"{")
    assert why(schedule) == "the first run"


def test_a_process_that_cannot_write_a_note_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path)
    with pytest.raises(ObjectStoreError):
        store.put("file/x", b"")
    (tmp_path / "activity").write_text("a file where the notes should be")
    store_module.note_activity(store)
    assert "the note of activity could not be written" in caplog.text


@pytest.mark.slow
def test_each_change_of_a_table_in_s3_is_noted(
    dsn: str, s3_store: ObjectStore, s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted_by(change: Callable[[], object]) -> bool:
        monkeypatch.setattr(store_module, "_noted", {})
        s3_store.delete([name for name, _ in s3_store.list("activity")])
        change()
        return any(s3_store.list("activity"))

    with dm.connect(dsn, s3_store.url, **s3_options) as instance:
        table = instance.create_table("t", OF_KEYS)
        rows = pa.table({"key": [1, 2]})
        assert noted_by(lambda: table.ingest(rows))
        assert noted_by(table.compact)
        assert noted_by(table.split)
        assert noted_by(lambda: table.set_properties(gc_delay_seconds=1))
        assert not noted_by(lambda: table.query().read_all())
        instance.submit([add("t", "a")])
        assert noted_by(lambda: instance.committer().drain())
        assert noted_by(lambda: instance.drop_table("t"))
        assert noted_by(lambda: instance.create_table("u", OF_KEYS))


def test_an_instance_in_a_folder_writes_no_notes(dsn: str, tmp_path: Path) -> None:
    with dm.connect(dsn, (tmp_path / "lake").as_uri()) as instance:
        instance.create_table("t", OF_KEYS)
    assert not (tmp_path / "lake" / "activity").exists()
