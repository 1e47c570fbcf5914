"""Orphans: objects that the database does not know. They cost space, and are never deleted by themselves.

They come from a database that was restored or adopted: what another timeline wrote is quarantined, so that
going back to it works as long as nobody deletes. Others are left by programs that died before attempts were
announced, or that use the store for something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice

from dormouse.durability.unknown import Known, is_there
from dormouse.errors import InvalidInput
from dormouse.objects import ObjectStore
from dormouse.objects.names import ANSWERS
from dormouse.payloads.objects import FOLDER as PAYLOADS

PAGE_OBJECTS = 10_000
FAILED_MAX = 1_000
_INCARNATION = re.compile(r"data/[0-9a-f]{32}/(\d+)/")
_OF_TABLE = re.compile(r"data/(?:[0-9a-f]{32}|t\d+)/")


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that the database does not know.

    `quarantined`: it may be another timeline's: it was written for a table before this database was adopted,
    or this one is a copy that was not.
    """

    name: str
    byte_count: int
    written_at: datetime
    quarantined: bool


@dataclass
class DeletedOrphans:
    """What was deleted; `failed` are the first of what was not, each with the reason."""

    objects: int = 0
    bytes: int = 0
    failures: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


class Orphans:
    """The orphans of one instance; what was written under incarnations before `adopted` is quarantined."""

    def __init__(self, objects: ObjectStore, known: Known, adopted: int, older_than: timedelta) -> None:
        # a program may write objects before it tells of them
        if not isinstance(older_than, timedelta) or older_than < timedelta(0):
            raise InvalidInput(f"older_than must be a timedelta of 0 or more, not {older_than!r}")
        self._objects = objects
        self._known = known
        self._adopted = adopted
        self._written_before = datetime.now(UTC) - older_than

    def __iter__(self) -> Iterator[Orphan]:
        for page in self._pages():
            yield from page

    def delete(
        self, progress: Callable[[int, int | None], object] = lambda done, total: None
    ) -> DeletedOrphans:
        """Deletes them, each page as soon as it was found to be unknown."""
        done = DeletedOrphans()
        for page in self._pages():
            failed = [(name, str(why)) for name, why in self._objects.delete([one.name for one in page])]
            kept = {name for name, _ in failed}
            gone = [one for one in page if one.name not in kept]
            done.objects += len(gone)
            done.bytes += sum(one.byte_count for one in gone)
            done.failures += len(failed)
            done.failed = [*done.failed, *failed][:FAILED_MAX]
            progress(done.objects, None)
        return done

    def _pages(self) -> Iterator[list[Orphan]]:
        old = (
            (name, size, written_at)
            for name, size, written_at in self._objects.list_dated()
            if written_at <= self._written_before and not self._known.is_record(name)
        )
        while page := list(islice(old, PAGE_OBJECTS)):
            unknown = set(self._known.unknown([name for name, _, _ in page]))
            yield [
                Orphan(*one, quarantined=is_quarantined(one[0], self._adopted))
                for one in page
                if one[0] in unknown and is_there(self._objects, one[0])
            ]


def is_quarantined(name: str, adopted: int) -> bool:
    """Whether what the database does not know may be another timeline's: see `Orphan`."""
    if adopted and name.startswith((f"{PAYLOADS}/", f"{ANSWERS}/")):
        return True
    if not adopted or not _OF_TABLE.match(name):
        return False
    found = _INCARNATION.match(name)
    return found is None or int(found[1]) < adopted
