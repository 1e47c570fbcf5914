"""Checks of the facts on which plans rely: the files of a plan, and the table's columns.

A file must exist, be readable, have its recorded size, and contain what was written. The columns must still
be those with which the plan was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Lock
from typing import TypeVar

import pyarrow as pa

from dormouse.data.arrow_schema import check_stored
from dormouse.data.object_access import open_parquet
from dormouse.data.transform import Transform
from dormouse.errors import (
    DormouseError,
    InvalidData,
    InvalidInput,
    InvalidQuery,
    InvalidSchema,
    ObjectDamaged,
    ObjectNotFound,
    QueryOvertaken,
    TableBusy,
    one_line,
    panics_as_errors,
)
from dormouse.model.file_reference import is_inlined
from dormouse.model.locks import process_lock
from dormouse.model.reshaping import as_known_by
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.objects.fault import WrittenObject, compared, digest_of_object
from dormouse.objects.inlined import local_name
from dormouse.objects.store import ObjectStore
from dormouse.reading.planner import Scan
from dormouse.reading.streams import Interruption
from dormouse.reading.where import SCHEMAS_CHASED_MAX
from dormouse.state.context import TableContext

T = TypeVar("T")
CHECKS_AT_ONCE_MAX = 16
KNOWN_MAX = 100_000
_Seen = set[tuple[str | int, ...]]
_known: _Seen = set()
"""Remote objects that had their recorded size when checked, by store and name."""
_verified: _Seen = set()
"""Objects that had their recorded digest when checked, by store and name.

For a file on this machine the inode, modification time and size are added, so that a replaced file is
verified again.
"""
_lock = process_lock()


class FileGone(ObjectNotFound):
    """An error for a file that a plan names and that no longer exists."""

    def __init__(self, filename: str, table: str) -> None:
        super().__init__(
            f"file {filename!r} of table {table!r} no longer exists: it was collected while the query ran; "
            "run the query again",
            filename=filename,
            table=table,
        )

    def lost(self) -> ObjectNotFound:
        """Returns the error for a lost file: it is missing, although a newer plan refers to it as well."""
        return ObjectNotFound(
            f"table {self.table!r} refers to the object {self.filename!r}, which does not exist: it is lost, "
            "not collected; 'dormouse check' lists all lost objects; restore them from a backup, or, of a "
            "deployed instance, with 'dormouse restore-objects'",
            **self.data,
        )


@contextmanager
def checked_sizes(
    context: TableContext, scans: Sequence[Scan], interruption: Interruption | None = None
) -> Iterator[None]:
    """Compares the sizes of files with the plan, before or while the block runs.

    The sizes of remote objects are checked in threads, and only once by each process. Raises `FileGone` or
    `ObjectDamaged`, at the latest at the end of the block. If the context demands verification, calls
    `verify` first.
    """
    verify(context, scans, interruption)
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
    _remember(_known, ((store.url, scan.filename) for scan in unknown))


def verify(
    context: TableContext,
    scans: Sequence[Scan],
    interruption: Interruption | None = None,
    digests: Mapping[str, bytes | None] | None = None,
) -> None:
    """Compares files with their digests, unless this process has verified them before.

    Without `digests` it does so only if the context demands verification, and reads the digests from the
    database. `digests` are recorded digests by filename: with them it verifies whatever the context demands,
    and needs no database.

    Raises `FileGone` or `ObjectDamaged`, `InvalidQuery` for a file without a digest, and `DormouseError` at
    once when it is interrupted.
    """
    if not context.verifies and digests is None:
        return
    found = {_seen_as(context.objects, scan.filename): scan for scan in scans}
    with _lock:
        unknown = {seen: scan for seen, scan in found.items() if seen not in _verified}
    if not unknown:
        return
    recorded = (
        context.store.digests([scan.filename for scan in unknown.values()]) if digests is None else digests
    )
    interruption, is_left = interruption or Interruption(), Event()

    def go_on() -> None:
        interruption.check()
        if is_left.is_set():
            raise CancelledError

    def check(scan: Scan) -> None:
        if scan.filename not in recorded:
            raise FileGone(scan.filename, context.table.name)
        digest = recorded[scan.filename]
        if digest is None:
            raise InvalidQuery(
                f"file {scan.filename!r} of table {context.table.name!r} cannot be verified: it was written "
                "before files had digests; run 'dormouse check --deep --note-digests' once, or compact the "
                "table"
            )
        _check_digest(context, scan, digest, go_on)

    threads = ThreadPoolExecutor(min(len(unknown), CHECKS_AT_ONCE_MAX), "dormouse-digests")
    try:
        _wait_for([threads.submit(check, scan) for scan in unknown.values()], interruption)
    finally:
        is_left.set()
        # a thread may still wait for the store, so it is not joined
        threads.shutdown(wait=False, cancel_futures=True)
    _remember(_verified, unknown)


def _seen_as(objects: ObjectStore, name: str) -> tuple[str | int, ...]:
    path = objects.local_path(name)
    if path is None:
        return objects.url, name
    try:
        status = path.stat()
    except OSError:  # the check raises the error for a missing file
        return objects.url, name
    return objects.url, name, status.st_ino, status.st_mtime_ns, status.st_size


def _wait_for(checks: Sequence[Future[None]], interruption: Interruption) -> None:
    """Waits until all checks have passed; raises the first error, or `DormouseError` when interrupted."""
    ended, left, lock = Future[None](), len(checks), Lock()

    def note(check: Future[None]) -> None:
        nonlocal left
        if check.cancelled():
            return
        with lock:
            left -= 1
        with suppress(InvalidStateError):  # another check has failed, or the query was interrupted
            if error := check.exception():
                ended.set_exception(error)
            elif not left:
                ended.set_result(None)

    for check in checks:
        check.add_done_callback(note)
    reader = object()
    interruption.awaits(reader, ended)
    try:
        ended.result()
    except CancelledError:
        interruption.check()
        raise
    finally:
        interruption.awaits(reader, None)


def _remember(known: _Seen, seen: Iterable[tuple[str | int, ...]]) -> None:
    with _lock:
        if len(known) > KNOWN_MAX:
            known.clear()
        known.update(seen)


def check_there(context: TableContext, scans: Iterable[Scan]) -> None:
    """Raises `FileGone` for a missing file, and `ObjectDamaged` for an empty one or one of another size.

    DataFusion would take a missing or empty file for one without rows.
    """
    for scan in scans:
        _check_size(context, scan)


def check_bytes(context: TableContext, scans: Sequence[Scan]) -> None:
    """Reads files on which a query engine failed; raises `FileGone` or `ObjectDamaged` for a bad one."""
    digests = context.store.digests([scan.filename for scan in scans])
    for scan in scans:
        digest = digests.get(scan.filename)
        if digest is None:
            check_columns(context, scan, pages=True)
        else:
            _check_digest(context, scan, digest)


def _check_digest(
    context: TableContext, scan: Scan, digest: bytes, go_on: Callable[[], object] = lambda: None
) -> None:
    with _naming(context, scan):
        _compare(context, scan, *digest_of_object(context.objects, scan.filename, go_on), digest)


def check_columns(context: TableContext, scan: Scan, *, pages: bool = False) -> None:
    """Raises `FileGone`, or `ObjectDamaged` when a file cannot be read or lacks the table's columns.

    With `pages`, it reads the whole file, otherwise only the footer.
    """
    with _naming(context, scan), open_parquet(context.objects, scan.filename) as file:
        check_stored(file.schema_arrow, context.stored_schema, scan.filename)
        for _ in file.iter_batches() if pages else ():
            pass


def check_local(scans: Iterable[Scan], table: str, error: str) -> None:
    """Raises `FileGone` if an engine's error names the local file of an inlined file.

    A process of this machine that collects an inlined file deletes the local files of all processes. This
    process may still have the content in memory, so no other check finds the file missing.
    """
    for scan in scans:
        if is_inlined(scan.filename) and local_name(scan.filename) in error:
            raise FileGone(scan.filename, table)


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
    _compare(context, scan, size)
    if not size:
        raise damaged(context, scan, "cannot be read as Parquet: it is empty")


def _compare(
    context: TableContext, scan: Scan, size: int, digest: bytes | None = None, was: bytes | None = None
) -> None:
    if fault := compared(WrittenObject(scan.filename, scan.byte_count or None, was), size, digest):
        raise damaged(context, scan, fault.text)


# DataFusion's errors while it reads files, turned into errors of one line that name the file or sum.

MEMORY_BYTES_MAX = 2 * 1024**3
_PREFIXES = (
    "DataFusion error: ",
    "Error during planning: ",
    "Schema error: ",
    "SQL error: ",
    "Arrow error: ",
    "Cast error: ",
    "Parser error: ",
)


@contextmanager
def named_failures(context: TableContext, scans: Sequence[Scan], transform: Transform) -> Iterator[None]:
    """Replaces DataFusion's errors in the block by errors of one line that name the file or sum at fault."""
    try:
        with panics_as_errors():
            yield
    except DormouseError:
        raise
    except Exception as error:
        raise transform.overflow(str(error)) or _failure(context, scans, error) from error


def _failure(context: TableContext, scans: Sequence[Scan], error: Exception) -> DormouseError:
    # the first line of the cause, without the names of DataFusion's layers
    cause = str(error).rpartition("\ncaused by\n")[2]
    text = (cause.splitlines() or [type(error).__name__])[0]
    while prefix := next((p for p in _PREFIXES if text.startswith(p)), None):
        text = text.removeprefix(prefix)
    if "Resources exhausted" in text:
        return DormouseError(f"the query needs more than the {MEMORY_BYTES_MAX:,} bytes of memory it may use")
    try:
        check_there(context, scans)
        check_bytes(context, scans)
        check_local(scans, context.table.name, str(error))
    except DormouseError as found:
        return found
    return InvalidQuery(f"the query of table {context.table.name!r} failed: {text.strip()}")


# Work that begins with a table's current columns, and keeps these columns if another process changes the
# table's columns meanwhile.


def on_current(context: TableContext, work: Callable[[TableContext], T]) -> T:
    """Runs work with the table's current columns and properties, and returns its result.

    The first run uses the columns that this process knows. If the work raises `SchemaMoved`, or raises
    `InvalidInput` and the columns have changed, it runs again with the new columns. Raises `TableBusy` when
    the columns keep changing.
    """

    def once() -> T:
        nonlocal context
        try:
            return work(context)
        except SchemaMoved:
            context = context.followed()
            raise
        except InvalidInput as error:
            now = context.followed()
            if now is context:
                raise
            context = now
            raise SchemaMoved(str(error)) from error

    return again_if_moved(once)


def again_if_moved(work: Callable[[], T]) -> T:
    """Runs work, and repeats it while it raises `SchemaMoved`; raises `TableBusy` after too many attempts."""
    for _ in range(SCHEMAS_CHASED_MAX):
        try:
            return work()
        except SchemaMoved as error:
            last = error
    raise TableBusy(
        f"{last}, on each of {SCHEMAS_CHASED_MAX} attempts: nothing was done; try again later"
    ) from last


def keeping_columns(context: TableContext) -> TableContext:
    """Returns the context with the same columns, able to read files written with later schema versions.

    Raises `QueryOvertaken` when one of the columns was dropped.
    """
    try:
        return seen_by(context, context.followed().table.schema)
    except InvalidSchema as error:
        raise QueryOvertaken(
            f"{error} from table {context.table.name!r} while the query ran, and files that have it were "
            "collected; run it again, or raise the table's property gc_delay_seconds"
        ) from None


def seen_by(context: TableContext, later: Schema) -> TableContext:
    """Returns the context with the same columns, able to read files of all versions up to `later`.

    Raises `InvalidSchema` when one of the columns no longer exists.
    """
    if later.version <= context.schema.version:
        return context
    return replace(context, table=replace(context.table, schema=as_known_by(context.table.schema, later)))
