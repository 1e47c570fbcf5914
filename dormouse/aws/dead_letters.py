"""The dead letters of a deployed instance's commit queues: commands list them and send them again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from dormouse.aws.instance import DeployedInstance
from dormouse.aws.renewal import foreign, received, sent_at
from dormouse.errors import CommitRequestTooNew, InstanceError, InvalidCommitRequest
from dormouse.state.commits.pointers import object_of
from dormouse.state.commits.requests import commit_id_of, decode

BODY_CHARACTERS_MAX = 1_000


@dataclass(frozen=True)
class SqsDeadLetter:
    """A message that was delivered too often, or that a committer rejected with a reason."""

    queue: str
    """The URL of the commit queue in whose dead-letter queue the message was found."""

    sent_at: datetime
    commit_id: str | None
    """The commit id, or None if the message has none."""

    body: str
    """The beginning of the message's text."""

    reason: str
    """The reason why the committer rejected the message, or why it cannot be sent again; empty without
    either."""

    can_be_sent: bool
    """True if the message is a readable commit request and came from this queue."""

    is_sent_again: bool = False


def dead_letters(instance: DeployedInstance, limit: int, *, send_again: bool = False) -> list[SqsDeadLetter]:
    """Returns at most `limit` dead letters, which stay in their dead-letter queues.

    With `send_again`, each letter that can be sent goes back to its commit queue. It is deleted only after it
    was sent, so none is lost.

    Raises `InstanceError` if the instance has no commit queues, or if AWS refuses.
    """
    resources = instance.resources.commit
    if resources is None:
        raise InstanceError(f"{instance.id} has no commit queues: add [commit] to its settings, deploy")
    found: list[SqsDeadLetter] = []
    for queue, dead in zip(resources.queues, resources.dead_letters, strict=True):
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
