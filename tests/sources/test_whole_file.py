"""Atomic, durable writes of local files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from dormouse.errors import InvalidInput
from dormouse.objects.staging import whole_file


def test_the_file_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "fsync", lambda number: done.append(Path(f"/proc/self/fd/{number}").resolve()))
    path = tmp_path / "a"
    with whole_file(path) as file:
        file.write(b"new")
        unfinished = next(tmp_path.iterdir())
        assert unfinished != path
    assert done == [unfinished, tmp_path]
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"new"


def test_the_file_is_written_to_a_folder_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may belong to another user, or be on a network file system that cannot be synced."""

    def no_folders(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", no_folders)
    with whole_file(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_file_does_not_change_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new")
        _ = 1 / 0
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"


def test_a_link_is_kept_and_its_target_is_written(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    with whole_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_path_that_cannot_be_a_file_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "a"):
        with pytest.raises(InvalidInput, match=f"^cannot write '{path}': [A-Z][a-z ]+$"), whole_file(path):
            pass


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with whole_file(path) as file:
        file.write(b"new")
        [unfinished] = [one for one in tmp_path.iterdir() if one != path]
        assert unfinished.stat().st_mode & 0o777 == 0o600
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
