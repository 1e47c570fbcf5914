"""The dead letters of a deployed instance's commit queues: what they are, and sending them again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from dormouse.aws.instance import DeployedInstance
from dormouse.errors import CommitRequestTooNew, InstanceError, InvalidCommitRequest
from dormouse.state.commits.pointers import object_of
from dormouse.state.commits.requests import commit_id_of, decode

# A queue of dead letters as SQS has it: they are received, and kept longer than SQS would.

RECEIVED_MAX = 10
HIDDEN_SECONDS = 300
"""Others do not see a message for so long that is looked at here."""

WAIT_SECONDS = 1
"""Without a wait SQS may answer that there is none though there are some."""


def keep_on(
    instance: DeployedInstance, queue: str, dead: str, seconds: float, ends: float, now: Callable[[], float]
) -> bool:
    """Sends dead letters that are so old to where they are again, which gives them a new age; False if `ends`
    comes before each was seen.

    One of another queue is left to SQS: nothing would tell it from the queue's own any more.
    """
    for message in received(instance, dead, sys.maxsize):
        if now() >= ends:
            return False
        if time.time() - sent_at(message).timestamp() < seconds or foreign(queue, message):
            continue
        about = message.get("MessageAttributes", {})
        given = {"QueueUrl": dead, "MessageBody": message["Body"], "MessageAttributes": about}
        instance.aws.call("sqs", "send_message", **given)
        instance.aws.call("sqs", "delete_message", QueueUrl=dead, ReceiptHandle=message["ReceiptHandle"])
    return True


def received(instance: DeployedInstance, dead: str, limit: int) -> Iterator[Any]:
    while limit > 0:
        answer = instance.aws.call(
            "sqs",
            "receive_message",
            QueueUrl=dead,
            MaxNumberOfMessages=min(limit, RECEIVED_MAX),
            VisibilityTimeout=HIDDEN_SECONDS,
            WaitTimeSeconds=WAIT_SECONDS,
            MessageSystemAttributeNames=["DeadLetterQueueSourceArn", "SentTimestamp"],
            MessageAttributeNames=["reason"],
        )
        messages = answer.get("Messages", ())
        if not messages:
            return
        limit -= len(messages)
        yield from messages


def sent_at(message: Any) -> datetime:
    return datetime.fromtimestamp(int(message["Attributes"]["SentTimestamp"]) / 1_000, UTC)


def foreign(queue: str, message: Any) -> str:
    """Why it is none of the queue's own: any queue of the account can have these dead letters for its own."""
    source = str(message["Attributes"].get("DeadLetterQueueSourceArn", ""))
    is_own = not source or source.rpartition(":")[2] == queue.rpartition("/")[2]
    return "" if is_own else f"it was a dead letter of another queue, {source}"


BODY_CHARACTERS_MAX = 1_000


@dataclass(frozen=True)
class SqsDeadLetter:
    """A message that was delivered too often, or was buried with a reason."""

    queue: str
    """The URL of the queue that it was in."""

    sent_at: datetime
    commit_id: str | None
    """None where it names none."""

    body: str
    """How it begins."""

    reason: str
    """Why it cannot be sent again, or why it was buried; empty if it was only delivered too often."""

    can_be_sent: bool
    """Whether it can be read, and was a request of its queue."""

    is_sent_again: bool = False


def dead_letters(instance: DeployedInstance, limit: int, *, send_again: bool = False) -> list[SqsDeadLetter]:
    """At most `limit` of them, which are left where they are. With `send_again` those that can be sent go to
    their queues again: first sent and then deleted, so that none is lost.

    Raises InstanceError without commit queues, and when AWS refuses.
    """
    told = instance.resources.commit
    if told is None:
        raise InstanceError(f"{instance.id} has no commit queues: add [commit] to its settings, deploy")
    found: list[SqsDeadLetter] = []
    for queue, dead in zip(told.queues, told.dead_letters, strict=True):
        kept: list[str] = []
        try:
            for message in received(instance, dead, limit - len(found)):
                letter, receipt = _letter(queue, message), message["ReceiptHandle"]
                if send_again and letter.can_be_sent:
                    instance.aws.call("sqs", "send_message", QueueUrl=queue, MessageBody=message["Body"])
                    instance.aws.call("sqs", "delete_message", QueueUrl=dead, ReceiptHandle=receipt)
                    letter = replace(letter, is_sent_again=True)
                else:
                    kept.append(receipt)
                found.append(letter)
        finally:
            for receipt in kept:
                seen = {"QueueUrl": dead, "ReceiptHandle": receipt, "VisibilityTimeout": 0}
                instance.aws.call("sqs", "change_message_visibility", **seen)
    return found


def _letter(queue: str, message: Any) -> SqsDeadLetter:
    body = str(message["Body"])
    why = message.get("MessageAttributes", {}).get("reason", {}).get("StringValue", "")
    commit_id = commit_id_of(body)
    trouble = foreign(queue, message)
    try:
        if commit_id is None or object_of(body) is None:
            decode(body)
    except (InvalidCommitRequest, CommitRequestTooNew) as error:
        trouble = " ".join(str(error).split())
    return SqsDeadLetter(
        queue=queue,
        sent_at=sent_at(message),
        commit_id=commit_id,
        body=body[:BODY_CHARACTERS_MAX],
        reason=trouble or why,
        can_be_sent=not trouble,
    )
