"""The handling of a batch of SQS records in a lambda, with an answer for each record."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dormouse.errors import InvalidCommitRequest, InvalidInput
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.settings.lambdas import field
from dormouse.state.commits.apply import Tables
from dormouse.state.commits.handling import RECEIVES_MAX, Handled, Handler, Tally
from dormouse.state.commits.outcomes import CommitOutcome
from dormouse.state.commits.pointers import delete_bodies, with_bodies
from dormouse.state.commits.queue import Message

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long to retry requests that wait for inputs, in seconds.

Usually another lambda applies the requests that make these inputs at the same time.
"""

IDLE_SECONDS_MAX = 2.0
"""How long to retry without success, in seconds.

Inputs that take longer may be behind many messages of the queue.
"""

FIRST_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a batch.

    - `again`: the ids of the messages that SQS shall deliver again.
    - `applied`: the number of requests that were applied, now or before.
    - `rejected`: the number of requests that are refused and not tried again.
    - `later`: the number of requests that are tried again.
    - `dead`: the number of messages that a committer would bury. SQS delivers them again until it moves them
      to its dead-letter queue.
    """

    again: frozenset[str]
    applied: int
    rejected: int
    later: int
    dead: int


def handle(
    event: Mapping[str, Any],
    supplier: Supplier,
    objects: ObjectStore,
    *,
    receives_max: int = RECEIVES_MAX,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Answer:
    """Applies the records of an SQS event as one batch: a statement for each table and kind of request.

    A request that waits for its inputs is retried here, because SQS would deliver it only after the
    visibility timeout. The retries last at most `patience_seconds`, and end earlier if none of these requests
    succeeds. A refused request is acknowledged; its submitter finds the reason by its commit id. These
    messages go to the dead-letter queue of SQS, and keep their objects:

    - messages that cannot be read
    - requests that never got their inputs
    - requests for a table of another timeline

    Raises `InvalidCommitRequest` when the event is not one of SQS.
    """
    handler = Handler(Tables(supplier), receives_max=receives_max)
    handled, unreadable, rest = list[Handled](), list[Message](), _messages(event)
    while rest:
        readable, away, rest = with_bodies(rest, objects)
        unreadable += away
        handled += (portion := _patiently(handler, readable, patience_seconds))
        delete_bodies([item.message for item in portion if item.fate == "done"], objects)
    for item in handled:
        if item.outcome.error is not None and not item.is_tried_again:
            _warn(item.outcome)
    tally = Tally()
    tally.add(handled)
    logger.info("committer: %s", tally.metrics())
    waiting = [*unreadable, *(item.message for item in handled if item.outcome.state == "try_later")]
    later = {message.receipt for message in waiting}
    dead = {item.message.receipt for item in handled if item.fate == "bury"}
    states = Counter(item.outcome.state for item in handled if item.fate != "bury")
    return Answer(
        again=frozenset(later | dead),
        applied=states["applied"] + states["applied_before"],
        rejected=states["rejected"],
        later=len(later),
        dead=len(dead),
    )


def _patiently(handler: Handler, messages: Sequence[Message], seconds: float) -> list[Handled]:
    """Handles messages, and retries those that wait for inputs; returns the last result of each message."""
    results = {item.message.receipt: item for item in handler.handle(messages)}
    end = time.monotonic() + seconds
    idle_end, pause = _idle_end(end), FIRST_PAUSE_SECONDS
    while waiting := [item.message for item in results.values() if item.is_tried_again]:
        pause = min(pause, idle_end - time.monotonic())
        if pause <= 0:
            break
        time.sleep(pause)
        again = {item.message.receipt: item for item in handler.handle(waiting)}
        results |= again
        if any(item.outcome.state != "try_later" for item in again.values()):
            idle_end, pause = _idle_end(end), FIRST_PAUSE_SECONDS
        else:
            pause *= 2
    return list(results.values())


def _idle_end(end: float) -> float:
    return min(end, time.monotonic() + IDLE_SECONDS_MAX)


def _warn(outcome: CommitOutcome) -> None:
    names = {"table": outcome.table, "commit_id": outcome.commit_id, "state": outcome.state}
    logger.warning(
        "%s is %s: %s",
        outcome.subject,
        outcome.state,
        outcome.error,
        extra={**names, "error_class": outcome.error_class},
    )


def _messages(event: Mapping[str, Any]) -> list[Message]:
    try:
        return [_message(record) for record in field(event, "Records", list)]
    except InvalidInput as error:
        raise InvalidCommitRequest(f"not an event of SQS: {error}") from None


def _message(record: Mapping[str, Any]) -> Message:
    sent, received, body, message_id = (
        field(record, name, str, "a record")
        for name in ("attributes.SentTimestamp", "attributes.ApproximateReceiveCount", "body", "messageId")
    )
    try:
        receives, sent_at = int(received), datetime.fromtimestamp(int(sent) / 1_000, UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"ApproximateReceiveCount or SentTimestamp of a record: {error}") from None
    # both clocks are of AWS: the lambda's, and that of SQS
    born = time.monotonic() - (datetime.now(UTC) - sent_at).total_seconds()
    return Message(body, message_id, receives, sent_at, born=born)
