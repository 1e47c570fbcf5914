"""How many queries run at once: others wait a while, in the order in which they came."""

from __future__ import annotations

import asyncio

from dormouse.service.problems import TooManyQueries


class Slots:
    """Of one event loop."""

    def __init__(self, count: int, wait_seconds_max: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._count = count
        self._wait_seconds_max = wait_seconds_max
        self.waiting = 0
        self.taken = 0

    async def take(self) -> None:
        """Raises `TooManyQueries` when none becomes free in time."""
        self.waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), self._wait_seconds_max)
        except TimeoutError:
            raise TooManyQueries(
                f"{self._count} queries run at once, and none ended within {self._wait_seconds_max:g} s; "
                "try again later"
            ) from None
        finally:
            self.waiting -= 1
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self._free.release()
