"""Which deletions a job applies: those that are there when it begins, each to the files that came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dormouse.context import TableContext
from dormouse.files.compaction_jobs import CompactionJob
from dormouse.model.schema import Schema
from dormouse.query.deletions import Deletion, deletions_of
from dormouse.query.reach import Reach
from dormouse.query.schemas import on_current

if TYPE_CHECKING:
    from datafusion import Expr


@dataclass(frozen=True, slots=True)
class JobDeletions:
    """The deletions that a job applies to each of its inputs; `till` is the number of the last of all.

    `context` has the columns by which the job is run: they are no older than those of deletions and inputs.
    """

    till: int
    of_inputs: tuple[tuple[Deletion, ...], ...]
    context: TableContext = field(repr=False, compare=False)

    @staticmethod
    def of(context: TableContext, job: CompactionJob) -> JobDeletions:
        """As they are now: each that comes later is of all rows of the output, as the inputs were there."""
        found = context.store.deletions_of([item.filename for item in job.inputs])
        context, pending = on_current(context, lambda now: (now, deletions_of(now.schema, found.deletions)))
        reach = Reach(context.schema, pending)
        files = tuple(reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files)
        return JobDeletions(found.till, files, context)


def remaining(schema: Schema, of_files: Sequence[Sequence[Deletion]]) -> list[Expr | None]:
    """For each file what its rows must meet that are of no deletion of it; None: they all remain."""
    from dormouse.query.predicates import remains

    return [remains(schema, deletions) if deletions else None for deletions in of_files]
