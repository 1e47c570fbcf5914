"""Deletions are announced in the store, so that one who adopts it waits for those that are under way.

A process may be frozen between its question whether it owns the store and the deletion that follows, for as
long as it likes. So it announces the deletion first, then asks, deletes, and takes the announcement back. Who
adopts marks the store first, then looks for announcements: one of the two always sees the other.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from dormouse.durability.incarnations import Process, new_deletion_name, records, this_process
from dormouse.errors import InstanceLocked, ObjectNotFound
from dormouse.objects import ObjectStore

POLL_SECONDS = 0.25
TOLD_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announced:
    """A deletion that was announced, and by which process."""

    name: str
    process: Process
    since: str


@contextmanager
def announced(objects: ObjectStore, number: int) -> Iterator[None]:
    """Announces a deletion under an incarnation. Raises `ObjectStoreError`, before anything is deleted."""
    name = new_deletion_name(number)
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    objects.put(name, json.dumps({**asdict(this_process()), "since": since}).encode())
    try:
        yield
    finally:
        take_back(objects, [name])


def take_back(objects: ObjectStore, names: Sequence[str]) -> None:
    """The deletions are over."""
    for name, why in objects.delete(names) if names else ():
        logger.warning("%s is not needed and could not be deleted: %s", name, why)


def take_back_dead(objects: ObjectStore, names: Sequence[str]) -> list[Announced]:
    """Takes back those whose process has surely ended; gives the others."""
    found = [one for name in names if (one := _read(objects, name)) is not None]
    gone = [one for one in found if one.process.is_gone()]
    take_back(objects, [one.name for one in gone])
    return [one for one in found if one not in gone]


def wait_for_deletions(
    objects: ObjectStore,
    before: int,
    *,
    seconds_max: float = 0.0,
    force: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Waits until none is under way that was announced under an incarnation `before` this one.

    With `force`, what is left after `seconds_max` is taken for ended, and logged. `tell` is told what is
    waited for. Raises `InstanceLocked` when some are left, which may still delete.
    """
    deadline = time.monotonic() + seconds_max
    told_at = float("-inf")
    while True:
        names = [name for number, name in records(objects).deletions if number < before]
        left = take_back_dead(objects, names)
        if not left:
            return
        now = time.monotonic()
        if now >= deadline:
            break
        if now - told_at >= TOLD_SECONDS:
            told_at = now
            tell(f"{_of(left)} to delete objects: waiting up to {deadline - now:.0f} s for its end")
        time.sleep(min(POLL_SECONDS, deadline - now))
    if not force:
        raise InstanceLocked(
            f"{_of(left)} to delete objects for the owner of before, and may go on at any time: end it, then "
            "run 'dormouse adopt' again. (With --force it is taken for ended; should it go on, the objects "
            "that it deletes are lost to this database)"
        )
    logger.warning("%s to delete objects, and is taken for ended: what it deletes later is lost", _of(left))
    take_back(objects, [one.name for one in left])


def _of(left: Sequence[Announced]) -> str:
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return f"{left[0].process}{more} began at {left[0].since}"


def _read(objects: ObjectStore, name: str) -> Announced | None:
    """None: it is over."""
    try:
        said = json.loads(objects.get(name))
        since = str(said.pop("since"))
        return Announced(name, Process(**said), since)
    except ObjectNotFound:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # of a newer Dormouse, perhaps
        return Announced(name, Process(), "a time that it does not tell")
