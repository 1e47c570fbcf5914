"""Values of the store as arrays for its SQL, and its rows as values."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from dormouse.model.file_reference import (
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)

Parameters = dict[str, Any]


@lru_cache(maxsize=100_000)
def narrow_id(text: str) -> uuid.UUID:
    """A file's or commit's id in the database: 128 bits of BLAKE2b, narrow and known without a look-up."""
    return uuid.UUID(bytes=hashlib.blake2b(text.encode(), digest_size=16).digest())


def reference_arrays(prefix: str, references: Sequence[FileReference]) -> Parameters:
    columns = {
        "partition_ids": [r.partition_id for r in references],
        "file_ids": [narrow_id(r.filename) for r in references],
        "filenames": [r.filename for r in references],
        "row_counts": [r.row_count for r in references],
        "approximate": [r.count_approximate for r in references],
        "only": [r.only_contains_data_for_this_partition for r in references],
    }
    return {f"{prefix}_{name}": values for name, values in columns.items()}


def file_arrays(files: Sequence[FileWithReferences]) -> Parameters:
    return {
        "file_ids": [narrow_id(f.filename) for f in files],
        "filenames": [f.filename for f in files],
        "byte_counts": [f.byte_count for f in files],
        "row_counts": [f.row_count for f in files],
        "min_keys": [f.min_key for f in files],
        "max_keys": [f.max_key for f in files],
        "referenced": [bool(f.references) for f in files],
        **reference_arrays("ref", [reference for f in files for reference in f.references]),
    }


def key_arrays(keys: Iterable[tuple[str, str]]) -> Parameters:
    """(partition id, filename) pairs."""
    listed = list(keys)
    return {"partition_ids": [p for p, _ in listed], "file_ids": [narrow_id(f) for _, f in listed]}


def replace_arrays(requests: Sequence[ReplaceFileReferencesRequest]) -> Parameters:
    inputs = [(n, r, name) for n, r in enumerate(requests) for name in r.input_filenames]
    outputs = [(n, r, r.new_reference) for n, r in enumerate(requests) if r.new_reference is not None]
    files = [request.new_file for _, request, _ in outputs]
    return {
        "requests": [n for n, _, _ in inputs],
        "job_ids": [r.job_id for _, r, _ in inputs],
        **key_arrays((r.partition_id, name) for _, r, name in inputs),
        "out_requests": [n for n, _, _ in outputs],
        **reference_arrays("out", [reference for _, _, reference in outputs]),
        "out_byte_counts": [f and f.byte_count for f in files],
        "out_min_keys": [f and f.min_key for f in files],
        "out_max_keys": [f and f.max_key for f in files],
    }


def split_arrays(requests: Sequence[SplitFileReferenceRequest]) -> Parameters:
    targets = [(n, new) for n, request in enumerate(requests) for new in request.new_references]
    return {
        "requests": list(range(len(requests))),
        **key_arrays((r.old_reference.partition_id, r.old_reference.filename) for r in requests),
        "new_requests": [n for n, _ in targets],
        **reference_arrays("new", [new for _, new in targets]),
    }


def reference_from_row(row: Sequence[Any]) -> FileReference:
    """The columns of the query `reference_columns`."""
    filename, partition_id, row_count, job_id, last_updated, approximate, only = row
    return FileReference(
        filename=filename,
        partition_id=partition_id,
        row_count=row_count,
        job_id=job_id,
        last_updated=last_updated,
        count_approximate=approximate,
        only_contains_data_for_this_partition=only,
    )
