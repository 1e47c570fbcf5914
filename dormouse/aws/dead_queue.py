"""A queue of dead letters as SQS has it: they are received, and kept longer than SQS would.

It needs nothing of what requests are, so that a lambda may have it that only calls AWS.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from dormouse.aws.instance import DeployedInstance

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
