"""The committer over queues in SQS gives the same answers as over queues in PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dormouse as dm
from dormouse.errors import CommitQueueError
from tests.commits import add, compaction
from tests.standard import OF_KEYS
from tests.stored import live
from tests.support.api import Instance, connect

NewQueue = Callable[..., str]


@pytest.fixture
def environment(sqs_options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment variables that a process on AWS has."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs_options["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", sqs_options["region_name"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", sqs_options["aws_access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", sqs_options["aws_secret_access_key"])


@pytest.fixture
def instance(
    dsn: str, tmp_path: Path, new_sqs_queue: NewQueue, environment: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Instance]:
    """Yields an instance whose tables are spread over two queues."""
    monkeypatch.setenv("DORMOUSE_COMMIT_QUEUE", f"{new_sqs_queue()}, {new_sqs_queue()}")
    monkeypatch.setenv("DORMOUSE_QUEUES", "2")
    with connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        yield instance


@pytest.mark.slow
def test_requests_travel_through_sqs_and_are_applied(instance: Instance) -> None:
    names = [f"t{number}" for number in range(4)]
    for name in names:
        instance.create_table(name, OF_KEYS)
        instance.submit(
            [*compaction(name, 1), add(name, "a", f"a of {name}"), add(name, "a", f"b of {name}")]
        )
    assert all(depth.messages > 0 for depth in instance.commits.depths())
    outcomes = instance.committer().drain()
    assert len(outcomes) == 20
    assert sorted(o.error_class for o in outcomes if o.state == "rejected") == ["FileAlreadyExists"] * 4
    for name in names:
        assert [file for _, file, _, _ in live(instance.table(name).files)] == ["a", "new 1"]
    assert instance.commit_status("replace job 1").state == "applied"


@pytest.mark.slow
def test_a_message_that_cannot_become_a_dead_letter_holds_up_no_others(instance: Instance) -> None:
    """The queues have no dead-letter queue."""
    instance.create_table("t", OF_KEYS)
    replace, assign, *adds = compaction("t", 1)
    instance.submit([replace, assign])
    next(queue for queue in instance.commits.queues if queue.depth().messages).send(["not a request"])
    with pytest.raises(CommitQueueError, match="no dead-letter queue"):
        instance.committer().drain()
    instance.submit(adds)
    committer = instance.committer()
    thread = threading.Thread(target=committer.run)
    thread.start()
    try:
        # sooner than the visibility timeout
        ids = [request.commit_id for request in (replace, assign, *adds)]
        statuses = instance.wait_for_commits(ids, seconds_max=45)
        assert {status.state for status in statuses} == {"applied"}
    finally:
        committer.close()
        thread.join()


@pytest.mark.slow
def test_draining_ends_at_once_when_one_thread_of_it_fails(instance: Instance) -> None:
    instance.commits.queues[0].send(["not a request"])
    errors: list[CommitQueueError] = []

    def drain() -> None:
        try:
            instance.committer(concurrency=4).drain()
        except CommitQueueError as error:
            errors.append(error)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    thread.join(45)  # sooner than the visibility timeout
    assert len(errors) == 1
    assert "has no dead-letter queue" in str(errors[0])


def test_a_queue_that_does_not_exist_is_one_clear_line(
    dsn: str, tmp_path: Path, sqs_options: dict[str, str], environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{sqs_options['endpoint_url']}/123456789012/none"
    monkeypatch.setenv("DORMOUSE_COMMIT_QUEUE", url)
    with connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        instance.create_table("t", OF_KEYS)
        with pytest.raises(CommitQueueError, match=f"^[^\n]*{url}[^\n]*$"):
            instance.submit([add("t", "a")])
        with pytest.raises(CommitQueueError, match=url):
            instance.committer().drain()


@pytest.mark.slow
def test_a_transaction_travels_through_sqs(instance: Instance) -> None:
    for name in "tu":
        instance.create_table(name, OF_KEYS, properties=dm.TableProperties(inline_bytes_max=0))
    committer = instance.committer()
    thread = threading.Thread(target=committer.run)
    thread.start()
    try:
        with instance.transaction("first") as tx:
            tx.ingest("t", [{"key": 1}])
            tx.delete("u", {"key": 1})
            tx.ingest("u", [{"key": 1}, {"key": 2}])
    finally:
        committer.close()
        thread.join(60)
    assert tx.applied and committer.metrics().applied == 1
    assert [instance.table(name).query().read_all().num_rows for name in "tu"] == [1, 2]
