"""Files of this machine are whole and durable, or what they were."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from dormouse.errors import InvalidInput
from dormouse.objects.staging import whole_file


def test_a_file_is_durable_before_its_name_and_its_name_before_the_end(
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


def test_a_folder_that_cannot_be_synced_has_the_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers folders of another user and of some network file systems."""

    def no_folders(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", no_folders)
    with whole_file(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_file_stays_what_it_was_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new")
        _ = 1 / 0
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    with whole_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_where_no_file_can_be_is_told_in_a_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "a"):
        with pytest.raises(InvalidInput, match=f"^cannot write '{path}': [A-Z][a-z ]+$"), whole_file(path):
            pass


def test_a_private_file_that_is_replaced_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with whole_file(path) as file:
        file.write(b"new")
        [unfinished] = [one for one in tmp_path.iterdir() if one != path]
        assert unfinished.stat().st_mode & 0o777 == 0o600
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
