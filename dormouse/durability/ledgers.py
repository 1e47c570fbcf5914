"""Ledgers and orphans. A ledger lists objects of one kind that the database knows. Orphans are in no ledger.

Checks, backups and the search for orphans are loops over the ledgers. So a new kind of object needs a new
ledger here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from dormouse.errors import InvalidInput, InvalidName, ObjectNotFound, TableNotFound
from dormouse.model.loops import Progress
from dormouse.model.table import TableRecord, is_edited
from dormouse.model.types import is_text
from dormouse.objects.ledger import Ledger, LedgerObject, Swept, sweep, unknown_pages
from dormouse.objects.names import ANSWERS, PAYLOADS, RECORDS
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.state.catalog import Catalog
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.layout import OwnTables
from dormouse.state.files.write_streams import PutFiles

FOLDERS = (PAYLOADS, ANSWERS)
"""The first path segments of the names of objects that a ledger has but that belong to no table."""

_OF_JOB = re.compile(rf"{ANSWERS}/([0-9a-f]{{32}})/")
_ANSWER = re.compile(rf"{ANSWERS}/[0-9a-f]{{32}}/\d+\.parquet")
_INCARNATION = re.compile(r"data/[0-9a-f]{32}/(\d+)/")
_OF_TABLE = re.compile(r"data/(?:[0-9a-f]{32}|t\d+)/")
_QUERIES = load(__file__, "ledgers")


class Ledgers:
    """The ledgers of an instance. Results are not cached, because the owner of an object may change."""

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        from dormouse.payloads.pack import PayloadObjects

        self.supplier, self.objects = supplier, objects
        self._attempts = WriteAttempts(supplier, objects)
        self.catalog = Catalog(supplier, self._attempts)
        self.of_instance: tuple[Ledger, ...] = (PayloadObjects(supplier, objects), JobObjects(supplier))

    def of_table(self, table: TableRecord) -> tuple[Ledger, ...]:
        """Returns the ledgers of those objects of a table that are not its Parquet files."""
        return (PutFiles(self.supplier, table),) if is_edited(table.properties) else ()

    def files(self, table: TableRecord) -> FileChecks:
        """Returns the ledger of a table's files."""
        return FileChecks(OwnTables(self.supplier, table))

    def written(self) -> Iterator[LedgerObject]:
        """Yields each object that was written according to a ledger."""
        for table in self.catalog.tables():
            with suppress(TableNotFound):  # dropped meanwhile
                for ledger in (*self.of_table(table), self.files(table)):
                    yield from ledger.written()
        for ledger in self.of_instance:
            yield from ledger.written()

    @staticmethod
    def is_record(name: str) -> bool:
        """Returns whether an object is a record of the instance, such as `instance.json`.

        No ledger has such objects.
        """
        first = name.split("/", 1)[0]
        return first in RECORDS and first not in FOLDERS

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns those of the names that no ledger has and that are not records of the instance."""
        impossible = [name for name in names if not is_text(name)]
        others = [name for name in names if is_text(name) and not self.is_record(name)]
        # attempts first: if one commits in between, the table knows its files
        others = self._attempts.unknown(others)
        for ledger in self.of_instance:
            others = ledger.unknown(others)
        return self._of_no_table(others) + impossible

    def _of_no_table(self, names: Sequence[str]) -> list[str]:
        """Returns those of the names that are not files of any table.

        The prefix of most names shows their table, and these names are looked up in that table alone. All
        other names are looked up in every table.
        """
        tables = self.catalog.tables()
        owners = {prefix: table.table_id for table in tables for prefix in table.object_prefixes}
        of_table: dict[int | None, list[str]] = {}
        for name in names:
            of_table.setdefault(owners.get(f"{'/'.join(name.split('/', 2)[:2])}/"), []).append(name)
        others, unknown = of_table.get(None, []), list[str]()
        for table in tables:
            unknown += self._of_other_tables(table, of_table.get(table.table_id, []))
            others = self._of_other_tables(table, others)
        return unknown + others

    def _of_other_tables(self, table: TableRecord, names: list[str]) -> list[str]:
        try:
            return self.files(table).unknown(names) if names else []
        except TableNotFound:  # dropped since, so its objects are deleted anyway
            return [name for name in names if not name.startswith(table.object_prefixes)]


class JobObjects:
    """The ledger of the objects of jobs: their answers, and data sent for them. They have no digests."""

    prefix = ANSWERS

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier

    def written(self) -> Iterator[LedgerObject]:
        """Yields nothing, because a job records only the objects that it may have written."""
        return iter(())

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns those of the names that belong to no job in the database. Jobs in all states count."""
        keys = of_jobs(names)
        work = rows_of(_QUERIES["known"], {"job_keys": list(set(keys.values()))})
        rows = run_lookup(self._supplier, work, operation="find jobs of objects") if keys else []
        known = {key for (key,) in rows}
        return [name for name in names if keys.get(name) not in known]


def of_jobs(names: Sequence[str]) -> Mapping[str, UUID]:
    """Returns the id of the job to which each name belongs. Leaves out names that belong to no job."""
    return {name: UUID(match[1]) for name in names if (match := _OF_JOB.match(name))}


def is_answer(name: str) -> bool:
    """Returns whether the name is that of a job's answer, and not of data that was sent for a job."""
    return _ANSWER.fullmatch(name) is not None


# Objects that no ledger knows cost space, and are never deleted automatically. Most come from a database that
# was restored or adopted. Objects of another timeline are quarantined: that timeline can be restored as long
# as no user deletes them. Others are of programs that died before they announced them, or of other software.


def is_there(objects: ObjectStore, name: str) -> bool:
    """Returns whether a listed object still exists.

    Garbage collection deletes an object before its record. So a listed object that the database no longer
    knows may have been collected.
    """
    try:
        return objects.size(name) >= 0
    except ObjectNotFound:
        return False
    except InvalidName:  # of another program: the store lists it, but Dormouse makes no such names
        return True


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that the database does not know.

    It is `quarantined` if another timeline may own it. This is so if the object was written before this
    database was adopted, or if this database is a copy that was not adopted.
    """

    name: str
    byte_count: int
    written_at: datetime
    quarantined: bool


def orphan_pages(ledgers: Ledgers, adopted: int, older_than: timedelta) -> Iterator[list[Orphan]]:
    """Yields the orphans in pages.

    Orphans that were written under incarnations before `adopted` are quarantined.

    Skips objects younger than `older_than`, because a program may write objects before it records them.
    Raises `InvalidInput` for an invalid `older_than`.
    """
    if not isinstance(older_than, timedelta) or older_than < timedelta(0):
        raise InvalidInput(f"older_than must be a timedelta of 0 or more, not {older_than!r}")
    before = datetime.now(UTC) - older_than
    listed = ledgers.objects.list_dated()
    old = (item for item in listed if item[2] <= before and not ledgers.is_record(item[0]))
    return (
        [
            Orphan(*item, quarantined=is_quarantined(item[0], adopted))
            for item in page
            if is_there(ledgers.objects, item[0])
        ]
        for page in unknown_pages(old, ledgers.unknown)
    )


def delete_orphans(ledgers: Ledgers, adopted: int, older_than: timedelta, progress: Progress) -> Swept:
    """Deletes the orphans, one page after another, and returns the numbers of deleted objects and bytes."""
    pages = orphan_pages(ledgers, adopted, older_than)
    named = ([(orphan.name, orphan.byte_count) for orphan in page] for page in pages)
    return sweep(ledgers.objects, named, progress=progress)


def is_quarantined(name: str, adopted: int) -> bool:
    """Returns whether another timeline may own an orphan. `adopted` is the last adoption's incarnation."""
    if adopted and name.split("/", 1)[0] in FOLDERS:
        return True
    if not adopted or not _OF_TABLE.match(name):
        return False
    match = _INCARNATION.match(name)
    return match is None or int(match[1]) < adopted
