"""The handling of a batch of messages, and counters of handled ones, for committers and lambdas."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dormouse.errors import (
    CommitRejected,
    CommitRequestTooNew,
    InvalidCommitRequest,
    TableOfAnotherTimeline,
)
from dormouse.postgres.transaction import RETRIES
from dormouse.state.commits.apply import Tables, apply
from dormouse.state.commits.outcomes import (
    CommitOutcome,
    commit_statuses,
    error_class,
    settle,
    text_of,
)
from dormouse.state.commits.pointers import object_of
from dormouse.state.commits.queue import Message, batches
from dormouse.state.commits.requests import Envelope, commit_id_of, decode, table_id_of

RECEIVES_MAX = 10
PATIENCE_SECONDS = 150.0
"""How old a request must be before it is refused for missing inputs, in seconds.

A dead committer may have received the request that makes the inputs. That message stays hidden at most this
long.
"""

PATIENCE_RECEIVES = 4
"""A request counts as old after this many times `receives_max` deliveries, whatever the clocks show."""

ITEMS_MAX = 50_000
"""The most files, or other changes, of one transaction. A transaction with this many takes a few seconds."""

LATENCIES_KEPT = 2_000

Fate = Literal["done", "later", "waits", "too new", "bury"]


@dataclass(frozen=True, slots=True)
class Handled:
    """A message, its outcome, and what to do with it now."""

    message: Message
    outcome: CommitOutcome
    fate: Fate

    @property
    def is_tried_again(self) -> bool:
        """True if the message is soon delivered again and a committer of this version can handle it."""
        return self.fate in ("later", "waits")


class Handler:
    """A handler of messages that applies their requests and records why requests were refused.

    A request that fails, or whose inputs are missing, is tried `receives_max` times. After that it is refused
    if one of these holds:

    - It is so old that no request that makes its inputs can still be hidden.
    - `hopeless` returns True: the queue has no other message.

    A request is never refused because of a lock or a database out of reach. It is not refused either while a
    newer Dormouse sends requests, which may make its inputs.
    """

    def __init__(self, tables: Tables, *, receives_max: int = RECEIVES_MAX) -> None:
        self._tables = tables
        self._receives_max = receives_max
        self._too_new_until = float("-inf")

    def handle(
        self, messages: Sequence[Message], hopeless: Callable[[], bool] = lambda: False
    ) -> list[Handled]:
        """Applies the requests of messages; returns the result for each, in their order.

        If a crash of the server undid a commit, its message is tried again later. Raises only
        `InstanceTooNew`, and an error of the database if a refusal could not be recorded.
        """
        began = time.monotonic()
        read = [self._read(message) for message in messages]
        envelopes = [item for item in read if isinstance(item, Envelope)]
        portions = batches(envelopes, lambda envelope: len(envelope.request.items), ITEMS_MAX)
        outcomes = [outcome for portion in portions for outcome in apply(self._tables, portion)]
        applied = iter(outcomes)
        some_help = any(outcome.waits or outcome.state == "applied" for outcome in outcomes)
        handled = [
            self._fate_of(message, next(applied), lambda: not some_help and hopeless())
            if isinstance(item, Envelope)
            else item
            for message, item in zip(messages, read, strict=True)
        ]
        settled = settle(self._tables.supplier, [item.outcome for item in handled], began)
        return [
            item if outcome == item.outcome else Handled(item.message, outcome, "waits")
            for item, outcome in zip(handled, settled, strict=True)
        ]

    def _read(self, message: Message) -> Envelope | Handled:
        try:
            return decode(message.body)
        except CommitRequestTooNew as error:
            outcome = CommitOutcome(
                commit_id_of(message.body) or "", "", "try_later", text_of(error), error_class(error)
            )
            self._too_new_until = time.monotonic() + PATIENCE_SECONDS
            return Handled(message, outcome, "too new")
        except InvalidCommitRequest as error:
            commit_id = commit_id_of(message.body)
            if commit_id is not None and object_of(message.body) is not None:
                table_id = table_id_of(message.body)
                (status,) = commit_statuses(
                    self._tables.supplier, [commit_id], durable_seconds=0, table_ids=[table_id]
                )
                # an earlier delivery was handled, and the object deleted with it
                if status.state == "applied":
                    return Handled(
                        message,
                        CommitOutcome(commit_id, "", "applied_before", status.error, table_id=table_id),
                        "done",
                    )
                if status.state == "rejected" and status.error != text_of(error):
                    known = (status.error, CommitRejected.__name__, table_id)
                    return Handled(message, CommitOutcome(commit_id, "", "rejected", *known), "done")
            outcome = CommitOutcome(commit_id or "", "", "rejected", text_of(error), error_class(error))
            return Handled(message, outcome, "bury")

    def _fate_of(self, message: Message, outcome: CommitOutcome, hopeless: Callable[[], bool]) -> Handled:
        if outcome.error_class == TableOfAnotherTimeline.__name__:
            return Handled(message, outcome, "bury")  # it is wanted if the other timeline is restored
        if outcome.state != "try_later":
            return Handled(message, outcome, "done")
        if outcome.waits:
            return Handled(message, outcome, "waits")
        spent = message.receive_count >= self._receives_max and time.monotonic() > self._too_new_until
        many = message.receive_count >= PATIENCE_RECEIVES * self._receives_max
        is_old = many or message.age_seconds > PATIENCE_SECONDS
        if not spent or not (is_old or hopeless()):
            return Handled(message, outcome, "later")
        times = f"tried {message.receive_count} times, the last time: {outcome.error}"
        return Handled(message, replace(outcome, state="rejected", error=times), "bury")


@dataclass(frozen=True, slots=True)
class CommitterMetrics:
    """The counts of a committer since it was created.

    `applied`, `applied_before` and `rejected` count requests, and `try_later` counts tries. The latencies are
    those of the last 2,000 messages, from sending to answer, in milliseconds. `retries` counts the retried
    transactions of this process, by operation.
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
    """A counter of handled messages. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: Counter[str] = Counter()
        self._batches = 0
        self._messages = 0
        self._messages_max = 0
        self._latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)

    def add(self, batch: Sequence[Handled]) -> None:
        with self._lock:
            self._batches += 1
            self._messages += len(batch)
            self._messages_max = max(self._messages_max, len(batch))
            self._states.update(item.outcome.state for item in batch)
            self._latencies.extend(item.message.age_seconds for item in batch if item.fate == "done")

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
