"""A model of the file reference store. It predicts the contents and the answers after a series of commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dormouse.errors import (
    CommitIdReused,
    FileAlreadyExists,
    FileHasReferences,
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    NewReferenceSameAsInput,
)
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    CheckAssignmentRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.state.files.operations import Commit, Kind, State
from dormouse.state.files.totals import Totals

Key = tuple[str, str]
Reason = type[Exception]


@dataclass
class Reference:
    row_count: int
    approximate: bool
    only: bool
    job_id: str | None = None


@dataclass
class Facts:
    byte_count: int | None
    row_count: int | None
    min_key: bytes | None
    max_key: bytes | None
    stamped: bool


@dataclass
class Expected:
    """The expected outcome of a commit: for each refused item, the possible reasons.

    The store finds the reason of a refused replacement after it applied the whole batch. So a later item of
    the batch may be the reason.
    """

    state: State
    failed: dict[int, set[Reason]] = field(default_factory=dict)


class StoreModel:
    """The model: tracked files, references by (partition id, filename), and the commits that were applied."""

    def __init__(self) -> None:
        self.files: dict[str, Facts] = {}
        self.references: dict[Key, Reference] = {}
        self.commits: dict[str, Any] = {}
        self.refused: dict[str, list[tuple[int, Any, set[Reason]]]] = {}

    def apply(self, kind: Kind, commits: Sequence[Commit]) -> list[Expected]:
        """Applies the commits one after the other; returns the expected outcomes."""
        refused: list[tuple[Any, set[Reason]]] = []
        return [self._commit(kind, commit, refused) for commit in commits]

    def copy(self) -> StoreModel:
        return deepcopy(self)

    def unassign(self, job_id: str) -> None:
        for reference in self.references.values():
            if reference.job_id == job_id:
                reference.job_id = None

    def clear(self) -> None:
        self.files.clear()
        self.references.clear()

    def stamp(self) -> int:
        """Stamps the files that lost their last reference since the previous call; returns the number of
        files.
        """
        gone = [self.files[name] for name in self.unreferenced() if not self.files[name].stamped]
        for facts in gone:
            facts.stamped = True
        return len(gone)

    def is_assigned(self, requests: Sequence[CheckAssignmentRequest]) -> bool | Reason:
        jobs = []
        for request in requests:
            for name in request.filenames:
                found = self.references.get((request.partition_id, name))
                if found is None:
                    return FileReferenceNotFound
                if found.job_id not in (None, request.job_id):
                    return FileReferenceAssignedToJob
                jobs.append(found.job_id)
        return None not in jobs

    def unreferenced(self) -> list[str]:
        held = {name for _, name in self.references}
        return sorted(name for name in self.files if name not in held)

    def held_by(self, partition_ids: Sequence[str]) -> list[FileReference]:
        return [r for r in self.listed() if r.partition_id in partition_ids]

    def listed(self) -> list[FileReference]:
        """Returns all references, sorted by partition and then filename, without their times."""
        return [
            FileReference(
                filename=name,
                partition_id=partition,
                row_count=found.row_count,
                job_id=found.job_id,
                count_approximate=found.approximate,
                only_contains_data_for_this_partition=found.only,
            )
            for (partition, name), found in sorted(self.references.items())
        ]

    def with_references(self, names: Sequence[str], references: Sequence[FileReference]) -> list[Any]:
        """Returns the named files with their facts, each with its references among `references`, without
        times.
        """
        return [
            FileWithReferences(
                filename=name,
                references=tuple(r for r in references if r.filename == name),
                byte_count=self.files[name].byte_count,
                row_count=self.files[name].row_count,
                min_key=self.files[name].min_key,
                max_key=self.files[name].max_key,
            )
            for name in names
        ]

    def counts(self) -> dict[str, int | bool]:
        held = {name for _, name in self.references}
        return {
            "references": len(self.references),
            "row_count": sum(r.row_count for r in self.references.values()),
            "rows_exact": not any(r.approximate for r in self.references.values()),
            "files": len(held),
            "byte_count": sum(self.files[name].byte_count or 0 for name in held),
            "unreferenced_files": len(self.files) - len(held),
        }

    def _commit(self, kind: Kind, commit: Commit, refused: list[tuple[Any, set[Reason]]]) -> Expected:
        alone = kind in ("replace_file_references", "split_file_references")
        failed: dict[int, set[Reason]] = {
            n: {reason} for n, reason in _CHECKS.get(kind, lambda _: {})(commit.items).items()
        }
        if failed and not (alone and len(failed) < len(commit.items)):
            return Expected("refused", failed)  # not even sent
        if not commit.items and (kind != "add_files" or commit.commit_id is None):
            return Expected("applied")
        content = (kind, tuple(commit.items)) if commit.same_content else None
        if commit.commit_id in self.commits:
            known = self.commits[commit.commit_id]
            if None in (content, known) or content == known:
                return Expected("applied_before", self._recalled(commit))
            return Expected("refused", failed | {0: {CommitIdReused}})
        applied = (
            self._each(kind, commit.items, failed, refused)
            if alone
            else self._whole(kind, commit.items, failed)
        )
        if applied and commit.commit_id is not None:
            self.commits[commit.commit_id] = content
            self.refused[commit.commit_id] = [(n, commit.items[n], failed[n]) for n in sorted(failed)]
        return Expected("applied" if applied else "refused", failed)

    def _recalled(self, commit: Commit) -> dict[int, set[Reason]]:
        """Returns the reasons of items that were refused when this commit was first applied."""
        found: dict[int, set[Reason]] = {}
        for n, item, why in self.refused[str(commit.commit_id)]:
            alike = [k for k, other in enumerate(commit.items) if other == item and k not in found]
            if alike:
                found[n if n in alike else alike[0]] = why
        return found

    def _whole(self, kind: Kind, items: Sequence[Any], failed: dict[int, set[Reason]]) -> bool:
        reason_of, change = _UPDATES[kind]
        for n, item in enumerate(items):
            reason = reason_of(self, item)
            if reason is not None and item not in items[:n]:
                failed[n] = {reason}
        if not failed:
            for item in items:
                change(self, item)
        return not failed

    def _each(
        self,
        kind: Kind,
        items: Sequence[Any],
        failed: dict[int, set[Reason]],
        refused: list[tuple[Any, set[Reason]]],
    ) -> bool:
        reason_of, change = _UPDATES[kind]
        applied = False
        for n, item in enumerate(items):
            if n in failed:
                continue
            reason = reason_of(self, item)
            if reason is not None:
                failed[n] = {reason}
                refused.append((item, failed[n]))
                continue
            change(self, item)
            applied = True
            if kind == "replace_file_references":
                for other, reasons in refused:
                    later = reason_of(self, other)
                    if later is not None:
                        reasons.add(later)
        return applied

    def _put(self, reference: FileReference) -> None:
        self.references[reference.partition_id, reference.filename] = Reference(
            reference.row_count, reference.count_approximate, reference.only_contains_data_for_this_partition
        )


def counted(totals: Totals) -> dict[str, int | bool]:
    """Returns the totals in the form of the model's counts."""
    return {name: getattr(totals, name) for name in StoreModel().counts()}


def _add_reason(model: StoreModel, file: FileWithReferences) -> Reason | None:
    return FileAlreadyExists if file.filename in model.files else None


def _add(model: StoreModel, file: FileWithReferences) -> None:
    model.files[file.filename] = Facts(
        file.byte_count, file.row_count, file.min_key, file.max_key, stamped=not file.references
    )
    for reference in file.references:
        model._put(reference)


def _assign_reason(model: StoreModel, request: AssignJobIdRequest) -> Reason | None:
    for name in request.filenames:
        found = model.references.get((request.partition_id, name))
        if found is None:
            return FileReferenceNotFound
        if found.job_id is not None:
            return FileReferenceAssignedToJob
    return None


def _assign(model: StoreModel, request: AssignJobIdRequest) -> None:
    for name in request.filenames:
        model.references[request.partition_id, name].job_id = request.job_id


def _replace_reason(model: StoreModel, request: ReplaceFileReferencesRequest) -> Reason | None:
    for name in request.input_filenames:
        found = model.references.get((request.partition_id, name))
        if name not in model.files:
            return FileNotFound
        if found is None:
            return FileReferenceNotFound
        if found.job_id != request.job_id:
            return FileReferenceNotAssignedToJob
    new = request.new_reference
    return FileAlreadyExists if new is not None and new.filename in model.files else None


def _replace(model: StoreModel, request: ReplaceFileReferencesRequest) -> None:
    for name in request.input_filenames:
        del model.references[request.partition_id, name]
    new, facts = request.new_reference, request.new_file
    if new is not None:
        model._put(new)
        model.files[new.filename] = Facts(
            facts and facts.byte_count,
            new.row_count,
            facts and facts.min_key,
            facts and facts.max_key,
            stamped=False,
        )


def _split_reason(model: StoreModel, request: SplitFileReferenceRequest) -> Reason | None:
    old = request.old_reference
    found = model.references.get((old.partition_id, old.filename))
    if old.filename not in model.files:
        return FileNotFound
    if found is None:
        return FileReferenceNotFound
    if found.job_id is not None:
        return FileReferenceAssignedToJob
    exists = any((r.partition_id, r.filename) in model.references for r in request.new_references)
    return FileReferenceAlreadyExists if exists else None


def _split(model: StoreModel, request: SplitFileReferenceRequest) -> None:
    del model.references[request.old_reference.partition_id, request.old_reference.filename]
    for reference in request.new_references:
        model._put(reference)


def _delete_reason(model: StoreModel, filename: str) -> Reason | None:
    if filename not in model.files:
        return FileNotFound
    return FileHasReferences if any(name == filename for _, name in model.references) else None


def _delete(model: StoreModel, filename: str) -> None:
    model.files.pop(filename, None)  # one commit may name a file twice


_UPDATES: dict[Kind, tuple[Callable[..., Reason | None], Callable[..., None]]] = {
    "add_files": (_add_reason, _add),
    "assign_job_ids": (_assign_reason, _assign),
    "replace_file_references": (_replace_reason, _replace),
    "split_file_references": (_split_reason, _split),
    "delete_collected_files": (_delete_reason, _delete),
}


def _doubled_files(files: Sequence[FileWithReferences]) -> dict[int, Reason]:
    failed: dict[int, Reason] = {}
    for n, file in enumerate(files):
        if any(file.filename == other.filename for other in files[:n]):
            failed[n] = FileAlreadyExists
        if len({r.partition_id for r in file.references}) < len(file.references):
            failed[n] = FileReferenceAlreadyExists
    return failed


def _doubled_claims(requests: Sequence[AssignJobIdRequest]) -> dict[int, Reason]:
    return {
        n: FileReferenceAssignedToJob
        for n, request in enumerate(requests)
        if any(
            other.partition_id == request.partition_id and set(other.filenames) & set(request.filenames)
            for other in requests[:n]
        )
    }


def _outputs_among_inputs(requests: Sequence[ReplaceFileReferencesRequest]) -> dict[int, Reason]:
    return {
        n: NewReferenceSameAsInput
        for n, request in enumerate(requests)
        if request.new_reference is not None and request.new_reference.filename in request.input_filenames
    }


_CHECKS: dict[Kind, Callable[[Sequence[Any]], dict[int, Reason]]] = {
    "add_files": _doubled_files,
    "assign_job_ids": _doubled_claims,
    "replace_file_references": _outputs_among_inputs,
}
