"""The renewal of the messages and dead letters of a paused instance, which SQS deletes after at most 14 days.

Renewal sends a message again and then deletes the old copy, so that the message's age begins at zero. Its
commit id makes the message apply once, even if both copies exist for a moment. So a resume has nothing to
bring back.

A pass of renewal receives every message of a queue, and SQS counts each receipt. A message that was received
twice is sent again at any age, so no count exceeds two. From three on, CloudWatch would ignore the message's
age. At a larger count, SQS would make it a dead letter.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

from dormouse.aws.drain import Waiting, waiting
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.switches import mapping_state, mappings
from dormouse.state.commits.queue import Message
from dormouse.state.commits.sqs_queue import BATCH_MESSAGES_MAX, DELAY_SECONDS_MAX, SqsQueue

HIDDEN_SECONDS = 120.0
"""The time for which a received message that is too young for renewal stays hidden."""

DEAD_HIDDEN_SECONDS = 300
"""The time for which a received dead letter stays hidden."""

WAIT_SECONDS = 1
"""The time that SQS waits for messages. Without waiting, SQS may answer that a queue with messages is
empty."""

WORK_SECONDS_MAX = 45.0
RECEIVES_MAX = 2

RENEWED_TAG = "dormouse:renewed"
"""The tag of a queue that records the start of the last complete pass. It disappears with the queue."""

logger = logging.getLogger(__name__)


class Renewed(Protocol):
    """The part of a `CommitQueue` that renewal needs."""

    def receive(self, limit: int, wait_seconds: float) -> list[Message]: ...

    def send_again(self, messages: list[Message], seconds: float) -> None: ...


def _opened(url: str) -> Renewed:
    return SqsQueue(url, visibility_seconds=HIDDEN_SECONDS)


def renew(
    instance: DeployedInstance,
    open_queue: Callable[[str], Renewed] = _opened,
    now: Callable[[], float] = time.time,
) -> bool:
    """Sends messages again that have spent half of their retention.

    Returns False if some are left for lack of time. Makes a pass once in a quarter of the retention. Does
    nothing while a mapping is on, since the lambda then applies the messages.
    """
    if any(mapping_state(instance, uuid) not in ("Disabled", None) for uuid in mappings(instance)):
        return True
    began, resources = now(), instance.resources.commit
    of_dead = dict(zip(resources.dead_letters, resources.queues, strict=True)) if resources else {}
    found = (*waiting(instance), *waiting(instance, tuple(of_dead)))
    due = [one for one in found if one.messages and _is_due(instance, one, began)]
    is_done = True
    for number, one in enumerate(due):
        logger.info("sending old messages again: %s", one)
        seconds = one.retention_seconds / 2
        ends = began + WORK_SECONDS_MAX * (number + 1) / len(
            due
        )  # so that a long queue does not delay the others
        if one.url in of_dead:
            is_kept = keep_on(instance, of_dead[one.url], one.url, seconds, ends, now)
        else:
            is_kept = _renew(open_queue(one.url), seconds, ends, now)
        if is_kept:
            at = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
            instance.aws.call("sqs", "tag_queue", QueueUrl=one.url, Tags={RENEWED_TAG: at})
        else:
            is_done = False
    return is_done


def _is_due(instance: DeployedInstance, state: Waiting, now: float) -> bool:
    """Returns whether a queue needs a pass.

    It does if the last pass was a quarter of the retention ago, or if CloudWatch shows a message near its
    deletion.
    """
    found = instance.aws.look("sqs", "list_queue_tags", QueueUrl=state.url) or {}
    passed = float("inf")
    with suppress(KeyError, ValueError):
        passed = now - datetime.fromisoformat(found["Tags"][RENEWED_TAG]).timestamp()
    return state.loss_is_near or not 0 <= passed < state.retention_seconds / 4


def _renew(queue: Renewed, seconds: float, ends: float, now: Callable[[], float]) -> bool:
    while now() < ends:
        if not (found := queue.receive(BATCH_MESSAGES_MAX, WAIT_SECONDS)):
            return True
        if again := [one for one in found if one.age_seconds >= seconds or one.receive_count >= RECEIVES_MAX]:
            queue.send_again(again, DELAY_SECONDS_MAX)  # the delay keeps this pass from receiving it again
    return False


# Dead letters, as raw SQS messages: renewal does not parse requests.


def keep_on(
    instance: DeployedInstance, queue: str, dead: str, seconds: float, ends: float, now: Callable[[], float]
) -> bool:
    """Sends old dead letters to their dead-letter queue again, which renews their age.

    Renews each letter in the queue `dead` that is older than `seconds`.

    Returns False if the time `ends` comes before all were seen. A dead letter of a queue other than `queue`
    is left to SQS: once renewed, it would look like one of `queue`.
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
            MaxNumberOfMessages=min(limit, BATCH_MESSAGES_MAX),
            VisibilityTimeout=DEAD_HIDDEN_SECONDS,
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
    """Returns the reason why a dead letter is not one of `queue`; an empty text if it is.

    Any queue of the account can send its dead letters to the same dead-letter queue.
    """
    source = str(message["Attributes"].get("DeadLetterQueueSourceArn", ""))
    is_own = not source or source.rpartition(":")[2] == queue.rpartition("/")[2]
    return "" if is_own else f"it is a dead letter of another queue, {source}"
