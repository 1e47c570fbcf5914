"""Backups and restores of an instance in a folder: during use, after damage, and when killed."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

import dormouse as dm
from dormouse.durability import backups
from dormouse.errors import BackupDamaged, InstanceError, InstanceTooNew, InvalidInput
from dormouse.jobs.job import upload_name
from dormouse.state.files.holds import held
from tests import forks
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.objects import SKETCHES_SUFFIX

pytestmark = pytest.mark.objects

SCHEMA = OF_KEYS
PROMPT = dm.TableProperties(
    gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2, attempt_expiry_seconds=1
)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an instance in use that has one backup."""
    folder = tmp_path_factory.mktemp("backups")
    with dm.local(folder / "lake") as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        for number in range(4):
            table.ingest(pa.table({"key": [10 * number + n for n in range(3)]}))
        instance.jobs.start("row_upload", None, job_id="waits")
        instance.objects.put(upload_name("waits"), b"rows")
        instance.backup(folder / "backups")
    return folder


def keys(instance: Instance, table: str = "t") -> list[int]:
    return sorted(instance.table(table).query().read_all()["key"].to_pylist())


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_restored_instance_equals_the_original_and_is_writable(lake: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    made = dm.restore(lake / "backups", tmp_path / "new")
    assert (made.tables, made.into, made.incarnation) == (1, str(tmp_path / "new"), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    with dm.local(tmp_path / "new") as instance, dm.local(lake / "lake") as original:
        assert keys(instance) == keys(original)
        assert instance.jobs.status("waits").is_waiting
        assert instance.objects.get(upload_name("waits")) == b"rows"
        instance.table("t").ingest(pa.table({"key": [99]}))
        instance.table("t").compact()
        instance.table("t").collect_garbage()
        assert 99 in keys(instance)
        assert 99 not in keys(original)


@pytest.mark.slow
def test_an_incremental_backup_copies_only_new_objects(lake: Path, tmp_path: Path) -> None:
    with dm.local(lake / "lake") as instance:
        first, answer = dm.backups(lake / "backups")[0], f"answers/{'0' * 32}/1.parquet"
        instance.objects.put(answer, b"of a job that expires")
        second = instance.backup(lake / "backups", since="last")
        # the only new objects are the incarnations, one for each start
        assert (second.since, second.copied) == (first.name, second.objects - first.objects)
        instance.create_table("later", SCHEMA).ingest(pa.table({"key": [5]}))
        instance.objects.delete([answer])
        instance.objects.put(answer, b"of another with its id")
        third = instance.backup(lake / "backups", since=second.name)
        assert 0 < third.copied < third.objects
    assert [one.name for one in dm.backups(lake / "backups")] == [first.name, second.name, third.name]
    # each backup is complete without the others
    for path in sorted((lake / "backups" / second.name).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (lake / "backups" / second.name).rmdir()
    dm.restore(lake / "backups", tmp_path / "third", third.name)
    with dm.local(tmp_path / "third") as instance:
        assert keys(instance, "later") == [5]
        assert instance.objects.get(answer) == b"of another with its id"
    dm.restore(lake / "backups", tmp_path / "first", first.name)
    with dm.local(tmp_path / "first") as instance:
        assert [table.name for table in instance.tables()] == ["t"]
    with dm.local(lake / "lake") as instance:
        instance.drop_table("later")


@pytest.mark.slow
def test_a_restore_with_check_leaves_no_files(lake: Path, tmp_path: Path) -> None:
    first = dm.backups(lake / "backups")[0].name
    made = dm.restore(lake / "backups", tmp_path / "new", first, check=True)
    assert (made.into, made.tables) == (None, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_restore_needs_an_empty_folder(lake: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for into in (tmp_path / "full", tmp_path / "full" / "mine"):
        with pytest.raises(InvalidInput, match="not empty"):
            dm.restore(lake / "backups", into)


def test_a_missing_backup_is_named_in_the_error(lake: Path, tmp_path: Path) -> None:
    known = dm.backups(lake / "backups")[0].name
    with pytest.raises(InvalidInput, match=known):
        dm.restore(lake / "backups", tmp_path / "new", "2020-01-01T000000Z")
    with pytest.raises(InvalidInput, match="there is no backup in"):
        dm.restore(tmp_path / "nothing", tmp_path / "new")
    with dm.local(lake / "lake") as instance:
        with pytest.raises(InvalidInput, match="there is no backup"):
            instance.backup(tmp_path / "nothing", since=known)
        assert not (tmp_path / "nothing").exists() or names(tmp_path / "nothing") == set()


@pytest.fixture
def copy(lake: Path, tmp_path: Path) -> Path:
    """Returns a private copy of a backup, which a test may damage."""
    name = dm.backups(lake / "backups")[0].name
    subprocess.run(["cp", "-a", lake / "backups" / name, tmp_path / name], check=True)
    return tmp_path / name


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("part", "how"),
    [
        ("database.tar.gz", "bit"),
        ("objects.txt", "short"),
        ("objects.txt", "gone"),
        ("manifest.json", "short"),
        ("objects/data", "bit"),
        ("objects/data", "gone"),
    ],
)
def test_a_damaged_backup_is_not_restored(copy: Path, tmp_path: Path, part: str, how: str) -> None:
    path = copy / part
    if path.is_dir():
        path = sorted(one for one in path.rglob("*") if one.is_file())[0]
    data = bytearray(path.read_bytes())
    if how == "bit":
        data[len(data) // 2] ^= 0x80
    path.unlink()
    if how != "gone":
        path.write_bytes(data[:-7] if how == "short" else data)
    with pytest.raises(BackupDamaged) as error:
        dm.restore(tmp_path, tmp_path / "new")
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [copy.name]


def test_a_backup_of_a_newer_version_is_refused(copy: Path, tmp_path: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 3}))
    with pytest.raises(InstanceTooNew, match="upgrade Dormouse"):
        dm.restore(tmp_path, tmp_path / "new")


@pytest.mark.slow
def test_a_backup_of_another_instance_cannot_be_a_base(copy: Path, tmp_path: Path) -> None:
    with dm.local(tmp_path / "other") as instance, pytest.raises(InvalidInput, match="of another instance"):
        instance.backup(tmp_path, since=copy.name)


@pytest.mark.slow
def test_since_last_without_an_earlier_backup_makes_a_full_one(copy: Path, tmp_path: Path) -> None:
    """This happens when cron starts a backup: the place is empty, or has only backups of other instances."""
    with dm.local(tmp_path / "other") as instance:
        first, second = (instance.backup(tmp_path, since="last") for _ in range(2))
    assert (first.since, second.since) == (None, first.name)
    assert dm.backups(tmp_path)[0].name == copy.name


@pytest.mark.slow
def test_a_damaged_object_is_not_backed_up(copy: Path, tmp_path: Path) -> None:
    """The damaged object is copied neither from the object store nor from an earlier backup."""
    dm.restore(tmp_path, tmp_path / "lake")
    [path, *_] = sorted((tmp_path / "lake/objects/data").rglob("*.parquet"))
    sound = path.read_bytes()
    with dm.local(tmp_path / "lake") as instance:
        path.write_bytes(bytes([*sound[:40], sound[40] ^ 1, *sound[41:]]))
        for since in (None, "last"):
            with pytest.raises(BackupDamaged, match=f"{path.name} does not have the bytes"):
                instance.backup(tmp_path / "new", since=since)
        assert dm.backups(tmp_path / "new") == []


@pytest.mark.slow
def test_an_object_damaged_before_its_backup_is_not_restored(copy: Path, tmp_path: Path) -> None:
    [path, *_] = sorted((copy / "objects/data").rglob("*.parquet"))
    name = str(path.relative_to(copy / "objects"))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    lines = (copy / "objects.txt").read_text().splitlines(keepends=True)
    others = [line for line in lines if not line.endswith(f" {name}\n")]
    listed = "".join([*others, f"{xxhash.xxh3_128_hexdigest(data)} {len(data)} {name}\n"]).encode()
    (copy / "objects.txt").write_bytes(listed)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["objects_digest"] = xxhash.xxh3_128_hexdigest(listed)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BackupDamaged, match="was damaged before it was backed up"):
        dm.restore(tmp_path, tmp_path / "new")


def test_an_unreadable_backup_does_not_hide_other_backups(copy: Path, tmp_path: Path) -> None:
    later = copy.with_name("2999-01-01T000000Z")
    subprocess.run(["cp", "-a", copy, later], check=True)
    (later / "manifest.json").write_text("{")
    assert [one.name for one in dm.backups(tmp_path)] == [copy.name]
    # the latest backup is unreadable, and was asked for
    with pytest.raises(BackupDamaged, match="dormouse backups"):
        dm.restore(tmp_path, tmp_path / "new")
    dm.restore(tmp_path, tmp_path / "new", copy.name)


def test_rows_of_a_backup_are_private(lake: Path) -> None:
    for one in dm.backups(lake / "backups"):
        assert (lake / "backups" / one.name).stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_hold_keeps_existing_files(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        dropped = instance.create_table("dropped", SCHEMA, properties=PROMPT)
        for one in (table, dropped):
            for number in range(2):
                one.ingest(pa.table({"key": [number]}))
        objects = tmp_path / "lake" / "objects" / "data"
        before = names(objects)
        with held(instance._supplier, "a reader"):
            table.compact()
            table.collect_garbage()
            instance.drop_table("dropped")
            instance._attempts.collect_abandoned(0)
            assert before <= names(objects)
        table.collect_garbage()
        instance._attempts.collect_abandoned(0)
        assert not before & names(objects)
        with (
            pytest.raises(InstanceError, match="files that it needs may have been deleted"),
            held(instance._supplier, "x"),
        ):
            query(instance._supplier, "update hold set until = '-infinity'")
            table.ingest(pa.table({"key": [7]}))
            table.compact()
            table.collect_garbage()
            assert len({n for n in names(objects) if not n.endswith(SKETCHES_SUFFIX)}) == 1


@pytest.mark.slow
def test_a_backup_while_everything_runs(tmp_path: Path) -> None:
    """Ingests, compactions, collection and drops run. A backup has all changes acknowledged before it
    began.
    """
    with dm.local(tmp_path / "lake", committer=True) as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        acknowledged: list[int] = []
        ended = threading.Event()

        def write() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                table.ingest(pa.table({"key": [number]}))
                acknowledged.append(number)

        def maintain() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                table.compact()
                table.collect_garbage()
                instance.create_table(f"d{number}", SCHEMA).ingest(pa.table({"key": [1]}))
                instance.drop_table(f"d{number}")

        threads = [threading.Thread(target=work) for work in (write, maintain)]
        for thread in threads:
            thread.start()
        moments = []
        for _ in range(2):
            while len(acknowledged) < 5 * (len(moments) + 1):
                time.sleep(0.01)
            before = list(acknowledged)
            made = instance.backup(tmp_path / "backups", since="last" if moments else None)
            moments.append((made.name, before, acknowledged[-1] + 1))
        ended.set()
        for thread in threads:
            thread.join()
    for name, before, latest in moments:
        dm.restore(tmp_path / "backups", tmp_path / name, name)
        with dm.local(tmp_path / name) as instance:
            found = keys(instance)
            assert found == sorted(set(found))
            assert set(before) <= set(found) <= set(range(1, latest + 1))
            for table in instance.tables():
                table.query().read_all()


KILLED = """
import os, signal, sys
import dormouse as dm
from dormouse.objects.folder import FolderStore
left = int(sys.argv[3])
real = FolderStore._publish
def publish(self, path, name):
    global left
    if "backups" in str(self.root) or "restoring" in str(self.root):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    real(self, path, name)
FolderStore._publish = publish
lake, place = sys.argv[1:3]
if len(sys.argv) > 4:
    dm.restore(place, sys.argv[4])
else:
    with dm.local(lake) as instance:
        instance.backup(place)
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_a_killed_backup_or_restore_leaves_all_or_nothing(lake: Path, tmp_path: Path, verb: str) -> None:
    """The test repeats the work many times. Each time, SIGKILL comes before another of the objects to be
    written.
    """
    place = tmp_path / "backups" if verb == "backup" else lake / "backups"
    into = [tmp_path / "new"] if verb == "restore" else []
    with dm.local(lake / "lake"):  # the instance stays open, because each start adds a record
        for step in range(0, 1_000, 5):
            code = forks.run(KILLED, lake / "lake", place, step, *into)
            assert code in (0, -signal.SIGKILL)
            # the backup has its manifest, even if the process was killed
            if verb == "backup" and dm.backups(place):
                dm.restore(place, tmp_path / "tried", check=True)
                break
            if verb == "restore":
                assert (tmp_path / "new").exists() == (code == 0)
                assert len(list(tmp_path.iterdir())) == 1
            if code == 0:
                break
    assert step > 5
    if verb == "backup":
        # the next backup removes the remains after a day; they do no harm until then
        assert len(list(place.iterdir())) > 1
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(backups, "ABANDONED_AFTER", -backups.ABANDONED_AFTER)
            with dm.local(lake / "lake") as instance:
                instance.backup(place)
        assert (
            len([path for path in place.iterdir() if path.name != ".staging"]) == len(dm.backups(place)) == 2
        )


@pytest.mark.slow
def test_a_restored_backup_keeps_cuts_and_can_be_read_as_of_them(tmp_path: Path) -> None:
    """The restored database has copies of the same cluster's files, so the recorded transaction ids stay
    valid.
    """
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        table.ingest(pa.table({"key": [1, 2]}))
        table.history.record_cut("kept")
        at = query(instance._supplier, "select clock_timestamp()")[0][0]
        table.consumer("etl")
        table.ingest(pa.table({"key": [3]}))
        table.compact()
        table.collect_garbage()
        instance.backup(tmp_path / "backups")
    dm.restore(tmp_path / "backups", tmp_path / "new")
    with dm.local(tmp_path / "new") as instance:
        table = instance.table("t")
        assert keys(instance) == [1, 2, 3]
        # collection deletes nothing: the cut and the consumer hold the files as before
        table.set_properties(history_retention_seconds=0, gc_delay_seconds=0)
        table.ingest(pa.table({"key": [4]}))
        table.compact()
        table.collect_garbage()
        for when in ("kept", at):
            assert table.query(as_of=when).read_all()["key"].to_pylist() == [1, 2]
        consumer = table.consumer("etl")
        assert consumer.read().read_all()["key"].to_pylist() == [3, 4]
        consumer.acknowledge()
        table.restore("kept")
        assert keys(instance) == [1, 2]
