"""Which deletions a job applies: those that are there when it begins, each to the files that came before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dormouse.context import TableContext
from dormouse.files.compaction_jobs import CompactionJob
from dormouse.files.reads import KeyBounds
from dormouse.model.schema import Schema
from dormouse.query.deletions import Deletion, deletions_of
from dormouse.query.reach import Reach

if TYPE_CHECKING:
    from datafusion import Expr


@dataclass(frozen=True, slots=True)
class JobDeletions:
    """The deletions that a job applies to each of its inputs; `till` is the number of the last of all."""

    till: int
    of_inputs: tuple[tuple[Deletion, ...], ...]

    @staticmethod
    def of(context: TableContext, job: CompactionJob) -> JobDeletions:
        """As they are now: each that comes later is of all rows of the output, as the inputs were there."""
        found = context.store.deletions_of([item.filename for item in job.inputs], KeyBounds())
        reach = Reach(context.schema, deletions_of(context.schema, found.deletions))
        return JobDeletions(
            found.till,
            tuple(reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files),
        )

    def remains(self, schema: Schema) -> list[Expr | None]:
        """For each input what its rows must meet; None: they all remain."""
        from dormouse.query.predicates import remains

        return [remains(schema, deletions) if deletions else None for deletions in self.of_inputs]
