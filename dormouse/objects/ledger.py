"""The ledgers of objects: the database's record of each object that is written.

Each kind of object has a ledger, whose package gives its SQL; `durability/ledgers.py` lists them. An object
passes through these states:

1. announced: before a byte is written, the ledger records the object's name, or a prefix of it. So objects of
   a process that dies are found;
2. settled: the transaction that needs the object records its size and digest. An expired object cannot be
   settled;
3. needed: as long as something refers to the object, checks and backups report it when it is missing;
4. expired: nothing has referred to the object for a while, and no hold keeps it. `sweep` deletes first the
   object, then its row. After a crash between the two, the row is left, and the next sweep retries.

An object that no ledger knows is an orphan. It is not swept, because it may belong to another timeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

from dormouse.errors import ObjectAlreadyExists
from dormouse.model.loops import Progress, no_progress
from dormouse.objects.fault import Fault, WrittenObject, fault_of
from dormouse.objects.store import ObjectStore

PAGE_OBJECTS = 10_000
FAILED_MAX = 1_000

logger = logging.getLogger(__name__)
Listed = TypeVar("Listed", bound=tuple[str, *tuple[object, ...]])
"""An object of a listing, as a tuple that begins with its name."""


@dataclass(frozen=True, slots=True)
class LedgerObject(WrittenObject):
    """A settled object. `needed` is True if something refers to it. Files also have their table and row
    count.
    """

    needed: bool = False
    table: str | None = None
    row_count: int | None = None


class Ledger(Protocol):
    """The database's record of one kind of objects."""

    @property
    def prefix(self) -> str:
        """The prefix that the names of all its objects begin with, for `ObjectStore.list`."""

    def written(self) -> Iterator[LedgerObject]:
        """Yields the settled objects that are needed, or that a hold keeps."""

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns the names that are neither announced nor settled."""


@dataclass
class Swept:
    """The result of a sweep. `bytes` sums known sizes only; `failed` has the first failures."""

    objects: int = 0
    bytes: int = 0
    failures: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def deleted(self) -> int:
        return self.objects

    def warn(self) -> Swept:
        """Logs the objects that could not be deleted; returns the same result."""
        for name, why in self.failed:
            logger.warning("%s is no longer needed but could not be deleted: %s", name, why)
        return self


def sweep(
    objects: ObjectStore,
    pages: Iterable[Sequence[tuple[str, int | None]]],
    forget: Callable[[list[str]], object] = lambda names: None,
    progress: Progress = no_progress,
) -> Swept:
    """Deletes objects, given as (name, bytes) page by page.

    `forget` is called with the names that were deleted.
    """
    done = Swept()
    for page in pages:
        failed = [(name, str(why)) for name, why in objects.delete([name for name, _ in page])]
        kept = {name for name, _ in failed}
        gone = {name: size for name, size in page if name not in kept}
        forget(list(gone))
        done.objects += len(gone)
        done.bytes += sum(size or 0 for size in gone.values())
        done.failures += len(failed)
        done.failed = [*done.failed, *failed][:FAILED_MAX]
        progress(done.objects, None)
    return done


def unknown_pages(
    listed: Iterable[Listed],
    unknown: Callable[[list[str]], Iterable[str]],
    page_objects: int = PAGE_OBJECTS,
) -> Iterator[list[Listed]]:
    """Yields, page by page, the listed objects whose names `unknown` returns."""
    rest = iter(listed)
    while page := {one[0]: one for one in islice(rest, page_objects)}:
        yield [page[name] for name in unknown(list(page))]


def faults(
    objects: ObjectStore, ledger: Ledger, limit: int | None = None, *, deep: bool = False
) -> list[tuple[LedgerObject, Fault]]:
    """Returns at most `limit` faults of needed objects, each with its object; with `deep`, every byte is
    read.
    """
    listed = dict(objects.list(ledger.prefix))
    found = (
        (one, fault)
        for one in ledger.written()
        # an object that is not listed with its size may have been written since
        if one.needed
        and (deep or listed.get(one.name) != one.byte_count)
        and (fault := fault_of(objects, one, deep=deep)) is not None
    )
    if not (some := list(islice(found, limit))):
        return []
    # objects that were collected meanwhile are no longer needed, so their absence is no fault
    needed = {one.name for one in ledger.written() if one.needed}
    return [(one, fault) for one, fault in some if one.name in needed]


def put_new(objects: ObjectStore, name: str, data: bytes) -> None:
    """Writes an object under a new name.

    Accepts an equal object there, which an earlier try of the store may have left.
    """
    try:
        objects.put(name, data)
    except ObjectAlreadyExists:
        # the store's client retried a write that had succeeded
        if objects.get(name) != data:
            raise
