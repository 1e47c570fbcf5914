"""The root of all errors, and the families whose messages are built from their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, overload

__all__ = [
    "AmbiguousRows", "BatchFailed", "CheckFailed", "DeletionsNotApplied", "DormouseError",
    "FileAlreadyExists", "FileHasReferences", "FileNotFound", "FileReferenceAlreadyExists",
    "FileReferenceAssignedToJob", "FileReferenceError", "FileReferenceNotAssignedToJob",
    "FileReferenceNotFound", "IndexNotReady", "InvalidColumn", "InvalidPage", "InvalidRow",
    "NewReferenceSameAsInput", "NotARowTable", "PageExpired", "PartitionForgotten",
    "ReplaceRequestsFailed", "RowConflict", "RowError", "RowLockHeld", "RowLockLost", "RowNotFound",
    "SnapshotExists", "SnapshotNotFound", "SplitRequestsFailed",
]  # fmt: skip

T = TypeVar("T")
_NAMED_MAX = 10
CONFLICT_ROWS_MAX = 1_000
"""The number of rows of a conflict that are sent to another process."""


class ErrorField(Generic[T]):
    """A field of an error: the value of the same name in the error's `data`, or None.

    `of` converts the value from JSON.
    """

    def __init__(self, of: Callable[[Any], T] | None = None) -> None:
        self._of = of

    def __set_name__(self, owner: type[DormouseError], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, error: None, owner: type[DormouseError]) -> Self: ...

    @overload
    def __get__(self, error: DormouseError, owner: type[DormouseError]) -> T | None: ...

    def __get__(self, error: DormouseError | None, owner: type[DormouseError]) -> Self | T | None:
        if error is None:
            return self
        value = error.data.get(self._name)
        return value if value is None or self._of is None else self._of(value)


class DormouseError(Exception):
    """The root of every error that Dormouse raises.

    A program reads the details of an error from its fields, whose names `fields` lists. An error that another
    process raised has the same fields. The service's problem documents have them as members.
    """

    data: Mapping[str, Any] = MappingProxyType({})
    """The known values of the error's fields, as JSON."""

    def __init__(self, *said: object, **data: Any) -> None:
        super().__init__(*said)
        if odd := data.keys() - set(self.fields()):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(odd))}")
        if known := {name: value for name, value in data.items() if value is not None}:
            self.data = known

    @classmethod
    def fields(cls) -> list[str]:
        """Returns the names of the fields that errors of this class may have."""
        own = (vars(one).items() for one in reversed(cls.__mro__))
        return [name for members in own for name, member in members if isinstance(member, ErrorField)]

    @classmethod
    def from_message(cls, message: str, data: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Returns an error that another process raised, from its message and its data."""
        return _rebuilt(cls, (message,), {"data": dict(data)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, vars(self))


E = TypeVar("E", bound=DormouseError)


def _rebuilt(kind: type[E], args: tuple[object, ...], attributes: Mapping[str, Any]) -> E:
    """Returns an error with these attributes, without calling the constructor of its class."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class FileReferenceError(DormouseError):
    """The file reference store refuses the update."""

    table = ErrorField[str]()
    filename = ErrorField[str]()
    partition_id = ErrorField[str]()
    job_id = ErrorField[str]()

    def __init__(
        self,
        table: str | None = None,
        filename: str | None = None,
        partition_id: str | None = None,
        job_id: str | None = None,
    ) -> None:
        about = {"table": table, "file": filename, "partition": partition_id, "job": job_id}
        what = ", ".join(f"{name} {value!r}" for name, value in about.items() if value is not None)
        reason = (type(self).__doc__ or "").splitlines()[0].rstrip(".")
        super().__init__(
            f"{reason}: {what}" if what else reason,
            table=table,
            filename=filename,
            partition_id=partition_id,
            job_id=job_id,
        )


class FileNotFound(FileReferenceError):
    """The file is not tracked."""


class FileAlreadyExists(FileReferenceError):
    """The file is tracked already."""


class FileHasReferences(FileReferenceError):
    """The file still has references."""


class FileReferenceNotFound(FileReferenceError):
    """The partition has no reference to the file."""


class FileReferenceAlreadyExists(FileReferenceError):
    """The partition has a reference to the file already."""


class FileReferenceAssignedToJob(FileReferenceError):
    """The reference is assigned to a job already."""


class FileReferenceNotAssignedToJob(FileReferenceError):
    """The reference is not assigned to the job."""


class DeletionsNotApplied(FileReferenceError):
    """A deletion of the file's rows is pending, and the job, of an older Dormouse, does not know it."""


class PartitionForgotten(FileReferenceError):
    """The partition left the tree so long ago that its successor is no longer known; plan it again."""


class NewReferenceSameAsInput(FileReferenceError):
    """The output file is one of the inputs."""


class BatchFailed(DormouseError):
    """Some requests of the batch failed; the rest are applied.

    `succeeded` has the applied requests, and `failed` has pairs of a request and its error.
    """

    succeeded: tuple[Any, ...] = ()
    failed: tuple[tuple[Any, DormouseError], ...] = ()

    def __init__(self, succeeded: Sequence[Any], failed: Sequence[tuple[Any, DormouseError]]) -> None:
        self.succeeded = tuple(succeeded)
        self.failed = tuple(failed)
        total = len(self.succeeded) + len(self.failed)
        first = f"; the first: {self.failed[0][1]}" if self.failed else ""
        super().__init__(f"{len(self.failed)} of {total} requests failed{first}")

    @property
    def errors(self) -> tuple[DormouseError, ...]:
        return tuple(error for _, error in self.failed)


class ReplaceRequestsFailed(BatchFailed):
    """Some replace requests failed; the rest are applied."""


class SplitRequestsFailed(BatchFailed):
    """Some split requests failed; the rest are applied."""


def _conflicts(rows: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    return [(row_id, sent, now) for row_id, sent, now in rows]


class RowError(DormouseError):
    """The row table does not allow the operation."""


class InvalidRow(RowError, ValueError):
    """A row is invalid: a value does not fit, an id is repeated or unknown, or a version is missing."""

    column = ErrorField[str]()


class InvalidColumn(RowError, ValueError):
    """A column is invalid, or values would not fit it; nothing was changed."""

    column = ErrorField[str]()


class InvalidPage(RowError, ValueError):
    """The page token is not one that this table gave for this query."""


class AmbiguousRows(RowError, ValueError):
    """Two rows have the values by which an upsert looks for one row, or a merge for one row of its source."""

    table = ErrorField[str]()


class NotARowTable(RowError, ValueError):
    """The table is not a row table, or it belongs to a row table and only that one may change it."""

    table = ErrorField[str]()


class RowNotFound(RowError, LookupError):
    """The table has no such row, or not that version of it."""

    table = ErrorField[str]()
    row_id = ErrorField[int]()
    version = ErrorField[int]()


class RowConflict(RowError):
    """Rows were changed since they were read: `rows` has (row id, sent version, present version).

    If another process raised the error, `rows` has only the first 1,000.
    """

    table = ErrorField[str]()
    rows = ErrorField(_conflicts)

    def __init__(self, table: str = "", rows: Sequence[tuple[int, int, int]] = ()) -> None:
        named = ", ".join(f"row {i} (sent {sent}, now {now})" for i, sent, now in rows[:_NAMED_MAX])
        more = f" and {len(rows) - _NAMED_MAX:,} more" if len(rows) > _NAMED_MAX else ""
        super().__init__(
            f"table {table!r}: rows were changed after you read them: {named}{more}; nothing was changed: "
            f"read them again, and send the change with their new versions",
            table=table,
            rows=[list(row) for row in rows[:CONFLICT_ROWS_MAX]],
        )
        vars(self)["rows"] = list(rows)  # this process knows all of them


class RowLockHeld(RowError):
    """Another worker holds the table's lock; try again later."""

    table = ErrorField[str]()
    holder = ErrorField[str]()


class RowLockLost(RowError):
    """The table's lock was given to another worker; nothing was changed."""

    table = ErrorField[str]()


class IndexNotReady(RowError):
    """The index does not have the table's latest rows yet; try again later."""

    table = ErrorField[str]()
    seconds = ErrorField[float]()


class PageExpired(RowError):
    """The rows of the page's version no longer exist; begin the query again."""

    table = ErrorField[str]()

    @classmethod
    def of(cls, table: str, why: str) -> Self:
        """Returns the error for a page of this table that has expired for this reason."""
        return cls(f"table {table!r}: {why}", table=table)


class SnapshotNotFound(RowError, LookupError):
    """The table has no snapshot of this name."""

    table = ErrorField[str]()
    snapshot = ErrorField[str]()


class SnapshotExists(RowError):
    """The table has a snapshot of this name already."""

    table = ErrorField[str]()
    snapshot = ErrorField[str]()


class CheckFailed(DormouseError):
    """A check found problems; `problems` has them."""

    problems: tuple[Any, ...] = ()

    def __init__(self, problems: Sequence[Any], consequence: str = "") -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        where = (("table", first.table), ("partition", first.partition_id), ("file", first.filename))
        named = ", ".join(f"{what} {name!r}" for what, name in where if name is not None)
        total = len(self.problems)
        super().__init__(
            f"{total:,} problem{'' if total == 1 else 's'}; the first: {first.kind}"
            f"{f' of {named}' if named else ''}: {first.detail}{f'; {consequence}' if consequence else ''}"
        )
