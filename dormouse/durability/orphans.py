"""Orphans: objects that the database does not know. They cost space, and are never deleted by themselves.

They come from a database that was restored or adopted: what another timeline wrote is quarantined, so that
going back to it works as long as nobody deletes. Others are left by programs that died before attempts were
announced, or that use the store for something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice

from dormouse.durability import job_objects
from dormouse.errors import InvalidInput, InvalidName, ObjectNotFound, TableNotFound
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import TableRecord
from dormouse.model.types import is_text
from dormouse.objects.names import ANSWERS, RECORDS
from dormouse.objects.store import ObjectStore
from dormouse.payloads.pack import FOLDER as PAYLOADS
from dormouse.payloads.pack import known as payload_objects
from dormouse.postgres.connection import Supplier
from dormouse.state.catalog import Catalog
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.layout import OwnTables

# Which objects the database knows: files, their sketches, what attempts write, the instance's records.


class Known:
    """What is known now. Each answer is of now: what an object belongs to may change."""

    def __init__(self, supplier: Supplier, catalog: Catalog, attempts: WriteAttempts) -> None:
        self._supplier = supplier
        self._catalog = catalog
        self._attempts = attempts

    @staticmethod
    def is_record(name: str) -> bool:
        """Whether it is one of the instance's own records, like `instance.json`, and no table's."""
        first = name.split("/", 1)[0]
        return first in RECORDS and first not in (ANSWERS, PAYLOADS)

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Those that are of no table and no attempt, and are no records.

        Each table is asked: most names are the own of one, and of these that one alone.
        """
        tables = self._catalog.tables()
        owners = {prefix: table.table_id for table in tables for prefix in table.object_prefixes}
        impossible = [name for name in names if not is_text(name)]
        # attempts first: what one has committed meanwhile its table knows
        possible = self._attempts.of_none(
            [name for name in names if is_text(name) and not self.is_record(name)]
        )
        of_table: dict[int | None, list[str]] = {}
        for name in possible:
            of_table.setdefault(owners.get(f"{'/'.join(name.split('/', 2)[:2])}/"), []).append(name)
        others = self._of_no_jobs(self._no_payloads(of_table.get(None, [])))
        found: list[str] = []
        for table in tables:
            found += self._of(table, of_table.get(table.table_id, []))
            others = self._of(table, others)
        return found + others + impossible

    def _no_payloads(self, names: list[str]) -> list[str]:
        """Those that are not of payloads which the database knows."""
        of_payloads = [name for name in names if name.startswith(f"{PAYLOADS}/")]
        known = payload_objects(self._supplier, of_payloads) if of_payloads else set()
        return [name for name in names if name not in known]

    def _of_no_jobs(self, names: list[str]) -> list[str]:
        """Those that are not of jobs which the database knows."""
        of_jobs = [name for name in names if name.startswith(f"{ANSWERS}/")]
        known = job_objects.known(self._supplier, of_jobs) if of_jobs else set()
        return [name for name in names if name not in known]

    def _of(self, table: TableRecord, names: list[str]) -> list[str]:
        """Those that the table does not know."""
        try:
            return FileChecks(OwnTables(self._supplier, table)).unknown(names) if names else []
        except TableNotFound:  # dropped since: its own objects are to be deleted
            return [name for name in names if not name.startswith(table.object_prefixes)]


def is_there(objects: ObjectStore, name: str) -> bool:
    """Whether an object that was listed is still there: what was collected is forgotten when it is gone."""
    try:
        return objects.size(name) >= 0
    except ObjectNotFound:
        return False
    except InvalidName:  # of another program: the store lists it, and no object of ours has such a name
        return True


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

    def delete(self, progress: Progress = no_progress) -> DeletedOrphans:
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
