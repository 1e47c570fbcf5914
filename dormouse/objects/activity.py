"""Activity: changes are noted beside the tables, so that schedules need not wake a database to ask.

A note is an empty object named after its minute: `activity/20261121/1542`. A process makes one a minute at
most, after what it did is visible; so one tells of all that its process did within two minutes from its name.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta

from dormouse.errors import DormouseError, ObjectAlreadyExists
from dormouse.objects.store import ObjectStore

NOTE_SECONDS = 60.0
TOLD_SECONDS = 2 * NOTE_SECONDS
"""What happened so long after the minute that a note is named after is told by that note."""

_FOLDER = "activity"
_DAY, _MINUTE = "%Y%m%d", "%H%M"

logger = logging.getLogger(__name__)
_noted: dict[str, float] = {}  # that threads meet in it costs a note more


def note(objects: ObjectStore) -> None:
    """Tells that something has changed; a store that cannot be written to is only logged."""
    now = time.monotonic()
    if now - _noted.get(objects.url, float("-inf")) < NOTE_SECONDS:
        return
    _noted[objects.url] = now
    try:
        objects.put(f"{_FOLDER}/{datetime.now(UTC):{_DAY}/{_MINUTE}}", b"")
    except ObjectAlreadyExists:
        return
    except DormouseError as error:
        _noted.pop(objects.url, None)
        logger.warning("activity is not noted, so schedules may come late: %s", error)


def note_if_shared(objects: ObjectStore) -> None:
    """As `note`, of a store in S3: the schedules of a deployed instance work there, none in a folder."""
    if is_shared(objects):
        note(objects)


def is_shared(objects: ObjectStore) -> bool:
    """Returns whether a store is in S3, so that other hosts see it and its database may pause itself."""
    return objects.url.startswith("s3://")


def is_noted_since(objects: ObjectStore, moment: datetime) -> bool:
    """Whether something may have changed since then."""
    earliest = moment.astimezone(UTC) - timedelta(seconds=TOLD_SECONDS)
    days = (datetime.now(UTC).date() - earliest.date()).days
    # tomorrow too, as clocks differ
    dates = [earliest.date() + timedelta(days=day) for day in range(days + 2)]
    first = f"{_FOLDER}/{earliest:{_DAY}/{_MINUTE}}"
    return any(name >= first for day in dates for name, _ in objects.list(f"{_FOLDER}/{day:{_DAY}}"))


def forget_before(objects: ObjectStore, moment: datetime) -> None:
    """Deletes the notes of earlier days."""
    first = f"{_FOLDER}/{moment.astimezone(UTC):{_DAY}}"
    objects.delete([name for name, _ in objects.list(_FOLDER) if name < first])
