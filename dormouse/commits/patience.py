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
        self._usual = SECONDS_MIN

    def pauses(self) -> Iterator[float]:
        """The seconds before each look; it learns from how many are taken."""
        usual = self._usual
        self._learn(_SOONER)
        yield usual
        self._learn(_LATER / _SOONER)  # the first look was too early
        pause = max(SECONDS_MIN, usual / 4)
        while True:
            yield pause
            pause = min(1.5 * pause, SECONDS_MAX)

    def _learn(self, factor: float) -> None:
        with self._lock:
            self._usual = min(max(self._usual * factor, SECONDS_MIN), SECONDS_MAX / 10)
