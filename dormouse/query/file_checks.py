"""Whether a plan's files are what was written: there, of the size that is recorded, and readable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import pyarrow as pa

from dormouse.context import TableContext
from dormouse.data.digests import digest_of_object
from dormouse.data.object_access import open_parquet
from dormouse.data.written import check_stored
from dormouse.errors import InvalidData, InvalidQuery, ObjectDamaged, ObjectNotFound, one_line
from dormouse.query.planner import Scan

CHECKS_AT_ONCE_MAX = 16
KNOWN_MAX = 100_000
_known: set[tuple[str, str]] = set()
"""Objects, by store and name, that are not on this machine and were found to be of their size."""
_verified: set[tuple[str, str]] = set()
"""Objects, by store and name, whose bytes were found to be those that were written."""
_lock = Lock()


class FileGone(ObjectNotFound):
    """A file that is to be read does not exist any more."""

    def __init__(self, filename: str, table: str) -> None:
        super().__init__(
            f"file {filename!r} of table {table!r} is gone: it was collected while the query ran; "
            "run the query again"
        )
        self.filename = filename
        self.table = table

    def lost(self) -> ObjectNotFound:
        """What it is when a plan that was made after the file was gone refers to it."""
        return ObjectNotFound(
            f"table {self.table!r} refers to the object {self.filename!r}, which does not exist: it is lost, "
            "not collected; 'dormouse check' lists what is; bring it back: from a backup, or, of a deployed "
            "instance, with 'dormouse restore-objects'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.table)


@contextmanager
def checked_sizes(context: TableContext, scans: Sequence[Scan]) -> Iterator[None]:
    """Holds the sizes of files against the plan; of objects elsewhere meanwhile, and once in a process.

    Raises `FileGone` or `ObjectDamaged`, at the end at the latest. Before all, verifies the files where the
    context does.
    """
    verify(context, scans)
    store = context.objects
    if store.url.startswith("file:"):
        check_there(context, scans)
        yield
        return
    with _lock:
        unknown = [scan for scan in scans if (store.url, scan.filename) not in _known]
    if not unknown:
        yield
        return
    threads = ThreadPoolExecutor(min(len(unknown), CHECKS_AT_ONCE_MAX), thread_name_prefix="dormouse-sizes")
    try:
        found = threads.map(lambda scan: _check_size(context, scan), unknown)
        yield
        for _ in found:
            pass
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    _remember(_known, context, unknown)


def verify(context: TableContext, scans: Sequence[Scan]) -> None:
    """Compares the digests of files that this process did not verify yet, if the context verifies.

    Raises `FileGone` or `ObjectDamaged`, and `InvalidQuery` for a file that has no digest.
    """
    if not context.verifies:
        return
    url = context.objects.url
    with _lock:
        found = {scan.filename: scan for scan in scans if (url, scan.filename) not in _verified}
    unknown = list(found.values())
    if not unknown:
        return
    digests = context.store.digests(list(found))

    def check(scan: Scan) -> None:
        if scan.filename not in digests:
            raise FileGone(scan.filename, context.table.name)
        digest = digests[scan.filename]
        if digest is None:
            raise InvalidQuery(
                f"file {scan.filename!r} of table {context.table.name!r} cannot be verified: it was written "
                "before files had digests; run 'dormouse check --deep --note-digests' once, or compact the "
                "table"
            )
        _check_digest(context, scan, digest)

    with ThreadPoolExecutor(min(len(unknown), CHECKS_AT_ONCE_MAX), "dormouse-digests") as threads:
        checks = [threads.submit(check, scan) for scan in unknown]
        try:
            for one in checks:
                one.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    _remember(_verified, context, unknown)


def _remember(known: set[tuple[str, str]], context: TableContext, scans: Iterable[Scan]) -> None:
    with _lock:
        if len(known) > KNOWN_MAX:
            known.clear()
        known.update((context.objects.url, scan.filename) for scan in scans)


def check_there(context: TableContext, scans: Iterable[Scan]) -> None:
    """`FileGone` or `ObjectDamaged` when a file is gone, empty, or of another size than was written.

    DataFusion takes the first two for no rows.
    """
    for scan in scans:
        _check_size(context, scan)


def check_bytes(context: TableContext, scans: Sequence[Scan]) -> None:
    """Reads files at which an engine failed; `FileGone` or `ObjectDamaged` for the first that is at fault."""
    digests = context.store.digests([scan.filename for scan in scans])
    for scan in scans:
        digest = digests.get(scan.filename)
        if digest is None:
            check_columns(context, scan, pages=True)
        else:
            _check_digest(context, scan, digest)


def _check_digest(context: TableContext, scan: Scan, digest: bytes) -> None:
    with _naming(context, scan):
        if digest_of_object(context.objects, scan.filename)[1] != digest:
            raise damaged(context, scan, "has not the bytes that were written")


def check_columns(context: TableContext, scan: Scan, *, pages: bool = False) -> None:
    """`FileGone`, or `ObjectDamaged` when a file's columns are not the table's, or it cannot be read."""
    with _naming(context, scan), open_parquet(context.objects, scan.filename) as file:
        check_stored(file.schema_arrow, context.stored_schema, scan.filename)
        for _ in file.iter_batches() if pages else ():
            pass


@contextmanager
def _naming(context: TableContext, scan: Scan) -> Iterator[None]:
    try:
        yield
    except ObjectNotFound as error:
        raise FileGone(scan.filename, context.table.name) from error
    except (InvalidData, pa.ArrowException, KeyError, OSError) as error:
        raise damaged(context, scan, f"cannot be read as Parquet: {one_line(error)}") from error


def damaged(context: TableContext, scan: Scan, fault: str) -> ObjectDamaged:
    return ObjectDamaged(context.table.name, scan.partition_id, scan.filename, fault)


def _check_size(context: TableContext, scan: Scan) -> None:
    try:
        size = context.objects.size(scan.filename)
    except ObjectNotFound as error:
        raise FileGone(scan.filename, context.table.name) from error
    if scan.byte_count and size != scan.byte_count:
        raise damaged(context, scan, f"has {size:,} bytes, and had {scan.byte_count:,} when it was written")
    if not size:
        raise damaged(context, scan, "cannot be read as Parquet: it is empty")
