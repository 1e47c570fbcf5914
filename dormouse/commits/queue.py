"""The commit queue seam: messages that are delivered at least once, in no order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Protocol

from dormouse.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Message:
    """A delivery of a body. `receipt` is this delivery's; `receive_count` is 1 the first time."""

    body: str
    receipt: str
    receive_count: int
    sent_at: datetime


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How many messages there are, those being worked on included, and the age of the oldest (none: 0)."""

    messages: int
    oldest_seconds: float
    approximate: bool


class CommitQueue(Protocol):
    """A received message is hidden for a while, and comes again unless it is deleted.

    Every failure is a `CommitQueueError` that names the queue and the cause. Threads may share a queue.
    """

    @property
    def body_bytes_max(self) -> int:
        """What one message may hold."""

    def send(self, bodies: Sequence[str]) -> None:
        """Send messages; when it raises, some may have been sent."""

    def receive(self, limit: int, wait_seconds: float) -> list[Message]:
        """At most `limit` messages, at once when there are any; else wait for the first. Maybe none."""

    def delete(self, messages: Sequence[Message]) -> None:
        """Done with them; a delivery that another one has overtaken is left to that one."""

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        """Deliver them again, after `seconds`."""

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Put them where they are delivered no more, with the reason, for a person to look at."""

    def depth(self) -> QueueDepth:
        """How much is waiting."""


def check_hidden(what: str, seconds: float, seconds_max: float) -> None:
    """Refuses times for which a queue cannot hide a message."""
    if not 0 <= seconds <= seconds_max:
        raise InvalidInput(f"{what} must be from 0 to {seconds_max:g}, not {seconds!r}")


def queue_number(table_id: int, queues: int) -> int:
    """The queue of a table's requests, the same in every process; changing `queues` moves tables."""
    digest = blake2b(table_id.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % queues
