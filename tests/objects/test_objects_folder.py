"""Stores in a folder: full disks, permissions, folders, durability."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from data_files import as_a_user_without_rights

from dormouse.errors import InstanceTakenOver, InvalidInput, ObjectStoreError
from dormouse.objects import store as store_module
from tests.support.objects import ObjectStore, open_store
from tests.support.reading import Staged

MEBIBYTE = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder with room for a MiB: a file system of its own, or else a limit on the size of files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        yield disk
        subprocess.run(["umount", str(disk)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, hard))
    yield disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_refused_without_space(store: ObjectStore) -> None:
    with (
        pytest.raises(
            ObjectStoreError, match=r"Cannot write object 'a/big' in .*: (No space|File too)"
        ) as caught,
        store.staged("a/big") as path,
    ):
        path.write_bytes(b"x" * 2 * MEBIBYTE)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_reported_in_one_line_and_leaves_nothing(small_disk: Path) -> None:
    store = open_store(small_disk / "objects")
    with pytest.raises(ObjectStoreError, match=r"Cannot write object 'a/big' in .*: (No space|File too)"):
        store.put("a/big", b"x" * 2 * MEBIBYTE)
    check_refused_without_space(store)
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []
    store.put("a/small", b"x" * (MEBIBYTE // 2))
    assert list(store.list()) == [("a/small", MEBIBYTE // 2)]


@pytest.mark.parametrize("mebibytes", [17, 40])
def test_staged_rows_that_do_not_fit_on_the_disk_are_an_error_of_one_line_and_leave_nothing(
    small_disk: Path, mebibytes: int
) -> None:
    schema = pa.schema([pa.field("a", pa.binary())])
    batches = [pa.record_batch([[os.urandom(MEBIBYTE)]], schema=schema) for _ in range(mebibytes)]
    with (
        pytest.raises(
            ObjectStoreError, match=r"^rows cannot be written to a temporary file: .*(No space|File too)"
        ),
        Staged(open_store(small_disk / "objects"), schema) as rows,
    ):
        rows.add_all(batches).select()
    assert [path for path in small_disk.rglob("*") if path.is_file() and ".staging" in path.parts] == []


def test_a_full_staging_disk_of_an_s3_store_is_reported_in_one_line(
    small_disk: Path, s3_options: dict[str, str]
) -> None:
    store = open_store("s3://dormouse-test/full", **s3_options | {"staging_dir": str(small_disk)})
    check_refused_without_space(store)
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []


def test_a_folder_without_rights_is_reported_in_one_line(tmp_path: Path) -> None:
    store = open_store(tmp_path / "objects")
    store.put("a/1", b"x")
    with as_a_user_without_rights(tmp_path):
        with pytest.raises(ObjectStoreError, match=r"Cannot write object 'a/2' in .*: Permission denied"):
            store.put("a/2", b"x")
        with pytest.raises(ObjectStoreError, match=r"Cannot read object 'a/1' in .*: Permission denied"):
            store.get("a/1")
        with pytest.raises(ObjectStoreError, match=r"Cannot list objects below 'a' in .*: Permission denied"):
            list(store.list("a"))
        failed = store.delete(["a/1"])
    assert [(name, str(error).rpartition(": ")[2]) for name, error in failed] == [
        ("a/1", "Permission denied")
    ]
    assert list(store.list()) == [("a/1", 1)]


def test_folders_that_a_deletion_empties_are_deleted_and_others_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in ("a/b/c/1", "a/b/2", "d/e/3"):
        store.put(name, b"")
    assert store.delete(["a/b/c/1", "d/e/3"]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging", "a"]
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["2"]
    assert store.delete(["a/b/2"]) == []
    assert [path.name for path in tmp_path.iterdir()] == [".staging"]


def test_publishing_makes_a_folder_again_that_a_deletion_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, taken = Path.hardlink_to, []

    def take_away_and_link(path: Path, target: Path) -> None:
        if len(taken) < 3:
            taken.append(open_store(tmp_path).delete(["x/y/none"]))
        link(path, target)

    monkeypatch.setattr(Path, "hardlink_to", take_away_and_link)
    open_store(tmp_path).put("x/y/a", b"1")
    assert taken == [[], [], []]
    assert list(open_store(tmp_path).list()) == [("x/y/a", 1)]


def test_opening_and_reading_writes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "none")
    assert (list(store.list()), store.sweep_staging(), store.delete(["a"])) == ([], 0, [])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("folder", ["with space", "100%20", "ünï#cödé?"])
def test_an_odd_folder_survives_its_url(tmp_path: Path, folder: str) -> None:
    store = open_store(tmp_path / folder)
    store.put("a", b"1")
    assert open_store(store.url) == open_store(str(tmp_path / folder)) == store
    assert store.uri("a") == str(tmp_path / folder / "a")
    assert store.local_path("a") == tmp_path / folder / "a"


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInput, match="there is a file where the folder should be"):
        open_store(tmp_path / "file")


def test_an_object_cannot_be_a_folder_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", b"1")
    with pytest.raises(ObjectStoreError, match=r"'a/b'.*there is an object at"):
        store.put("a/b", b"2")
    assert list(store.list()) == [("a", 1)]


def test_staging_publishes_the_file_itself_without_a_copy(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with store.staged("a") as path:
        path.write_bytes(b"1")
        inode = path.stat().st_ino
    assert (tmp_path / "a").stat().st_ino == inode


def test_a_staged_file_is_private(tmp_path: Path) -> None:
    with open_store(tmp_path).staged("a") as path:
        path.write_bytes(b"1")
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_file_is_durable_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name, (tmp_path / "x" / "y" / "a").exists()))

    monkeypatch.setattr(os, "fsync", record)
    open_store(tmp_path).put("x/y/a", b"1")
    assert synced == [("a", False), ("y", True), ("x", True), (tmp_path.name, True)]


def test_a_folder_is_made_durable_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = open_store(tmp_path), list[str]()
    store.put("x/y/a", b"1")
    for folder in (tmp_path / "x", tmp_path):
        os.utime(folder, ns=(0, 1_000_000_000))  # a modification time of long ago
    monkeypatch.setattr(
        os, "fsync", lambda found: synced.append(Path(f"/proc/self/fd/{found}").readlink().name)
    )

    def put(name: str) -> list[str]:
        synced.clear()
        store.put(name, b"1")
        return synced[1:]

    assert put("x/y/b") == ["y", "x", tmp_path.name]
    assert put("x/y/c") == ["y"]
    assert put("x/z/d") == ["z", "x"]
    os.utime(tmp_path / "x", ns=(0, 2_000_000_000))
    assert put("x/y/e") == ["y", "x"]
    assert put("x/y/f") == ["y"]


def test_an_object_whose_name_cannot_be_made_durable_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_on_folders(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail_on_folders)
    store = open_store(tmp_path)
    with pytest.raises(ObjectStoreError, match=r"'x/a'.*Input/output error"):
        store.put("x/a", b"1")
    assert list(store.list()) == []


def test_a_long_deletion_checks_ownership_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ASKED_EVERY", 2)
    store, asked = open_store(tmp_path), list[int]()
    names = [f"a/{number}" for number in range(6)]
    for name in names:
        store.put(name, b"x")

    @contextmanager
    def taken_over_meanwhile() -> Iterator[None]:
        asked.append(len(list(store.list())))
        if len(asked) == 3:
            raise InstanceTakenOver("another database owns the store")
        yield

    with pytest.raises(InstanceTakenOver):
        store_module.GuardedStore(store, taken_over_meanwhile).delete(iter(names))
    assert asked == [6, 4, 2]
    assert sorted(name for name, _ in store.list()) == names[4:]
