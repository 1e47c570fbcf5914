"""The five kinds of updates: the parameters of their statements, and the errors of refused items.

A statement only refuses an item. The item's error is looked up afterwards. If the look-up finds no error
(None), the state has changed meanwhile, and the item is retried.

A commit may have been planned on an older tree, and name partitions that have left the tree. Statements that
add references refuse such a commit. It is then sent again with the partitions that took their places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dormouse import errors
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
    PartitionForgotten,
)
from dormouse.model.file_reference import (
    COUNT_MAX,
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.types import is_text
from dormouse.state.files.layout import (
    Parameters,
    assign_arrays,
    file_arrays,
    forget_arrays,
    replace_arrays,
    split_arrays,
)

Places = Mapping[str, str]
"""A mapping from partitions that left the tree to the partitions that took their places."""
ReferenceState = tuple[bool, bool, str | None, bool]
"""The state of a reference, in four parts.

1. True if the file is tracked.
2. True if the reference exists.
3. The job that holds the reference, if any.
4. True if a pending deletion applies to the file.
"""

Kind = Literal[
    "add_files",
    "assign_job_ids",
    "replace_file_references",
    "split_file_references",
    "delete_collected_files",
]
State = Literal["applied", "applied_before", "refused"]
Keys = list[tuple[str, str]]


def of_forgotten(
    table: str, items: Sequence[FileWithReferences | SplitFileReferenceRequest], forgotten: Collection[str]
) -> dict[int, PartitionForgotten]:
    """Returns an error for each item that adds references to forgotten partitions, by the item's number.

    A forgotten partition left the tree so long ago that the partition in its place is no longer known.
    """
    return {
        number: PartitionForgotten(table, new.filename, new.partition_id)
        for number, item in enumerate(items if forgotten else ())
        for new in (item.references if isinstance(item, FileWithReferences) else item.new_references)
        if new.partition_id in forgotten
    }


def file_in_place(file: FileWithReferences, places: Places) -> FileWithReferences:
    """Returns the file with each reference moved to the partition that took the place of its own."""
    return replace(file, references=_in_place(file.references, places))


def split_in_place(request: SplitFileReferenceRequest, places: Places) -> SplitFileReferenceRequest:
    """Returns the split with each new reference moved to the partition that took the place of its own."""
    return replace(request, new_references=_in_place(request.new_references, places))


def _in_place(references: Iterable[FileReference], places: Places) -> tuple[FileReference, ...]:
    """Moves references to one file to the partitions that took the places of their own.

    References that get the same partition become one, and their row counts are added.
    """
    of_partition: dict[str, list[FileReference]] = defaultdict(list)
    for reference in references:
        of_partition[places.get(reference.partition_id, reference.partition_id)].append(reference)
    return tuple(
        replace(
            group[0],
            partition_id=partition_id,
            row_count=min(sum(each.row_count for each in group), COUNT_MAX),
            count_approximate=any(each.count_approximate for each in group),
            only_contains_data_for_this_partition=len(group) == 1
            and group[0].only_contains_data_for_this_partition,
        )
        for partition_id, group in of_partition.items()
    )


def _outputs_among_inputs(
    table: str, requests: Sequence[ReplaceFileReferencesRequest]
) -> dict[int, DormouseError]:
    return {
        n: NewReferenceSameAsInput(table, r.new_reference.filename, r.partition_id, r.job_id)
        for n, r in enumerate(requests)
        if r.new_reference is not None and r.new_reference.filename in r.input_filenames
    }


def _impossible_names(table: str, filenames: Sequence[str]) -> dict[int, DormouseError]:
    """Returns an error for each name that PostgreSQL cannot store, by the name's number.

    No file can have such a name.
    """
    return {n: FileNotFound(table, name) for n, name in enumerate(filenames) if not is_text(name)}


def refused_assignment(
    table: str, request: AssignJobIdRequest, states: Sequence[ReferenceState]
) -> DormouseError | None:
    """Returns the error of a refused assignment, or None; `states` are those of its references."""
    for name, (_, exists, job_id, _) in zip(request.filenames, states, strict=True):
        if not exists:
            return FileReferenceNotFound(table, name, request.partition_id, request.job_id)
        if job_id is not None:
            return FileReferenceAssignedToJob(table, name, request.partition_id, job_id)
    return None


def refused_replacement(
    table: str, request: ReplaceFileReferencesRequest, states: Sequence[ReferenceState]
) -> DormouseError | None:
    """Returns the error of a refused replacement, or None.

    `states` are those of its inputs and then, if it has one, of its output.
    """
    about = (request.partition_id, request.job_id)
    for name, state in zip(request.input_filenames, states, strict=False):
        tracked, exists, job_id, is_deleted_from = state
        if not tracked:
            return FileNotFound(table, name, *about)
        if not exists:
            return FileReferenceNotFound(table, name, *about)
        if job_id != request.job_id:
            return FileReferenceNotAssignedToJob(table, name, *about)
        if is_deleted_from and request.deletions_till is None:
            return DeletionsNotApplied(table, name, *about)
    if request.new_reference is not None and states[-1][0]:
        return FileAlreadyExists(table, request.new_reference.filename, *about)
    return None


def refused_split(
    table: str, request: SplitFileReferenceRequest, states: Sequence[ReferenceState]
) -> DormouseError | None:
    """Returns the error of a refused split, or None.

    `states` are those of the old reference and then of the new ones.
    """
    old = request.old_reference
    (tracked, is_there, job_id, _), *targets = states
    if not tracked:
        return FileNotFound(table, old.filename, old.partition_id)
    if not is_there:
        return FileReferenceNotFound(table, old.filename, old.partition_id)
    if job_id is not None:
        return FileReferenceAssignedToJob(table, old.filename, old.partition_id, job_id)
    for new, (_, exists, _, _) in zip(request.new_references, targets, strict=True):
        if exists:
            return FileReferenceAlreadyExists(table, new.filename, new.partition_id)
    return None


@dataclass(frozen=True, slots=True)
class Commit:
    """Changes of one kind to one table, which are applied together. Each commit id is applied once.

    - `items` are FileWithReferences, AssignJobIdRequest, ReplaceFileReferencesRequest,
      SplitFileReferenceRequest or filenames, depending on the kind.
    - `commit_id` is kept without limit. If the commit `expires`, garbage collection deletes the id after
      `history_retention_seconds`.
    - `same_content`: if the id was applied before with other content, refuse this commit. It was given the
      same id by mistake.
    """

    items: Sequence[Any]
    commit_id: str | None = None
    expires: bool = True
    same_content: bool = True
    source: bytes | None = None
    """A digest, 16 bytes, of the data from which the items were made. It is recorded with the id."""
    attempt_id: str | None = None
    """The write attempt that the commit ends. An abandoned attempt can commit nothing."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of a commit.

    `failed` has the number and error of each refused item, even if the commit was applied before. The state
    is "refused" when no item was applied. The replacements or splits of a commit succeed or fail one by one.
    Other items of a commit succeed or fail together.
    """

    state: State
    failed: tuple[tuple[int, DormouseError], ...] = ()

    @property
    def error(self) -> DormouseError | None:
        return self.failed[0][1] if self.failed else None


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """The refused items of an applied commit. `items` is the number of all its items."""

    items: int
    failed: tuple[tuple[int, DormouseError], ...]
    marks: tuple[str, ...] = ()
    """Marks by which failed items are recognized when the commit is repeated in another order."""

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON that is stored with the commit."""
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
        """Returns the object that `to_json` stored; `table` is the table's current name, for the errors."""
        failed = [(n, getattr(errors, kind)(table, *about)) for n, kind, *about in kept["failed"]]
        return cls(kept["items"], tuple(failed), tuple(kept["marks"]))

    def __str__(self) -> str:
        reasons = "; ".join(f"number {number + 1}: {error}" for number, error in self.failed)
        return f"{len(self.failed)} of {self.items} requests failed, the others are applied: {reasons}"


@dataclass(frozen=True)
class Operation:
    """One kind of update.

    - `alone`: each item of a commit succeeds or fails alone; otherwise all or none are applied.
    - `names_refused`: the last column of the statement names the files that it refused.
    - `whole_statement`: a faster statement for batches in which nothing is refused.
    - `order`: the sort key of items, if the statement does not sort them.
    - `touches`: returns the things that an item changes. Two items that change the same thing cannot be in
      one statement.
    - `keys`: returns the references (partition id, filename) whose states `diagnose` needs.
    - `diagnose`: returns the error of a refused item, or None when nothing prevents it now.
    - `in_place`: returns an item with the partitions that took the places of merged ones. The statement
      returns these after its outcome.
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
    diagnose: Callable[[str, Any, Sequence[ReferenceState]], DormouseError | None] = lambda *_: None


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
    """Returns the first item that equals an earlier one, or None when all differ."""
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
        diagnose=refused_assignment,
    ),
    "replace_file_references": Operation(
        "replace_file_references",
        "replace",
        replace_arrays,
        _replaced,
        _replace_fingerprint,
        _outputs_among_inputs,
        alone=True,
        keys=_replace_keys,
        diagnose=refused_replacement,
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
        diagnose=refused_split,
    ),
    "delete_collected_files": Operation(
        "delete_collected_files",
        "forget",
        forget_arrays,
        lambda name: [name],
        lambda name: [name],
        _impossible_names,
        names_refused=True,
    ),
}
