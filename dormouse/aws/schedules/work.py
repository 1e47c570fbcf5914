"""The test whether a schedule has work, by the object store alone, so that the database can stay asleep.

A run leaves a record, `work/<kind>/<start>-<nonce>.json`, with the time of the next certain work. The next
run has work if activity was noted since the last one began (dormouse/objects/store.py), if work is due, or
if a day has passed. A run that fails leaves no record, so the next one has the work of both.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from dormouse.errors import ObjectNotFound
from dormouse.objects.store import ObjectStore, forget_activity, is_noted_since

LOOK_HOURS_MAX = 24
"""A schedule runs after this time in any case: a writer may have died before it noted its activity."""

NOTES_KEPT = timedelta(hours=2 * LOOK_HOURS_MAX)
Why = Literal["the first run", "activity", "due", "a day has passed"]

logger = logging.getLogger(__name__)
_TIME = "%Y%m%dT%H%M%S%fZ"


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Record:
    """A run that ended: its start, the time of the next certain work, and its kind's memory."""

    began_at: datetime
    due_at: datetime | None = None
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A run that has work, with the reason."""

    why: Why
    began_at: datetime
    last: Record | None
    _superseded: tuple[str, ...]


class Schedule:
    """The runs of one kind, such as "garbage"."""

    def __init__(self, objects: ObjectStore, kind: str, now: Callable[[], datetime] = utc_now) -> None:
        self._objects = objects
        self._folder = f"work/{kind}"
        self._now = now

    def turn(self) -> Turn | None:
        """Returns the work that is due now, or None."""
        began_at = self._now()
        names = sorted(name for name, _ in self._objects.list(self._folder))
        records = [record for name in names if (record := self._record(name)) is not None]
        why = self._why(records, began_at)
        if why is None:
            return None
        logger.info("%s: there is work: %s", self._folder, why)
        return Turn(why, began_at, records[-1] if records else None, tuple(names))

    def done(
        self, turn: Turn, *, due_at: datetime | None = None, memory: dict[str, Any] | None = None
    ) -> None:
        """Records that the run has done its work, and what is due later.

        Keeps records of concurrent runs, which may know of due work that this run has not seen.
        """
        content = {"due_at": None if due_at is None else due_at.isoformat(), "memory": memory or {}}
        name = f"{self._folder}/{turn.began_at.astimezone(UTC):{_TIME}}-{uuid.uuid4().hex[:8]}.json"
        self._objects.put(name, json.dumps(content).encode())
        self._objects.delete(turn._superseded)
        forget_activity(self._objects, turn.began_at - NOTES_KEPT)

    def _why(self, records: list[Record], now: datetime) -> Why | None:
        if not records:
            return "the first run"
        last = records[-1]
        if any(record.due_at is not None and record.due_at <= now for record in records):
            return "due"
        if now - last.began_at >= timedelta(hours=LOOK_HOURS_MAX):
            return "a day has passed"
        return "activity" if is_noted_since(self._objects, last.began_at) else None

    def _record(self, name: str) -> Record | None:
        """Returns a record, or None if another run has just deleted it or it is unreadable."""
        try:
            began = datetime.strptime(name.rpartition("/")[2].partition("-")[0], _TIME).replace(tzinfo=UTC)
            content = json.loads(self._objects.get(name))
            due_at = content["due_at"]
            return Record(began, due_at and datetime.fromisoformat(due_at), content["memory"])
        except (ObjectNotFound, ValueError, KeyError, TypeError):
            return None
