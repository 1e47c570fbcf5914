"""The ledgers of objects: what the database knows of each object that is written.

Each kind of objects has a ledger, whose room gives its SQL; `durability/ledgers.py` lists them. An object is

1. announced: the ledger knows its name, or what that begins with, before a byte is written, so that the
   objects of a process that dies are found;
2. settled: the transaction that relies on it records its size and digest. What has expired cannot be settled;
3. relied on: as long as something does, checks and backups miss the object when it is gone;
4. expired: nothing has relied on it for a while, and no hold keeps it. `sweep` deletes first the object, then
   its row: a crash between the two leaves a row, which is tried again.

What no ledger knows is an orphan, and is not swept: it may be another timeline's.
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
"""An object of a listing, which begins with its name."""


@dataclass(frozen=True, slots=True)
class LedgerObject(WrittenObject):
    """An object that was settled; `needed`: something relies on it. Of a file, its table and its rows."""

    needed: bool = False
    table: str | None = None
    row_count: int | None = None


class Ledger(Protocol):
    """What the database knows of one kind of objects."""

    @property
    def prefix(self) -> str:
        """What the names of all its objects begin with, as `ObjectStore.list` takes it."""

    def written(self) -> Iterator[LedgerObject]:
        """Yields the objects that were settled; of those that nothing relies on, what a hold keeps."""

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns those of some names that it does not know: neither as announced nor as settled."""


@dataclass
class Swept:
    """What a sweep deleted; `bytes` as far as they are known. `failed` are the first of what it could not."""

    objects: int = 0
    bytes: int = 0
    failures: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def deleted(self) -> int:
        return self.objects

    def warn(self) -> Swept:
        """Logs what could not be deleted; gives itself."""
        for name, why in self.failed:
            logger.warning("%s is not needed and could not be deleted: %s", name, why)
        return self


def sweep(
    objects: ObjectStore,
    pages: Iterable[Sequence[tuple[str, int | None]]],
    forget: Callable[[list[str]], object] = lambda names: None,
    progress: Progress = no_progress,
) -> Swept:
    """Deletes objects, given as (name, bytes) page by page; `forget` then forgets those that are gone."""
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
    """Yields those of the listed objects whose names `unknown` returns, page by page."""
    rest = iter(listed)
    while page := {one[0]: one for one in islice(rest, page_objects)}:
        yield [page[name] for name in unknown(list(page))]


def faults(
    objects: ObjectStore, ledger: Ledger, limit: int | None = None, *, deep: bool = False
) -> list[tuple[LedgerObject, Fault]]:
    """Returns the faults of the objects that something relies on, at most `limit`."""
    listed = dict(objects.list(ledger.prefix))
    found = (
        (one, fault)
        for one in ledger.written()
        # what is not listed so may have been written since
        if one.needed
        and (deep or listed.get(one.name) != one.byte_count)
        and (fault := fault_of(objects, one, deep=deep)) is not None
    )
    if not (some := list(islice(found, limit))):
        return []
    # what was collected meanwhile was needed no more before
    needed = {one.name for one in ledger.written() if one.needed}
    return [(one, fault) for one, fault in some if one.name in needed]


def put_new(objects: ObjectStore, name: str, data: bytes) -> None:
    """Writes an object under a name that no other has: it may be there, if the store tried again."""
    try:
        objects.put(name, data)
    except ObjectAlreadyExists:
        # the store's client tried again a write that had succeeded
        if objects.get(name) != data:
            raise
