"""The interface of commit queues, whose messages are delivered at least once, in no order; and backpressure.

Senders and jobs, which make work for the committer, wait while its queue is long: above the high mark, and
until the queue is down to half of it. An approximate depth, as SQS gives it, counts only when several looks
agree.
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
"""The bytes that one receiver gets at once, some 40,000 files; a larger message comes alone."""
# A caller first looks for its answer after the time that recent answers took, then less and less often.

SECONDS_MIN, SECONDS_MAX = 0.002, 0.5
_SOONER, _LATER = 0.93, 1.075
"""The factors of the first wait, after a first look that found the answer or did not.

They balance when half of the first looks find it: a shorter wait costs more looks, a longer one costs time.
"""
logger = logging.getLogger(__name__)
Waiting = Callable[[str], object]
AGE_MESSAGES_MIN = 100
"""The messages from which the age of the oldest counts, so that a single retried one stops no sender."""
LOOK_SECONDS = 0.1
LOOK_SECONDS_APPROXIMATE = 1.0
LOOKS_TO_BELIEVE = 3
SAY_AGAIN_SECONDS = 10.0
UNLOOKED_SECONDS_MAX = 0.5
"""How long a sender may rely on the last look at the depth."""
UNLOOKED_SHARE = 10
"""Senders may fill a tenth of the room below the high mark before they look again."""


@dataclass(frozen=True, slots=True)
class Message:
    """A delivery of a body.

    - `receipt`: the id of this delivery.
    - `receive_count`: 1 at the first delivery.
    - `sent_at`: by the queue's clock.
    - `born`: the same moment by this process's `time.monotonic`. It is made from the age that the queue
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
    """The number of messages, including those being worked on, and the age of the oldest (none: 0)."""

    messages: int
    oldest_seconds: float
    approximate: bool


class TablesRenamed(CommitQueueError):
    """An error for messages of a table that was renamed or dropped since the sender read its name."""


class CommitQueue(Protocol):
    """A queue of messages. A received message is hidden for a while, then delivered again unless deleted.

    Every failure is a `CommitQueueError` that names the queue and the cause. Threads may share a queue.
    """

    body_bytes_max: int
    """The largest body of a message, in bytes."""
    visibility_seconds: float
    """How long a received message is hidden."""
    knows_tables: bool
    """True if `send` checks the names of tables."""

    def send(self, bodies: Sequence[str], tables: Collection[TableName] = ()) -> None:
        """Sends messages; when it raises, some may have been sent.

        A queue with `knows_tables` raises `TablesRenamed`, and sends none, if a table no longer has its name
        in `tables`.
        """

    def receive(self, limit: int, wait_seconds: float) -> list[Message]:
        """Returns at most `limit` messages at once, or waits up to `wait_seconds` for the first; maybe none.

        Together they have about `RECEIVED_BYTES_MAX` at most, unless the first one alone is larger.
        """

    def delete(self, messages: Sequence[Message]) -> None:
        """Deletes messages that are done; skips those that were delivered again since."""

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        """Delivers messages again after `seconds`."""

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        """Delivers messages again after `seconds`, as if they had not been received; maybe twice."""

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Moves messages to the dead letters, which are not delivered, with a reason for a person to read."""

    def depth(self) -> QueueDepth:
        """Returns how many messages the queue has, and the age of the oldest."""


def batches(
    items: Iterable[T], size_of: Callable[[T], int], size_max: int, count_max: int | None = None
) -> Iterator[list[T]]:
    """Yields items in batches, in their order: at most `size_max` and `count_max` a batch.

    An item that is larger than `size_max` comes alone.
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
    """Raises `InvalidInput` for a time for which a queue cannot hide a message."""
    if not 0 <= seconds <= seconds_max:
        raise InvalidInput(f"{what} must be from 0 to {seconds_max:g}, not {seconds!r}")


def queue_number(table_id: int, queues: int) -> int:
    """Returns the queue of a table's requests, the same in every process; changing `queues` moves tables."""
    digest = blake2b(table_id.to_bytes(8, "big", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "big") % queues


class Patience:
    """An estimate of how long answers take, learned from the looks for them. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.usual = SECONDS_MIN
        """The seconds to wait before the first look."""

    def learn(self, looks: int) -> None:
        """Adapts `usual` after an answer took this number of looks, the first of them after `usual`."""
        with self._lock:
            usual = self.usual * (_SOONER if looks <= 1 else _LATER)
            self.usual = min(max(usual, SECONDS_MIN), SECONDS_MAX / 10)

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each look; learns from how many are taken."""
        usual, looks = self.usual, 1
        try:
            yield usual
            for pause in more_and_more(max(SECONDS_MIN, usual / 4)):
                looks += 1
                yield pause
        finally:
            self.learn(looks)


def more_and_more(pause: float) -> Iterator[float]:
    """Yields pauses without end, each half as long again as the last, up to `SECONDS_MAX`."""
    while True:
        yield pause
        pause = min(1.5 * pause, SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class Marks:
    """The high marks above which callers wait, until half of both is reached; and the longest wait."""

    messages_max: int = 10_000
    age_seconds_max: float = 60
    wait_seconds_max: float = 300

    def is_above(self, depth: QueueDepth, share: float = 1.0) -> bool:
        """Returns whether the depth is above this share of the marks."""
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
        `CommitQueueError`.
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
        """Waits like `wait`, for a sender of so many messages.

        Skips the look if the last one is recent, and left room for more messages than were sent since.
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
        """Returns whether the queue is below this share of the marks, and its depth at the last look.

        When depths are approximate, a change must be seen `LOOKS_TO_BELIEVE` times in a row: one look above
        stops no sender, and one look below lets no waiting sender in.
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
