"""What becomes of a batch of messages: the same for a committer and for a lambda."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from dormouse.commits.apply import apply
from dormouse.commits.outcomes import CommitOutcome, commit_statuses, error_class, settle, text_of
from dormouse.commits.pointers import object_of
from dormouse.commits.queue import Message
from dormouse.commits.requests import Envelope, commit_id_of, decode
from dormouse.commits.table_cache import Tables
from dormouse.errors import InvalidCommitRequest

RECEIVES_MAX = 10
PATIENCE_SECONDS = 150.0
"""What a request needs may be with a committer that died: its messages stay hidden for so long at most."""

PATIENCE_RECEIVES = 4  # times as many as the limit, whatever the clocks say

Fate = Literal["done", "later", "bury"]


@dataclass(frozen=True, slots=True)
class Handled:
    """A message, its outcome, and what to do with it now."""

    message: Message
    outcome: CommitOutcome
    fate: Fate


class Handler:
    """Applies the requests of messages, and keeps why one was refused where its submitter finds it.

    What waits for its inputs, or fails, at `receives_max` deliveries is refused when it is so old that
    nothing it needs can still be hidden, or when `hopeless` knows that nothing else is in the queue.
    """

    def __init__(self, tables: Tables, *, receives_max: int = RECEIVES_MAX) -> None:
        self._tables = tables
        self._receives_max = receives_max

    def handle(
        self, messages: Sequence[Message], hopeless: Callable[[], bool] = lambda: False
    ) -> list[Handled]:
        """What became of each, in their order. Raises only when a refusal could not be kept."""
        read = [self._read(message) for message in messages]
        envelopes = [item for item in read if isinstance(item, Envelope)]
        applied = iter(apply(self._tables, envelopes))
        handled = [
            self._fate_of(message, next(applied), hopeless) if isinstance(item, Envelope) else item
            for message, item in zip(messages, read, strict=True)
        ]
        settle(self._tables.supplier, [item.outcome for item in handled])
        return handled

    def _read(self, message: Message) -> Envelope | Handled:
        try:
            return decode(message.body)
        except InvalidCommitRequest as error:
            commit_id = commit_id_of(message.body)
            if commit_id is not None and object_of(message.body) is not None and self._is_applied(commit_id):
                # its object went with an earlier delivery
                return Handled(message, CommitOutcome(commit_id, "", "applied_before"), "done")
            outcome = CommitOutcome(commit_id or "", "", "rejected", text_of(error), error_class(error))
            return Handled(message, outcome, "bury")

    def _is_applied(self, commit_id: str) -> bool:
        return commit_statuses(self._tables.supplier, [commit_id])[0].state == "applied"

    def _fate_of(self, message: Message, outcome: CommitOutcome, hopeless: Callable[[], bool]) -> Handled:
        if outcome.state != "try_later":
            return Handled(message, outcome, "done")
        spent = message.receive_count >= self._receives_max and outcome.was_tried
        if not spent or not (self._is_old(message) or hopeless()):
            return Handled(message, outcome, "later")
        times = f"tried {message.receive_count} times, the last time: {outcome.error}"
        return Handled(message, replace(outcome, state="rejected", error=times), "bury")

    def _is_old(self, message: Message) -> bool:
        age = (datetime.now(UTC) - message.sent_at).total_seconds()
        return age > PATIENCE_SECONDS or message.receive_count >= PATIENCE_RECEIVES * self._receives_max
