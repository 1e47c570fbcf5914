"""Edits: changes of rows that read before they write, committed together, once, and without a lost update.

Each change computes new files and deletions from what a table had at one moment. One transaction then checks
that no commit since that moment changed rows that concern the change, records the deletions and adds the
files. If a commit did, the change is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from dormouse.model.cut import Position
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.region import KeyRanges
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.deletions import NewDeletion

ATTEMPTS_MAX = 5
"""How often a change is computed before it is refused with `EditConflict`."""
Changed = Iterator[pa.RecordBatch]
"""Rows that commits added or removed meanwhile, as `reading.changes.changes` returns them."""


@dataclass(frozen=True, slots=True)
class Concern:
    """The rows that a change depends on.

    All have keys in `ranges`. `of` returns whether one of some changed rows concerns the change. It gets the
    rows of files whose keys may lie in the ranges, with the column `_change`, and may stop reading them.
    """

    ranges: KeyRanges
    of: Callable[[TableContext, Changed], bool]


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a change at one moment: files and deletions that are not committed yet.

    The deletions do not apply to the rows of the files. `concern` is None for a change that read nothing.
    `counts` are the numbers of changed rows, by kind: "inserted", "updated" and "deleted".
    """

    files: Sequence[FileWithReferences] = ()
    deletions: Sequence[NewDeletion] = ()
    concern: Concern | None = None
    counts: dict[str, int] = field(default_factory=dict)


class Change(Protocol):
    """A change of one table, which can be computed again."""

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        """Computes the change from the rows of the moment `at`, or from later ones, all of one moment.

        Writes the files of the attempt, and commits nothing. The context has the table's present columns.
        """
        ...
