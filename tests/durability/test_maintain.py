"""Unattended maintenance of an instance, and the metadata backup that replaces a lost database."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import dormouse as dm
from dormouse.durability import backups
from dormouse.durability.backups import KIND
from dormouse.durability.ownership import Ownership
from dormouse.embedded.restoring import restore_metadata
from dormouse.errors import (
    CheckFailed,
    InstanceError,
    InstanceLocked,
    InstanceReadOnly,
    InvalidInput,
    NotAnInstance,
    TableBusy,
)
from tests.standard import OF_KEYS
from tests.stored import query, wait_until
from tests.support.api import Instance, Table

PROMPT = dm.TableProperties(
    gc_delay_seconds=0,
    compaction_strategy="basic",
    compaction_batch_files=2,
    split_threshold_rows=10,
    split_min_rows=2,
)


def fill(instance: Instance, name: str, files: int = 2) -> None:
    table = instance.create_table(name, OF_KEYS, properties=PROMPT)
    for number in range(files):
        table.ingest(pa.table({"key": [10 * number + n for n in range(3)]}))


def keys(instance: Instance, table: str) -> list[int]:
    return sorted(instance.table(table).query().read_all()["key"].to_pylist())


def damage(instance: Instance, name: str) -> Path:
    """Makes a file of the table unreadable."""
    context = instance.table(name).context
    path = context.objects.local_path(next(iter(context.store.file_references())).filename)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"x" * path.stat().st_size)
    return path


def backup_times(instance: Instance) -> list[str]:
    return [one.made for one in backups.metadata_backups(instance._objects)]


def a_day_passes(instance: Instance) -> None:
    query(instance._supplier, "update instance_round set ended_at = ended_at - interval '25 hours'")


@pytest.mark.objects
def test_all_tables_are_maintained_despite_a_failing_one(tmp_path: Path) -> None:
    reported: list[str] = []
    with dm.local(tmp_path / "lake") as instance:
        fill(instance, "a")
        fill(instance, "b")
        fill(instance, "c", files=5)
        damaged = damage(instance, "a")
        done = instance.maintain(once=True, tell=reported.append)
        assert done.cycles == 1
        assert (done.jobs_run, done.partitions_split) >= (1, 1)
        assert done.files_deleted >= 2
        assert done.failed == len(done.failures) == len(reported) >= 1
        assert all(line.startswith("a: ") for line in reported)
        assert damaged.name in reported[0]
        assert instance.table("b").status().files == 1
        assert keys(instance, "c") == sorted(10 * number + n for number in range(5) for n in range(3))
        rounds = {one.kind: one for one in instance.rounds()}
        checks = {kind for kind in rounds if kind.startswith("check ")}
        assert rounds.keys() - checks == {"commit bodies", "jobs", KIND, "payloads", "rows"}
        assert checks
        last = rounds[KIND]
        assert last.error is None
        assert last.well_at == last.ended_at


def test_compactions_can_be_left_to_another_program(instance: Instance) -> None:
    fill(instance, "a", files=5)
    done = instance.maintain(once=True, compacts=False)
    assert (done.cycles, done.jobs_run, done.partitions_split, done.failed) == (1, 0, 0, 0)
    assert instance.table("a").status().files == 5
    [last] = [one for one in instance.table("a").status().rounds if one.kind == "collection"]
    assert last.error is None
    assert instance.maintain(once=True).jobs_run >= 1


def test_tables_without_work_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dm.local(tmp_path / "lake") as instance:
        for name in ("a", "b", "gone"):
            fill(instance, name, files=1)
        instance.maintain(once=True)
        assert instance.maintain(once=True).tables_idle == 3
        # objects of a dropped table that the metadata backup kept are deleted, although no table has work
        instance.drop_table("gone")
        query(instance._supplier, "delete from hold returning 1")
        left = set(instance._objects.list("data/"))
        assert instance.maintain(once=True).tables_idle == 2
        assert len(set(instance._objects.list("data/"))) < len(left)
        fill(instance, "c")
        done = instance.maintain(once=True)
        assert (done.tables_idle, done.jobs_run, done.failed) == (2, 1, 0)

        def lost(*_: object, **__: object) -> None:
            raise TableBusy("a lock")

        fill(instance, "d")
        monkeypatch.setattr("dormouse.state.history.due.run_lookup", lost)
        done = instance.maintain(once=True)
        assert (done.tables_idle, done.jobs_run, done.failed) == (0, 1, 0)


@pytest.mark.slow
def test_the_metadata_is_backed_up_daily_and_the_newest_backups_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_METADATA_BACKUPS", "2")
    seconds = iter(range(60))

    class Clock:
        @staticmethod
        def now(zone: object) -> datetime:
            return datetime(2026, 1, 1, 0, 0, next(seconds), tzinfo=UTC)

    monkeypatch.setattr(backups, "datetime", Clock)
    with dm.local(tmp_path / "lake") as instance:
        fill(instance, "t")
        for _ in range(3):
            instance.maintain(once=True)
            instance.maintain(once=True)
            a_day_passes(instance)
        assert backup_times(instance) == ["2026-01-01T000001Z", "2026-01-01T000002Z"]


@pytest.mark.slow
def test_a_new_backup_is_the_last_even_if_an_earlier_clock_was_ahead(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        for day in ("01", "02"):
            instance._objects.put(f"backups/1/2999-01-{day}T000000Z.tar.gz", b"of a clock that was ahead")
        instance._durability.metadata_backups = 2
        for _ in range(2):
            instance.maintain(once=True)
            assert backups.find_metadata(instance._objects, None).byte_count > 1_000
            a_day_passes(instance)
        assert backup_times(instance) == ["2999-01-02T000001Z", "2999-01-02T000002Z"]


@pytest.mark.slow
def test_a_failed_backup_is_recorded_and_retried_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with dm.local(tmp_path / "lake") as instance:
        works, instance._durability.base_backup = instance._durability.base_backup, fail
        for _ in range(2):
            done = instance.maintain(once=True)
        assert done.failed == 0
        [last] = [one for one in instance.rounds() if one.kind == KIND]
        assert "No space left" in str(last.error)
        assert last.well_at is None
        instance._durability.base_backup = works
        query(instance._supplier, "update instance_round set ended_at = ended_at - interval '1 hour'")
        instance.maintain(once=True)
        assert [one.error for one in instance.rounds() if one.kind == KIND] == [None]
        assert len(backup_times(instance)) == 1


@pytest.mark.slow
def test_one_process_maintains_an_instance(tmp_path: Path) -> None:
    stop = threading.Event()
    with dm.local(tmp_path / "lake") as instance, dm.local(tmp_path / "lake") as other:
        fill(instance, "t")
        thread = threading.Thread(
            target=lambda: instance.maintain(stop=stop, cycle_seconds=0.05, tell=lambda line: None)
        )
        thread.start()
        wait_until(lambda: backup_times(instance) != [])
        with pytest.raises(InstanceLocked, match="another process already maintains this instance"):
            other.maintain(once=True)
        # tables that are created while maintenance runs are maintained, too
        fill(instance, "later")
        try:
            wait_until(lambda: instance.table("later").status().files == 1)
        finally:
            stop.set()
            thread.join(10)
        assert not thread.is_alive()
        other.maintain(once=True)


@pytest.mark.objects
@pytest.mark.slow
def test_metrics_have_the_backlog_and_the_failures(tmp_path: Path) -> None:
    found: dict[str, float] = {}
    with dm.local(tmp_path / "lake") as instance:
        fill(instance, "bad")
        damage(instance, "bad")
        instance.maintain(once=True, metrics=tmp_path / "dormouse.prom")
    for family in text_string_to_metric_families((tmp_path / "dormouse.prom").read_text()):
        for sample in family.samples:
            found[" ".join([sample.name, *map(str, sample.labels.values())])] = sample.value
    assert found["dormouse_table_files bad"] == 2
    assert found["dormouse_round_failing compaction bad"] == 1
    assert found[f"dormouse_round_failing {KIND} "] == 0
    assert found[f"dormouse_round_well_timestamp_seconds {KIND}"] > 1e9
    assert found["dormouse_maintenance_failures"] >= 1


@pytest.mark.slow
def test_maintenance_continues_after_a_cycle_without_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    stop = threading.Event()
    with dm.local(tmp_path / "lake") as instance:
        fill(instance, "t")
        tables, looks = instance.tables, iter(range(2))

        def listed() -> list[Table]:
            if next(looks, None) is not None:
                raise InstanceError("the database is away")
            stop.set()
            return tables()

        monkeypatch.setattr(instance, "tables", listed)
        done = instance.maintain(stop=stop, cycle_seconds=0.01, tell=reported.append)
        assert (done.cycles, reported) == (3, ["maintenance: the database is away"] * 2)


@pytest.mark.slow
def test_a_read_only_instance_is_not_maintained(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake"):
        pass
    with dm.local(tmp_path / "lake", read_only=True) as instance, pytest.raises(InstanceReadOnly):
        instance.maintain(once=True)


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    arguments = [str(Path(sys.executable).with_name("dormouse")), *words, "--instance", str(folder)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.objects
def test_the_command_runs_until_a_signal_and_reports_failures(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    lake = tmp_path / "lake"
    with dm.local(lake) as instance:
        fill(instance, "t")
        process = command(lake, "maintain", "--every", "0.1")
        wait_until(lambda: instance.table("t").status().files == 1)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        fill(instance, "u")
        process = command(lake, "maintain", "--every", "0.1", "--json")
        wait_until(lambda: instance.table("u").status().files == 1)
        process.send_signal(signal.SIGTERM)
        reported, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert json.loads(reported)["jobs_run"] == 1
        fill(instance, "bad")
        name = damage(instance, "bad").name
        code, _, errors = cli("maintain", "--once", "--instance", str(lake))
        assert code == 1
        assert name in errors
        _, reported, _ = cli("status", "--instance", str(lake))
        assert f"last {KIND}" in reported


# ---------------------------------------------------------------------- a database that is lost


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Returns a folder without its database, with a metadata backup and a file that was ingested after the
    backup.
    """
    lake = tmp_path / "lake"
    with dm.local(lake) as instance:
        fill(instance, "t", files=1)
        instance.maintain(once=True)
        instance.table("t").ingest(pa.table({"key": [99]}))
    shutil.rmtree(lake / "postgres")
    return lake


def files(lake: Path) -> set[Path]:
    return set((lake / "objects" / "data").rglob("*.parquet"))


@pytest.mark.slow
def test_a_lost_database_is_restored_from_the_metadata_backup(lost: Path) -> None:
    made = restore_metadata(lost)
    assert (made.tables, made.incarnation) == (1, 2)
    assert made.backup.startswith("backups/1/")
    with dm.local(lost) as instance:
        assert instance.refusal is None
        assert keys(instance, "t") == [0, 1, 2]
        instance.release("adoption 2")
        [tracked] = instance.table("t").files.file_references()
        [later] = {path for path in files(lost) if not path.match(f"*/{tracked.filename}")}
        instance.table("t").ingest(pa.table({"key": [7]}))
        instance.maintain(once=True)
        assert keys(instance, "t") == [0, 1, 2, 7]
        # the file ingested after the backup has no reference, and stays
        assert len(files(lost)) == 2
        assert later in files(lost)
        # the next metadata backup belongs to the new incarnation
        a_day_passes(instance)
        instance.maintain(once=True)
        assert [one.incarnation for one in backups.metadata_backups(instance._objects)][-1] == 3
    assert not list(lost.glob("postgres.new*"))


@pytest.mark.objects
@pytest.mark.slow
def test_files_of_the_last_metadata_backup_are_kept_after_a_compaction(tmp_path: Path) -> None:
    """While files are missing, no orphan is deleted: an orphan may have the last copy of their rows."""
    lake = tmp_path / "lake"
    with dm.local(lake) as instance:
        fill(instance, "t", files=1)
        instance.maintain(once=True)
        instance.table("t").ingest(pa.table({"key": [99]}))
        done = instance.maintain(once=True)
        assert (done.jobs_run, done.files_deleted) == (1, 0)
        assert instance.table("t").status().unreferenced_files == 2
    shutil.copytree(lake, tmp_path / "later")
    shutil.rmtree(lake / "postgres")
    restore_metadata(lake)
    with dm.local(lake) as instance:
        assert keys(instance, "t") == [0, 1, 2]
        instance.release("adoption 2")
        [tracked] = instance.table("t").files.file_references()
        (lake / "objects" / tracked.filename).unlink()
        with pytest.raises(CheckFailed, match="may be the last copy"):
            instance.delete_orphans(timedelta(0))
        assert len(files(lake)) == 2
    # after the next backup, the files that were merged before it may be deleted
    with dm.local(tmp_path / "later") as instance:
        a_day_passes(instance)
        assert instance.maintain(once=True).files_deleted == 0
        query(instance._supplier, "update hold set since = clock_timestamp() returning 1")
        assert query(instance._supplier, "select count(*) from hold") == [(1,)]
        assert instance.maintain(once=True).files_deleted == 2


@pytest.mark.slow
def test_an_existing_database_is_not_replaced(tmp_path: Path, lost: Path) -> None:
    restore_metadata(lost)
    with pytest.raises(InvalidInput, match="is not lost"):
        restore_metadata(lost)
    with pytest.raises(NotAnInstance):
        restore_metadata(tmp_path)
    assert list(tmp_path.iterdir()) == [lost]


@pytest.mark.slow
def test_without_a_valid_backup_nothing_is_restored(lost: Path) -> None:
    with pytest.raises(InvalidInput, match="no such backup"):
        restore_metadata(lost, "2020-01-01T000000Z")
    [path] = (lost / "objects" / "backups").rglob("*.tar.gz")
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(dm.DormouseError, match=f"{path.name} is damaged"):
        restore_metadata(lost)
    path.write_bytes(
        bytes([*data[:-100_000], data[-100_000] ^ 1, *data[-99_999:]])
    )  # in a page of zeros, for example
    with pytest.raises(dm.DormouseError, match=f"{path.name} is damaged"):
        restore_metadata(lost)
    path.unlink()
    with pytest.raises(InvalidInput, match="there are: none"):
        restore_metadata(lost)
    assert not (lost / "postgres").exists()
    assert not list(lost.glob("postgres.new*"))


@pytest.mark.slow
def test_a_restored_database_is_moved_into_place_after_it_owns_the_store(
    lost: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Ownership, instance_id: str, **how: float | bool) -> int:
        raise KeyboardInterrupt

    before = sorted(path.name for path in lost.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "adopt", die)
        with pytest.raises(KeyboardInterrupt):
            restore_metadata(lost)
    assert sorted(path.name for path in lost.iterdir()) == before
    descriptor = os.open(lost, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another process that restores into the folder
    with pytest.raises(InstanceLocked, match="another process"):
        restore_metadata(lost)
    os.close(descriptor)
    assert restore_metadata(lost).tables == 1
    assert sorted(path.name for path in lost.iterdir()) == sorted([*before, "postgres"])


@pytest.mark.objects
@pytest.mark.slow
def test_a_full_disk_is_not_reported_as_damage(lost: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tarfile.TarFile.extractall", fill)
    with pytest.raises(InstanceError, match=f"cannot restore into {lost}: No space left"):
        restore_metadata(lost)
    assert not (lost / "postgres").exists()
