"""When to look for an answer: about when the last ones came, and then more and more rarely."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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
