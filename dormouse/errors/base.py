"""The root of all errors, and the families whose messages are made of their fields."""

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
ROWS_TOLD_MAX = 1_000
"""How many rows of a conflict another process is told."""


class Told(Generic[T]):
    """A field of an error: what its `data` has by this name, None where that is not known.

    `of` makes the value of what JSON has for it.
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

    What its message names, a program reads of its fields: of those of its class, which `fields` lists. They
    are the same where another process met the error, and are members of the service's problem documents.
    """

    data: Mapping[str, Any] = MappingProxyType({})
    """The fields that are known, as JSON."""

    def __init__(self, *said: object, **data: Any) -> None:
        super().__init__(*said)
        if odd := data.keys() - set(self.fields()):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(odd))}")
        if known := {name: value for name, value in data.items() if value is not None}:
            self.data = known

    @classmethod
    def fields(cls) -> list[str]:
        """Returns the names of the fields that errors of the class may have."""
        own = (vars(one).items() for one in reversed(cls.__mro__))
        return [name for members in own for name, member in members if isinstance(member, Told)]

    @classmethod
    def told(cls, message: str, data: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Returns an error that another process met, of which its message and its data are known."""
        return _made_again(cls, (message,), {"data": dict(data)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, vars(self))


E = TypeVar("E", bound=DormouseError)


def _made_again(kind: type[E], args: tuple[object, ...], attributes: Mapping[str, Any]) -> E:
    """Returns an error with these attributes, whatever its class is made of."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class FileReferenceError(DormouseError):
    """The file reference store refuses the update."""

    table = Told[str]()
    filename = Told[str]()
    partition_id = Told[str]()
    job_id = Told[str]()

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
    """A deletion from the file is pending, and the job, of an older Dormouse, does not know it."""


class PartitionForgotten(FileReferenceError):
    """The partition left the tree so long ago that what took its place is forgotten; plan it anew."""


class NewReferenceSameAsInput(FileReferenceError):
    """The output file is one of the inputs."""


class BatchFailed(DormouseError):
    """Some requests of the batch failed; the others are applied.

    `succeeded` has the requests that were applied, `failed` pairs each other one with its error.
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
    """Some replace requests failed; the others are applied."""


class SplitRequestsFailed(BatchFailed):
    """Some split requests failed; the others are applied."""


def _conflicts(rows: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    return [(row_id, sent, now) for row_id, sent, now in rows]


class RowError(DormouseError):
    """The row table does not allow it."""


class InvalidRow(RowError, ValueError):
    """A row that cannot be: a value that does not fit, a repeated or unknown id, a missing version."""

    column = Told[str]()


class InvalidColumn(RowError, ValueError):
    """A column that cannot be, or values that would not fit it; nothing was changed."""

    column = Told[str]()


class InvalidPage(RowError, ValueError):
    """The page token was not given by this table for this query."""


class AmbiguousRows(RowError, ValueError):
    """Two rows have the values by which an upsert looks for one."""


class NotARowTable(RowError, ValueError):
    """The table is not a row table, or it is one and is changed by its rows alone."""

    table = Told[str]()


class RowNotFound(RowError, LookupError):
    """The table has no such row, or not that version of it."""

    table = Told[str]()
    row_id = Told[int]()
    version = Told[int]()


class RowConflict(RowError):
    """Rows were changed since they were read: `rows` has (row id, version that was sent, version of now).

    Of a conflict that another process met, the first 1,000.
    """

    table = Told[str]()
    rows = Told(_conflicts)

    def __init__(self, table: str = "", rows: Sequence[tuple[int, int, int]] = ()) -> None:
        named = ", ".join(f"row {i} (sent {sent}, now {now})" for i, sent, now in rows[:_NAMED_MAX])
        more = f" and {len(rows) - _NAMED_MAX:,} more" if len(rows) > _NAMED_MAX else ""
        super().__init__(
            f"table {table!r}: changed since they were read: {named}{more}; nothing was changed: read them "
            "again, and send the change with their versions of now",
            table=table,
            rows=[list(row) for row in rows[:ROWS_TOLD_MAX]],
        )
        vars(self)["rows"] = list(rows)  # here all of them are known


class RowLockHeld(RowError):
    """Another worker holds the table's lock: try again when it is done."""

    table = Told[str]()
    holder = Told[str]()


class RowLockLost(RowError):
    """The table's lock was given to another worker; nothing was changed."""

    table = Told[str]()


class IndexNotReady(RowError):
    """The index is behind the table's rows: it is being worked on, ask again."""

    table = Told[str]()
    seconds = Told[float]()


class PageExpired(RowError):
    """The rows of the page's version are kept no longer: begin the query again."""

    table = Told[str]()

    @classmethod
    def of(cls, table: str, why: str) -> Self:
        """Returns the error of a table's page."""
        return cls(f"table {table!r}: {why}", table=table)


class SnapshotNotFound(RowError, LookupError):
    """The table has no snapshot of this name."""

    table = Told[str]()
    snapshot = Told[str]()


class SnapshotExists(RowError):
    """The table has a snapshot of this name already."""

    table = Told[str]()
    snapshot = Told[str]()


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
