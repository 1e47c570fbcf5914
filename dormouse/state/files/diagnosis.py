"""Why a part of an update was refused: looked up only after the statement has refused it.

`None` when nothing speaks against it any more: the state has changed meanwhile, and it is worth another try.
"""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.errors import (
    DeletionsNotApplied,
    DormouseError,
    FileAlreadyExists,
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    NewReferenceSameAsInput,
)
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.types import is_text

State = tuple[bool, bool, str | None, bool]
"""Whether the file is tracked, the reference there, its job; whether a pending deletion is of the file."""


def outputs_among_inputs(
    table: str, requests: Sequence[ReplaceFileReferencesRequest]
) -> dict[int, DormouseError]:
    return {
        n: NewReferenceSameAsInput(table, r.new_reference.filename, r.partition_id, r.job_id)
        for n, r in enumerate(requests)
        if r.new_reference is not None and r.new_reference.filename in r.input_filenames
    }


def impossible_names(table: str, filenames: Sequence[str]) -> dict[int, DormouseError]:
    """Files that cannot be: PostgreSQL could not hold their names."""
    return {n: FileNotFound(table, name) for n, name in enumerate(filenames) if not is_text(name)}


def assignment(table: str, request: AssignJobIdRequest, states: Sequence[State]) -> DormouseError | None:
    """The states are of the request's references."""
    for name, (_, found, job_id, _) in zip(request.filenames, states, strict=True):
        if not found:
            return FileReferenceNotFound(table, name, request.partition_id, request.job_id)
        if job_id is not None:
            return FileReferenceAssignedToJob(table, name, request.partition_id, job_id)
    return None


def replacement(
    table: str, request: ReplaceFileReferencesRequest, states: Sequence[State]
) -> DormouseError | None:
    """The states are of the inputs, and then of the output when there is one."""
    about = (request.partition_id, request.job_id)
    for name, (tracked, found, job_id, is_deleted_from) in zip(request.input_filenames, states, strict=False):
        if not tracked:
            return FileNotFound(table, name, *about)
        if not found:
            return FileReferenceNotFound(table, name, *about)
        if job_id != request.job_id:
            return FileReferenceNotAssignedToJob(table, name, *about)
        if is_deleted_from and request.deletions_till is None:
            return DeletionsNotApplied(table, name, *about)
    if request.new_reference is not None and states[-1][0]:
        return FileAlreadyExists(table, request.new_reference.filename, *about)
    return None


def split(table: str, request: SplitFileReferenceRequest, states: Sequence[State]) -> DormouseError | None:
    """The states are of the old reference, and then of the new ones."""
    old = request.old_reference
    (tracked, found, job_id, _), *targets = states
    if not tracked:
        return FileNotFound(table, old.filename, old.partition_id)
    if not found:
        return FileReferenceNotFound(table, old.filename, old.partition_id)
    if job_id is not None:
        return FileReferenceAssignedToJob(table, old.filename, old.partition_id, job_id)
    for new, (_, exists, _, _) in zip(request.new_references, targets, strict=True):
        if exists:
            return FileReferenceAlreadyExists(table, new.filename, new.partition_id)
    return None
