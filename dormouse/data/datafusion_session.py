"""DataFusion sessions, set up for sorted streams of bounded memory, and their errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa
from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext, col

from dormouse.data.arrow_schema import check_columns, one_line
from dormouse.data.forks import check_not_forked
from dormouse.data.transform import quoted
from dormouse.errors import DormouseError, InvalidData, JobFailed, ObjectNotFound
from dormouse.model.schema import Schema

if TYPE_CHECKING:
    from dormouse.objects.store import ObjectStore

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


def sorted_session(
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    store: ObjectStore | None = None,
    options: dict[str, str] | None = None,
) -> SessionContext:
    """A session whose plans keep the order that files have."""
    check_not_forked()
    runtime = RuntimeEnvBuilder().with_greedy_memory_pool(memory_limit_bytes)
    config = SessionConfig()
    for name, value in (_OPTIONS | (options or {})).items():
        config = config.set(name, value)
    context = SessionContext(config, runtime)
    if store is not None:
        from dormouse.data.object_access import register

        register(context, store)
    return context


def register_sorted(
    context: SessionContext, schema: Schema, files: Sequence[str], prefix: str = "file"
) -> str:
    """A query of the rows of sorted files, each file a sorted stream; `InvalidData` names a bad file."""
    order = [[col(quoted(name)).sort(ascending=True, nulls_first=False) for name in schema.key_names]]
    columns = ", ".join(map(quoted, schema.names))
    for number, file in enumerate(files):
        try:
            with panics_as_errors():
                context.register_parquet(
                    f"{prefix}_{number}", file_url(file), file_extension="", file_sort_order=order
                )
        except Exception as error:
            raise file_error(file, error) from error
        _check_columns(context.table(f"{prefix}_{number}").schema(), schema, file)
    return " UNION ALL ".join(f"SELECT {columns} FROM {prefix}_{number}" for number in range(len(files)))


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
    for number, file in enumerate(files):
        try:
            rows = register_sorted(context, schema, [file], prefix=f"check_{number}")
            with panics_as_errors():
                for _ in context.sql(rows).execute_stream():
                    pass
        except DormouseError as found:
            return found
        except Exception as found:
            return file_error(file, found)
    return JobFailed(f"DataFusion failed: {one_line(error)}")


def _check_columns(found: pa.Schema, schema: Schema, file: str) -> None:
    try:
        check_columns(found, schema)
    except InvalidData as error:
        raise InvalidData(f"file {file!r}: {error}") from None
