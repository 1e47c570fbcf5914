"""The commit lambda: it answers each SQS record of a batch, and keeps nothing between calls."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.errors import InstanceError, InvalidCommitRequest, InvalidInput
from dormouse.objects import store as store_module
from dormouse.settings.database import RECEIVES_LEAST
from dormouse.state.commits.pointers import object_of
from lambdas.commit import handler
from tests.aws_lambda import Context, json_lines, lambda_service, metrics_in, waking_server
from tests.commits import add, assignment, compaction, replacement
from tests.standard import OF_KEYS
from tests.stored import at_once, file, live, query, ref, wait_until
from tests.support.api import Instance
from tests.support.commits import (
    CommitRequest,
    EditTables,
    PointerQueue,
    PostgresQueue,
    TableEdit,
    encode,
)
from tests.support.state import Read

ROOT = Path(__file__).parents[3]


@pytest.fixture
def instance(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """Yields the instance that the lambda's environment names, with an empty table `t`."""
    url = (tmp_path / "objects").as_uri()
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", url)
    monkeypatch.setenv("DORMOUSE_PATIENCE_SECONDS", "0")
    with dm.connect(dsn, url) as instance:
        instance.create_table("t", OF_KEYS)
        yield instance


def record(message_id: str, body: CommitRequest | str, receives: int = 1) -> dict[str, Any]:
    return {
        "messageId": message_id,
        "body": body if isinstance(body, str) else encode(body),
        "attributes": {"ApproximateReceiveCount": str(receives), "SentTimestamp": "1700000000000"},
        "eventSource": "aws:sqs",
    }


def again(*records: dict[str, Any]) -> list[str]:
    """Calls the lambda with the records; returns the ids of those that SQS shall deliver again."""
    return [item["itemIdentifier"] for item in handler({"Records": list(records)}, None)["batchItemFailures"]]


def test_only_requests_to_try_later_are_delivered_again(instance: Instance) -> None:
    assert again(
        record("1", replacement("t", "j", ["none"], "x")),
        record("2", add("t", "a")),
        record("3", add("t", "a", "taken")),
        record("4", add("nowhere", "b")),
    ) == ["1"]
    assert [name for _, name, _, _ in live(instance.table("t").files)] == ["a"]
    assert instance.commit_status("taken").state == "rejected"
    assert instance.commit_status("add b").state == "rejected"


def test_an_edit_of_two_tables_is_applied_whole(instance: Instance) -> None:
    instance.create_table("u", OF_KEYS)
    [(moment,)] = query(instance._supplier, "select pg_current_snapshot()::text")
    parts = [TableEdit(table=name, files=(file(name, ref(name)),)) for name in "tu"]
    reads = Read(moment, [(b"", b"")])
    outdated = [parts[0], TableEdit(table="u", files=(file("x", ref("x")),), reads=(reads,))]
    edit, other = EditTables(commit_id="e", parts=parts), EditTables(commit_id="f", parts=outdated)
    assert again(record("1", edit), record("2", edit), record("3", other)) == []
    assert [name for table in "tu" for _, name, _, _ in live(instance.table(table).files)] == ["t", "u"]
    assert instance.commit_status("e").state == "applied"
    status = instance.commit_status("f")
    assert status.state == "rejected" and "other commits may have changed rows" in str(status.error)


def test_a_request_for_a_table_of_another_timeline_becomes_a_dead_letter(instance: Instance) -> None:
    """A timeline is a database's history up to a restore, after which another begins.

    The request is needed again if an operator restores its timeline.
    """
    known = instance.table("t").files.table
    bodies = [
        encode(add("t", name), table_id=known.table_id, table_uuid=uuid)
        for name, uuid in (("theirs", uuid4().hex), ("ours", known.uuid))
    ]
    assert again(record("1", bodies[0]), record("2", bodies[1])) == ["1"]
    assert instance.commit_status("add theirs").state == "rejected"
    assert [name for _, name, _, _ in live(instance.table("t").files)] == ["ours"]


@pytest.mark.parametrize(("is_adopted", "left"), [(True, ["1"]), (False, [])])
def test_a_request_for_a_table_that_a_restored_database_never_had_becomes_a_dead_letter(
    instance: Instance, is_adopted: bool, left: list[str]
) -> None:
    """The object with the request's body is kept for the dead letter.

    In a database that was never restored, an unknown table must have been dropped: nothing is kept.
    """
    if is_adopted:
        query(instance._supplier, "update incarnation set reason = 'adoption'")
    queue = PointerQueue(PostgresQueue(instance._supplier, 0, body_bytes_max=300), instance._objects)
    queue.send([encode(add("made later", "x" * 500, "c"), table_id=99, table_uuid=uuid4().hex)])
    [message] = queue._queue.receive(1)
    queue._queue.delete([message])  # it is in SQS
    assert again(record("1", message.body)) == left
    assert [name for name, _ in instance._objects.list("commits/")] == [object_of(message.body)][: len(left)]
    assert instance.commit_status("c").state == "rejected"
    unmarked = encode(add("made later", "y", "d"), table_id=99)
    assert again(record("2", unmarked)) == [], "written by an older Dormouse"


def test_a_request_waits_for_what_another_lambda_applies_meanwhile(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lambda itself waits for the missing inputs.

    If it asked SQS to deliver the record again, SQS would hide it for six times the lambda's timeout.
    """
    monkeypatch.setenv("DORMOUSE_PATIENCE_SECONDS", "60")
    replaced, assigned, added = compaction("t", 1)
    waiting, other = record("1", replaced), [record("2", assigned), record("3", added)]
    outcomes = at_once(lambda: again(waiting), lambda: time.sleep(0.3) or again(*other))
    assert outcomes == [[], []]
    assert [name for _, name, _, _ in live(instance.table("t").files)] == ["new 1"]


def test_a_record_delivered_twice_is_applied_once(instance: Instance) -> None:
    assert again(record("1", add("t", "a")), record("2", add("t", "a"))) == []
    assert again(record("1", add("t", "a"), 2)) == []
    assert instance.commit_status("add a").error is None


def test_records_that_need_each_other_are_applied_together(instance: Instance) -> None:
    assert again(*(record(str(n), request) for n, request in enumerate(compaction("t", 1)))) == []
    assert [name for _, name, _, _ in live(instance.table("t").files)] == ["new 1"]


def test_a_request_whose_needs_never_arrive_is_rejected_and_becomes_a_dead_letter(instance: Instance) -> None:
    """The lambda rejects the request after at most 40 deliveries, before SQS makes it a dead letter.

    Earlier, the record may only have waited for a database that could not be reached.
    """
    assert again(record("1", assignment("t", "j", "none"), 9)) == ["1"]
    assert instance.commit_status("assign j").state == "unknown"
    assert again(record("1", assignment("t", "j", "none"), 40)) == ["1"]
    assert RECEIVES_LEAST > 40
    status = instance.commit_status("assign j")
    assert status.state == "rejected" and "tried 40 times" in str(status.error)
    assert again(record("1", assignment("t", "j", "a"), 41), record("2", add("t", "a"))) == []
    assert instance.commit_status("assign j").state == "applied", "the file that it needs was added later"


def test_an_unreadable_message_is_left_to_the_dead_letter_queue(
    instance: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit that an unreadable message names is rejected. The message 'nonsense' names none."""
    wrong = encode(add("t", "a")).replace('"version":1', '"version":0')
    assert again(record("1", "nonsense"), record("2", wrong), record("3", add("t", "b"))) == ["1", "2"]
    assert instance.commit_status("add a").state == "rejected"
    assert "a message without an id is rejected: " in caplog.text and "commit ''" not in caplog.text


def test_a_rejected_commit_keeps_its_reason_when_delivered_again_without_its_object(
    instance: Instance,
) -> None:
    """SQS may deliver a message again after its answer, when the object with its request is deleted.

    A message whose object is missing before any answer becomes a dead letter.
    """
    assert again(record("1", add("t", "a" * 500, "first"))) == []
    known = instance.table("t").files.table
    queue = PointerQueue(PostgresQueue(instance._supplier, 0, body_bytes_max=300), instance._objects)
    sent = add("t", "a" * 500, "refused"), add("t", "b" * 500, "lost")
    queue.send([encode(request, table_id=known.table_id) for request in sent])
    refused, lost = queue._queue.receive(2)
    queue._queue.delete([refused, lost])  # they are in SQS
    assert again(record("1", refused.body)) == []
    why = instance.commit_status("refused")
    for name, _ in instance._objects.list("commits/"):
        instance._objects.delete([name])
    for receives in (2, 3):
        assert again(record("1", refused.body, receives), record("2", lost.body, receives)) == ["2"]
    assert instance.commit_status("refused") == why and why.state == "rejected" and why.error
    assert "no longer exists" in str(instance.commit_status("lost").error)
    kept = query(instance._supplier, "select table_id from rejected_commit where commit_id = 'refused'")
    assert kept == [(known.table_id,)]


def test_a_request_of_a_newer_dormouse_is_delivered_again(instance: Instance) -> None:
    unknown = encode(add("t", "a")).replace('"add_files"', '"odd"')
    assert again(record("1", unknown, 49), record("2", add("t", "b"))) == ["1"]
    assert instance.commit_status("add a").state == "unknown"


def test_no_connection_outlives_the_call(instance: Instance) -> None:
    """The test waits, because the server needs a moment to notice that a connection was closed."""
    assert again(record("1", add("t", "a"))) == []
    text = "select count(*) from pg_stat_activity where application_name = 'dormouse-commit'"
    wait_until(lambda: query(instance._supplier, text) == [(0,)], seconds_max=60)


def test_every_record_is_delivered_again_while_the_database_is_unreachable(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records of a call that raises are delivered again, and the error is one of the lambda's metrics."""
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.3")
    with pytest.raises(InstanceError, match=r"cannot connect to PostgreSQL at 127\.0\.0\.1:1"):
        again(record("1", add("t", "a"), 50), record("2", add("t", "b")))


@pytest.mark.slow
def test_a_lambda_waits_for_a_database_that_starts(
    instance: Instance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database first refuses connections, then accepts them and answers late."""
    given = conninfo_to_dict(dsn)
    path = f"{given['host']}/.s.PGSQL.{given.get('port') or 5432}"
    with waking_server(path, 0.5) as port:
        monkeypatch.setenv("DORMOUSE_DSN", make_conninfo(dsn, host="127.0.0.1", port=port))
        assert again(record("1", add("t", "a"))) == []
    assert instance.commit_status("add a").state == "applied"


def test_metrics_count_the_outcomes(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        record("1", replacement("t", "j", ["none"], "x")),
        record("2", add("t", "a")),
        record("3", add("t", "a")),
        record("4", add("t", "a", "taken")),
        record("5", "nonsense"),
    ]
    assert again(*records) == ["1", "5"]
    assert metrics_in(capsys.readouterr().out) == {
        "CommitsApplied": 2,
        "CommitsRejected": 1,
        "CommitsLater": 1,
        "CommitsDead": 1,
    }


def test_the_log_is_json_with_table_and_commit(
    instance: Instance, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with lambda_service(monkeypatch):
        handler({"Records": [record("1", add("t", "a")), record("2", add("t", "a", "taken"))]}, Context())
    warnings = [line for line in json_lines(capsys.readouterr().out) if line.get("level") == "WARNING"]
    assert [(line["table"], line["commit_id"], line["error_class"]) for line in warnings] == [
        ("t", "taken", "FileAlreadyExists")
    ]
    assert warnings[0]["function"] == "commit" and warnings[0]["request_id"] == "request-1"


def test_applied_commits_are_noted_as_activity(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_noted", {})
    again(record("1", add("nowhere", "a")))
    assert not (tmp_path / "objects" / "activity").exists()
    again(record("2", add("t", "a")))
    assert len(list((tmp_path / "objects" / "activity").rglob("*"))) == 2


def test_an_event_that_is_not_from_sqs_is_refused(instance: Instance) -> None:
    with pytest.raises(InvalidCommitRequest, match="not an event of SQS"):
        handler({"Records": [{"body": "x"}]}, None)


def test_a_missing_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DORMOUSE_OBJECTS", raising=False)
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://h/d")
    with pytest.raises(InvalidInput, match="DORMOUSE_OBJECTS"):
        handler({"Records": []}, None)


def test_the_lambda_loads_no_heavy_library() -> None:
    heavy = {"pyarrow", "datafusion", "pyspark", "numpy", "boto3"}
    script = f"import lambdas.commit, sys; print(*{heavy!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
