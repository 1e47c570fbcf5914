"""Requests that wait for a lock or for an unreachable database are retried until applied, at little cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg.conninfo import make_conninfo

import dormouse as dm
from dormouse.errors import (
    CommitOutcomeUnknown,
    ConnectionsExhausted,
    FileNotFound,
    InstanceReadOnly,
    InstanceTakenOver,
    InvalidInput,
    TooManyRetries,
)
from dormouse.state.commits import committer as committer_module
from dormouse.state.commits.apply import apply
from dormouse.state.commits.committer import CommitterOptions
from dormouse.state.commits.outcomes import CommitOutcome, only_waits
from tests.commits import add, assignment, drained, files_of, replacement
from tests.standard import OF_KEYS
from tests.stored import CountingSupplier, query, wait_until
from tests.support.api import Instance
from tests.support.commits import Committer, Envelope, Tables

SCHEMA = OF_KEYS
TIMEOUTS = {"lock_timeout": 60, "statement_timeout": 300}
"""The timeouts in ms. A statement that does not wait needs only a few ms."""


@pytest.fixture
def patient(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an instance whose sessions have no timeout."""
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        instance.create_table("t", SCHEMA)
        instance.create_table("u", SCHEMA)
        yield instance


@pytest.fixture
def limited(patient: Instance, dsn: str, timeout: str) -> Iterator[Instance]:
    """Yields the same instance with the given timeout in its sessions."""
    options = f"-c {timeout}={TIMEOUTS[timeout]}"
    with dm.connect(make_conninfo(dsn, options=options), patient._objects.url) as instance:
        yield instance


@pytest.mark.slow
def test_a_committer_waits_for_a_failover_and_ends_at_a_takeover(
    patient: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, committer = patient.commits.queues[0], patient.committer(concurrency=1)
    receive, errors = type(queue).receive, [True, True]

    def after_a_failover(self: Any, *given: Any) -> Any:
        if errors and errors.pop():
            raise InstanceReadOnly("the database only takes reads") from pg.ReadOnlySqlTransaction()
        return receive(self, *given)

    def taken_over() -> None:
        raise InstanceTakenOver("another database owns it")

    monkeypatch.setattr(type(queue), "receive", after_a_failover)
    patient.submit([add("t", "a")])
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(committer.run)
        wait_until(lambda: committer.metrics().applied == 1)
        monkeypatch.setattr(committer, "_check", taken_over)
        with pytest.raises(InstanceTakenOver):
            running.result(60)
    assert errors == []


@pytest.fixture
def held(dsn: str) -> Iterator[Callable[[str], psycopg.Connection]]:
    """Yields a function that locks a table exclusively until its connection is rolled back."""
    conns = []

    def hold(table: str) -> psycopg.Connection:
        conn = psycopg.connect(dsn)
        conns.append(conn)
        row = conn.execute("select table_id from dormouse.tables where name = %s", [table]).fetchone()
        conn.execute(f"lock table dormouse.file_reference_{row[0]} in access exclusive mode")
        return conn

    yield hold
    for conn in conns:
        conn.close()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_a_request_that_waits_for_a_lock_is_never_rejected(
    limited: Instance, patient: Instance, held: Callable[[str], psycopg.Connection]
) -> None:
    """Covers all kinds of requests. None needs another's output: a missing input would count as a try."""
    drained(patient, add("t", "a"), add("t", "b"), assignment("t", "j", "a"))
    holder = held("t")
    patient.submit([add("t", f"f{number}") for number in range(6)])
    patient.submit([replacement("t", "j", ["a"], "new"), assignment("t", "k", "b"), add("u", "other")])
    query(patient._supplier, "update commit_message set sent_at = sent_at - interval '1 hour'")
    tables, queues = Tables(limited._supplier), patient.commits.queues
    committer, outcomes = Committer(tables, queues, CommitterOptions(receives_max=2)), list[CommitOutcome]()
    thread = threading.Thread(target=lambda: outcomes.extend(committer.drain()))
    thread.start()
    wait_until(lambda: committer.metrics().try_later >= 8 * 3)
    wait_until(lambda: files_of(patient, "u") == ["other"])  # its table is not locked
    assert thread.is_alive()
    holder.rollback()
    thread.join(60)
    assert {o.state for o in outcomes} == {"applied"} and len(outcomes) == 9
    assert len(files_of(patient)) == 8


@pytest.mark.few(1)
@pytest.mark.parametrize(("timeout", "waits_max"), [("lock_timeout", 1), ("statement_timeout", 6)])
def test_a_batch_that_waits_is_not_tried_request_by_request(
    limited: Instance, held: Callable[[str], psycopg.Connection], waits_max: int
) -> None:
    held("t")
    supplier = CountingSupplier(limited._supplier)
    outcomes = apply(Tables(supplier), [Envelope(add("t", f"f{number}")) for number in range(32)])
    assert all(outcome.waits for outcome in outcomes)
    assert supplier.lent <= waits_max + 1  # one statement looks the table up


@pytest.mark.slow
@pytest.mark.parametrize("timeout", ["statement_timeout"])
def test_a_batch_that_is_too_much_for_the_limits_is_applied_in_parts(
    limited: Instance, patient: Instance
) -> None:
    """A trigger makes each file slow, so that twenty files together exceed the statement timeout."""
    query(
        patient._supplier,
        """create function slow() returns trigger language plpgsql as
           $$ begin perform pg_sleep(0.03); return new; end $$;
           create trigger slow before insert on file_reference_1 for each row execute function slow()""",
    )
    patient.submit([add("t", f"f{number}") for number in range(20)])
    committer = Committer(Tables(limited._supplier), patient.commits.queues)
    assert {o.state for o in committer.drain()} == {"applied"}
    assert committer.metrics().try_later < 20  # not every request had to wait until it was alone in a batch


@pytest.mark.slow
def test_waits_for_a_lock_do_not_count_as_tries_in_sqs(
    dsn: str,
    tmp_path: Path,
    sqs_options: dict[str, str],
    new_sqs_queue: Callable[..., str],
    held: Callable[[str], psycopg.Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SQS counts deliveries itself, and moves a message with too many to the dead letters."""
    for name, key in (("ENDPOINT_URL_SQS", "endpoint_url"), ("DEFAULT_REGION", "region_name")):
        monkeypatch.setenv(f"AWS_{name}", sqs_options[key])
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", sqs_options[f"aws_{name.lower()}"])
    dead = new_sqs_queue().rsplit("/", 1)[1]
    policy = f'{{"deadLetterTargetArn": "arn:aws:sqs:us-east-1:123456789012:{dead}", "maxReceiveCount": "2"}}'
    monkeypatch.setenv("DORMOUSE_COMMIT_QUEUE", new_sqs_queue(RedrivePolicy=policy))
    monkeypatch.setattr(committer_module, "AGAIN_SECONDS", 0)
    options = make_conninfo(dsn, options="-c lock_timeout=30")
    with dm.connect(options, (tmp_path / "objects").as_uri()) as instance:
        instance.create_table("t", SCHEMA)
        holder = held("t")
        instance.submit([add("t", "a")])
        committer = instance.committer()
        thread = threading.Thread(target=committer.run)
        thread.start()
        wait_until(lambda: committer.metrics().try_later >= 5)
        holder.rollback()
        assert instance.wait_for_commits(["add a"], seconds_max=60)[0].state == "applied"
        committer.close()
        thread.join()


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (pg.LockNotAvailable(), True),
        (pg.QueryCanceled(), True),
        (pg.DiskFull(), True),
        (pg.TooManyConnections(), True),
        (pg.AdminShutdown(), True),
        (InstanceReadOnly("a failover"), True),
        (ConnectionsExhausted("all are lent"), True),
        (caused(TooManyRetries("others were faster"), pg.SerializationFailure()), True),
        (caused(CommitOutcomeUnknown("it shut down"), pg.AdminShutdown()), True),
        (caused(CommitOutcomeUnknown("it died, maybe of the request"), psycopg.OperationalError()), False),
        (pg.ProgramLimitExceeded(), False),
        (FileNotFound("t", "f"), False),
        (InvalidInput("wrong"), False),
    ],
)
def test_errors_that_only_mean_waiting_are_no_tries(error: Exception, waits: bool) -> None:
    assert only_waits(error) is waits
