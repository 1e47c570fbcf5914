"""DataFusion sessions, set up for sorted streams of bounded memory, and their errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import DataFrame, RuntimeEnvBuilder, SessionConfig, SessionContext

from dormouse.data.expressions import key_order
from dormouse.data.written import check_stored, reshaped, written_schema
from dormouse.errors import DormouseError, InvalidData, JobFailed, ObjectNotFound, one_line
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore
from dormouse.objects.forks import ForkGuard
from dormouse.objects.s3 import current, s3_options

if TYPE_CHECKING:
    from datafusion import SessionContext

# How DataFusion and pyarrow reach the object store's objects.


def credentials(store: ObjectStore) -> dict[str, str]:
    """What `register` would give a session to reach the store with, which may expire."""
    return current(store.options) if urlsplit(store.url).scheme == "s3" else {}


def register(ctx: SessionContext, store: ObjectStore) -> None:
    """Let `ctx` read the objects of `store` under their `store.uri(name)`; a folder needs nothing."""
    parts = urlsplit(store.url)
    if parts.scheme == "s3":
        from datafusion.object_store import AmazonS3

        options: dict[str, Any] = {"bucket_name": parts.netloc, "allow_http": True} | s3_options(
            store.options
        )
        ctx.register_object_store("s3://", AmazonS3(**options), parts.netloc)


@contextmanager
def parquet_object(
    store: ObjectStore, name: str, *, verify: bool = False, **how: Any
) -> Iterator[pq.ParquetFile]:
    """An object as a Parquet file; `ObjectNotFound`, or `InvalidData` that names it when it is damaged.

    `verify`: pages that have a checksum are verified by it. `how` is pyarrow's, as for `open_parquet`.
    """
    try:
        with open_parquet(store, name, verify=verify, **how) as file:
            yield file
    except InvalidData as error:
        raise InvalidData(f"file {name!r}: {error}") from None
    except (pa.ArrowException, KeyError, OSError) as error:
        raise InvalidData(f"file {name!r} cannot be read as Parquet: {one_line(error)}") from error


def open_parquet(store: ObjectStore, name: str, *, verify: bool = False, **how: Any) -> pq.ParquetFile:
    """Open an object as a Parquet file: mapped from a folder, else read in the ranges that are asked for.

    `verify`: not mapped, as a page of a damaged disk would end the process. `how` is pyarrow's: `metadata`
    that was read before, columns to `read_dictionary` as they are. Raises `ObjectNotFound`; close it, or use
    it in a `with`.
    """
    path = store.local_path(name)
    if path is None:
        return pq.ParquetFile(store.reader(name), pre_buffer=True, page_checksum_verification=verify, **how)
    store.size(name)  # says ObjectNotFound
    return pq.ParquetFile(path, memory_map=not verify, page_checksum_verification=verify, **how)


check_not_forked = ForkGuard("DataFusion").check
MEMORY_LIMIT_BYTES = 1_500_000_000
_OPTIONS = {
    # one file is one sorted stream: nothing may cut it up or mix it
    "datafusion.optimizer.repartition_file_scans": "false",
    "datafusion.optimizer.enable_round_robin_repartition": "false",
    "datafusion.optimizer.repartition_aggregations": "false",
    "datafusion.optimizer.prefer_existing_sort": "true",
    # from them DataFusion takes a key that is constant in each file for one that is constant in all of them,
    # and merges by the other keys alone
    "datafusion.execution.collect_statistics": "false",
    # strings as views: merging compares four bytes inline before it looks further
    "datafusion.execution.parquet.schema_force_view_types": "true",
}
_BATCH_ROWS = 8_192
_BATCH_BYTES = 8 * 1024 * 1024
"""Of each file, as it is written: where rows are wide, fewer are in memory at once."""


def sorted_session(
    *,
    store: ObjectStore | None = None,
    options: dict[str, str] | None = None,
    row_bytes: float = 0.0,
) -> SessionContext:
    """A session whose plans keep the order that files have; `row_bytes`: how wide rows are in the files."""
    runtime = RuntimeEnvBuilder().with_greedy_memory_pool(MEMORY_LIMIT_BYTES)
    rows = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1.0, row_bytes))))
    at_once = {"datafusion.execution.batch_size": str(rows)}
    return open_session(_OPTIONS | at_once | (options or {}), runtime, store)


def open_session(
    options: dict[str, str], runtime: RuntimeEnvBuilder, store: ObjectStore | None
) -> SessionContext:
    """A session with these options, which reads the store's objects."""
    check_not_forked()
    config = SessionConfig()
    for name, value in options.items():
        config = config.set(name, value)
    context = SessionContext(config, runtime)
    if store is not None:
        register(context, store)
    return context


def sorted_file(
    context: SessionContext, file: str | Path, keys: Sequence[str], descending: Sequence[str] = ()
) -> DataFrame:
    """The rows of a file that is sorted by some of its columns, as one sorted stream."""
    order = key_order(keys, descending)
    return context.read_parquet(file_url(file), file_extension="", file_sort_order=[order])


def table_file(
    context: SessionContext, schema: Schema, file: str, descending: Sequence[str] = ()
) -> DataFrame:
    """The rows of a table's file, as one sorted stream; `InvalidData` or `ObjectNotFound` names a bad one.

    Whatever columns it was written with, which its name tells, they are those of the schema. A file that has
    each key once is sorted by other columns after the key, too.
    """
    written = written_schema(schema, file)
    try:
        with panics_as_errors():
            frame = sorted_file(context, file, written.key_names, descending)
    except Exception as error:
        raise file_error(file, error) from error
    try:
        check_stored(frame.schema(), schema, file)
    except InvalidData as error:
        raise InvalidData(f"file {file!r}: {error}") from None
    return reshaped(frame, written, schema, views=True)


class Panic(Exception):
    """DataFusion panicked, as some corrupt files make it; turned into an error that names the file."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns Rust's panics, which are no `Exception` in Python, into `Panic`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(str(error)) from error


def file_url(path: str | Path) -> str:
    """A local path as a URL, so that no character of it means anything; other URLs as they are."""
    text = str(path)
    return text if "://" in text else "file://" + quote(os.path.abspath(text))  # noqa: PTH100  # not links


def file_error(file: str, error: Exception) -> DormouseError:
    """What a failure to read a file means, naming the file."""
    text = one_line(error)
    if "not found" in text.lower() or "no such file" in text.lower() or "no files found" in text.lower():
        return ObjectNotFound(f"file {file!r} does not exist")
    return InvalidData(f"file {file!r} cannot be read as Parquet: {text}")


def query_error(
    context: SessionContext, schema: Schema, files: Sequence[str], error: Exception
) -> DormouseError:
    """What a failed query over files means: the first file that cannot be read, else `JobFailed`."""
    for file in files:
        try:
            rows = table_file(context, schema, file)
            with panics_as_errors():
                for _ in rows.execute_stream():
                    pass
        except DormouseError as found:
            return found
        except Exception as found:
            return file_error(file, found)
    return JobFailed(f"DataFusion failed: {one_line(error)}")
