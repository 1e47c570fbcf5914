"""Why a request of a batch was refused: looked up only after the statement has refused it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import psycopg

from dormouse.errors import (
    DormouseError,
    FileAlreadyExists,
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    NewReferenceSameAsInput,
)
from dormouse.model.file_reference import ReplaceFileReferencesRequest, SplitFileReferenceRequest
from dormouse.model.table import TableRecord

State = tuple[bool, bool, str | None]
"""Whether the file is tracked, whether the reference is there, and its job."""


class _Store(Protocol):
    table: TableRecord

    def _states(self, conn: psycopg.Connection[Any], keys: Sequence[tuple[str, str]]) -> list[State]: ...


def outputs_among_inputs(
    table: str, requests: Sequence[ReplaceFileReferencesRequest]
) -> dict[int, DormouseError]:
    return {
        n: NewReferenceSameAsInput(table, r.new_reference.filename, r.partition_id, r.job_id)
        for n, r in enumerate(requests)
        if r.new_reference is not None and r.new_reference.filename in r.input_filenames
    }


def replacement(
    store: _Store, conn: psycopg.Connection[Any], request: ReplaceFileReferencesRequest
) -> DormouseError:
    keys = [(request.partition_id, name) for name in request.input_filenames]
    if request.new_reference is not None:
        keys.append((request.partition_id, request.new_reference.filename))
    states = store._states(conn, keys)
    about = (request.partition_id, request.job_id)
    for (_, name), (tracked, found, job_id) in zip(keys, states, strict=True):
        if name not in request.input_filenames:
            continue
        if not tracked:
            return FileNotFound(store.table.name, name, *about)
        if not found:
            return FileReferenceNotFound(store.table.name, name, *about)
        if job_id != request.job_id:
            return FileReferenceNotAssignedToJob(store.table.name, name, *about)
    return FileAlreadyExists(store.table.name, keys[-1][1], *about)


def split(store: _Store, conn: psycopg.Connection[Any], request: SplitFileReferenceRequest) -> DormouseError:
    old = request.old_reference
    keys = [(r.partition_id, r.filename) for r in (old, *request.new_references)]
    (tracked, found, job_id), *targets = store._states(conn, keys)
    if not tracked:
        return FileNotFound(store.table.name, old.filename, old.partition_id)
    if not found:
        return FileReferenceNotFound(store.table.name, old.filename, old.partition_id)
    if job_id is not None:
        return FileReferenceAssignedToJob(store.table.name, old.filename, old.partition_id, job_id)
    for new, (_, exists, _) in zip(request.new_references, targets, strict=True):
        if exists:
            return FileReferenceAlreadyExists(store.table.name, new.filename, new.partition_id)
    return FileReferenceNotFound(store.table.name, old.filename, old.partition_id)
