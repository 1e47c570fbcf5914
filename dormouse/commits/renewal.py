"""Keeps the messages of a paused instance, which SQS would forget after 14 days at most.

A message that is sent again and then deleted has a new age. Its commit has an id, and so is applied once,
also when both were there for a moment. Nothing has to be brought back by a resume.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from dormouse.commits.queue import Message
from dormouse.commits.sqs_queue import BATCH_MESSAGES_MAX, DELAY_SECONDS_MAX, SqsQueue
from dormouse.system.instance import DeployedInstance
from dormouse.system.switches import mapping_state, mappings
from dormouse.system.waiting import waiting

HIDDEN_SECONDS = 120.0
"""For so long messages that are too young are not received again."""

WAIT_SECONDS = 1.0
"""Without a wait SQS may answer that there is none though there are some."""

WORK_SECONDS_MAX = 45.0

logger = logging.getLogger(__name__)


class Renewed(Protocol):
    """What of a `CommitQueue` is needed here."""

    def receive(self, limit: int, wait_seconds: float) -> list[Message]: ...

    def send_again(self, messages: list[Message], seconds: float) -> None: ...


def _opened(url: str) -> Renewed:
    return SqsQueue(url, visibility_seconds=HIDDEN_SECONDS)


def renew(
    instance: DeployedInstance,
    open_queue: Callable[[str], Renewed] = _opened,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Sends messages again that have waited for half of their time; False if some are left for another call.

    Only while all mappings are off: else the lambda applies them.
    """
    if any(mapping_state(instance, uuid) != "Disabled" for uuid in mappings(instance)):
        return True
    ends, is_done = now() + WORK_SECONDS_MAX, True
    for one in waiting(instance):
        half = one.retention_seconds / 2
        # Without an age from CloudWatch they are as old as the pause may have let them become.
        age = instance.desired_seconds if one.oldest_seconds is None else one.oldest_seconds
        if one.messages and age >= half:
            logger.info("sending those again that are old: %s", one)
            is_done &= _renew(open_queue(one.url), half, lambda: now() < ends)
    return is_done


def _renew(queue: Renewed, seconds: float, has_time: Callable[[], bool]) -> bool:
    while has_time():
        if not (found := queue.receive(BATCH_MESSAGES_MAX, WAIT_SECONDS)):
            return True
        if old := [message for message in found if message.age_seconds >= seconds]:
            queue.send_again(old, DELAY_SECONDS_MAX)  # and is not received again so soon
    return False
