"""What the file reference store refuses: one update, or some of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from dormouse.errors.base import DormouseError, Told

__all__ = [
    "BatchFailed", "DeletionsNotApplied", "FileAlreadyExists", "FileHasReferences", "FileNotFound",
    "FileReferenceAlreadyExists", "FileReferenceAssignedToJob", "FileReferenceError",
    "FileReferenceNotAssignedToJob", "FileReferenceNotFound", "NewReferenceSameAsInput",
    "PartitionForgotten", "ReplaceRequestsFailed", "SplitRequestsFailed",
]  # fmt: skip


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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.table, self.filename, self.partition_id, self.job_id)


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

    def __init__(self, succeeded: Sequence[Any], failed: Sequence[tuple[Any, DormouseError]]) -> None:
        self.succeeded = tuple(succeeded)
        self.failed = tuple(failed)
        total = len(self.succeeded) + len(self.failed)
        first = f"; the first: {self.failed[0][1]}" if self.failed else ""
        super().__init__(f"{len(self.failed)} of {total} requests failed{first}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.succeeded, self.failed)

    @classmethod
    def _of_nothing(cls) -> Self:
        return cls((), ())

    @property
    def errors(self) -> tuple[DormouseError, ...]:
        return tuple(error for _, error in self.failed)


class ReplaceRequestsFailed(BatchFailed):
    """Some replace requests failed; the others are applied."""


class SplitRequestsFailed(BatchFailed):
    """Some split requests failed; the others are applied."""
