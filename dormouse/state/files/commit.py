"""A commit: changes that are applied together, once for each commit id; and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dormouse import errors
from dormouse.errors import DormouseError

Kind = Literal[
    "add_files",
    "assign_job_ids",
    "replace_file_references",
    "split_file_references",
    "delete_collected_files",
]
State = Literal["applied", "applied_before", "refused"]


@dataclass(frozen=True, slots=True)
class Commit:
    """Changes of one kind to one table.

    `items` are FileWithReferences, AssignJobIdRequest, ReplaceFileReferencesRequest,
    SplitFileReferenceRequest or filenames, as the kind says. The id is kept for ever, unless the commit
    `expires`: then garbage collection forgets it after `history_retention_seconds`. When the id was applied
    before, `same_content` tells a repetition from another commit that was given the same id by mistake.
    """

    items: Sequence[Any]
    commit_id: str | None = None
    expires: bool = True
    same_content: bool = True
    source: bytes | None = None
    """A digest of 16 bytes of the data that the items were made of, which is recorded with the id."""
    attempt_id: str | None = None
    """The write attempt that the commit ends; one that was abandoned commits nothing."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a commit.

    `failed` has the items that were refused, by number, with the error of each, also when the commit was
    applied before. A commit is refused when nothing of it was applied; replacements and splits succeed alone,
    all else of a commit together.
    """

    state: State
    failed: tuple[tuple[int, DormouseError], ...] = ()

    @property
    def error(self) -> DormouseError | None:
        return self.failed[0][1] if self.failed else None


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """What was refused of a commit of so many items that is applied: `failed` as in `CommitResult`."""

    items: int
    failed: tuple[tuple[int, DormouseError], ...]
    marks: tuple[str, ...] = ()
    """By which those that failed are known, in whatever order they come again."""

    def to_json(self) -> dict[str, Any]:
        """As it is kept with the commit."""
        failed = [
            [
                n,
                type(e).__name__,
                *(getattr(e, name, None) for name in ("filename", "partition_id", "job_id")),
            ]
            for n, e in self.failed
        ]
        return {"items": self.items, "failed": failed, "marks": self.marks}

    @classmethod
    def from_json(cls, kept: dict[str, Any], table: str) -> RefusedPart:
        """What `to_json` made, of a table that may have another name by now."""
        failed = [(n, getattr(errors, kind)(table, *about)) for n, kind, *about in kept["failed"]]
        return cls(kept["items"], tuple(failed), tuple(kept["marks"]))

    def __str__(self) -> str:
        said = "; ".join(f"number {number + 1}: {error}" for number, error in self.failed)
        return f"{len(self.failed)} of {self.items} requests failed, the others are applied: {said}"
