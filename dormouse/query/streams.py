"""Streams of batches: exact types, one batch made ahead, and errors that name the file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa

from dormouse.data.datafusion_session import panics_as_errors
from dormouse.data.object_access import parquet_object
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError, InvalidData, InvalidQuery, ObjectNotFound, ObjectStoreError
from dormouse.objects import ObjectStore

T = TypeVar("T")
MEMORY_BYTES_MAX = 2 * 1024**3
CHECKS_AT_ONCE_MAX = 8
_PREFIXES = (
    "DataFusion error: ",
    "Error during planning: ",
    "Schema error: ",
    "SQL error: ",
    "Arrow error: ",
    "Cast error: ",
    "Parser error: ",
)
_CAUSED_BY = "\ncaused by\n"


def exact(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly the types of a schema."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def first_rows(reader: pa.RecordBatchReader, limit: int) -> pa.RecordBatchReader:
    """The rows up to the limit; no batch is read beyond it."""

    def batches() -> Iterator[pa.RecordBatch]:
        remaining = limit
        while remaining and (batch := next(reader, None)) is not None:
            part = batch.slice(0, remaining)
            remaining -= part.num_rows
            yield part

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def one_ahead(items: Iterator[T], interrupt: Callable[[], object] = lambda: None) -> Iterator[T]:
    """The same items; from the second on, each is made in a thread while the one before it is used.

    So an answer of one item needs no thread. Closing it closes the source, when that has made what it is at,
    or has heeded `interrupt`.
    """
    end = object()
    yield from islice(items, 1)
    second: T | object = next(items, end)
    if second is end:
        return
    worker = ThreadPoolExecutor(1, thread_name_prefix="dormouse-query")
    try:
        upcoming: Future[T | object] = worker.submit(next, items, end)
        yield second  # type: ignore[misc]
        while (item := upcoming.result()) is not end:
            upcoming = worker.submit(next, items, end)
            yield item  # type: ignore[misc]
    finally:
        interrupt()
        if isinstance(items, Generator):
            # at the end of the process there are no more threads
            with suppress(RuntimeError):
                worker.submit(items.close)
        worker.shutdown(wait=False)


class FileGone(ObjectNotFound):
    """A file that is to be read does not exist any more."""

    def __init__(self, filename: str) -> None:
        super().__init__(
            f"file {filename!r} is gone: it was collected while the query ran; run the query again"
        )
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename,)


def check_there(store: ObjectStore | None, filenames: Sequence[str]) -> None:
    """`FileGone` or `ObjectStoreError` when one is gone or empty: DataFusion takes both for no rows."""
    if store is None or not filenames:
        return

    def check(filename: str) -> None:
        try:
            size = store.size(filename)
        except ObjectNotFound as error:
            raise FileGone(filename) from error
        if not size:
            raise ObjectStoreError(f"file {filename!r} cannot be read as Parquet: it is empty")

    if len(filenames) == 1:
        check(filenames[0])
        return
    with ThreadPoolExecutor(CHECKS_AT_ONCE_MAX) as threads:
        for _ in threads.map(check, filenames):
            pass


@contextmanager
def named_failures(
    store: ObjectStore | None, filenames: Iterable[str], *transforms: Transform
) -> Iterator[None]:
    """Turns what fails while these files are read into one line, which names the file or sum at fault."""
    try:
        with panics_as_errors():
            yield
    except DormouseError:
        raise
    except Exception as error:
        too_large = (transform.overflow(str(error)) for transform in transforms)
        raise next(filter(None, too_large), None) or _failure(store, filenames, error) from error


def one_line(error: BaseException) -> str:
    """The first line of what caused an error, without the names of DataFusion's layers."""
    cause = str(error).rpartition(_CAUSED_BY)[2]
    text = (cause.splitlines() or [type(error).__name__])[0]
    while prefix := next((p for p in _PREFIXES if text.startswith(p)), None):
        text = text.removeprefix(prefix)
    return text.strip()


def _failure(store: ObjectStore | None, filenames: Iterable[str], error: Exception) -> DormouseError:
    text = one_line(error)
    if store is None:
        return InvalidQuery(f"the query failed: {text}")
    if "Resources exhausted" in text:
        return DormouseError(f"the query needs more than the {MEMORY_BYTES_MAX:,} bytes of memory it may use")
    names = list(filenames)
    try:
        check_there(store, names)
        for filename in names:
            _check_readable(store, filename)
    except DormouseError as found:
        return found
    return InvalidQuery(f"the query failed: {text}")


def _check_readable(store: ObjectStore, filename: str) -> None:
    try:
        with parquet_object(store, filename) as file:
            for _ in file.iter_batches():
                pass
    except InvalidData as error:
        raise ObjectStoreError(str(error)) from error
