"""What a committer has done so far."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dormouse.commits.handling import Handled
from dormouse.postgres.transaction import RETRIES

LATENCIES_KEPT = 2_000


@dataclass(frozen=True, slots=True)
class CommitterMetrics:
    """Counts since the committer was made.

    `try_later` counts tries, the other three requests. The latencies are of the last requests, from sending
    to answer, as far as the clocks agree. `retries` are this process's transactions by operation.
    """

    applied: int
    applied_before: int
    rejected: int
    try_later: int
    batches: int
    batch_messages_mean: float
    batch_messages_max: int
    latency_ms_p50: float | None
    latency_ms_p99: float | None
    retries: dict[str, int]

    def __str__(self) -> str:
        latency = "" if self.latency_ms_p50 is None else f"; p50 {self.latency_ms_p50:.0f} ms"
        again = f"; {sum(self.retries.values())} retries" if self.retries else ""
        return (
            f"{self.applied:,} applied, {self.applied_before:,} applied before, {self.rejected:,} rejected, "
            f"{self.try_later:,} put off; {self.batches:,} batches of {self.batch_messages_mean:.1f} "
            f"messages{latency}{again}"
        )


class Tally:
    """Counts what is handled. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: Counter[str] = Counter()
        self._batches = 0
        self._messages = 0
        self._messages_max = 0
        self._latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)

    def add(self, batch: Sequence[Handled]) -> None:
        now = datetime.now(UTC)
        with self._lock:
            self._batches += 1
            self._messages += len(batch)
            self._messages_max = max(self._messages_max, len(batch))
            self._states.update(item.outcome.state for item in batch)
            self._latencies.extend(
                max(0.0, (now - item.message.sent_at).total_seconds())
                for item in batch
                if item.fate == "done"
            )

    def metrics(self) -> CommitterMetrics:
        with self._lock:
            latencies = sorted(self._latencies)
            return CommitterMetrics(
                applied=self._states["applied"],
                applied_before=self._states["applied_before"],
                rejected=self._states["rejected"],
                try_later=self._states["try_later"],
                batches=self._batches,
                batch_messages_mean=self._messages / self._batches if self._batches else 0.0,
                batch_messages_max=self._messages_max,
                latency_ms_p50=_quantile_ms(latencies, 0.5),
                latency_ms_p99=_quantile_ms(latencies, 0.99),
                retries=RETRIES.by_operation(),
            )


def _quantile_ms(ordered: Sequence[float], share: float) -> float | None:
    return 1_000 * ordered[int(share * (len(ordered) - 1))] if ordered else None
