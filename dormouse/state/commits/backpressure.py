"""Backpressure: senders and jobs, which make work for the committer, wait while its queue is long.

Two marks: above the high mark callers wait, until the queue is down to half of it. Depths that are
approximate, as those of SQS, are believed only when several looks agree.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dormouse.errors import CommitQueueFull
from dormouse.state.commits.queue import QueueDepth

# Work that is repeated beside other work.


@contextmanager
def repeating(work: Callable[[], object], seconds: float, name: str) -> Iterator[int]:
    """Does it every so many seconds, in a thread of that name, until the block ends; waits for the last.

    Gives the thread's id.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield thread.ident or 0
    finally:
        ended.set()
        thread.join()


# When to look for an answer: about when the last ones came, and then more and more rarely.

SECONDS_MIN, SECONDS_MAX = 0.002, 0.5
_SOONER, _LATER = 0.93, 1.075
"""They balance when every second first look finds an answer: a look costs, and so does a wait."""


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

    def wait(self, waiting: Waiting | None = None) -> float:
        """Returns when the queue is short enough; gives the seconds waited. `waiting` is told why it waits.

        Raises `CommitQueueFull` after `wait_seconds_max`, and `CommitQueueError`.
        """
        started = time.monotonic()
        self._wait(waiting)
        return time.monotonic() - started

    def admit(self, messages: int, waiting: Waiting | None = None) -> None:
        """As `wait`, for a sender of so many messages; looks only as often as the room that is left asks."""
        with self._lock:
            fresh = time.monotonic() - self._looked_at < UNLOOKED_SECONDS_MAX
            if fresh and messages <= self._unlooked:
                self._unlooked -= messages
                return
        room = self._marks.messages_max - self._wait(waiting).messages
        with self._lock:
            self._looked_at = time.monotonic()
            self._unlooked = max(0, room // UNLOOKED_SHARE - messages)

    def _wait(self, waiting: Waiting | None) -> QueueDepth:
        """Waits; gives the depth of the last look."""
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
