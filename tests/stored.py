"""Helpers for tests of the state store: references, requests, stored rows and racing threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg

from dormouse.model.file_reference import (
    AssignJobIdRequest,
    CheckAssignmentRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.transaction import fetched
from dormouse.state.context import TableContext
from dormouse.state.files.store import FileReferenceStore
from tests.pauses import pauses


def ref(filename: str, partition_id: str = "root", rows: int = 100, **more: Any) -> FileReference:
    return FileReference(filename=filename, partition_id=partition_id, row_count=rows, **more)


def file(filename: str, *references: FileReference, **facts: Any) -> FileWithReferences:
    return FileWithReferences(filename=filename, references=references, **facts)


def assign(job_id: str, partition_id: str, *filenames: str) -> AssignJobIdRequest:
    return AssignJobIdRequest(job_id=job_id, partition_id=partition_id, filenames=filenames)


def check(job_id: str, partition_id: str, *filenames: str) -> CheckAssignmentRequest:
    return CheckAssignmentRequest(job_id=job_id, partition_id=partition_id, filenames=filenames)


def replace(
    job_id: str, inputs: Iterable[str], output: str | None, partition_id: str = "root", rows: int = 100
) -> ReplaceFileReferencesRequest:
    return ReplaceFileReferencesRequest(
        job_id=job_id,
        partition_id=partition_id,
        input_filenames=tuple(inputs),
        new_reference=None if output is None else ref(output, partition_id, rows),
    )


def split(reference: FileReference, left: str = "L", right: str = "R") -> SplitFileReferenceRequest:
    return SplitFileReferenceRequest.split_to_children(reference, left, right)


def live(store: FileReferenceStore) -> list[tuple[str, str, int, str | None]]:
    """Returns (partition, file, rows, job) of every reference, in the order of the store."""
    return [(r.partition_id, r.filename, r.row_count, r.job_id) for r in store.file_references()]


def jobs_of(store: FileReferenceStore) -> dict[tuple[str, str], str | None]:
    return {(partition, name): job for partition, name, _, job in live(store)}


def unreferenced(store: FileReferenceStore) -> list[str]:
    return [f.filename for f in store.all_files(1000).unreferenced]


def clock(store: FileReferenceStore) -> datetime:
    """Returns the time of the store's database."""
    return query(store.supplier, "select clock_timestamp()")[0][0]


def remove(store: FileReferenceStore, *filenames: str, partition_id: str = "root") -> None:
    """Removes references to files, in the way of a compaction without output."""
    job = f"remove {filenames[0]}"
    store.assign_job_ids([assign(job, partition_id, *filenames)])
    store.replace_file_references([replace(job, filenames, None, partition_id)])


def query(supplier: Any, text: str, *values: Any) -> list[Any]:
    with supplier.connection() as conn:
        return fetched(conn.execute(text, values))


@contextmanager
def transaction(table: TableContext) -> Iterator[psycopg.Connection[Any]]:
    """Yields a connection in a transaction, which is rolled back if it was not committed."""
    with table.supplier.connection() as conn:
        conn.execute("begin")
        try:
            yield conn
        finally:
            conn.execute("rollback")


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Runs each function in its own thread, all at the same time; returns their results or errors."""
    barrier = threading.Barrier(len(works))
    outcomes: list[Any] = [None] * len(works)

    def run(number: int, work: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            outcomes[number] = work()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive(), "a thread hangs"
    return outcomes


@contextmanager
def case(value: object) -> Iterator[None]:
    """Adds the value under test to the notes of an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"with {value!r}")
        raise


def wait_until(condition: Callable[[], Any], seconds_max: float = 60) -> None:
    """Waits until the condition holds; fails after `seconds_max`."""
    for _ in pauses(seconds_max):
        if condition():
            return
    raise AssertionError("waited in vain")


def blocked(supplier: Any) -> int:
    """Returns the number of the database's backends that wait for a lock."""
    text = """select count(*) from pg_stat_activity
              where datname = current_database() and wait_event_type = 'Lock'"""
    return int(query(supplier, text)[0][0])


class CountingSupplier:
    """A supplier that counts the connections that it lends."""

    def __init__(self, supplier: ConnectionSupplier) -> None:
        self._supplier = supplier
        self.lent = 0

    def connection(self) -> Any:
        self.lent += 1
        return self._supplier.connection()

    def close(self) -> None:
        """Does nothing, because the wrapped supplier belongs to the caller."""
