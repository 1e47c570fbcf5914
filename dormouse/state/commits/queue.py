"""The commit queue seam: messages that are delivered at least once, in no order.

Backpressure: senders and jobs, which make work for the committer, wait while its queue is long. There are two
marks: above the high mark callers wait, until the queue is down to half of it. Depths that are approximate,
as those of SQS, are believed only when several looks agree.
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
"""What one receiver gets at once, but for a larger message that comes alone: some 40,000 files."""
# When to look for an answer: about when the last ones came, and then more and more rarely.

SECONDS_MIN, SECONDS_MAX = 0.002, 0.5
_SOONER, _LATER = 0.93, 1.075
"""They balance when every second first look finds an answer: a look costs, and so does a wait."""
logger = logging.getLogger(__name__)
Waiting = Callable[[str], object]
AGE_MESSAGES_MIN = 100
"""The oldest message's age counts with so many waiting: one that is tried again holds up no sender."""
LOOK_SECONDS = 0.1
LOOK_SECONDS_APPROXIMATE = 1.0
LOOKS_TO_BELIEVE = 3
SAY_AGAIN_SECONDS = 10.0
UNLOOKED_SECONDS_MAX = 0.5
UNLOOKED_SHARE = 10


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

    body_bytes_max: int
    """What one message may hold."""
    visibility_seconds: float
    """For how long a message that was received is hidden."""
    knows_tables: bool
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


class Patience:
    """How long answers take here, learned from the looks for them. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.usual = SECONDS_MIN
        """The seconds before a first look."""

    def learn(self, looks: int) -> None:
        """So many looks, the first after `usual`, it took to find an answer."""
        with self._lock:
            usual = self.usual * (_SOONER if looks <= 1 else _LATER)
            self.usual = min(max(usual, SECONDS_MIN), SECONDS_MAX / 10)

    def pauses(self) -> Iterator[float]:
        """The seconds before each look; it learns from how many are taken."""
        usual, looks = self.usual, 1
        try:
            yield usual
            for pause in more_and_more(max(SECONDS_MIN, usual / 4)):
                looks += 1
                yield pause
        finally:
            self.learn(looks)


def more_and_more(pause: float) -> Iterator[float]:
    """Longer and longer pauses."""
    while True:
        yield pause
        pause = min(1.5 * pause, SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class Marks:
    """When to wait, and for how long at most; work resumes at half of the first two."""

    messages_max: int = 10_000
    age_seconds_max: float = 60
    wait_seconds_max: float = 300

    def is_above(self, depth: QueueDepth, share: float = 1.0) -> bool:
        """Whether the depth is above this share of the marks."""
        old = depth.messages >= AGE_MESSAGES_MIN and depth.oldest_seconds > share * self.age_seconds_max
        return old or depth.messages > share * self.messages_max

    def reason(self, depth: QueueDepth) -> str:
        about = "about " if depth.approximate else ""
        age = f" and {self.age_seconds_max / 2:g} s" if math.isfinite(self.age_seconds_max) else ""
        return (
            f"the commit queue has {about}{depth.messages:,} messages, the oldest is "
            f"{depth.oldest_seconds:.0f} s old; work goes on below {self.messages_max // 2:,} messages{age}"
        )


class Gate:
    """Lets callers through while the queue is short. Threads may share one."""

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
        """Returns the depth of the last look when the queue is short enough; `waiting` is told why it waits.

        Raises `CommitQueueFull` after `wait_seconds_max`, and `CommitQueueError`.
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
        """As `wait`, for a sender of so many messages; looks only as often as the room that is left asks."""
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
        """Whether the queue is below this share of the marks, and the last look.

        Of approximate depths a single look above stops no sender, and a single look below lets no waiting
        sender in: the news must be sustained.
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
