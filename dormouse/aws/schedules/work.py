"""The test whether a schedule has work. It reads only the object store, so that the database can stay asleep.

A run leaves a record, `work/<kind>/<start>-<nonce>.json`, with the time of the next certain work. The next
run has work in three cases: activity was noted since the last run began (dormouse/objects/store.py), the time
of certain work has come, or a day has passed. A failed run leaves no record, so the next run has the work of
both.
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
"""The number of hours after which a schedule has work in any case. A writer may have died before it noted
activity."""

NOTES_KEPT = timedelta(hours=2 * LOOK_HOURS_MAX)
Why = Literal["the first run", "activity", "due", "a day has passed"]

logger = logging.getLogger(__name__)
_TIME = "%Y%m%dT%H%M%S%fZ"


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a run that ended: its start, the time of the next certain work, and its memory.

    `memory` has values that the next run of the same kind needs.
    """

    began_at: datetime
    due_at: datetime | None = None
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A run that has work, with the reason and the record of the run before."""

    why: Why
    began_at: datetime
    last: Record | None
    _superseded: tuple[str, ...]


class Schedule:
    """The runs of one kind of schedule, such as "garbage"."""

    def __init__(self, objects: ObjectStore, kind: str, now: Callable[[], datetime] = utc_now) -> None:
        self._objects = objects
        self._folder = f"work/{kind}"
        self._now = now

    def turn(self) -> Turn | None:
        """Returns a run if there is work now, or None."""
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
        """Records that a run has done its work, and the time at which more work is due.

        Deletes the records that the run found at its start. Records of concurrent runs stay, because they may
        name due work that this run has not seen.
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
        """Returns a record, or None if it cannot be read or another run has just deleted it."""
        try:
            began = datetime.strptime(name.rpartition("/")[2].partition("-")[0], _TIME).replace(tzinfo=UTC)
            content = json.loads(self._objects.get(name))
            due_at = content["due_at"]
            return Record(began, due_at and datetime.fromisoformat(due_at), content["memory"])
        except (ObjectNotFound, ValueError, KeyError, TypeError):
            return None
