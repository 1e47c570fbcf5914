"""Counts of the transactions that were tried again, given up or left unknown."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, get_args

RetryEvent = Literal["retries", "exhausted", "unknown"]
RETRY_EVENTS: tuple[RetryEvent, ...] = get_args(RetryEvent)
"""Tried again; given up after the last attempt; died between the commit and its answer."""


class Retries:
    """How often work was tried again, given up or left unknown, by operation. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}

    def add(self, operation: str, event: RetryEvent = "retries") -> None:
        with self._lock:
            self._counts.setdefault(operation, Counter())[event] += 1

    def count(self, operation: str | None = None, event: RetryEvent = "retries") -> int:
        """The retries, or other events, of one operation, or of all."""
        with self._lock:
            counts = self._counts.values() if operation is None else [self._counts.get(operation, Counter())]
            return sum(counter[event] for counter in counts)

    def by_operation(self) -> dict[str, int]:
        """The retries of each operation that had one."""
        return {name: events["retries"] for name, events in self.snapshot().items() if events["retries"]}

    def snapshot(self) -> dict[str, dict[RetryEvent, int]]:
        """For metrics: of each operation that met any, its retries, its give-ups, its unknown outcomes."""
        with self._lock:
            return {name: {e: counter[e] for e in RETRY_EVENTS} for name, counter in self._counts.items()}


RETRIES = Retries()
"""The retries of this process."""
