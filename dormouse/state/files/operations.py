"""The five kinds of updates: how each travels to its statement, and why a part of it was refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dormouse import errors
from dormouse.errors import (
    DormouseError,
    FileAlreadyExists,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
)
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.state.files import diagnosis
from dormouse.state.files.layout import (
    Parameters,
    assign_arrays,
    file_arrays,
    forget_arrays,
    replace_arrays,
    split_arrays,
)
from dormouse.state.files.moves import Places, file_in_place, split_in_place

# A commit: changes that are applied together, once for each commit id; and what became of it.

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


Keys = list[tuple[str, str]]


@dataclass(frozen=True)
class Operation:
    """One kind of update.

    `alone`: items of a commit succeed alone, else all of them or none. `names_refused`: the statement itself
    names the files that it refused, in its last column. `whole_statement`: a quicker one for batches in which
    nothing is refused. `order`: by what items are sorted, where the statement does not sort. `touches` gives
    what an item changes: two items that touch the same cannot be in one statement. `keys` are the references
    (partition id, filename) whose states explain a refusal, to `diagnose`. `in_place`: an item as it is where
    partitions that it adds references to are merged; the statement tells them after its outcome.
    """

    name: Kind
    statement: str
    arrays: Callable[[Sequence[int], Sequence[Any]], Parameters]
    touches: Callable[[Any], Collection[Any]]
    fingerprint: Callable[[Any], Iterable[str]]
    check: Callable[[str, Sequence[Any]], dict[int, DormouseError]]
    alone: bool = False
    names_refused: bool = False
    whole_statement: str | None = None
    order: Callable[[Any], str] | None = None
    in_place: Callable[[Any, Places], Any] | None = None
    keys: Callable[[Any], Keys] = lambda item: []
    diagnose: Callable[[str, Any, Sequence[diagnosis.State]], DormouseError | None] = lambda *_: None


def _files_touched(file: FileWithReferences) -> list[str]:
    return [file.filename]


def _file_fingerprint(file: FileWithReferences) -> list[str]:
    parts = [file.filename, f"{file.byte_count} {file.row_count} {file.min_key!r} {file.max_key!r}"]
    if file.digest is not None:
        parts.append(file.digest.hex())
    if file.deletions_till is not None:
        parts.append(f"deletions {file.deletions_till}")
    for reference in file.references:
        parts += (reference.partition_id, _counted(reference))
    return parts


def _counted(reference: FileReference) -> str:
    exact = not reference.count_approximate
    return f"{reference.row_count} {exact} {reference.only_contains_data_for_this_partition}"


def _check_files(table: str, files: Sequence[FileWithReferences]) -> dict[int, DormouseError]:
    failed: dict[int, DormouseError] = {}
    if len({file.filename for file in files}) == len(files) and all(len(f.references) < 2 for f in files):
        return failed
    names: set[str] = set()
    for number, file in enumerate(files):
        if file.filename in names:
            failed[number] = FileAlreadyExists(table, file.filename)
        names.add(file.filename)
        doubled = first_doubled([reference.partition_id for reference in file.references])
        if doubled is not None:
            failed[number] = FileReferenceAlreadyExists(table, file.filename, doubled)
    return failed


def _assigned_keys(request: AssignJobIdRequest) -> Keys:
    return [(request.partition_id, name) for name in request.filenames]


def _check_assignments(table: str, requests: Sequence[AssignJobIdRequest]) -> dict[int, DormouseError]:
    holders: dict[tuple[str, str], str] = {}
    failed: dict[int, DormouseError] = {}
    for number, request in enumerate(requests):
        for key in _assigned_keys(request):
            if key in holders:
                failed[number] = FileReferenceAssignedToJob(table, key[1], key[0], holders[key])
            holders[key] = request.job_id
    return failed


def _replaced(request: ReplaceFileReferencesRequest) -> list[Any]:
    inputs: list[Any] = [(request.partition_id, name) for name in request.input_filenames]
    return inputs if request.new_reference is None else [*inputs, request.new_reference.filename]


def _replace_keys(request: ReplaceFileReferencesRequest) -> Keys:
    new = request.new_reference
    names = request.input_filenames if new is None else (*request.input_filenames, new.filename)
    return [(request.partition_id, name) for name in names]


def _replace_fingerprint(request: ReplaceFileReferencesRequest) -> list[str]:
    parts = [request.job_id, request.partition_id, *request.input_filenames]
    if request.new_reference is not None:
        parts += ("", request.new_reference.filename, _counted(request.new_reference))
    if request.new_file is not None:
        parts += _file_fingerprint(request.new_file)
    if request.deletions_till is not None:
        parts.append(f"deletions {request.deletions_till}")
    return parts


def _split_keys(request: SplitFileReferenceRequest) -> Keys:
    return [(r.partition_id, r.filename) for r in (request.old_reference, *request.new_references)]


def _split_fingerprint(request: SplitFileReferenceRequest) -> list[str]:
    parts: list[str] = []
    for reference in (request.old_reference, *request.new_references):
        parts += (reference.filename, reference.partition_id, _counted(reference))
    return parts


def first_doubled(items: Sequence[Any]) -> Any:
    """The first item that was there before; None when all differ."""
    seen: set[Any] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


OPERATIONS: dict[Kind, Operation] = {
    "add_files": Operation(
        "add_files",
        "add_files",
        file_arrays,
        _files_touched,
        _file_fingerprint,
        _check_files,
        names_refused=True,
        whole_statement="add_whole",
        in_place=file_in_place,
    ),
    "assign_job_ids": Operation(
        "assign_job_ids",
        "assign",
        assign_arrays,
        _assigned_keys,
        lambda request: (request.job_id, request.partition_id, *request.filenames),
        _check_assignments,
        keys=_assigned_keys,
        diagnose=diagnosis.assignment,
    ),
    "replace_file_references": Operation(
        "replace_file_references",
        "replace",
        replace_arrays,
        _replaced,
        _replace_fingerprint,
        diagnosis.outputs_among_inputs,
        alone=True,
        keys=_replace_keys,
        diagnose=diagnosis.replacement,
        whole_statement="replace_whole",
        order=lambda request: str(request.partition_id),
    ),
    "split_file_references": Operation(
        "split_file_references",
        "split",
        split_arrays,
        _split_keys,
        _split_fingerprint,
        lambda table, requests: {},
        alone=True,
        in_place=split_in_place,
        keys=_split_keys,
        diagnose=diagnosis.split,
    ),
    "delete_collected_files": Operation(
        "delete_collected_files",
        "forget",
        forget_arrays,
        lambda name: [name],
        lambda name: [name],
        diagnosis.impossible_names,
        names_refused=True,
    ),
}
