"""From which job on a worker looks, of each kind: what was claimed weighs on the index until vacuum."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

EVERYWHERE_SECONDS = 1.0


class Sight:
    """Mostly from the first of the last jobs claimed on; once a second everywhere.

    That finds what was started in a long transaction, and what others gave back.
    """

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._everywhere_at = float("-inf")

    def since(self) -> Mapping[int, int]:
        """The numbers by kind."""
        now = time.monotonic()
        if now - self._everywhere_at < EVERYWHERE_SECONDS:
            return self._since
        self._everywhere_at = now
        return {}

    def saw(self, claimed: Iterable[tuple[int, int]]) -> None:
        """What was claimed, as kinds and numbers."""
        firsts: dict[int, int] = {}
        for kind_id, number in claimed:
            firsts[kind_id] = min(number, firsts.get(kind_id, number))
        self._since |= firsts

    def look_everywhere(self) -> None:
        self._everywhere_at = float("-inf")
