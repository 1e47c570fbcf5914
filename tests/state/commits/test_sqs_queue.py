"""The commit queue in SQS, against moto's server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import boto3
import pytest

from dormouse.errors import CommitQueueError, InvalidCommitRequest, InvalidInput
from dormouse.state.commits import sqs_queue as module
from dormouse.state.commits.sqs_queue import BATCH_BYTES_MAX, SqsQueue
from tests.support.commits import Message

NewQueue = Callable[..., str]
Options = dict[str, str]


@pytest.fixture
def queue(new_sqs_queue: NewQueue, sqs_options: Options) -> SqsQueue:
    return SqsQueue(new_sqs_queue(), **sqs_options)


@pytest.fixture
def denying(aws_endpoint: str) -> Iterator[Callable[[], None]]:
    """Yields a function that makes moto refuse all requests until the test ends.

    Moto then checks credentials, and knows no user.
    """

    def checked_after(requests: str) -> None:
        connection = HTTPConnection(aws_endpoint.removeprefix("http://"), timeout=60)
        connection.request("POST", "/moto-api/reset-auth", requests, {"Content-Type": "text/plain"})
        assert connection.getresponse().status == 200
        connection.close()

    yield lambda: checked_after("0")
    checked_after("inf")


def client(options: Options) -> Any:
    return boto3.client("sqs", **options)


def received(queue: SqsQueue) -> list[Message]:
    return queue.receive(100, 0)


def test_messages_are_received_once_and_can_be_deleted(queue: SqsQueue) -> None:
    bodies = [f"body {n}" for n in range(25)]
    queue.send(bodies)
    messages = received(queue)
    assert sorted(m.body for m in messages) == sorted(bodies)
    assert {m.receive_count for m in messages} == {1}
    assert received(queue) == []
    assert queue.depth().messages == 25
    queue.delete(messages)
    assert queue.depth().messages == 0
    assert queue.depth().approximate


def test_a_limit_is_kept(queue: SqsQueue) -> None:
    queue.send([str(n) for n in range(25)])
    assert len(queue.receive(12, 0)) == 12


@pytest.mark.slow
def test_a_wait_for_an_empty_queue_ends(queue: SqsQueue) -> None:
    assert queue.receive(10, 0.5) == []


def test_a_postponed_message_is_delivered_again_with_its_count(queue: SqsQueue) -> None:
    queue.send(["again"])
    (first,) = received(queue)
    queue.retry_later([first], 0)
    (second,) = received(queue)
    assert (second.body, second.receive_count) == ("again", 2)
    queue.retry_later([second], 600)
    assert received(queue) == []
    assert queue.depth().oldest_seconds >= 0


@pytest.mark.slow
def test_received_messages_are_bounded_in_bytes(queue: SqsQueue) -> None:
    queue.send(["x" * 2**19] * 30)
    assert [len(received(queue)) for _ in range(4)] == [10, 10, 10, 0]


def test_sending_again_makes_a_new_message(queue: SqsQueue) -> None:
    queue.send(["again", "late"])
    again, late = sorted(received(queue), key=lambda message: message.body)
    queue.send_again([again], 0)
    queue.send_again([late], 600)
    [message] = received(queue)
    assert (message.body, message.receive_count) == ("again", 1)
    assert queue.depth().messages == 2


def test_batches_have_at_most_ten_messages_and_one_mebibyte(queue: SqsQueue) -> None:
    bodies = ["x" * (BATCH_BYTES_MAX // 3) for _ in range(7)]
    queue.send(bodies)
    assert [m.body for m in received(queue)] == bodies


def test_a_body_too_large_or_not_xml_is_refused(queue: SqsQueue) -> None:
    for body in ("x" * (BATCH_BYTES_MAX + 1), "nul \0", "\ufffe", "\ud800", ""):
        with pytest.raises(InvalidCommitRequest):
            queue.send([body])
    assert received(queue) == []


def redrive_to(url: str, options: Options) -> str:
    """Returns the redrive policy of a queue whose dead letters go to the queue at the URL."""
    answer = client(options).get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return json.dumps({"deadLetterTargetArn": answer["Attributes"]["QueueArn"], "maxReceiveCount": 100})


def test_a_dead_letter_goes_where_the_redrive_policy_says(
    new_sqs_queue: NewQueue, sqs_options: Options
) -> None:
    dead_url = new_sqs_queue()
    queue = SqsQueue(new_sqs_queue(RedrivePolicy=redrive_to(dead_url, sqs_options)), **sqs_options)
    queue.send(["bad", "good"])
    messages = received(queue)
    queue.bury([m for m in messages if m.body == "bad"], "no\0t JSON: " + "é" * 10_000)
    assert queue.depth().messages == 1
    (letter,) = client(sqs_options).receive_message(QueueUrl=dead_url, MessageAttributeNames=["All"])[
        "Messages"
    ]
    assert letter["Body"] == "bad"
    assert letter["MessageAttributes"]["reason"]["StringValue"].startswith("no�t JSON: é")


def test_a_dead_letter_may_have_no_reason(new_sqs_queue: NewQueue, sqs_options: Options) -> None:
    dead = SqsQueue(new_sqs_queue(), **sqs_options)
    queue = SqsQueue(new_sqs_queue(RedrivePolicy=redrive_to(dead._url, sqs_options)), **sqs_options)
    queue.send(["bad"])
    queue.bury(received(queue), "")
    assert [m.body for m in received(dead)] == ["bad"]
    assert queue.depth().messages == 0


def test_without_a_dead_letter_queue_a_message_stays(queue: SqsQueue) -> None:
    queue.send(["bad"])
    with pytest.raises(CommitQueueError, match=f"{queue._url} has no dead-letter queue"):
        queue.bury(received(queue), "bad")
    assert queue.depth().messages == 1


def test_the_messages_that_failed_in_a_batch_are_sent_again(
    queue: SqsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto accepts everything, so the test cuts messages from the request and reports that they failed."""
    call = queue._call
    sizes: list[int] = []

    def flaky(operation: str, **parameters: Any) -> Any:
        entries = parameters["Entries"]
        sizes.append(len(entries))
        taken, failed = entries[:4], entries[4:]
        answer = call(operation, **{**parameters, "Entries": taken})
        faults = [{"Id": e["Id"], "SenderFault": False, "Code": "InternalError"} for e in failed]
        return {**answer, "Failed": faults}

    with monkeypatch.context() as patch:
        patch.setattr(queue, "_call", flaky)
        queue.send([str(n) for n in range(10)])
    assert sizes == [10, 6, 2]
    assert sorted(m.body for m in received(queue)) == sorted(str(n) for n in range(10))


def test_messages_that_the_queue_refuses_are_reported(
    queue: SqsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {"Id": "0", "SenderFault": True, "Code": "InvalidMessageContents", "Message": "bad text"}
    monkeypatch.setattr(queue, "_call", lambda *_, **__: {"Failed": [fault]})
    with pytest.raises(CommitQueueError, match="refused 1 of 1 messages: InvalidMessageContents: bad text"):
        queue.send(["x"])


def test_messages_that_never_succeed_are_reported_in_the_end(
    queue: SqsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {"Id": "0", "SenderFault": False, "Code": "InternalError"}
    monkeypatch.setattr(queue, "_call", lambda *_, **__: {"Failed": [fault]})
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    with pytest.raises(CommitQueueError, match="refused 1 of 1 messages: InternalError"):
        queue.send(["x"])


def test_a_delivery_that_is_overtaken_is_left_alone(queue: SqsQueue) -> None:
    queue.send(["x"])
    (message,) = received(queue)
    queue.delete([message])
    queue.delete([message])
    queue.retry_later([message], 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda queue: queue.send(["x"]),
        lambda queue: queue.receive(1, 0),
        lambda queue: queue.depth(),
        lambda queue: queue.delete([Message("x", "receipt", 1, None)]),
    ],
    ids=["send", "receive", "depth", "delete"],
)
class TestFailures:
    def test_a_queue_that_does_not_exist(self, use: Any, aws_endpoint: str, sqs_options: Options) -> None:
        url = f"{aws_endpoint}/123456789012/nothing-here"
        with pytest.raises(CommitQueueError, match=f"^commit queue {url} does not exist: [^\n]*$"):
            use(SqsQueue(url, **sqs_options))

    def test_denied_access(
        self, use: Any, new_sqs_queue: NewQueue, sqs_options: Options, denying: Callable[[], None]
    ) -> None:
        url = new_sqs_queue()
        denying()
        with pytest.raises(CommitQueueError, match=f"^commit queue {url} denies access: [^\n]*$"):
            use(SqsQueue(url, **sqs_options))

    @pytest.mark.few(1)
    def test_a_server_that_cannot_be_reached(self, use: Any, sqs_options: Options) -> None:
        url = "http://127.0.0.1:1/123456789012/q"
        options = {**sqs_options, "endpoint_url": "http://127.0.0.1:1"}
        with pytest.raises(CommitQueueError, match=f"^commit queue {url} cannot be reached: [^\n]*$"):
            use(SqsQueue(url, **options))


def test_a_missing_region_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    queue = SqsQueue("http://127.0.0.1:1/1/q", **keys)
    with pytest.raises(InvalidInput, match="has no region: set AWS_REGION"):
        queue.depth()


def test_missing_credentials_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    with pytest.raises(CommitQueueError, match=r"sqs\.eu-west-1\S* has no credentials"):
        SqsQueue("https://sqs.eu-west-1.amazonaws.com/123456789012/q").depth()


@pytest.mark.parametrize("url", ["queue", "arn:aws:sqs:us-east-1:1:q", "https://sqs.x/1/q.fifo"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="commit queue"):
        SqsQueue(url)
