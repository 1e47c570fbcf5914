"""A batch of SQS records, as a lambda gets them: applied, and answered record by record."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dormouse.commits.handling import RECEIVES_MAX, Handled, Handler
from dormouse.commits.metrics import Tally
from dormouse.commits.pointers import PointerQueue
from dormouse.commits.queue import Message, QueueDepth
from dormouse.commits.tables import Tables
from dormouse.errors import InvalidCommitRequest
from dormouse.objects import ObjectStore
from dormouse.postgres.connection import Supplier

logger = logging.getLogger(__name__)


def handle(
    event: Mapping[str, Any], supplier: Supplier, objects: ObjectStore, *, receives_max: int = RECEIVES_MAX
) -> dict[str, Any]:
    """Applies the records of an SQS event; the answer names those that SQS shall deliver again.

    A request that was refused for good is acknowledged, since its submitter finds why by its commit id.
    Messages that name no commit are left to the queue's own dead-letter queue. Raises `InvalidCommitRequest`
    when the event is not one of SQS.
    """
    records = _Records(_messages(event))
    queue = PointerQueue(records, objects)
    found = queue.resolve(records.messages)
    handled = Handler(Tables(supplier), receives_max=receives_max).handle(found)
    queue.delete([item.message for item in handled if item.fate == "done"])
    for item in handled:
        if item.outcome.error is not None and item.fate != "later":
            logger.warning(
                "commit %r of table %r is %s: %s",
                item.outcome.commit_id,
                item.outcome.table,
                item.outcome.state,
                item.outcome.error,
            )
    _report(handled)
    again = {*records.later, *(item.message.receipt for item in handled if _comes_again(item))}
    return {"batchItemFailures": [{"itemIdentifier": receipt} for receipt in sorted(again)]}


def _comes_again(item: Handled) -> bool:
    return item.fate == "later" or (item.fate == "bury" and not item.outcome.commit_id)


def _report(handled: Sequence[Handled]) -> None:
    tally = Tally()
    tally.add(handled)
    logger.info("committer: %s", tally.metrics())


def _messages(event: Mapping[str, Any]) -> list[Message]:
    try:
        return [_message(record) for record in event["Records"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCommitRequest(f"not an event of SQS: {type(error).__name__} {error}") from None


def _message(record: Mapping[str, Any]) -> Message:
    attributes = record["attributes"]
    sent_at = datetime.fromtimestamp(int(attributes["SentTimestamp"]) / 1_000, UTC)
    return Message(record["body"], record["messageId"], int(attributes["ApproximateReceiveCount"]), sent_at)


@dataclass
class _Records:
    """The records as a queue that the lambda service acknowledges by the lambda's answer."""

    messages: list[Message]

    def __post_init__(self) -> None:
        self.later: set[str] = set()

    @property
    def body_bytes_max(self) -> int:
        return 0

    def send(self, bodies: Sequence[str]) -> None:
        raise NotImplementedError

    def receive(self, limit: int, wait_seconds: float) -> list[Message]:
        return self.messages

    def delete(self, messages: Sequence[Message]) -> None:
        """SQS does, from the answer."""

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        self.later.update(message.receipt for message in messages)

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """They are acknowledged, or left to the queue's own dead-letter queue."""

    def depth(self) -> QueueDepth:
        return QueueDepth(len(self.messages), 0.0, approximate=False)
