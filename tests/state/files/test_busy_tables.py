"""Tests that waiting processes block no others: drops and conversions behind a reader, and committers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import Composed

import dormouse as dm
from dormouse.errors import TableBusy
from dormouse.postgres import ConnectionSupplier, Query, session, transaction
from dormouse.postgres.transaction import run_alone, run_transaction
from dormouse.state import catalog
from dormouse.state.commits import committer as committer_module
from tests.commits import add, assignment, files_of
from tests.standard import OF_KEYS
from tests.stored import at_once, blocked, query, ref, wait_until
from tests.support.api import Instance

SCHEMA = OF_KEYS


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an instance whose waits for a lock fail after 3 s."""
    impatient = make_conninfo(dsn, options="-c lock_timeout=3s")
    with dm.connect(impatient, (tmp_path / "objects").as_uri()) as instance:
        instance.create_table("t", SCHEMA)
        instance.create_table("u", SCHEMA)
        yield instance


@contextmanager
def held(dsn: str, instance: Instance, mode: str, table: str = "t") -> Iterator[None]:
    """Keeps a lock on the references of a table in another session."""
    table_id = instance.table(table).files.table.table_id
    with psycopg.connect(dsn) as conn:
        conn.execute(f"lock table dormouse.file_reference_{table_id} in {mode} mode")
        yield
        conn.rollback()


CHANGES: dict[str, Callable[[Instance], object]] = {
    "drop": lambda i: i.drop_table("t"),
    "convert": lambda i: i.table("t").convert_layout("salted_counts"),
    "clear": lambda i: i.table("t").files.clear(),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES)
def test_an_operation_that_waits_blocks_no_others(dsn: str, instance: Instance, change: str) -> None:
    store = instance.table("t").files
    with dm.connect(dsn, instance._objects.url) as other:
        thread = threading.Thread(target=CHANGES[change], args=(other,))
        with held(dsn, instance, "row exclusive" if change == "clear" else "access share"):
            thread.start()
            wait_until(lambda: blocked(instance._supplier))
            for number in range(3):
                store.add_files([ref(f"b{number}")])
                assert len(list(store.file_references())) == number + 1
            assert thread.is_alive()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("forgotten", ["applied_commit", "write_attempt"])
def test_a_drop_blocks_no_others_while_its_rows_are_deleted(
    dsn: str, instance: Instance, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    monkeypatch.setattr(transaction, "ALONE_LOCK_SECONDS_MIN", 60)
    context = instance.table("t").context
    context.store.add_files([ref("a")], commit_id="c")
    context.attempts.begin(context.table)
    thread = threading.Thread(target=instance.drop_table, args=("t",))
    with psycopg.connect(dsn) as conn:
        conn.execute(f"select from dormouse.{forgotten} for update")
        thread.start()
        wait_until(lambda: blocked(instance._supplier))
        instance.create_table("v", SCHEMA)
        conn.rollback()
    thread.join(60)
    assert [table.name for table in instance.tables()] == ["u", "v"]


def test_tables_are_made_while_the_files_of_another_are_converted(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = catalog.composed

    def composing(query: Query, names: Mapping[str, str]) -> Composed:
        if query.name == "adopt_files":
            at_once(lambda: instance.create_table("v", SCHEMA, layout="salted_counts"))
        return composed(query, names)

    monkeypatch.setattr(catalog, "composed", composing)
    instance.table("t").convert_layout("salted_counts")
    assert [table.layout for table in instance.tables()] == ["salted_counts", "file_table", "salted_counts"]


def test_a_wait_for_a_table_is_limited(dsn: str, instance: Instance) -> None:
    table_id = instance.table("t").files.table.table_id

    def work(conn: psycopg.Connection) -> None:
        conn.execute(f"lock table file_reference_{table_id} in access exclusive mode")

    with (
        held(dsn, instance, "access share"),
        pytest.raises(TableBusy, match=r"^test: .*a backup.*try again later$"),
    ):
        run_alone(instance._supplier, work, seconds_max=0.1, operation="test")


@pytest.mark.slow
def test_a_busy_table_is_put_off_and_the_others_go_on(
    dsn: str, tmp_path: Path, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(session.COMMIT, "lock_timeout", 50)
    monkeypatch.setattr(committer_module, "AGAIN_SECONDS", 0.1)
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as patient:
        committer = patient.committer(concurrency=1)
        with held(dsn, instance, "access exclusive"):
            patient.submit([add("t", "a"), add("u", "b")])
            thread = threading.Thread(target=committer.run)
            thread.start()
            assert patient.wait_for_commits(["add b"], seconds_max=60)[0].state == "applied"
            wait_until(lambda: committer.metrics().try_later >= 1)
            assert patient.commit_status("add a").state == "pending"
        assert patient.wait_for_commits(["add a"], seconds_max=60)[0].state == "applied"
        committer.close()
        thread.join()


FROZEN = """
import signal, sys
import dormouse as dm
from dormouse.postgres import session
from dormouse.state.files.attempts import WriteAttempts
session.COMMIT["idle_in_transaction_session_timeout"] = 500
freeze = WriteAttempts.finish
def finish(*values, **more):
    signal.raise_signal(signal.SIGSTOP)  # of this thread: of the process, another may be the first to stop
    freeze(*values, **more)
WriteAttempts.finish = staticmethod(finish)
with dm.connect(*sys.argv[1:]) as instance:
    print([outcome.state for outcome in instance.committer(concurrency=1).drain()], flush=True)
"""


@pytest.mark.slow
def test_a_committer_that_is_frozen_in_its_transaction_blocks_no_other(
    dsn: str, tmp_path: Path, instance: Instance
) -> None:
    context = instance.table("t").context
    attempt = context.attempts.begin(context.table)
    # requests of two kinds take a transaction of several statements
    instance.submit([add("t", "a", attempt_id=attempt.attempt_id), assignment("t", "job", "a")])
    command = [sys.executable, "-c", FROZEN, dsn, (tmp_path / "objects").as_uri()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as frozen:
        try:
            _, status = os.waitpid(frozen.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
            outcomes = {outcome.state for outcome in instance.committer().drain()}
            assert outcomes == {"applied"} and files_of(instance) == ["a"]
        finally:
            frozen.send_signal(signal.SIGCONT)
            said, _ = frozen.communicate(timeout=60)
    # its transaction was rolled back, and another committer has applied the request
    assert said == "['applied_before', 'applied_before']\n"


def test_a_session_that_was_idle_for_too_long_is_begun_anew(dsn: str) -> None:
    supplier = ConnectionSupplier(dsn)
    limited = supplier.limited(idle_in_transaction_session_timeout=50, transaction_timeout=60_000)
    tries: list[int] = []

    def work(conn: psycopg.Connection) -> int:
        tries.append(conn.info.backend_pid)
        if len(tries) == 1:
            wait_until(
                lambda: query(supplier, "select 1 from pg_stat_activity where pid = %s", tries[0]) == []
            )
        return conn.execute("select 7").fetchone()[0]

    assert run_transaction(limited, work) == 7
    assert len(set(tries)) == 2
    limited.close()
    supplier.close()


def test_a_lower_limit_of_the_role_is_kept(dsn: str) -> None:
    supplier = ConnectionSupplier(make_conninfo(dsn, options="-c lock_timeout=70"))
    limited = supplier.limited(lock_timeout=3_000, statement_timeout=9_000)
    names = ("lock_timeout", "statement_timeout")
    found = [query(limited, f"show {name}")[0][0] for name in names]
    assert found == ["70ms", "9s"]
    assert query(supplier, "show statement_timeout") == [("15min",)]
    limited.close()
    supplier.close()
