"""A clock of tests, which passes no real time."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dormouse.aws.steps import Clock


@dataclass
class FakeClock:
    """A clock that only `sleep` advances. `at` lists (second, action); each action runs at its second."""

    seconds: float = 0.0
    at: list[tuple[float, Any]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        until = self.seconds + seconds
        while due := [one for one in self.at if one[0] <= until]:
            first = min(due, key=itemgetter(0))
            self.at.remove(first)
            self.seconds = max(self.seconds, first[0])
            first[1]()
        self.seconds = max(self.seconds, until)

    def monotonic(self) -> float:
        return self.seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.seconds, self.sleep)
