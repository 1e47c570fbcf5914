"""The wait of a query for the index of its table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dormouse.errors import IndexNotReady
    from dormouse.reading.streams import Interruption

INDEX_WAIT_SECONDS = 10.0
"""How long a query waits for the index of its table by default."""

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.02, 0.25
"""How long a query that waits for an index pauses before it looks again; the longer, the more rarely."""


class Wait:
    """The wait of one query for its index."""

    def __init__(self, seconds: float, interruption: Interruption | None) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._interruption = interruption

    def pause(self, refusal: IndexNotReady) -> None:
        """Sleeps before the next look; raises the refusal when the time is over."""
        waited = time.monotonic() - self._began
        if waited >= self._seconds:
            refusal.data = {**refusal.data, "seconds": round(waited, 3)}
            raise refusal
        if self._interruption is not None:
            self._interruption.check()
        pause = min(max(waited / 10, WAIT_SECONDS_MIN), WAIT_SECONDS_MAX)
        time.sleep(min(pause, self._seconds - waited))
