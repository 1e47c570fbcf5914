"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProblemKind = Literal[
    "object_missing",
    "object_size",
    "object_unknown",
    "reference_without_file",
    "file_without_reference",
    "partitions",
    "totals",
    "object_digest",
    "object_unreadable",
    "row_count",
    "key_range",
    "not_sorted",
    "statistics",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of a table, or with None of none, that is not as it was written; `detail` says what."""

    kind: ProblemKind
    table: str | None
    partition_id: str | None
    filename: str | None
    detail: str
