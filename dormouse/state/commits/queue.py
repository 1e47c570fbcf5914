"""The interface of commit queues, which deliver messages at least once and in no order; and backpressure.

Senders and jobs make work for the committer. They begin to wait when its queue is longer than the high mark,
and go on when the queue has fallen to half of the mark. An approximate depth, as SQS gives it, counts only
when several looks agree.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Protocol, TypeAlias, TypeVar

from dormouse.errors import CommitQueueError, CommitQueueFull, InvalidInput

T = TypeVar("T")
TableName: TypeAlias = tuple[str, str]
"""A table's UUID, and the name that its sender knows."""
RECEIVED_BYTES_MAX = 4 * 2**20
"""The most bytes that one receiver gets at once, enough for some 40,000 files.

A larger message comes alone.
"""
# A caller first looks for its answer after the time that recent answers took, then less and less often.

SECONDS_MIN, SECONDS_MAX = 0.002, 0.5
_SOONER, _LATER = 0.93, 1.075
"""The factors by which the wait before the first look changes.

The first factor applies if the first look found the answer, the second if it did not. They balance when half
of the first looks find it. A shorter wait costs more looks, and a longer one costs time.
"""
logger = logging.getLogger(__name__)
Waiting = Callable[[str], object]
AGE_MESSAGES_MIN = 100
"""The number of messages from which the age of the oldest counts.

So one message that is retried for long does not stop senders.
"""
LOOK_SECONDS = 0.1
LOOK_SECONDS_APPROXIMATE = 1.0
LOOKS_TO_BELIEVE = 3
SAY_AGAIN_SECONDS = 10.0
UNLOOKED_SECONDS_MAX = 0.5
"""How long a sender may rely on the last look at the depth, in seconds."""
UNLOOKED_SHARE = 10
"""The divisor of the room below the high mark: senders may fill a tenth before they look again."""


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message, with the message's text as `body`.

    - `receipt`: the id of this delivery.
    - `receive_count`: 1 at the first delivery.
    - `sent_at`: when the message was sent, by the queue's clock.
    - `born`: the same moment by this process's `time.monotonic`. It is computed from the age that the queue
      gives, as the clocks may differ.
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
    """The number of messages in a queue, with those being worked on, and the age of the oldest.

    The age is 0 if there are no messages.
    """

    messages: int
    oldest_seconds: float
    approximate: bool


class TablesRenamed(CommitQueueError):
    """An error for messages of a table that was renamed or dropped after the sender had read its name."""


class CommitQueue(Protocol):
    """A queue of messages. A received message is hidden for a while, then delivered again unless deleted.

    Every failure raises a `CommitQueueError` that names the queue and the cause. Threads may share a queue.
    """

    body_bytes_max: int
    """The largest body of a message, in bytes."""
    visibility_seconds: float
    """How long a received message is hidden, in seconds."""
    knows_tables: bool
    """True if `send` checks the names of tables."""

    def send(self, bodies: Sequence[str], tables: Collection[TableName] = ()) -> None:
        """Sends messages. If an error is raised, some of them may have been sent.

        `tables` contains the names that the tables must still have. If one has another name, a queue with
        `knows_tables` raises `TablesRenamed` and sends none of the messages.
        """

    def receive(self, limit: int, wait_seconds: float) -> list[Message]:
        """Returns at most `limit` messages that are there, or waits up to `wait_seconds` for the first.

        Returns an empty list if none came. The messages together have at most about `RECEIVED_BYTES_MAX`,
        unless the first one alone is larger.
        """

    def delete(self, messages: Sequence[Message]) -> None:
        """Deletes messages that were handled; skips messages that have been delivered again."""

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        """Delivers messages again after `seconds`."""

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        """Delivers messages again after `seconds`, perhaps twice, as if they had never been received."""

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Moves messages to the dead letters, which are not delivered; `reason` is text for a person."""

    def depth(self) -> QueueDepth:
        """Returns the number of messages in the queue, and the age of the oldest."""


def batches(
    items: Iterable[T], size_of: Callable[[T], int], size_max: int, count_max: int | None = None
) -> Iterator[list[T]]:
    """Yields items in batches, in their order.

    A batch has at most `count_max` items, whose sizes add up to at most `size_max`. An item that is larger
    than `size_max` comes alone.
    """
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
    """Raises `InvalidInput` if a queue cannot hide a message for this time."""
    if not 0 <= seconds <= seconds_max:
        raise InvalidInput(f"{what} must be from 0 to {seconds_max:g}, not {seconds!r}")


def queue_number(table_id: int, queues: int) -> int:
    """Returns the number of the queue for a table's requests, from 0 to `queues` - 1.

    It is the same in every process. With another number of `queues`, the table may have another queue.
    """
    digest = blake2b(table_id.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % queues


class Patience:
    """An estimate of how long answers take, learned from earlier answers. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.usual = SECONDS_MIN
        """The seconds to wait before the first look."""

    def learn(self, looks: int) -> None:
        """Adapts `usual` after one answer.

        `looks` is the number of looks that the answer took. The first of these looks was after `usual`
        seconds.
        """
        with self._lock:
            usual = self.usual * (_SOONER if looks <= 1 else _LATER)
            self.usual = min(max(usual, SECONDS_MIN), SECONDS_MAX / 10)

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each look; at its end, learns from the number of looks."""
        usual, looks = self.usual, 1
        try:
            yield usual
            for pause in more_and_more(max(SECONDS_MIN, usual / 4)):
                looks += 1
                yield pause
        finally:
            self.learn(looks)


def more_and_more(pause: float) -> Iterator[float]:
    """Yields pauses in seconds without end, each 1.5 times the last, up to `SECONDS_MAX`."""
    while True:
        yield pause
        pause = min(1.5 * pause, SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class Marks:
    """The high marks of a queue: the number of messages, and the age of the oldest in seconds.

    Above one of the marks, callers wait until both values have fallen to half of their marks, but at most
    `wait_seconds_max`.
    """

    messages_max: int = 10_000
    age_seconds_max: float = 60
    wait_seconds_max: float = 300

    def is_above(self, depth: QueueDepth, share: float = 1.0) -> bool:
        """Returns True if the depth is above this share of a mark."""
        old = depth.messages >= AGE_MESSAGES_MIN and depth.oldest_seconds > share * self.age_seconds_max
        return old or depth.messages > share * self.messages_max

    def reason(self, depth: QueueDepth) -> str:
        about = "about " if depth.approximate else ""
        age = f" and {self.age_seconds_max / 2:g} s" if math.isfinite(self.age_seconds_max) else ""
        return (
            f"the commit queue has {about}{depth.messages:,} messages, the oldest is "
            f"{depth.oldest_seconds:.0f} s old; work continues below {self.messages_max // 2:,} messages{age}"
        )


class Gate:
    """A gate that lets callers through while the queue is short. Threads may share one."""

    def __init__(
        self,
        depth: Callable[[], QueueDepth],
        marks: Marks | None = None,
        *,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._depth = depth
        self._marks = marks or Marks()
        self._pause = pause
        self._lock = threading.Lock()
        self._unlooked = 0
        self._looked_at = float("-inf")

    def wait(self, waiting: Waiting | None = None) -> QueueDepth:
        """Waits until the queue is short enough; returns its depth at the last look.

        Calls `waiting` with the reason while it waits. Raises `CommitQueueFull` after `wait_seconds_max`, and
        `CommitQueueError` if the queue fails.
        """
        below, depth = self._look(1.0)
        started, say_at = time.monotonic(), 0.0
        while not below:
            waited = time.monotonic() - started
            if waited >= self._marks.wait_seconds_max:
                raise CommitQueueFull(
                    f"waited {waited:.0f} s: {self._marks.reason(depth)}; is a committer running? "
                    "(dormouse committer)"
                )
            if waited >= say_at:
                say_at = waited + SAY_AGAIN_SECONDS
                self._say(depth, waiting)
            self._pause(LOOK_SECONDS_APPROXIMATE if depth.approximate else LOOK_SECONDS)
            below, depth = self._look(0.5)
        return depth

    def admit(self, messages: int, waiting: Waiting | None = None) -> None:
        """Waits, like `wait`, until a sender may send so many messages.

        Does not look at the queue if the last look was recent and found room for these messages, too.
        """
        with self._lock:
            fresh = time.monotonic() - self._looked_at < UNLOOKED_SECONDS_MAX
            if fresh and messages <= self._unlooked:
                self._unlooked -= messages
                return
        room = self._marks.messages_max - self.wait(waiting).messages
        with self._lock:
            self._looked_at = time.monotonic()
            self._unlooked = max(0, room // UNLOOKED_SHARE - messages)

    def _look(self, share: float) -> tuple[bool, QueueDepth]:
        """Returns True if the queue is below this share of the marks, and its depth at the last look.

        When depths are approximate, a change must be seen `LOOKS_TO_BELIEVE` times in a row. So one wrong
        depth neither stops a sender nor lets a waiting sender continue.
        """
        was_below = share == 1.0
        for look in range(1, LOOKS_TO_BELIEVE + 1):
            depth = self._depth()
            below = not self._marks.is_above(depth, share)
            if below == was_below or not depth.approximate or look == LOOKS_TO_BELIEVE:
                break
            self._pause(LOOK_SECONDS_APPROXIMATE)
        return below, depth

    def _say(self, depth: QueueDepth, waiting: Waiting | None) -> None:
        reason = self._marks.reason(depth)
        logger.warning("waiting: %s", reason)
        if waiting is not None:
            waiting(f"waiting: {reason}")
