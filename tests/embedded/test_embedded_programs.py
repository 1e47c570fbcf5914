"""A copy of PostgreSQL's programs, for a server whose user may not enter the folder of the originals."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from embedded import NOBODY, as_ordinary_user, ask

from dormouse.embedded import owner
from dormouse.embedded import server as embedded_server
from dormouse.embedded.running import close_lock, open_lock, try_lock
from dormouse.errors import InstanceError
from tests.support.embedded import EmbeddedPostgres

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users"),
    pytest.mark.skipif("DORMOUSE_TEST_POSTGRES" in os.environ, reason="copies the programs of the package"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the programs in a copy of the package, whose files the tests may change."""
    home = tmp_path_factory.mktemp("home")
    binaries = embedded_server._binaries()
    package = binaries.parents[1]
    unused = shutil.ignore_patterns("include", "*.a")
    shutil.copytree(binaries.parent, home / package.name / binaries.parent.name, ignore=unused)
    shutil.copytree(package.with_name(f"{package.name}.libs"), home / f"{package.name}.libs")
    return home / package.name / binaries.parent.name / "bin"


@pytest.fixture
def private(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the programs in a home folder that only root may enter."""
    home = installed.parents[2]
    for folder in home.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o001)
    home.chmod(0o700)
    monkeypatch.setattr(embedded_server, "_binaries", lambda: installed)
    return installed


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the path of the folder for copies, which does not exist yet."""
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    above.chmod(0o755)
    monkeypatch.setattr(owner, "PLACE", above / "dormouse")
    yield above / "dormouse"
    shutil.rmtree(above)


def copies(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir())


def program(folder: Path) -> Path:
    """Returns the program that a folder's server runs."""
    pid = int((folder / "postgres" / "postmaster.pid").read_text().splitlines()[0])
    return Path(psutil.Process(pid).cmdline()[0])


def test_a_server_runs_programs_from_a_private_home(private: Path, place: Path, tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        for folder in (tmp_path / "first", tmp_path / "second"):
            with EmbeddedPostgres(folder, options={"fsync": "off"}) as server:
                assert ask(server.dsn, "select to_tsvector('english', 'dormice sleeping')::text") == (
                    "'dormic':1 'sleep':2"  # this needs a library and a dictionary of the copy
                )
                assert place in program(folder).parents
    finally:
        os.umask(umask)
    (copy,) = copies(place)
    assert private.parents[2].stat().st_mode & 0o777 == 0o700
    for path in (place, copy, *copy.rglob("*")):
        assert (path.lstat().st_uid, path.lstat().st_mode & 0o7777) == (0, 0o755), path
    denied = as_ordinary_user(lambda: shutil.rmtree(copy))
    assert "Permission denied" in denied


@pytest.mark.slow
def test_a_copy_is_used_again_until_the_version_changes(private: Path, place: Path) -> None:
    first = owner.copied_programs(private)
    inode = (first / "postgres").stat().st_ino
    assert owner.copied_programs(private) == first
    assert (first / "postgres").stat().st_ino == inode
    added = private.parent / "share" / "of_another_version"
    added.touch()
    try:
        assert owner.copied_programs(private) != first
    finally:
        added.unlink()
    assert len(copies(place)) == 2


@pytest.mark.slow
def test_an_incomplete_copy_is_made_again(private: Path, place: Path) -> None:
    first = owner.copied_programs(private)
    (first / "postgres").write_bytes(b"")  # as after a power cut
    left = place / "new-killed"
    left.mkdir()
    assert owner.copied_programs(private) == first
    assert (first / "postgres").read_bytes() == (private / "postgres").read_bytes()
    assert not left.exists()


def test_nothing_is_left_of_a_copy_that_fails(
    private: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shutil.copyfile

    def until_the_last(source: Path, target: Path) -> None:
        if source.name == "postgres":
            raise OSError(28, "No space left on device")
        made(source, target)

    monkeypatch.setattr(shutil, "copyfile", until_the_last)
    with pytest.raises(OSError, match="No space left"):
        owner.copied_programs(private)
    assert copies(place) == []


def made_by_another(place: Path) -> None:
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)


def linked(place: Path) -> None:
    target = place.with_name("target")
    target.mkdir()
    place.symlink_to(target)
    os.chown(place, NOBODY, NOBODY, follow_symlinks=False)


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o1777)


def below_a_folder_of_another(place: Path) -> None:
    os.chown(place.parent, NOBODY, NOBODY)


def below_a_folder_that_is_open_to_all(place: Path) -> None:
    place.parent.chmod(0o1777)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (made_by_another, "dormouse is not a folder of root"),
        (linked, "dormouse is not a folder of root"),
        (open_to_all, "users other than root may write to .*dormouse"),
        (below_a_folder_of_another, "is not a folder of root"),
        (below_a_folder_that_is_open_to_all, "users other than root may write to"),
    ],
)
def test_a_folder_that_another_user_prepared_is_refused(
    private: Path, place: Path, server_folder: Path, prepare: Callable[[Path], None], why: str
) -> None:
    prepare(place)
    home = private.parents[2]
    with pytest.raises(
        InstanceError,
        match=rf"^{home} is private, .* run 'chmod o\+x {home}'.*; no copy could be made: .*{why}",
    ):
        EmbeddedPostgres(server_folder).start()
    assert not place.exists() or copies(place) == []


@pytest.mark.slow
def test_a_copy_waits_for_the_process_that_makes_one(
    private: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LOCK_SECONDS_MAX", 0.1)
    place.mkdir()
    place.chmod(0o755)
    lock = open_lock(place / "lock")
    try:
        assert try_lock(lock)
        with pytest.raises(InstanceError, match=r"another process has held .*lock for 0\.1 s"):
            owner.copied_programs(private)
    finally:
        close_lock(lock)
    assert owner.copied_programs(private).is_dir()


@pytest.mark.slow
def test_programs_that_are_links_into_a_private_folder_run(
    private: Path, place: Path, tmp_path: Path, server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installer may link files to its cache, so that the programs are links."""
    (tmp_path / "open").mkdir()
    for folder in (*tmp_path.parents[:-2], tmp_path):
        folder.chmod(folder.stat().st_mode | 0o001)
    linked_files = tmp_path / "open" / "site-packages"
    shutil.copytree(private.parents[2], linked_files, copy_function=os.symlink)
    linked_files.chmod(0o755)
    binaries = linked_files / private.relative_to(private.parents[2])
    monkeypatch.setattr(embedded_server, "_binaries", lambda: binaries)
    with EmbeddedPostgres(server_folder) as server:
        assert ask(server.dsn, "select 1") == 1
        assert place in program(server_folder).parents
