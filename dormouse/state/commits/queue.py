"""The commit queue seam: messages that are delivered at least once, in no order."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Protocol, TypeAlias, TypeVar

from dormouse.errors import CommitQueueError, InvalidInput

T = TypeVar("T")
TableName: TypeAlias = tuple[str, str]
"""A table's UUID, and the name that its sender knows."""

RECEIVED_BYTES_MAX = 4 * 2**20
"""What one receiver gets at once, but for a larger message that comes alone: some 40,000 files."""


@dataclass(frozen=True, slots=True)
class Message:
    """A delivery of a body. `receipt` is this delivery's; `receive_count` is 1 the first time.

    `sent_at` is of the queue's clock; `born` is that moment on this process's monotonic clock: the queue
    tells the age, as the clocks may differ.
    """

    body: str
    receipt: str
    receive_count: int
    sent_at: datetime
    born: float = field(default_factory=time.monotonic, kw_only=True)

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.monotonic() - self.born)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How many messages there are, those being worked on included, and the age of the oldest (none: 0)."""

    messages: int
    oldest_seconds: float
    approximate: bool


class TablesRenamed(CommitQueueError):
    """A table has another name than its sender knew, or is gone."""


class CommitQueue(Protocol):
    """A received message is hidden for a while, and comes again unless it is deleted.

    Every failure is a `CommitQueueError` that names the queue and the cause. Threads may share a queue.
    """

    @property
    def body_bytes_max(self) -> int:
        """What one message may hold."""

    @property
    def visibility_seconds(self) -> float:
        """For how long a message that was received is hidden."""

    @property
    def knows_tables(self) -> bool:
        """Whether `send` looks at the names of tables."""

    def send(self, bodies: Sequence[str], tables: Collection[TableName] = ()) -> None:
        """Send messages; when it raises, some may have been sent.

        `TablesRenamed`, and none is sent, when these are not the names of the tables, if it can tell.
        """

    def receive(self, limit: int, wait_seconds: float) -> list[Message]:
        """At most `limit` messages, at once when there are any; else wait for the first. Maybe none.

        After the first, no more than about `RECEIVED_BYTES_MAX`.
        """

    def delete(self, messages: Sequence[Message]) -> None:
        """Done with them; a delivery that another one has overtaken is left to that one."""

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        """Deliver them again, after `seconds`."""

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        """Deliver them again, after `seconds`, as if they had not been received; maybe twice."""

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Put them where they are delivered no more, with the reason, for a person to look at."""

    def depth(self) -> QueueDepth:
        """How much is waiting."""


def batches(
    items: Iterable[T], size_of: Callable[[T], int], size_max: int, count_max: int | None = None
) -> Iterator[list[T]]:
    """In their order, at most so many and so large a batch; an item that is larger comes alone."""
    batch: list[T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if batch and (len(batch) == count_max or size + more > size_max):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


def check_hidden(what: str, seconds: float, seconds_max: float) -> None:
    """Refuses times for which a queue cannot hide a message."""
    if not 0 <= seconds <= seconds_max:
        raise InvalidInput(f"{what} must be from 0 to {seconds_max:g}, not {seconds!r}")


def queue_number(table_id: int, queues: int) -> int:
    """The queue of a table's requests, the same in every process; changing `queues` moves tables."""
    digest = blake2b(table_id.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % queues
