"""Private folders for temporary files. A folder that another user made first is not used."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from embedded import NOBODY, as_ordinary_user

from dormouse.durability.backups import BackupWriter
from dormouse.objects import staging as private_folders_module
from dormouse.objects.s3 import S3Store
from dormouse.objects.staging import StagingArea, private_folder, private_folders, temporary_folder
from tests.support.objects import open_store

NAME = "dormouse-test"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder that serves as the folder for temporary files of all users."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def open_to_others(own: Path) -> None:
    own.mkdir()
    own.chmod(0o755)


def a_link(own: Path) -> None:
    target = own.with_name("target")
    target.mkdir(mode=0o700)
    own.symlink_to(target)


def a_file(own: Path) -> None:
    own.touch(mode=0o600)


LAID = [open_to_others, a_link, a_file]


def test_no_other_module_names_a_file_in_the_folder_for_temporary_files() -> None:
    """Only the listed modules may: they measure its disk, name it in a message, or make a private folder in
    it.
    """
    package = Path(private_folders_module.__file__).parents[1]
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"gettempdir|\"/tmp|\bTMPDIR\b.*environ|mktemp\(", path.read_text("utf-8"))
    }
    assert asking == {
        "objects/staging.py",
        "embedded/server.py",
        "reading/sql/workers.py",
        "data/leaf_sorter.py",
        "objects/names.py",
    }


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_private_folder_admits_only_its_user_with_any_umask(shared: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = private_folder(NAME)
    finally:
        os.umask(before)
    assert folder == shared / f"{NAME}-{os.geteuid()}"
    assert mode(folder) == 0o700
    assert private_folder(NAME) == folder


@pytest.mark.parametrize("lay", LAID)
def test_a_folder_that_is_not_private_is_not_used(
    shared: Path, lay: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    own = shared / f"{NAME}-{os.geteuid()}"
    lay(own)
    folder = private_folder(NAME)
    assert folder.parent == shared
    assert folder.name.startswith(f"{own.name}-")
    assert mode(folder) == 0o700
    assert f"{own} is not a private folder of user {os.geteuid()}" in caplog.text
    assert private_folder(NAME) == folder
    assert not own.is_dir() or list(own.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")
def test_a_private_folder_of_another_user_is_not_used(shared: Path) -> None:
    own = shared / f"{NAME}-0"
    random = shared / f"{NAME}-0-12345678"
    assert as_ordinary_user(lambda: [folder.mkdir(mode=0o700) for folder in (own, random)] and None) == ""
    assert own.stat().st_uid == NOBODY
    assert private_folder(NAME) not in {own, random}


def test_a_folder_of_another_owner_is_not_private(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs without root: the folder belongs to this process, which then pretends to be
    another user.
    """
    own = private_folder(NAME)
    monkeypatch.setattr(private_folders_module.os, "geteuid", lambda: os.getuid() + 1)
    assert not private_folders_module.is_private(own)


def test_every_private_folder_is_swept(shared: Path) -> None:
    """A folder with a random name is swept, too, even when the predictable name is free again."""
    own = shared / f"dormouse-staging-{os.geteuid()}"
    a_file(own)
    store = open_store("s3://bucket/prefix", region="us-east-1")
    assert isinstance(store, S3Store)
    slot = store.staging_area().claim()
    os.close(slot.lock)  # as when the writer dies
    own.unlink()
    other = store.staging_area().claim()
    os.close(other.lock)
    assert slot.folder.parent != other.folder.parent == own
    assert sorted(private_folders("dormouse-staging")) == sorted({slot.folder.parent, own})
    assert store.sweep_staging() == 2
    assert not slot.folder.exists()


def test_a_parent_folder_that_others_can_write_to_causes_a_warning(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private_folder(NAME)
    assert caplog.text == ""
    loose = shared / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    private_folder(NAME, above=loose)
    assert f"another user can replace folders in {loose}: set TMPDIR" in caplog.text


def test_a_staged_file_of_a_replaced_folder_is_not_published(tmp_path: Path) -> None:
    slot = StagingArea(tmp_path).claim()
    slot.path("0.parquet").write_bytes(b"written")
    assert slot.written("0.parquet").read_bytes() == b"written"
    slot.folder.rename(tmp_path / "hidden")
    slot.folder.mkdir()
    slot.path("0.parquet").write_bytes(b"forged")
    with pytest.raises(FileNotFoundError, match="was replaced by another folder"):
        slot.written("0.parquet")


SPILLING = """
import os, signal, sys
import pyarrow as pa
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG
from dormouse.objects.staging import temporary_folder

with LeafSorter(Schema([Field("k", LONG)]), 1, memory_bytes=1) as sorter:
    for number in range(3):
        sorter.add(pa.record_batch({"k": [number]}), pa.array([0], pa.int32()))
    sorter._spilling.result()
    print(*sorted(str(path) for path in temporary_folder().rglob("*.parquet")), flush=True)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_process_deletes_the_temporary_files_of_a_killed_one(shared: Path) -> None:
    def run(how: str) -> tuple[int, list[Path]]:
        command = [sys.executable, "-c", SPILLING, how]
        done = subprocess.run(
            command, check=False, env={**os.environ, "TMPDIR": str(shared)}, capture_output=True, text=True
        )
        return done.returncode, [Path(line) for line in done.stdout.split()]

    code, runs = run("dies")
    assert (code, len(runs), all(path.exists() for path in runs)) == (-signal.SIGKILL, 2, True)
    code, others = run("ends")
    assert (code, len(others)) == (0, 2)
    assert list((shared / f"dormouse-temporary-{os.geteuid()}").iterdir()) == []


def test_a_folder_for_temporary_files_that_was_deleted_is_made_again(shared: Path) -> None:
    first = temporary_folder()
    assert temporary_folder() == first
    (first / "rows").touch()
    (first / "owner.lock").unlink()
    assert temporary_folder() == first
    assert (first / "rows").exists()
    assert StagingArea(first.parent).sweep() == 0, "it is locked again"
    shutil.rmtree(first)
    again = temporary_folder()
    assert again.is_dir()
    assert (again != first, again.parent) == (True, first.parent)


def test_a_forked_process_has_temporary_files_of_its_own(shared: Path) -> None:
    own = temporary_folder()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(temporary_folder()).encode())
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert Path(os.read(read, 4_096).decode()).parent == own.parent
    assert own.is_dir()
    os.close(read)
    os.close(write)


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    area = tmp_path / "area"
    (area / "x").mkdir(parents=True)
    (area / "x" / "owner.lock").symlink_to(tmp_path / "made")
    assert StagingArea(area).sweep() == 0
    (area / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    assert StagingArea(area).sweep() == 0
    assert not (tmp_path / "made").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_locks_and_folders_of_a_slot_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        slot = StagingArea(tmp_path).claim()
    finally:
        os.umask(before)
    assert [mode(slot.folder), mode(slot.path("owner.lock"))] == [0o700, 0o600]
    slot.close()


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"),
    [
        (0o000, 0o700, 0o600),
        (0o002, 0o700, 0o600),
        (0o022, 0o700, 0o600),
        (0o027, 0o750, 0o640),
        (0o007, 0o770, 0o660),
        (0o077, 0o700, 0o600),
    ],
)
def test_a_backup_respects_the_umask_and_admits_no_other_user(
    tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    """A umask that excludes other users may admit the group. A stricter one admits only the owner."""

    def write(path: Path) -> None:
        path.write_bytes(b"roles and rows")

    root = tmp_path / "new" / "backups"
    before = os.umask(umask)
    try:
        writer = BackupWriter(open_store(root), "instance", None)
        writer.database(write)
    finally:
        os.umask(before)
    assert [mode(root), mode(root / writer.name)] == [folder_mode] * 2
    assert mode(root / writer.name / "database.tar.gz") == file_mode


def test_a_backup_changes_no_permissions_of_an_existing_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    BackupWriter(open_store(tmp_path), "instance", None)
    assert mode(tmp_path) == 0o755
