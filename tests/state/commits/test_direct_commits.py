"""`Instance.commit` answers callers at once; only requests whose inputs are missing go through the queue."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dormouse as dm
from dormouse.errors import InstanceReadOnly, InvalidCommitRequest, InvalidInput, TableNotFound
from dormouse.postgres.queries import execute_each
from dormouse.state.commits import apply
from dormouse.state.commits import committer as committer_module
from tests.commits import add, compaction, files_of, replacement
from tests.standard import OF_KEYS
from tests.stored import at_once, query, wait_until
from tests.support.api import Instance

pytestmark = pytest.mark.usefixtures("table_t")

SCHEMA = OF_KEYS


def committed(instance: Instance, *requests: Any, **options: Any) -> list[str]:
    return [status.state for status in instance.commit(requests, **options)]


def messages(instance: Instance) -> int:
    return sum(depth.messages for depth in instance.commits.depths())


def test_a_commit_is_answered_without_a_committer(instance: Instance) -> None:
    first = add("t", "a")
    for _ in range(3):  # the first commit looks the table up, the others repeat it
        assert committed(instance, first) == ["applied"]
    assert committed(instance, *reversed(compaction("t", 1))) == ["applied"] * 3
    assert committed(instance) == []
    assert (files_of(instance), messages(instance)) == (["a", "new 1"], 0)
    assert instance.commit_status("add a").state == "applied"


def test_a_refusal_is_returned_at_once_and_can_be_looked_up_later(instance: Instance) -> None:
    committed(instance, add("t", "a"))
    (status, good) = instance.commit([add("t", "a", commit_id="again"), add("t", "b")])
    assert (status.state, good.state) == ("rejected", "applied")
    assert "already" in (status.error or "")
    assert instance.commit_status("again") == status
    with pytest.raises(TableNotFound, match="nowhere"):
        instance.commit([add("t", "c"), add("nowhere", "c")])
    with pytest.raises(InvalidCommitRequest, match="not str"):
        instance.commit(["c"])  # type: ignore[list-item]
    with pytest.raises(InvalidCommitRequest, match=r"write \[request\]"):
        instance.commit(add("t", "c"))  # type: ignore[arg-type]
    for seconds in ("5", float("nan"), None, True):
        with pytest.raises(InvalidInput, match="seconds_max must be a number of seconds, not"):
            instance.commit([add("t", "c")], seconds_max=seconds)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="seconds_max must be a number of seconds, not"):
            instance.wait_for_commits(["again"], seconds_max=seconds)  # type: ignore[arg-type]
    assert (files_of(instance), messages(instance)) == (["a", "b"], 0)


@pytest.mark.slow
def test_a_commit_that_waits_for_its_inputs_is_left_to_the_queue(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "RETRY_SECONDS_MAX", 0.1)
    replace, assign, old = compaction("t", 1)
    assert committed(instance, replace, assign, seconds_max=0) == ["pending", "pending"]
    committer = instance.committer()
    thread = threading.Thread(target=committer.run)
    thread.start()
    try:
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.extend(committed(instance, replace)))
        waiting.start()
        wait_until(lambda: committer.metrics().try_later >= 1)
        assert committed(instance, old) == ["applied"]
        waiting.join(60)
        assert (found, files_of(instance)) == (["applied"], ["new 1"])
    finally:
        committer.close()
        thread.join()


def test_a_name_means_the_table_that_currently_has_it(instance: Instance, dsn: str, tmp_path: Path) -> None:
    assert committed(instance, add("t", "before")) == ["applied"]
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as other:
        other.rename_table("t", "former")
        other.create_table("t", SCHEMA)
        assert committed(instance, add("t", "after")) == ["applied"]
        assert (files_of(other, "former"), files_of(other)) == (["before"], ["after"])
        other.drop_table("t")
    with pytest.raises(TableNotFound, match="'t' does not exist"):
        instance.commit([add("t", "late")])
    assert committed(instance, add("former", "known again")) == ["applied"]


def test_commits_of_several_threads_are_one_statement_and_a_bad_one_harms_no_other(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(instance, add("t", "taken"))
    sent: list[int] = []
    held, full = threading.Event(), 11

    def execute(conn: psycopg.Connection[Any], calls: Any) -> Any:
        if not sent:
            sent.append(0)
            held.set()
            wait_until(lambda: len(instance.commits._direct._together._waiting) >= full)
        found = execute_each(conn, calls)
        sent.append(len(found))
        return found

    monkeypatch.setattr(apply, "execute_each", execute)

    def commit(number: int) -> Sequence[str]:
        if number:
            assert held.wait(60)
        name = "taken" if number == 5 else f"f{number:02}"
        return committed(instance, add("t", name, commit_id=f"c{number}"))

    states = at_once(*(lambda n=number: commit(n) for number in range(full + 1)))
    assert states == [["rejected" if number == 5 else "applied"] for number in range(full + 1)]
    assert files_of(instance) == [*(f"f{n:02}" for n in range(full + 1) if n != 5), "taken"]
    # the first was sent alone, the others together; the bad one failed them all, so each was then tried alone
    assert sent == [0, 1, 1]


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_a_commit_of_an_abandoned_attempt_is_rejected(instance: Instance, isolation: str) -> None:
    instance.create_table("u", SCHEMA, properties=dm.TableProperties(isolation=isolation))
    context = instance.table("u").context
    committed(instance, add("u", "known"))
    for number, abandoned in enumerate((False, True)):
        attempt = context.attempts.begin(context.table)
        if abandoned:
            context.attempts.abandon(attempt)
        name = attempt.object_name("root")
        request = add("u", name, commit_id=f"c{number}", attempt_id=attempt.attempt_id)
        assert committed(instance, request) == ["rejected" if abandoned else "applied"]
        assert (name in files_of(instance, "u")) is not abandoned
    assert query(instance._supplier, "select abandoned_at is null from write_attempt") == [(False,)]


def test_an_attempt_that_is_abandoned_while_its_commit_waits_for_it_commits_nothing(
    instance: Instance, dsn: str
) -> None:
    """The commit waits for the attempt's row, which another transaction changes meanwhile.

    PostgreSQL before 15.15, 16.11, 17.7 and 18.1 finds a row by its ctid even if the row has changed.
    """
    context = instance.table("t").context
    committed(instance, add("t", "known"))
    attempt = context.attempts.begin(context.table)
    name = attempt.object_name("root")
    request = add("t", name, attempt_id=attempt.attempt_id)
    found: list[str] = []
    with psycopg.connect(dsn) as other:
        other.execute("update dormouse.write_attempt set abandoned_at = clock_timestamp()")
        thread = threading.Thread(target=lambda: found.extend(committed(instance, request)))
        thread.start()
        wait_until(lambda: query(instance._supplier, "select true from pg_locks where not granted") != [])
        other.commit()
    thread.join(60)
    assert (found, files_of(instance)) == (["rejected"], ["known"])


def test_a_read_only_instance_commits_nothing(instance: Instance, dsn: str, tmp_path: Path) -> None:
    with (
        dm.connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reader,
        pytest.raises(InstanceReadOnly),
    ):
        reader.commit([add("t", "a")])


def test_a_replacement_of_what_another_job_holds_is_refused_at_once(instance: Instance) -> None:
    _, assign, old = compaction("t", 1)
    assert committed(instance, old, assign) == ["applied", "applied"]
    assert committed(instance, replacement("t", "another", ["old 1"], "out")) == ["rejected"]
    assert files_of(instance) == ["old 1"]
