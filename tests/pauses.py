"""Pauses between two looks at a condition."""

from __future__ import annotations

import time
from collections.abc import Iterator

PAUSE_SECONDS_MAX = 0.02


def pauses(seconds_max: float) -> Iterator[None]:
    """Yields at once, and after each pause, until the pauses have lasted `seconds_max`.

    The pauses grow, because a look takes processor time from the work that it waits for.
    """
    paused = 0.0
    while True:
        yield
        if paused > seconds_max:
            return
        pause = min(0.005 + paused / 8, PAUSE_SECONDS_MAX)
        time.sleep(pause)
        paused += pause
