"""The five kinds of updates: how each travels to its statement, and why a part of it was refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
from dormouse.state.files.commit import Kind
from dormouse.state.files.moves import Places, file_in_place, split_in_place
from dormouse.state.files.parameters import (
    Parameters,
    assign_arrays,
    file_arrays,
    forget_arrays,
    replace_arrays,
    split_arrays,
)

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
