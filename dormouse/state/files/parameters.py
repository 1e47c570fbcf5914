"""Values of the store as arrays for its SQL, and its rows as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any

from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.model.text import narrow_bytes
from dormouse.postgres.arrays import Uuids, booleans, bytes_, integers, texts

Parameters = dict[str, Any]
_REFERENCE_FIELDS = tuple(field.name for field in fields(FileReference))


def reference_arrays(
    prefix: str, references: Sequence[FileReference], ids: Mapping[str, bytes] | None = None
) -> Parameters:
    """References as columns; `ids` has the narrow ids of their files, where they are known."""
    names = [r.filename for r in references]
    columns = {
        "partition_ids": texts([r.partition_id for r in references]),
        "file_ids": Uuids([ids[name] for name in names] if ids else list(map(narrow_bytes, names))),
        "filenames": texts(names),
        "row_counts": integers([r.row_count for r in references]),
        "approximate": booleans([r.count_approximate for r in references]),
        "only": booleans([r.only_contains_data_for_this_partition for r in references]),
    }
    return {f"{prefix}_{name}": values for name, values in columns.items()}


def file_arrays(commits: Sequence[int], files: Sequence[FileWithReferences]) -> Parameters:
    """Files, each of the commit of its number."""
    references = [(n, reference) for n, f in zip(commits, files, strict=True) for reference in f.references]
    references.sort(key=lambda pair: pair[1].partition_id)  # neighbours in the index come together
    ids = {f.filename: narrow_bytes(f.filename) for f in files}
    return {
        "commits": integers(commits),
        "file_ids": Uuids([ids[f.filename] for f in files]),
        "filenames": texts([f.filename for f in files]),
        "byte_counts": integers([f.byte_count for f in files]),
        "row_counts": integers([f.row_count for f in files]),
        "min_keys": bytes_([f.min_key for f in files]),
        "max_keys": bytes_([f.max_key for f in files]),
        "digests": Uuids([f.digest for f in files]),
        "deletions_till": integers([f.deletions_till for f in files]),
        "referenced": booleans([bool(f.references) for f in files]),
        "ref_commits": integers([n for n, _ in references]),
        **reference_arrays("ref", [reference for _, reference in references], ids),
    }


def key_arrays(keys: Iterable[tuple[str, str]]) -> Parameters:
    """(partition id, filename) pairs."""
    listed = list(keys)
    return {
        "partition_ids": texts([p for p, _ in listed]),
        "file_ids": Uuids([narrow_bytes(f) for _, f in listed]),
    }


def assign_arrays(commits: Sequence[int], requests: Sequence[AssignJobIdRequest]) -> Parameters:
    return {
        "commits": integers(commits),
        "partition_ids": texts([r.partition_id for r in requests]),
        "job_ids": texts([r.job_id for r in requests]),
        **_input_arrays([r.filenames for r in requests]),
    }


def replace_arrays(commits: Sequence[int], requests: Sequence[ReplaceFileReferencesRequest]) -> Parameters:
    outputs = [(n, r, r.new_reference) for n, r in enumerate(requests, 1) if r.new_reference is not None]
    files = [request.new_file for _, request, _ in outputs]
    return {
        "commits": integers(commits),
        "partition_ids": texts([r.partition_id for r in requests]),
        "job_ids": texts([r.job_id for r in requests]),
        "deletions_till": integers([r.deletions_till for r in requests]),
        **_input_arrays([r.input_filenames for r in requests]),
        "out_requests": integers([n for n, _, _ in outputs]),
        **reference_arrays("out", [reference for _, _, reference in outputs]),
        "out_byte_counts": integers([f.byte_count if f else None for f in files]),
        "out_min_keys": bytes_([f.min_key if f else None for f in files]),
        "out_max_keys": bytes_([f.max_key if f else None for f in files]),
        "out_digests": Uuids([f.digest if f else None for f in files]),
        "out_deletions_till": integers([r.deletions_till for _, r, _ in outputs]),
    }


def split_arrays(commits: Sequence[int], requests: Sequence[SplitFileReferenceRequest]) -> Parameters:
    news = [request.new_references for request in requests]
    return {
        "commits": integers(commits),
        **key_arrays((r.old_reference.partition_id, r.old_reference.filename) for r in requests),
        "filenames": texts([r.old_reference.filename for r in requests]),
        "targets": texts([texts([new.partition_id for new in group]) for group in news]),
        "row_counts": texts([integers([new.row_count for new in group]) for group in news]),
        "approximate": texts([booleans([new.count_approximate for new in group]) for group in news]),
        "only": texts(
            [booleans([new.only_contains_data_for_this_partition for new in group]) for group in news]
        ),
    }


def forget_arrays(commits: Sequence[int], filenames: Sequence[str]) -> Parameters:
    return {
        "commits": integers(commits),
        "file_ids": Uuids(list(map(narrow_bytes, filenames))),
        "filenames": texts(filenames),
    }


def reference_from_row(row: Sequence[Any]) -> FileReference:
    """The columns of the query `reference_columns`, which are the fields."""
    return FileReference(**dict(zip(_REFERENCE_FIELDS, row, strict=True)))


def _input_arrays(groups: Sequence[Sequence[str]]) -> Parameters:
    """Files by request: the ids of all, and from which to which each has."""
    sizes = list(map(len, groups))
    lasts = list(accumulate(sizes))
    return {
        "inputs": Uuids([narrow_bytes(name) for group in groups for name in group]),
        "firsts": integers([last - size + 1 for last, size in zip(lasts, sizes, strict=True)]),
        "lasts": integers(lasts),
    }
