"""The erasures of one table: the files that had rows of a deletion, and what became of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from dormouse.model.text import narrow_id
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.state.files.deletions import Deletions
from dormouse.state.files.layout import MAY_BE_OF
from dormouse.state.files.reads import KeyBounds
from dormouse.state.files.store import FileReferenceStore

PAGE_FILES = 256
_QUERIES = load(__package__ or "", "erasures")
_CANDIDATES = _QUERIES["candidates"].including(may_be_of=MAY_BE_OF)


class Candidate(NamedTuple):
    """A file that may have rows of an erasure; `is_found`: it has."""

    file_id: UUID
    filename: str
    byte_count: int | None
    is_found: bool


class ErasedBy(NamedTuple):
    """An erasure that took files out of the history: what it began and ended, by the database's clock."""

    deletion_id: int
    began_at: datetime
    ended_at: datetime


class Erasure:
    """One erasure. Whatever step it was ended at, each of its methods goes on where it was."""

    def __init__(self, store: FileReferenceStore, deletion_id: int) -> None:
        self._store = store
        self._own = store.own
        self.deletion_id = deletion_id

    @property
    def run_id(self) -> str:
        """Under which its compaction jobs run: always the same, so that it finds those that it left."""
        return str(uuid.uuid5(UUID(self._own.table.uuid), f"erasure {self.deletion_id}"))

    def candidates(self) -> Iterator[list[Candidate]]:
        """The files that may have rows, in pages; streamed."""
        after = UUID(int=0)
        while True:
            page = [Candidate(*row) for row in self._rows(_CANDIDATES, after=after, limit=PAGE_FILES)]
            if page:
                yield page
            if len(page) < PAGE_FILES:
                return
            after = page[-1].file_id

    def looked(
        self,
        rows: Mapping[str, int],
        looked: int,
        conn: psycopg.Connection[Any] | None = None,
        *,
        is_freed: bool = False,
    ) -> None:
        """So many files were looked at; `rows` are those of files that have some."""
        found = {name: count for name, count in rows.items() if count}
        values = {
            "file_ids": [narrow_id(name) for name in found],
            "filenames": list(found),
            "row_counts": list(found.values()),
            "looked": looked,
            "is_freed": is_freed,
        }
        if conn is None:
            self._rows("looked", **values)
        else:
            conn.execute(_QUERIES["looked"].on(), self._values(values))

    def referenced(self) -> tuple[int, int]:
        """How many references there are to files with rows; and how many of them no job holds."""
        [(all_of_them, free)] = self._rows("referenced")
        return all_of_them, free

    def is_undone(self) -> bool:
        """Whether a restore to a moment before it took its deletion back."""
        return bool(self._rows("is_undone")[0][0])

    def release_others(self, *, running_too: bool) -> int:
        """Takes files with rows from jobs that no process runs, or from all others; how many still hold some.

        From its own, too, that it did not run in time. Such a job commits nothing.
        """
        left = 0
        for job_id, partition_id, is_running in self._rows("held_by_others", run_id=self.run_id):
            if is_running and not running_too:
                left += 1
            else:
                self._store.unassign_job(job_id, partition_id=partition_id)
        return left

    def to_free(self) -> list[str]:
        """Some of the files that had rows, and that nothing refers to; none when all are freed."""
        return [row[0] for row in self._rows("to_free", limit=PAGE_FILES)]

    def freed(self, filenames: Sequence[str]) -> None:
        self._rows("freed", filenames=list(filenames))

    def consumers_behind(self) -> list[str]:
        return [row[0] for row in self._rows("consumers_behind")]

    def writers(self) -> list[tuple[str, str]]:
        """Attempts that were begun before and go on: their ids, and where their objects are."""
        return [(row[0], row[1]) for row in self._rows("writers")]

    def counts(self) -> tuple[int, int, int]:
        """How many files were looked at, how many had rows, and how many rows these were."""
        [(looked, files, rows)] = self._rows("counts")
        return looked, files, rows

    def filenames(self) -> list[str]:
        return [row[0] for row in self._rows("filenames")]

    def finish(self, report: str, *, is_finished: bool) -> None:
        self._rows("finish", report=report, is_finished=is_finished)

    def _rows(self, query: Any, **values: Any) -> list[Any]:
        statement = _QUERIES[query] if isinstance(query, str) else query
        return self._own.rows(statement, self._values(values), operation="erase")

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**values, "table_id": self._own.table.table_id, "deletion_id": self.deletion_id}


def begin(
    store: FileReferenceStore, deletions: Deletions, condition: str, bounds: KeyBounds, *, by_values: bool
) -> tuple[Erasure, datetime, list[Erasure]]:
    """Records a deletion and its erasure, in one transaction; gives it, when it was, and those it takes over.

    These are of the same condition, and were not finished. The deletion is a new one, for what was committed
    since theirs is to be erased, too.
    """
    older: list[Erasure] = []

    def also(conn: psycopg.Connection[Any], deletion_id: int) -> None:
        key = {"table_id": store.table.table_id, "deletion_id": deletion_id, "condition": condition}
        older[:] = [Erasure(store, row[0]) for row in conn.execute(_QUERIES["begin"].on(), key).fetchall()]

    deletion_id, at = deletions.record(condition, bounds, by_values=by_values, also=also)
    return Erasure(store, deletion_id), at, older


def proofs(store: FileReferenceStore) -> list[str]:
    """What the table's erasures told at their ends, as JSON, the oldest first."""
    return [row[0] for row in store.own.rows(_QUERIES["list"], operation="list erasures")]


def erased_by(store: FileReferenceStore, files: Sequence[str] | None, at: datetime) -> ErasedBy | None:
    """The erasure that took files, given by names or ids; without any, the last that went on after a time."""
    values = {"files": None if files is None else list(files), "at": at}
    rows = store.own.rows(_QUERIES["erased"], values, operation="look for erasures")
    return ErasedBy(*rows[0]) if rows else None


def backups_taken(supplier: Supplier) -> dict[str, list[str]]:
    """Returns the places that backups of the instance were begun in, each with their names."""
    return dict(run_lookup(supplier, rows_of(_QUERIES["backups_taken"]), operation="look for backups"))
