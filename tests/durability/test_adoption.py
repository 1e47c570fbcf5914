"""Adoptions: an adoption waits for running deletions, and keeps files that the other timeline needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability import ownership
from dormouse.durability.incarnations import Process, records, this_process
from dormouse.durability.ownership import Ownership, announced
from dormouse.errors import InstanceIsACopy, InstanceLocked, InstanceTakenOver, InvalidInput
from dormouse.payloads.days import leased
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.jobs import Claims
from tests.support.objects import open_store

SCHEMA = OF_KEYS
PROMPT = dm.TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2)

FROZEN = """
import os, signal, sys
import dormouse as dm
from dormouse.objects.folder import FolderStore

delete = FolderStore.delete

def frozen(self, names):
    names = list(names)
    if any(name.startswith("data/") for name in names):
        os.kill(os.getpid(), signal.SIGSTOP)
    return delete(self, names)

FolderStore.delete = frozen
with dm.connect(sys.argv[1], sys.argv[2]) as instance:
    instance.table("t").compact()
    instance.table("t").collect_garbage()
"""
"""The program of a process that stops itself after it has checked that it owns the store, before it
deletes.
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def copy(dsn: str, url: str, copied: Callable[[], str]) -> str:
    """Copies a database whose table has two files that the original can compact; returns the copy's DSN."""
    with dm.connect(dsn, url) as instance:
        instance.create_table("t", SCHEMA, properties=PROMPT)
        for key in (1, 2):
            add(instance, key)
    return copied()


def add(instance: Instance, *keys: int) -> None:
    instance.table("t").ingest(pa.table({"key": list(keys)}))


def keys(instance: Instance) -> list[int]:
    return sorted(instance.table("t").query().read_all()["key"].to_pylist())


def problems_here(instance: Instance) -> list[str]:
    """Returns the problems that a check finds, except those about objects of the other timeline."""
    found = instance.check(deep=True).problems
    return [str(problem) for problem in found if problem.kind != "object_unknown"]


def data(url: str) -> set[str]:
    return {name for name, _ in open_store(url).list("data")}


@contextmanager
def frozen(dsn: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process of the store's owner once that process has stopped itself; kills it at the end."""
    with subprocess.Popen([sys.executable, "-c", FROZEN, dsn, url], stderr=subprocess.DEVNULL) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_an_adoption_waits_for_a_running_deletion(dsn: str, url: str, copy: str) -> None:
    """The deletion could otherwise delete files that the adopted database needs."""
    reported: list[str] = []
    with frozen(dsn, url) as process:
        before = data(url)
        with dm.connect(copy, url) as instance:
            for _ in range(2):
                with pytest.raises(InstanceLocked, match=rf"process {process.pid} on host .*--force"):
                    instance.adopt(wait_seconds=0.3, tell=reported.append)
                with pytest.raises(InstanceIsACopy):
                    add(instance, 3)
        assert str(process.pid) in reported[0]
        with (
            dm.connect(copy, url) as instance,
            pytest.raises(InstanceIsACopy, match=r"adoption .* has begun"),
        ):
            add(instance, 3)
        with dm.connect(dsn, url) as former, pytest.raises(InstanceTakenOver):
            add(former, 3)
        assert data(url) == before
        process.kill()
        process.wait()
        with dm.connect(copy, url) as instance:  # the second `connect` completes the announced adoption
            assert instance.refusal is None
            assert instance.adopt() == 2, "an adoption that has begun may be repeated"
            assert keys(instance) == [1, 2]
            assert query(instance._supplier, "select max(number) from incarnation") == [(2,)]
            assert problems_here(instance) == []
            add(instance, 3)
            assert [one.holder for one in instance.holds()] == ["adoption 2"]
        assert records(open_store(url)).deletions == ()


@pytest.mark.slow
def test_an_adoption_continues_when_the_deletion_ends(dsn: str, url: str, copy: str) -> None:
    with frozen(dsn, url) as process, dm.connect(copy, url) as instance:

        def end(line: str) -> None:
            process.send_signal(signal.SIGCONT)

        with pytest.raises(InstanceLocked):
            instance.adopt(wait_seconds=0)
        assert instance.adopt(wait_seconds=60, tell=end) == 2
        process.wait()
        assert records(open_store(url)).deletions == ()
        add(instance, 3)


@pytest.mark.slow
def test_a_forced_adoption_does_not_wait_for_a_deletion(dsn: str, url: str, copy: str) -> None:
    with frozen(dsn, url) as process:
        with dm.connect(copy, url) as instance, pytest.raises(InstanceLocked):
            instance.adopt(wait_seconds=0)
        with dm.connect(copy, url) as instance:
            assert instance.adopt(wait_seconds=0, force=True, keep_days=3) == 2
            assert records(open_store(url)).deletions == ()
            add(instance, 3)
            days = query(
                instance._supplier, "select round(extract(epoch from until - now()) / 86400) from hold"
            )
            assert days == [(3,)], "the newest keep_days counts"
        process.kill()


@pytest.mark.slow
def test_a_deletion_that_checks_ownership_after_an_adoption_began_deletes_nothing(
    dsn: str, url: str, copy: str
) -> None:
    """The owner announces its deletion before the adoption begins, and checks its ownership afterwards."""
    before = data(url)
    with dm.connect(dsn, url) as former, dm.connect(copy, url) as instance:
        ask: Callable[[], Any] = former._ownership._ask

        def adopted_meanwhile() -> Any:
            with pytest.raises(InstanceLocked):
                instance.adopt(wait_seconds=0)
            return ask()

        former._ownership._ask = adopted_meanwhile  # type: ignore[method-assign]
        with pytest.raises(InstanceTakenOver):
            former._objects.delete(before)
        former._ownership._ask = ask  # type: ignore[method-assign]
        assert data(url) == before
        assert instance.adopt(wait_seconds=0) == 2, "the announcement was removed"


def test_a_process_counts_as_ended_only_when_that_is_certain(tmp_path: Path) -> None:
    me = this_process()
    assert not me.is_gone()
    assert replace(me, started="1").is_gone(), "another process has its id"
    assert not replace(me, boot="another", pid=2**22 + 1).is_gone()
    assert not replace(me, host="its clone", pid=2**22 + 1).is_gone()
    assert not replace(me, namespace="pid:[1]", pid=2**22 + 1).is_gone()
    assert not Process().is_gone()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert replace(me, pid=child.pid, started="").is_gone()
    assert replace(me, pid=child.pid, started="").is_gone()


@pytest.mark.slow
def test_announcements_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dm.local(tmp_path / "lake") as instance:
        instance.create_table("t", SCHEMA)
        store = open_store(tmp_path / "lake" / "objects")
        dead, elsewhere = replace(this_process(), started="1"), Process("elsewhere", "b", "n", 1)
        for process in (dead, this_process(), elsewhere):
            with monkeypatch.context() as patched:
                patched.setattr(ownership, "this_process", lambda process=process: process)
                patched.setattr(ownership, "take_back", lambda objects, names: None)
                with announced(store, 1):
                    pass
        store.put("owner/now/deletion-1-00.json", b"of another version")
        with dm.connect(instance._tables.dsn, store.url):
            assert len(records(store).deletions) == 3
        instance.backup(tmp_path / "backups")
    dm.restore(tmp_path / "backups", tmp_path / "restored")
    assert records(open_store(tmp_path / "restored" / "objects")).deletions == ()
    with dm.local(tmp_path / "restored", read_only=True) as instance:
        assert instance.holds() == [], "no other database knows its objects"
    with dm.local(tmp_path / "lake"):  # the folder's lease proves that all earlier processes are dead
        assert records(store).deletions == ()


@pytest.mark.slow
def test_an_adoption_can_be_reverted_by_another_adoption(dsn: str, url: str, copy: str) -> None:
    """One timeline compacts and collects files that both timelines know; the other timeline still
    needs them.
    """
    with dm.connect(copy, url) as instance:
        instance.adopt()
        instance.table("t").compact()
        for _ in range(2):
            assert instance.table("t").collect_garbage().deleted == 0
        assert keys(instance) == [1, 2]
    with dm.connect(dsn, url) as former:
        former.adopt()
        assert keys(former) == [1, 2]
        assert problems_here(former) == []
    with dm.connect(copy, url) as instance:
        # adopt again: the other timeline still refers to files that this one replaced before
        instance.adopt()
        instance.table("t").collect_garbage()
    with dm.connect(dsn, url) as former:
        former.adopt(keep_days=0)
        assert keys(former) == [1, 2]
        assert problems_here(former) == []
        former.table("t").compact()
        assert former.table("t").collect_garbage().deleted == 2


@pytest.mark.slow
def test_the_hold_of_an_adoption_is_listed_and_can_be_released(
    url: str, copy: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    where = ("--dsn", copy, "--objects", url)
    with dm.connect(copy, url) as instance:
        for days in (-1, 40_000, float("nan")):
            with pytest.raises(InvalidInput, match="keep_days must be from 0"):
                instance.adopt(keep_days=days)
        with pytest.raises(InstanceIsACopy):
            instance.release("adoption 2")
    code, _, said = cli("status", *where)
    assert (code, said.startswith("dormouse: the database is a copy of the one")) == (0, True)
    (shown,) = json.loads(cli("status", "--json", *where)[1])
    assert said == f"dormouse: {shown['refusal']}\n"
    assert "kept for 2 days ('dormouse holds')" in cli("adopt", "--yes", "--keep-days", "2", *where)[1]
    _, out, said = cli("status", *where)
    assert ("collection waits for adoption 2, until" in out, said) == (True, "")
    assert [one["refusal"] for one in json.loads(cli("status", "--json", *where)[1])] == [None]
    (found,) = json.loads(cli("holds", "--json", *where)[1])
    assert found["holder"] == "adoption 2"
    code, _, said = cli("holds", "--release", "adoption 3", *where)
    assert (code, "there is no hold 'adoption 3'; the holds are: 'adoption 2'" in said) == (2, True)
    assert cli("holds", "--release", "adoption 2", *where)[:2] == (0, "there are no holds\n")
    with dm.connect(copy, url) as instance:
        instance.table("t").compact()
        instance.table("t").collect_garbage()
        assert instance.table("t").status().files == 1


def test_an_adoption_ends_all_leases(instance: Instance) -> None:
    """No holder of a lease works with the adopted database, so its processes must not wait for these
    leases.
    """
    supplier, day = instance._supplier, (datetime.now(UTC) - timedelta(days=1)).date()
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
    table = instance.create_table("t", SCHEMA, properties=properties)
    for _ in range(2):
        table.ingest(pa.table({"key": [1]}))
    assert table.context.jobs.create(1) == len(table.context.jobs.take(1)) == 1
    job_id, claims, worker_id = instance.jobs.start("work", {}), Claims(supplier), uuid4()
    kind_id = instance.jobs._kind_id("work")
    claims.register(worker_id, [kind_id], "of before", 30.0)
    assert len(claims.claim(worker_id, {kind_id: 1}, {})) == 1
    query(
        supplier,
        "insert into commit_waiter (queue, waiter, waits_until) "
        "values (0, gen_random_uuid(), clock_timestamp() + interval '1 minute')",
    )
    query(
        supplier,
        "insert into commit_message (queue, commit_key, body, visible_at) "
        "values (0, gen_random_uuid(), '{}', clock_timestamp() + interval '1 minute')",
    )
    with rows.locks.write(), leased(supplier, day, "offload", ["open"]), table.context.writing():
        Ownership(supplier, instance.objects).adopt(instance._catalog.instance_id(), keep_days=0)
        for name in ("row_lock", "job_worker", "commit_waiter", "write_attempt"):
            assert query(supplier, f"select count(*) from {name}") == [(0,)], name
        assert query(supplier, "select worker, leased_until, token from payload_day") == [(None, None, 2)]
        assert query(supplier, "select worker_id, claimed_at, deaths from job") == [(None, None, 0)]
        for name, time in (("compaction_job", "leased_until"), ("commit_message", "visible_at")):
            assert query(supplier, f"select {time} <= clock_timestamp() from {name}") == [(True,)], name
        assert table.compact().jobs_run == 1
        assert rows.change([dm.Insert([{"n": 1}])], wait_seconds=0).versions
    instance.jobs.worker({"work": lambda request, progress: "done"}).run(drain=True)
    assert instance.jobs.result(job_id) == "done"
