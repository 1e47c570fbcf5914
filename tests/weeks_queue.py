"""The commit queue of simulated weeks, as seen by the lambda that keeps messages from expiring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dormouse.errors import CommitQueueError
from tests.support.commits import Message

if TYPE_CHECKING:
    from tests.weeks import Weeks

RECEIVES_MAX = 50


class Killed(BaseException):
    """An error that stands for the death of the process."""


@dataclass(eq=False)
class Sent:
    """A message of the queue; `number` is the number of its commit."""

    number: int
    at: float
    received: float = 0.0
    """The number of times that the message was received."""

    hidden_until: float = 0.0


@dataclass
class Queue:
    """The commit queue for one invocation of the lambda, which may die between sending and deleting."""

    weeks: Weeks
    calls: Iterator[int]
    invocation: int

    def receive(self, limit: int, wait_seconds: float) -> list[Message]:
        self._fault()
        free = [one for one in self.weeks.messages if one.hidden_until <= self.weeks.now]
        self.weeks._gone([one for one in free if one.received >= RECEIVES_MAX], self.weeks.dead)
        seen = [one for one in free if one.received < RECEIVES_MAX][:limit]
        for one in seen:
            one.hidden_until = self.weeks.now + 120
            one.received += 1
        return [
            Message(
                str(one.number),
                str(id(one)),
                int(one.received),
                datetime.now(UTC),
                born=time.monotonic() - self.weeks.now + one.at,
            )
            for one in seen
        ]

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        for message in messages:
            self.weeks.messages.append(
                Sent(int(message.body), self.weeks.now, hidden_until=self.weeks.now + seconds)
            )
        self._fault()
        receipts = {message.receipt for message in messages}
        self.weeks.messages = [one for one in self.weeks.messages if str(id(one)) not in receipts]

    def _fault(self) -> None:
        if (error := self.weeks.lambda_fault(next(self.calls), self.invocation)) is not None:
            raise error if isinstance(error, Killed) else CommitQueueError(str(error))
