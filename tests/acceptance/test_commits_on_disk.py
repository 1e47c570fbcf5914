"""A committer's commits are seen before they are on disk: what a crash may undo then, nobody was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import dormouse as dm
from dormouse.commits import handling
from dormouse.commits.job_commits import QueuedJobCommits
from dormouse.commits.outcomes import CommitOutcome, settle
from dormouse.commits.postgres_queue import PostgresQueue
from dormouse.commits.queue import Message
from dormouse.commits.requests import AddFiles
from dormouse.embedded.postgres import EmbeddedPostgres
from dormouse.errors import DormouseError
from dormouse.instance import Instance
from dormouse.table import Table
from tests.commits import add, assignment, files_of, replacement
from tests.embedded import postmaster
from tests.state import file, query, ref, wait_until

OPTIONS = {"fsync": "off", "autovacuum": "off"}  # a kill is no power cut: what was written is there
TABLES = ("t", "u", "v")


class Server:
    """A server that writes its log when it is asked to, and only then; and an instance of it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.start()
        objects = (folder / "objects").as_uri()
        self.instance = stack.enter_context(dm.connect(self.dsn, objects))

    def start(self) -> None:
        self.dsn = self._stack.enter_context(EmbeddedPostgres(self._folder / "server", options=OPTIONS)).dsn
        writers: list[psutil.Process] = []

        def find() -> bool:
            """It is named a moment after it was started."""
            processes = postmaster(self._folder / "server").children()
            writers[:] = [one for one in processes if "walwriter" in " ".join(one.cmdline())]
            return bool(writers)

        wait_until(find)
        [writer] = writers
        writer.suspend()
        self._stack.callback(wake, writer)

    def crash(self) -> None:
        main = postmaster(self._folder / "server")
        processes = [main, *main.children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=60)


def wake(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        made = Server(tmp_path, stack)
        for name in TABLES:
            schema = dm.Schema(row_keys=[dm.Field("key", dm.LONG)])
            made.instance.create_table(name, schema, properties=dm.TableProperties(gc_delay_seconds=0))
        yield made


@pytest.fixture
def crash_after(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has the next committer do something when all is applied, then crash the server; which runs again."""

    def run(meanwhile: Callable[[], object]) -> None:
        def crash(*_: Any) -> None:
            meanwhile()
            server.crash()
            raise OSError("the committer is killed, too")

        monkeypatch.setattr(handling, "settle", crash)
        with pytest.raises((OSError, DormouseError)):
            server.instance.committer(concurrency=1).drain()
        monkeypatch.setattr(handling, "settle", settle)
        server.start()
        query(server.instance._supplier, "update commit_message set visible_at = clock_timestamp()")

    return run


def crash_once(server: Server) -> Callable[[], None]:
    """Returns a function that crashes the server and starts it again, the first time that it is called."""
    left = [True]

    def crash() -> None:
        if left and left.pop():
            server.crash()
            server.start()
            query(server.instance._supplier, "update commit_message set visible_at = clock_timestamp()")

    return crash


def crash_when_received(server: Server, patch: pytest.MonkeyPatch) -> None:
    crash, receive = crash_once(server), PostgresQueue.receive

    def received(queue: PostgresQueue, limit: int, wait_seconds: float) -> list[Message]:
        if messages := receive(queue, limit, wait_seconds):
            crash()
        return messages

    patch.setattr(PostgresQueue, "receive", received)


def crash_when_applied(server: Server, patch: pytest.MonkeyPatch) -> None:
    crash, apply = crash_once(server), handling.apply

    def applied(*given: Any) -> list[CommitOutcome]:
        # the deliveries are on disk, so that the messages can be deleted after the crash
        query(server.instance._supplier, "select pg_logical_emit_message(true, 'test', '')")
        outcomes = apply(*given)
        crash()
        return outcomes

    patch.setattr(handling, "apply", applied)


def crash_when_settled(server: Server, patch: pytest.MonkeyPatch) -> None:
    crash = crash_once(server)

    def settled(*given: Any) -> list[CommitOutcome]:
        outcomes = settle(*given)
        crash()
        return outcomes

    patch.setattr(handling, "settle", settled)


def crash_when_deleted(server: Server, patch: pytest.MonkeyPatch) -> None:
    crash, delete = crash_once(server), PostgresQueue.delete

    def deleted(queue: PostgresQueue, messages: Sequence[Message]) -> None:
        delete(queue, messages)
        crash()

    patch.setattr(PostgresQueue, "delete", deleted)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "crashing", [crash_when_applied, crash_when_received, crash_when_settled, crash_when_deleted]
)
def test_a_committer_that_goes_on_after_a_crash_of_the_server_loses_no_commit(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    crashing: Callable[[Server, pytest.MonkeyPatch], None],
) -> None:
    instance = server.instance
    instance.commit([add("t", "there")])
    names = [f"add {table}" for table in TABLES]
    instance.submit([add(table, "a", commit_id=name) for table, name in zip(TABLES, names, strict=True)])
    # a refusal that rests on a commit that the crash undoes
    instance.submit([add("t", "a", commit_id="again")])
    crashing(server, monkeypatch)
    answered: set[str] = set()
    for _ in range(5):
        with suppress(DormouseError):
            outcomes = instance.committer(concurrency=1).drain()
            answered |= {o.commit_id for o in outcomes if o.state in ("applied", "applied_before")}
        if all(instance.commit_status(name).state == "applied" for name in names):
            break
    assert answered <= set(names) | {"again"}
    server.crash()
    server.start()
    assert {table: files_of(instance, table) for table in TABLES} == {
        "t": ["a", "there"], "u": ["a"], "v": ["a"]
    }  # fmt: skip
    # the crash may bring messages back, which are then found to be applied
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    instance.committer(concurrency=1).drain()
    assert [instance.commit_status(name).state for name in names] == ["applied"] * 3
    assert instance.commit_status("again").state == "rejected"


@pytest.mark.slow
def test_what_a_crash_undoes_was_told_to_be_pending_and_comes_again(
    server: Server, crash_after: Callable[[Callable[[], object]], None]
) -> None:
    instance = server.instance
    instance.submit([add(table, "a", commit_id=f"add {table}") for table in TABLES])

    def states() -> list[str]:
        return [instance.commit_status(f"add {table}").state for table in TABLES]

    def look() -> None:
        assert [files_of(instance, table) for table in TABLES] == [["a"]] * 3
        assert states() == ["pending"] * 3

    crash_after(look)
    assert [files_of(instance, table) for table in TABLES] == [[]] * 3
    assert states() == ["pending"] * 3
    assert [outcome.state for outcome in instance.committer().drain()] == ["applied"] * 3
    assert states() == ["applied"] * 3
    server.crash()
    server.start()
    assert [files_of(instance, table) for table in TABLES] == [["a"]] * 3


@pytest.mark.slow
def test_who_commits_what_a_committer_has_just_applied_is_told_of_it_when_it_is_on_disk(
    server: Server, crash_after: Callable[[Callable[[], object]], None]
) -> None:
    instance = server.instance
    instance.commit([add("t", "known")])  # from then on the table is known
    instance.submit([add("t", "a")])
    told: list[str] = []
    crash_after(lambda: told.append(instance.commit([add("t", "a")])[0].state))
    assert (told, files_of(instance)) == (["applied"], ["a", "known"])


@pytest.mark.slow
def test_a_job_is_told_nothing_that_a_crash_may_undo(
    server: Server, crash_after: Callable[[Callable[[], object]], None]
) -> None:
    instance = server.instance
    context = instance.table("t")._context
    attempt = context.attempts.begin(context.table)
    name = attempt.object_name("root")
    told: list[bool] = []
    looks: list[float] = []
    sent = threading.Event()

    def send(request: Any, *table: Any) -> None:
        instance.commits.send(request, *table)
        sent.set()

    def looking(deadline: float) -> Iterator[float]:
        for seconds in instance.commits.looks(deadline):
            yield min(seconds, 0.01)
            looks.append(seconds)  # that look found nothing

    def job() -> None:
        commits = QueuedJobCommits(
            send, looking, instance.commits.patience, instance._supplier, context.attempts
        )
        files = (file(name, ref(name)),)
        request = AddFiles(commit_id="c", table="t", files=files, attempt_id=attempt.attempt_id)
        told.append(commits.commit(request, attempt))

    def look() -> None:
        assert files_of(instance) == [name]
        already = len(looks)
        wait_until(lambda: len(looks) > already + 1)
        assert told == []

    thread = threading.Thread(target=job)
    thread.start()
    assert sent.wait(60)
    crash_after(look)
    assert (files_of(instance), told) == ([], [])
    assert [outcome.state for outcome in instance.committer().drain()] == ["applied"]
    thread.join(60)
    assert told == [True]
    server.crash()
    server.start()
    assert files_of(instance) == [name]


def test_what_was_committed_at_once_outlives_a_crash(server: Server) -> None:
    instance = server.instance
    for number in range(3):
        assert [status.state for status in instance.commit([add("t", f"f{number}")])] == ["applied"]
    server.crash()
    server.start()
    assert files_of(instance) == ["f0", "f1", "f2"]


@pytest.mark.slow
def test_no_object_is_collected_that_a_crash_brings_back(
    server: Server, crash_after: Callable[[Callable[[], object]], None]
) -> None:
    instance = server.instance
    table = instance.table("t")
    for name in ("old", "new"):
        instance._objects.put(name, b"rows")
    instance.submit([add("t", "old"), assignment("t", "job", "old")])
    instance.committer().drain()
    instance.submit([replacement("t", "job", ["old"], "new")])

    def collect() -> None:
        collect_twice(table)
        assert not holds(instance, "old")

    crash_after(collect)
    assert all(holds(instance, name) for name in files_of(instance))
    instance.committer().drain()
    assert files_of(instance) == ["new"]


def collect_twice(table: Table) -> None:
    for _ in range(2):
        table.collect_garbage()


def holds(instance: Instance, name: str) -> bool:
    return name in {found for found, _ in instance._objects.list()}
