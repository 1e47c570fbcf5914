"""Comparisons of a table's references, files, counts, removal log and job claims, which must agree.

They are made with set-based SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import psycopg

from dormouse.model.file_reference import INLINED_NAME, is_inlined
from dormouse.model.stored_conditions import ROWS
from dormouse.model.table import Problem, ProblemKind
from dormouse.model.text import narrow_id
from dormouse.objects.ledger import LedgerObject
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.postgres.queries import Uuids
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import allow_scans
from dormouse.state.files.holds import lock_history
from dormouse.state.files.layout import OwnTables
from dormouse.state.files.totals import FOUND_MAX, Difference, Differences, named_rows, not_counted

T = TypeVar("T")
PAGE_FILES = 10_000
_FIRST = UUID(int=0)
_QUERIES: dict[str, ProblemKind] = {
    "check_references": "reference_without_file",
    "check_files": "file_without_reference",
    "check_places": "partitions",
    "check_rows": "totals",
    "check_claims": "totals",
    "check_log": "totals",
    "check_counts": "totals",
    "check_contents": "object_missing",
    "check_deletions": "object_missing",
}
_LISTED = f'"{ROWS}": .*"content": "([^"]+)"'
"""A regular expression for the name of the file, in the stored condition of a deletion that lists rows."""


@dataclass(frozen=True, slots=True)
class TrackedFile(LedgerObject):
    """A file with its recorded facts and the number of its references.

    `partition_id` is the partition that has all rows of the file, if one has.
    """

    file_id: UUID = _FIRST
    min_key: bytes | None = None
    max_key: bytes | None = None
    references: int = 0
    partition_id: str | None = None


class FileChecks:
    """The checks of one table, and the list of the objects that it should have: files and their sketches."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own
        self.prefix = own.table.object_prefix
        self._differences = Differences(own)

    def problems(self) -> list[Problem]:
        """Returns the problems that one snapshot shows; at most 1,000 of each kind."""
        return self._run(self._problems, isolation=Isolation.REPEATABLE_READ)

    def files(self, *, with_references: bool = False) -> Iterator[TrackedFile]:
        """Yields all files of the table, sorted by id."""
        values = {"table": self._own.table.name, "limit": PAGE_FILES, "with_references": with_references}
        after = _FIRST
        while True:
            page = [TrackedFile(*row) for row in self._rows("check_page", {**values, "after": after})]
            yield from page
            if len(page) < PAGE_FILES:
                return
            after = page[-1].file_id

    def written(self) -> Iterator[LedgerObject]:
        """Yields each file and its sketches. The size and digest of sketches are not recorded.

        Leaves out inlined files, which are no objects.
        """
        for file in self.files():
            if not is_inlined(file.name):
                yield from (file, LedgerObject(file.name + SKETCHES_SUFFIX))

    def referenced(self, file_ids: Sequence[UUID]) -> dict[UUID, int | None]:
        """Returns the size of each given file that has a reference now, by file id."""
        return dict(self._rows("check_again", {"file_ids": list(file_ids)}))

    def listed(self) -> list[str]:
        """Returns the names of the files in the database with rows that deletions list."""
        return [name for (name,) in self._rows("listed", {"listed": _LISTED})]

    def note_digests(self, digests: Mapping[UUID, bytes]) -> None:
        """Records the digests of files that were written without one."""
        values = {"file_ids": list(digests), "digests": Uuids(list(digests.values()))}

        def work(conn: psycopg.Connection[Any]) -> None:
            # garbage collection finds files by row ids (ctid), which this update changes
            lock_history(conn, self._own.table.table_id)
            conn.execute(self._own.on("note_digests"), values)

        self._own.run(work, operation="note digests")

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns those of the names that belong neither to a file of the table nor to a file's sketches."""
        ids = [narrow_id(name.removesuffix(SKETCHES_SUFFIX)) for name in names]
        return [name for (name,) in self._rows("check_unknown", {"names": list(names), "file_ids": ids})]

    def _problems(self, conn: psycopg.Connection[Any]) -> list[Problem]:
        allow_scans(conn)
        table = self._own.table
        values = {"table_id": table.table_id, "limit": FOUND_MAX, "inlined": INLINED_NAME, "listed": _LISTED}
        found = [
            Problem(kind, table.name, *row)
            for name, kind in _QUERIES.items()
            if name in self._own.layout.queries
            for row in conn.execute(self._own.on(name), values)
        ]
        lost = [*self._differences.lost_in(conn), *self._totals(conn), *self._differences.remembered_in(conn)]
        named = {problem.filename for problem in found if problem.kind == "file_without_reference"}
        return found + [
            Problem("totals", table.name, each.partition_id, each.filename, each.detail)
            for each in dict.fromkeys(lost)
            if each.filename not in named
        ]

    def _totals(self, conn: psycopg.Connection[Any]) -> Iterator[Difference]:
        """Yields a difference for each total that is not the stored total plus the changes since then."""
        key = {"table_id": self._own.table.table_id}
        since = named_rows(conn.execute(self._own.on("count_since"), key))
        if since:
            [now] = named_rows(conn.execute(self._own.on("count_all"), key))
            yield from not_counted(since[0], now)

    def _rows(self, name: str, values: dict[str, Any]) -> list[Any]:
        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            key = {**values, "table_id": self._own.table.table_id}
            return conn.execute(self._own.on(name), key).fetchall()

        return self._run(work)

    def _run(
        self,
        work: Callable[[psycopg.Connection[Any]], T],
        isolation: Isolation = Isolation.READ_COMMITTED,
    ) -> T:
        """Runs `work` in a transaction that first locks the layout's tables against conversion and drop."""

        def locked(conn: psycopg.Connection[Any]) -> T:
            self._own.still(conn)
            return work(conn)

        return self._own.run(locked, isolation=isolation, read_only=True, operation="check")
