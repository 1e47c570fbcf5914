"""A database restored to an earlier state has the same incarnation, but counts as a copy."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability import ownership
from dormouse.durability.incarnations import records
from dormouse.durability.ownership import Milestones
from dormouse.embedded.postgres import extract
from dormouse.errors import (
    InstanceIsACopy,
    InstanceReadOnly,
    InstanceTakenOver,
    ObjectAlreadyExists,
    ObjectStoreError,
)
from dormouse.objects.folder import FolderStore
from tests.embedded import postmaster
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.embedded import EmbeddedPostgres
from tests.support.objects import open_store

SCHEMA = OF_KEYS
COLUMNS = "number, milestone, milestone_id, passed_at, passed_in"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a process record a milestone after every change."""
    monkeypatch.setattr(ownership, "CHECK_SECONDS", 0.0)


def made(dsn: str, url: str) -> Instance:
    instance = dm.connect(dsn, url)
    instance.create_table("t", SCHEMA, properties=dm.TableProperties(gc_delay_seconds=0))
    return instance


def add(instance: Instance, *keys: int) -> None:
    instance.table("t").ingest(pa.table({"key": list(keys)}))


def keys(instance: Instance) -> list[int]:
    return sorted(instance.table("t").query().read_all()["key"].to_pylist())


def milestone(url: str) -> int:
    return records(open_store(url)).milestone


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def snapshot(dsn: str) -> Callable[[], None]:
    """Returns a function that restores the present rows of the table `incarnation`.

    This simulates a restored database, for which no other rows matter.
    """
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(f"select {COLUMNS} from dormouse.incarnation").fetchall()

    def put_back() -> None:
        with psycopg.connect(dsn) as conn:
            for row in rows:
                conn.execute(
                    f"update dormouse.incarnation set ({COLUMNS}) = (%s, %s, %s, %s, %s::pg_snapshot) "
                    "where number = %s",
                    [*row, row[0]],
                )

    return put_back


@pytest.mark.objects
@pytest.mark.slow
def test_a_database_restored_to_an_earlier_state_is_a_copy(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup was taken while the instance ran, with the same incarnation and an active writer."""
    lake, tar = tmp_path / "lake", tmp_path / "tar"
    with dm.local(lake) as instance:
        instance.create_table("t", SCHEMA)
        add(instance, 1)
        context = instance.table("t").context
        attempt = context.attempts.begin(context.table)
        assert instance._durability.base_backup is not None
        instance._durability.base_backup(tar)
        instance._objects.put(attempt.object_name("root"), b"committed later")
        add(instance, 2)
        before = files(lake / "objects" / "data")
        # a killed process records no last milestone
        monkeypatch.setattr(ownership.Ownership, "advance", lambda *_, **__: None)
    shutil.rmtree(lake / "postgres")
    extract(tar, lake / "postgres")
    monkeypatch.undo()
    with dm.local(lake) as instance:
        assert keys(instance) == [1]
        with pytest.raises(
            InstanceIsACopy,
            match=r"restored to an earlier state, .* 'dormouse adopt' makes this one the owner",
        ):
            add(instance, 3)
    assert files(lake / "objects" / "data") == before
    with dm.local(lake) as instance:
        instance.adopt()
        add(instance, 3)
        instance.table("t").collect_garbage()
        assert keys(instance) == [1, 3]
    assert files(lake / "objects" / "data") > before


def test_an_open_instance_fails_once_its_database_is_put_back(
    dsn: str, url: str, at_once: None, tmp_path: Path
) -> None:
    with made(dsn, url) as instance:
        put_back = snapshot(dsn)
        add(instance, 1)
        put_back()
        before = files(tmp_path / "objects")
        with pytest.raises(InstanceTakenOver, match=r"put back|an earlier state"):
            add(instance, 2)
        with pytest.raises(InstanceTakenOver):
            instance._objects.delete(before)
        assert files(tmp_path / "objects") == before


def test_only_one_of_two_running_copies_is_the_owner(dsn: str, url: str, at_once: None) -> None:
    """Covers a cloned disk: system identifier, timeline, database and milestone are the same."""
    with made(dsn, url) as instance:
        add(instance, 1)
        first = milestone(url)
        put_back = snapshot(dsn)
        instance._ownership.advance()
        assert milestone(url) == first, "nothing has changed"
        add(instance, 2)
        query(instance._supplier, "update incarnation set milestone_id = gen_random_uuid()")
        with pytest.raises(InstanceTakenOver):
            add(instance, 3)
        put_back()  # tries to replace the milestone that the other copy has recorded
        store = Milestones(instance._supplier, open_store(url))
        mine = max(ownership.known(instance._supplier), key=lambda one: one.number)
        seen = ownership.Records(mine.number, ((mine.number, mine.milestone),))
        assert store.pass_next(mine, seen, 0.0) is False


def test_a_crash_between_the_two_steps_of_a_milestone_makes_no_copy(
    dsn: str, url: str, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(dsn, url) as instance:
        first = milestone(url)
        with monkeypatch.context() as patched:
            patched.setattr(Milestones, "_give", lambda *_: True)
            add(instance, 1)
            instance._ownership.check_now()
            instance._ownership.check_now()
        passed = "select milestone from incarnation order by number desc limit 1"
        assert query(instance._supplier, passed) == [(first + 1,)], "one at most is ahead of the store"
        assert milestone(url) == first
        instance._ownership.check()
        assert milestone(url) == first + 1
        add(instance, 2)
    with dm.connect(dsn, url) as instance:
        assert keys(instance) == [1, 2]
        add(instance, 3)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_milestone_that_a_later_one_replaces_at_once_was_written(
    dsn: str, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    """Another process closes, and so passes the next milestone, right after this one has put its own."""
    put = FolderStore.put
    with made(dsn, url) as other:
        instance = dm.connect(dsn, url)
        add(instance, 1)
        before = milestone(url)

        def overtaken(store: FolderStore, name: str, data: bytes) -> None:
            monkeypatch.setattr(FolderStore, "put", put)
            put(store, name, data)
            add(other, 2)
            other._ownership.advance(last=True)
            if is_there:
                raise ObjectAlreadyExists(name)

        monkeypatch.setattr(FolderStore, "put", overtaken)
        instance.close()
        assert caplog.text == ""
        assert records(open_store(url)).milestones == ((1, before + 2),)


@pytest.mark.slow
def test_an_object_store_restored_to_an_earlier_state_is_refused(
    dsn: str, url: str, at_once: None, tmp_path: Path
) -> None:
    with made(dsn, url) as instance:
        add(instance, 1)
        shutil.copytree(tmp_path / "objects", tmp_path / "copy")
        for key in (2, 3):
            add(instance, key)
    shutil.rmtree(tmp_path / "objects")
    (tmp_path / "copy").rename(tmp_path / "objects")
    with dm.connect(dsn, url) as instance:
        with pytest.raises(InstanceReadOnly, match=r"older than the database.* has milestone \d+ of"):
            add(instance, 4)
        instance.adopt()
        add(instance, 4)


@pytest.mark.slow
def test_a_process_that_writes_nothing_passes_no_milestone(dsn: str, url: str) -> None:
    with made(dsn, url):
        pass
    with dm.connect(dsn, url):  # opening makes the day's partition of the log, for example
        pass
    before = milestone(url)
    for read_only in (False, True, False):
        with dm.connect(dsn, url, read_only=read_only) as instance:
            assert keys(instance) == []
    assert milestone(url) == before
    with dm.connect(dsn, url) as instance:
        add(instance, 1)
        add(instance, 2)
        instance._ownership.check_now()
        assert milestone(url) == before, "not each commit passes one, nor each question"
    assert milestone(url) == before + 1
    assert len(records(open_store(url)).milestones) == 1


def test_milestones_go_on_after_the_clock_is_set_back(dsn: str, url: str) -> None:
    with made(dsn, url) as instance:
        add(instance, 1)
        query(instance._supplier, "update incarnation set passed_at = clock_timestamp() + interval '1 day'")
        before = milestone(url)
        instance._ownership.check_now()
        assert milestone(url) == before + 1
        add(instance, 2)
        query(instance._supplier, "update incarnation set passed_at = clock_timestamp() + interval '1 day'")
    assert milestone(url) == before + 2


def test_a_store_that_refuses_milestones_can_be_written_to(
    dsn: str, url: str, at_once: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = FolderStore.put

    def refused(self: FolderStore, name: str, data: bytes) -> None:
        if "milestone" in name:
            raise ObjectStoreError("forbidden")
        put(self, name, data)

    with made(dsn, url) as instance:
        monkeypatch.setattr(FolderStore, "put", refused)
        for key in (1, 2, 3):
            add(instance, key)
        assert "the milestone could not be written" in caplog.text
        monkeypatch.undo()
        assert keys(instance) == [1, 2, 3]


def kill(folder: Path) -> None:
    main = postmaster(folder)
    processes = [main, *main.children(recursive=True)]  # the parent first: it would start other processes
    for process in processes:
        with suppress(ProcessLookupError):  # its parent has already ended it
            os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)


@pytest.mark.slow
def test_a_server_that_died_is_not_started_for_a_milestone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(EmbeddedPostgres, "revive", lambda self: bool(asked.append(True)))
    instance = dm.local(tmp_path / "lake")
    instance.create_table("t", SCHEMA)
    kill(tmp_path / "lake")
    instance.close()
    assert asked == []


@pytest.mark.slow
@pytest.mark.parametrize("claims", [False, True], ids=["milestone", "incarnation"])
def test_milestones_in_the_store_survive_a_crash_of_the_database(
    tmp_path: Path, url: str, claims: bool
) -> None:
    """Commits do not wait for the disk, but the store only gets milestones that a crash cannot undo."""
    options = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    with EmbeddedPostgres(tmp_path / "server", options=options) as server:
        instance = made(server.dsn, url)
        add(instance, 1)
        instance._ownership.advance(last=True)
        number = milestone(url)
        if claims:
            instance._ownership.open(instance._catalog.instance_id(), starts=True)
        kill(tmp_path / "server")
        instance.close()
        assert server.revive()
        with dm.connect(server.dsn, url) as instance:
            assert instance.refusal is None
            assert number > 0
            assert records(open_store(url)).last == 1 + claims
