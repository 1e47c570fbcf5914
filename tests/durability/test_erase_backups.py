"""The backups that an erasure names, including killed and unreachable ones."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability.backups import MANIFEST
from dormouse.durability.erasing import EraseReport
from tests import forks
from tests.stored import query
from tests.support.api import Instance

SCHEMA = dm.Schema(row_keys=[dm.Field("key", dm.LONG)], values=[dm.Field("who", dm.STRING)])

KILLED = """
import os, signal, sys
import dormouse as dm
from dormouse.objects.folder import FolderStore
lake, place, wanted, when = sys.argv[1:5]
real, seen = FolderStore._publish, 0
def publish(self, path, name):
    global seen
    is_it = "backups" in str(self.root) and wanted in (str(seen), name.rpartition("/")[2])
    seen += "backups" in str(self.root)
    if is_it and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, path, name)
    if is_it:
        os.kill(os.getpid(), signal.SIGKILL)
FolderStore._publish = publish
with dm.local(lake) as instance:
    instance.backup(place)
"""


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA)
        table.ingest(pa.table({"key": [1, 2], "who": ["a person", "another"]}))
    return tmp_path / "lake"


Killed = Callable[[object, str], int]


@pytest.fixture
def killed(lake: Path) -> Killed:
    """Returns a function that backs the lake up in a process that dies at a step; returns its exit code."""
    return lambda step, when: forks.run(KILLED, lake, lake.parent / "backups", step, when)


def erased(lake: Path, key: int = 1) -> EraseReport:
    with dm.local(lake) as instance:
        return _release_and_erase(instance, key)


def _release_and_erase(instance: Instance, key: int) -> EraseReport:
    """Releases the hold of a killed backup, which would expire after 15 minutes, and erases the key."""
    for one in instance.holds():
        instance.release(one.holder)
    return instance.table("t").erase({"key": key})


def of_backups(report: EraseReport) -> dict[str, str]:
    """Returns the note on each named backup, by the backup's name; leaves out metadata backups."""
    named = (name.partition(" ") for name in report.backups if "keys of files" not in name)
    return {name.rpartition("/")[2]: doubt for name, _, doubt in named}


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_backup_that_is_killed_at_its_manifest_is_named(lake: Path, killed: Killed, when: str) -> None:
    assert killed(MANIFEST, when) == -signal.SIGKILL
    place = lake.parent / "backups"
    whole = [one.name for one in dm.backups(place)]
    assert len(whole) == (when == "after")
    [begun] = [path.name for path in place.iterdir() if not path.name.startswith(".")]
    report = erased(lake)
    assert list(of_backups(report)) == [begun]
    assert ("incomplete" in of_backups(report)[begun]) == (when == "before")
    if whole:  # the complete backup holds the erased rows
        dm.restore(place, lake.parent / "restored")
        with dm.local(lake.parent / "restored") as instance:
            assert instance.table("t").query(where={"key": 1}).read_all().num_rows == 1
    shutil.rmtree(place / begun)
    assert of_backups(erased(lake, 2)) == {}


@pytest.mark.slow
def test_a_backup_killed_at_any_step_is_named_if_it_left_files(lake: Path, killed: Killed) -> None:
    place = lake.parent / "backups"
    for step in range(0, 1_000, 5):
        ended = killed(step, "after")
        left = {path.name for path in place.iterdir() if not path.name.startswith(".")}
        named = of_backups(erased(lake))
        # a backup that was not recorded yet has no files
        copied = {name for name in left if (place / name / "objects").exists()}
        assert copied <= set(named) <= left, (step, named)
        for name in left:
            shutil.rmtree(place / name)
        with dm.local(lake) as instance:
            instance.table("t").ingest(pa.table({"key": [1], "who": ["a person"]}))
        if ended == 0:
            break
    assert step > 5


@pytest.mark.slow
def test_an_unreadable_backup_is_named_with_the_reason(lake: Path) -> None:
    place = lake.parent / "backups"
    with dm.local(lake) as instance:
        made = [instance.backup(place).name for _ in range(3)]
        damaged, unreadable, _ = made
        (place / damaged / "objects.txt").write_bytes(b"x")
        (place / unreadable / MANIFEST).write_bytes(b"no JSON")
        named = of_backups(_release_and_erase(instance, 1))
        assert list(named) == made
        doubts = [doubt.startswith("(could not be checked") for doubt in named.values()]
        assert doubts == [True, True, False]
        place.rename(lake.parent / "away")
        named = of_backups(_release_and_erase(instance, 2))
        assert list(named) == made
        assert all("does not exist" in doubt for doubt in named.values())
        # an empty folder in its place: the backups were deleted permanently
        place.mkdir()
        assert of_backups(instance.table("t").erase({"key": 2})) == {}
        # the backups were moved
        report = instance.table("t").erase({"key": 2}, backups=[str(lake.parent / "away")])
        assert list(of_backups(report)) == made


@pytest.mark.objects
@pytest.mark.slow
def test_a_killed_backup_of_an_older_version_is_named_if_it_has_files(lake: Path) -> None:
    place = lake.parent / "backups"
    with dm.local(lake) as instance:
        first, second = (instance.backup(place).name for _ in range(2))
        (place / second / MANIFEST).unlink()
        query(instance._supplier, "delete from backup_taken where name = %s", second)
        named = of_backups(_release_and_erase(instance, 1))
        assert list(named) == [first, second]


@pytest.mark.slow
def test_a_failed_backup_is_not_recorded(lake: Path) -> None:
    with dm.local(lake) as instance:
        context = instance.table("t").context
        path = context.objects.local_path(next(iter(context.store.file_references())).filename)
        assert path is not None
        path.write_bytes(b"x")
        with pytest.raises(dm.errors.BackupDamaged):
            instance.backup(lake.parent / "backups")
        assert query(instance._supplier, "select name from backup_taken") == []
