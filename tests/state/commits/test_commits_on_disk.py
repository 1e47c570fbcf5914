"""Commits are visible before they are on disk, but no caller gets an answer that a crash can undo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import dormouse as dm
from dormouse.errors import DormouseError
from dormouse.state.commits import commit_queues, handling
from dormouse.state.commits.job_commits import QueuedJobCommits
from dormouse.state.commits.outcomes import settle
from tests.commits import add, assignment, files_of, replacement
from tests.embedded import postmaster
from tests.standard import OF_KEYS
from tests.stored import file, query, ref, wait_until
from tests.support.api import Instance, Table
from tests.support.commits import AddFiles, PostgresQueue
from tests.support.embedded import EmbeddedPostgres

OPTIONS = {"fsync": "off", "autovacuum": "off"}  # a kill is no power cut: written data survives it
TABLES = ("t", "u", "v")


class Server:
    """A server that writes its log only when a commit asks for it, and an instance of it."""

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
            """Returns whether the WAL writer was found. It gets its process name only after its start."""
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
            schema = OF_KEYS
            made.instance.create_table(name, schema, properties=dm.TableProperties(gc_delay_seconds=0))
        yield made


@pytest.fixture
def crash_after(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Returns a function that runs a committer and crashes the server after the batch is applied.

    Just before the crash, it calls its argument. Then it starts the server again.
    """

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


@pytest.mark.slow
def test_a_commit_that_a_crash_undoes_was_reported_pending_and_is_applied_again(
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
def test_a_commit_that_a_committer_just_applied_is_acknowledged_once_it_is_on_disk(
    server: Server, crash_after: Callable[[Callable[[], object]], None]
) -> None:
    instance = server.instance
    instance.commit([add("t", "known")])  # now the table is cached
    instance.submit([add("t", "a")])
    answers: list[str] = []
    crash_after(lambda: answers.append(instance.commit([add("t", "a")])[0].state))
    assert (answers, files_of(instance)) == (["applied"], ["a", "known"])


@pytest.mark.slow
def test_a_job_gets_no_answer_that_a_crash_may_undo(
    server: Server, crash_after: Callable[[Callable[[], object]], None]
) -> None:
    instance = server.instance
    context = instance.table("t").context
    attempt = context.attempts.begin(context.table)
    name = attempt.object_name("root")
    answers: list[bool] = []
    looks: list[float] = []
    sent = threading.Event()

    def send(request: Any, *table: Any) -> None:
        instance.commits.send(request, *table)
        sent.set()

    def looking(deadline: float) -> Iterator[float]:
        for seconds in instance.commits.looks(deadline):
            yield min(seconds, 0.01)
            looks.append(seconds)  # the look before found nothing

    def job() -> None:
        commits = QueuedJobCommits(
            send, looking, instance.commits.patience, instance._supplier, context.attempts
        )
        files = (file(name, ref(name)),)
        request = AddFiles(commit_id="c", table="t", files=files, attempt_id=attempt.attempt_id)
        answers.append(commits.commit(request, attempt))

    def look() -> None:
        assert files_of(instance) == [name]
        already = len(looks)
        wait_until(lambda: len(looks) > already + 1)
        assert answers == []

    thread = threading.Thread(target=job)
    thread.start()
    assert sent.wait(60)
    crash_after(look)
    assert (files_of(instance), answers) == ([], [])
    assert [outcome.state for outcome in instance.committer().drain()] == ["applied"]
    thread.join(60)
    assert answers == [True]
    server.crash()
    server.start()
    assert files_of(instance) == [name]


@pytest.mark.slow
def test_direct_commits_survive_a_crash(server: Server) -> None:
    instance = server.instance
    for number in range(3):
        assert [status.state for status in instance.commit([add("t", f"f{number}")])] == ["applied"]
    server.crash()
    server.start()
    assert files_of(instance) == ["f0", "f1", "f2"]


def crashing(server: Server, work: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    """Returns a function that calls `work`, and once crashes and restarts the server.

    The crash comes before the first call, or after the first call that does not return an empty list.
    """
    crashed: list[bool] = []

    def crash() -> None:
        crashed.append(True)
        server.crash()
        server.start()
        # as if the visibility timeout had passed
        query(server.instance._supplier, "update commit_message set visible_at = clock_timestamp()")

    def run(*args: Any, **more: Any) -> Any:
        if before and not crashed:
            crash()
        found = work(*args, **more)
        if not before and not crashed and found != []:
            crash()
        return found

    return run


def drain(instance: Instance) -> dict[str, str]:
    """Drains the queue until it is empty, and tries again after each error.

    Returns the last state of each commit, by commit id.
    """
    found: dict[str, str] = {}
    for _ in range(20):
        with suppress(DormouseError):
            found |= {o.commit_id: o.state for o in instance.committer(concurrency=1).drain()}
            if instance.commits.depths()[0].messages == 0:
                return found
    raise AssertionError("the queue does not become empty")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "before"),
    [
        pytest.param(PostgresQueue, "receive", False, marks=pytest.mark.slow, id="after receive"),
        pytest.param(handling, "settle", True, id="after apply"),
        pytest.param(handling, "settle", False, marks=pytest.mark.slow, id="after settle"),
        pytest.param(PostgresQueue, "delete", False, marks=pytest.mark.slow, id="after delete"),
    ],
)
def test_a_batch_outlives_a_crash_of_the_server_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, before: bool
) -> None:
    instance = server.instance
    instance.submit([add(table, "a", commit_id=f"add {table}") for table in TABLES])
    instance.submit(
        [add("t", "a", commit_id="again")]
    )  # it is refused because of a commit that the crash may undo
    ids = [f"add {table}" for table in TABLES]
    receive = PostgresQueue.receive

    def received_on_disk(*args: Any, **more: Any) -> Any:
        """Receives messages, and makes the server write its log, so that no crash undoes the delivery.

        After an undone delivery, the queue would refuse to delete the message.
        """
        found = receive(*args, **more)
        query(instance._supplier, "select pg_logical_emit_message(true, 'test', '')::text")
        return found

    monkeypatch.setattr(PostgresQueue, "receive", received_on_disk)
    monkeypatch.setattr(place, name, crashing(server, getattr(place, name), before=before))
    found = drain(instance)
    assert {found.get(one) for one in ids} <= {"applied", "applied_before", None}
    assert [instance.commit_status(one).state for one in ids] == ["applied"] * 3
    server.crash()
    server.start()
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    drain(instance)  # messages may exist again after the crash; they were applied before
    assert [instance.commit_status(one).state for one in ids] == ["applied"] * 3
    assert [files_of(instance, table) for table in TABLES] == [["a"]] * 3
    assert instance.commit_status("again").state == "rejected"


@pytest.mark.slow
def test_a_direct_commit_is_not_acknowledged_after_a_crash_undid_it(
    server: Server, crash_after: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = server.instance
    instance.submit([add("t", "a")])
    answers: list[str] = []

    def commit() -> None:
        monkeypatch.setattr(commit_queues, "settle", crashing(server, settle, before=True))
        answers.append(instance.commit([add("t", "a")], seconds_max=0)[0].state)
        answers.extend(files_of(instance))

    crash_after(commit)
    assert answers == ["pending"]
    drain(instance)
    assert files_of(instance) == ["a"]


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
