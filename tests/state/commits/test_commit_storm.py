"""Commits while processes die or freeze, connections are cut or silent, and tables change.

Every answer that a process got for a commit must be true at the end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dormouse.errors import CommitOutcomeUnknown, TableAlreadyExists
from dormouse.state.commits import pointers
from dormouse.state.commits.outcomes import CommitStatus
from dormouse.writing.ingest import commit_id
from tests.commit_storm import (
    AHEAD_SECONDS,
    PAIR,
    PROPERTIES,
    SCHEMA,
    TABLES,
    VISIBILITY_SECONDS,
    Answer,
    Signal,
    Storm,
    commit,
    disturb,
    opened,
    run,
    submit,
)
from tests.cutting import CAN_VANISH
from tests.embedded import postmaster
from tests.forks import FORKS
from tests.stored import query, wait_until
from tests.storming import STORM_SECONDS, failing_network, is_gone, kill_postmaster, kill_server
from tests.support.api import Instance
from tests.support.embedded import EmbeddedPostgres
from tests.support.model import is_inlined
from tests.support.objects import SKETCHES_SUFFIX

SECONDS = 3 * STORM_SECONDS
UNTOUCHED_SECONDS_MAX = 30.0
BYTES_MEAN = 60_000
WAIT_SECONDS_MAX = 120.0
IDS: dict[str, Callable[[str], str]] = {
    "ingest": commit_id,
    "transaction": lambda name: f"transaction:{name}",
    "claim": lambda name: f"{name} claim",
    "rewrite": str,
    "futile": str,
}
"""Functions that return the commit id of a piece of work from its name, by the kind of work."""


class Crowd:
    """The storm's processes. A killed process is replaced by another."""

    def __init__(self, storm: Storm, seed: int) -> None:
        self._storm = storm
        self._seed = seed
        self._processes: dict[tuple[str, int], Any] = {}

    def start(self, work: Callable[..., None], number: int, until: str) -> None:
        args = (self._storm, work, number, self._seed, until)
        process = FORKS.Process(target=run, args=args, daemon=True)
        process.start()
        self._processes[work.__name__, number] = process

    def kill_committer(self, number: int) -> None:
        self._processes["commit", number].kill()
        self.start(commit, number, "over")

    def send(self, number: int, what: signal.Signals) -> None:
        os.kill(self._processes["commit", number].pid, what)

    def join(self, *works: Callable[..., None]) -> None:
        for (name, number), process in self._processes.items():
            if name in {work.__name__ for work in works}:
                process.join(WAIT_SECONDS_MAX)
                assert process.exitcode == 0, f"{name} {number}: {process.exitcode}"

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


def plan(seed: int, seconds: float, committers: int) -> list[tuple[float, str, int, float]]:
    """Returns the freezes and kills of committers, in order of time.

    Each is (seconds after the start, "freeze" or "kill", number of the committer, seconds of a freeze).
    """
    dice = random.Random(seed)
    found = []
    for number in range(committers):
        at = dice.uniform(0.2, 1)
        while at < seconds:
            what = dice.choice(["freeze", "kill"])
            length = dice.choice([0.1, 0.5, 1.5 * VISIBILITY_SECONDS]) if what == "freeze" else 0.0
            found.append((at, what, number, length))
            at += length + dice.uniform(0.2, 0.8)
    return sorted(found)


def blow(crowd: Crowd, storm: Storm, seed: int, seconds: float, submitters: int, committers: int) -> None:
    for number in range(committers):
        crowd.start(commit, number, "over")
    for number in range(submitters):
        crowd.start(submit, number, "calm")
    crowd.start(disturb, 0, "calm")
    actions, began = plan(seed, seconds, committers), time.monotonic()
    print(f"seed {seed}: {actions}")
    due = [(at, what, n) for at, what, n, _ in actions]
    due += [(at + length, "wake", n) for at, what, n, length in actions if what == "freeze"]
    for at, what, number in sorted(due):
        time.sleep(max(0.0, began + at - time.monotonic()))
        if what == "kill":
            crowd.kill_committer(number)
        else:
            crowd.send(number, signal.SIGSTOP if what == "freeze" else signal.SIGCONT)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    wait_until(lambda: is_enough(storm.answers()), WAIT_SECONDS_MAX)
    Signal(storm.folder / "calm").set()
    crowd.join(submit, disturb)
    Signal(storm.folder / "over").set()
    crowd.join(commit)


def is_enough(answers: list[Answer]) -> bool:
    done = {(t.what, t.table) for t in answers if t.answer == "applied"}
    wanted = {("clear", "cleared"), ("drop", "dropped"), ("convert", "converted")}
    # a file of `quiet` with pending deletions of transactions cannot be replaced by its copy
    return wanted | {("ingest", "quiet"), ("transaction", "quiet"), ("rewrite", "converted")} <= done


def check_answers(instance: Instance, answers: list[Answer]) -> None:
    """Checks that the state of each commit is known by its id, and equals the answers that were given."""
    there = {table.name: table.context.table.table_id for table in instance.tables()}
    # the answers for dropped tables are not kept
    answers = [t for t in answers if t.what in IDS and there.get(t.table) == t.table_id]
    ids = [IDS[t.what](t.name) for t in answers]
    for one, status in zip(answers, instance.commits.statuses(ids), strict=True):
        check_answer(one, status)


def check_answer(answer: Answer, status: CommitStatus) -> None:
    about = f"{answer}: {status}"
    assert status.state != "pending", about
    assert "no committer answered" not in answer.error, about
    if answer.what == "futile":
        assert status.state == "rejected" or answer.answer == "unknown", about
    elif answer.answer == "applied" and answer.what != "claim":
        assert status.state == "applied", about
    elif answer.answer == "applied" or "CommitRejected" in answer.error:
        assert status.state in ("applied", "rejected"), about
    if status.state == "rejected":
        assert status.error, about
    if answer.what == "rewrite" and status.state == "applied":
        assert status.error is not None and status.error.startswith("1 of 2 requests failed"), about
        assert "number 2" in status.error, about
    if answer.table == "quiet" and answer.what == "ingest":
        assert answer.ended - answer.began < UNTOUCHED_SECONDS_MAX, about


def check_rows(instance: Instance, answers: list[Answer]) -> None:
    """Checks that each acknowledged row exists once, by a query and by SQL, and no refused row exists.

    Both tables of a transaction must have its rows, or none.
    """
    transactions = [t for t in answers if t.what == "transaction"]
    whole: dict[str, set[str]] = {}
    for table in instance.tables():
        found = Counter(table.query().read_all()["key"].to_pylist())
        by_sql = instance.sql(f"select key from {table.name}").read_all()["key"].to_pylist()
        assert Counter(by_sql) == found
        assert not [key for key, times in found.items() if times > 1], "rows are doubled"
        assert table.count() == len(found)
        own = [t for t in answers if t.table == table.name and t.table_id == table.context.table.table_id]
        clears = [t for t in own if t.what == "clear" and t.answer != "refused"]
        ingests: dict[str, list[Answer]] = {}
        for one in [*own, *(transactions if table.name == PAIR[1] else ())]:
            if one.what in ("ingest", "transaction"):
                ingests.setdefault(one.name, []).append(one)
        whole[table.name] = {t.name for t in transactions if found.keys() >= set(t.keys)}
        for tries in ingests.values():
            keys = found.keys() & set(tries[0].keys)
            about = f"{table.name}: {sorted(keys)} of {tries}"
            assert len(keys) in (0, len(tries[0].keys)), about
            outcomes = {t.answer for t in tries}
            if "applied" in outcomes and all(clear.ended < tries[0].began for clear in clears):
                assert keys, about
            if outcomes == {"refused"}:
                assert not keys, about
        assert set(found) <= {key for tries in ingests.values() for key in tries[0].keys}, (
            "rows that no process wrote"
        )
    assert whole[PAIR[0]] == whole[PAIR[1]], "half of a transaction"


def check_objects(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collects garbage, and checks that the store then has exactly the objects that are needed.

    Objects of the table "cleared" may remain, because `clear` removed their records.
    """
    monkeypatch.setattr(pointers, "APPLIED_SECONDS", -2 * AHEAD_SECONDS)
    expected = {"instance.json"}
    for table in instance.tables():
        table.set_properties(attempt_expiry_seconds=0, history_retention_seconds=0)
        for _ in range(2):
            assert not table.collect_garbage().failed
        expected |= {r.filename for r in table.files.file_references() if not is_inlined(r.filename)}
    instance._attempts.collect_abandoned()
    pointers.sweep_bodies(instance._supplier, instance._objects, -2 * AHEAD_SECONDS)
    dead = "select substring(body from 'commits/[-0-9a-f]*.json') from dead_commit_message"
    expected |= {name for (name,) in query(instance._supplier, dead) if name}
    cleared = instance.table("cleared").context.table.object_prefix
    names = {name.removesuffix(SKETCHES_SUFFIX) for name, _ in instance._objects.list()}
    left = {name for name in names - expected if not name.startswith((cleared, "activity/", "owner/"))}
    assert not left
    assert not {name for name in expected - names if not name.startswith("commits/")}


def prepare(dsn: str, storm: Storm) -> None:
    """Creates the tables, although the server may be killed between COMMIT and its answer."""
    try:
        with opened(dsn, storm) as instance:
            for name in TABLES:
                with suppress(TableAlreadyExists):
                    instance.create_table(name, SCHEMA, properties=PROPERTIES)
    except CommitOutcomeUnknown:
        prepare(dsn, storm)


def storm_of(dsn: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, **numbers: int) -> None:
    with failing_network(dsn, random.Random(seed), BYTES_MEAN) as (proxy, reached):
        storm = Storm(reached, folder)
        prepare(dsn, storm)
        with closing(Crowd(storm, seed)) as crowd:
            blow(crowd, storm, seed, SECONDS, **numbers)
        print(f"{proxy.vanished} connections vanished")
        assert proxy.vanished or not CAN_VANISH
    with opened(dsn, storm) as instance:
        # as if the visibility timeout had passed
        query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
        instance.committer().drain()
        answers = storm.answers()
        print(Counter((t.what, t.table, t.answer, t.error.split(":")[0]) for t in answers))
        check_answers(instance, answers)
        check_rows(instance, answers)
        check_objects(instance, monkeypatch)
        check_rows(instance, answers)


@pytest.mark.slow
def test_answers_given_in_a_storm_are_true(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storm_of(dsn, tmp_path, monkeypatch, seed=2, submitters=4, committers=3)


@contextmanager
def killed_again_and_again(folder: Path, seed: int) -> Iterator[str]:
    """Runs a server that is repeatedly killed at random times and started again.

    At every other kill one of its processes is frozen, and survives the others as an orphan. The log is
    written every 10 s, or when a commit asks for it, so a kill loses the commits that did not ask.
    """
    options = {"fsync": "off", "wal_writer_delay": "10s", "autovacuum": "off"}
    dice, over, kills = random.Random(f"kills {seed}"), threading.Event(), list[float]()
    orphans: list[psutil.Process] = []
    with ExitStack() as stack:
        dsn = stack.enter_context(EmbeddedPostgres(folder, options=options)).dsn

        def kill() -> None:
            until = time.monotonic() + SECONDS - 4
            while not over.wait(dice.uniform(1, 3)) and time.monotonic() < until:
                if len(kills) % 2 == 0:
                    orphans.append(kill_postmaster(postmaster(folder), dice))
                else:
                    kill_server(postmaster(folder))
                stack.enter_context(EmbeddedPostgres(folder, options=options))
                kills.append(time.monotonic())

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            yield dsn
        finally:
            over.set()
            killer.join()
        assert kills, "the server was never killed"
        assert all(map(is_gone, orphans)), "processes of a dead server go on"


@pytest.mark.slow
def test_answers_given_in_a_storm_that_kills_the_server_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_again_and_again(tmp_path / "server", seed=3) as dsn:
        storm_of(dsn, tmp_path, monkeypatch, seed=3, submitters=3, committers=2)
