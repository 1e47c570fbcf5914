"""Which objects the database knows: files, their sketches, what attempts write, the instance's records."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.durability import job_objects
from dormouse.errors import InvalidName, ObjectNotFound, TableNotFound
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text
from dormouse.objects import ObjectStore
from dormouse.objects.names import ANSWERS, RECORDS
from dormouse.payloads.objects import FOLDER as PAYLOADS
from dormouse.payloads.objects import known as payload_objects
from dormouse.postgres.connection import Supplier
from dormouse.state.catalog import Catalog
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.own_tables import OwnTables


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
