"""Machines with several users: folders that others may not enter, and folders that another user made
first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from embedded import NOBODY, as_ordinary_user, ask
from psycopg.conninfo import conninfo_to_dict

import dormouse as dm
from dormouse.errors import InstanceError
from tests.support.embedded import EmbeddedPostgres

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder that serves as the folder for temporary files of all users."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def deep(server_folder: Path) -> Path:
    """Returns an instance's folder whose path is too long for a socket."""
    return server_folder.rename(server_folder.with_name("x" * 120))


@pytest.mark.slow
def test_only_its_user_can_enter_the_folder_of_sockets(shared: Path, deep: Path) -> None:
    with EmbeddedPostgres(deep) as server:
        sockets = Path(str(conninfo_to_dict(server.dsn)["host"]))
        uid = (deep / "postgres").stat().st_uid
        assert sockets.parent == shared / f"dormouse-{uid}"
        assert [mode(sockets), mode(sockets.parent)] == [0o700, 0o700]
        assert {sockets.stat().st_uid, sockets.parent.stat().st_uid} == {uid}
    assert not sockets.exists()


def made_first(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)


def linked_first(own: Path) -> None:
    own.symlink_to(own.with_name("target"))


@pytest.mark.few(1)
@needs_root
@pytest.mark.parametrize("lay", [made_first, linked_first])
def test_a_folder_made_by_another_user_is_not_used(
    shared: Path, deep: Path, lay: Callable[[Path], None]
) -> None:
    own = shared / f"dormouse-{(deep / 'postgres').stat().st_uid}"
    target = shared / "target"
    target.mkdir(mode=0o700)
    assert as_ordinary_user(lambda: lay(own)) == ""
    assert own.lstat().st_uid == NOBODY
    with EmbeddedPostgres(deep) as server:
        assert ask(server.dsn, "select 1") == 1
        sockets = Path(str(conninfo_to_dict(server.dsn)["host"]))
        assert sockets.parent.parent == shared
        assert mode(sockets) == mode(sockets.parent) == 0o700
        dsn = server.dsn
        denied = as_ordinary_user(lambda: str(psycopg.connect(dsn)) and None)
        assert "Permission denied" in denied
    assert not sockets.exists()
    assert target.stat().st_uid == os.geteuid()
    assert list(target.iterdir()) == list(own.iterdir()) == []


def test_a_folder_of_sockets_that_others_may_enter_is_not_used(shared: Path, deep: Path) -> None:
    own = shared / f"dormouse-{(deep / 'postgres').stat().st_uid}"
    own.mkdir()
    own.chmod(0o755)
    with EmbeddedPostgres(deep):
        assert list(own.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_new_instance_is_private(tmp_path: Path, *, there: bool) -> None:
    folder = tmp_path / "lake"
    umask = os.umask(0o022)
    try:
        if there:
            folder.mkdir()
        with dm.local(folder):
            assert mode(folder) == 0o700
    finally:
        os.umask(umask)


@pytest.mark.slow
def test_access_that_was_granted_to_other_users_stays(tmp_path: Path) -> None:
    folder = tmp_path / "lake"
    with dm.local(folder):
        pass
    folder.chmod(0o750)
    with dm.local(folder):
        assert mode(folder) == 0o750


def test_folders_above_stay_private(server_folder: Path) -> None:
    for folder in (server_folder, server_folder.parent):
        folder.chmod(0o700)
    with EmbeddedPostgres(server_folder) as server:
        assert ask(server.dsn, "select 1") == 1
        assert [mode(server_folder), mode(server_folder.parent)] == [0o700, 0o700]


@pytest.mark.slow
@pytest.mark.parametrize("read_only", [False, True])
def test_a_lost_database_is_reported_and_not_replaced(tmp_path: Path, *, read_only: bool) -> None:
    with dm.local(tmp_path):
        pass
    shutil.rmtree(tmp_path / "postgres")
    with pytest.raises(InstanceError, match=rf"is missing .*'dormouse restore-metadata {tmp_path}'"):
        dm.local(tmp_path, read_only=read_only)
    assert not (tmp_path / "postgres").exists()


@pytest.mark.slow
def test_a_killed_creation_is_completed(tmp_path: Path) -> None:
    with dm.local(tmp_path):
        pass
    for entry in tmp_path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    with dm.local(tmp_path) as instance:
        assert instance.tables() == []
