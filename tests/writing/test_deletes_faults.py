"""Faults planted into the code, each of which the model test of deletions must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dormouse.durability.erasing import _Erasing
from dormouse.postgres.queries import Query
from dormouse.reading import changes, scan_session, table_view
from dormouse.reading.planner import PlannedReference, QueryPlan
from dormouse.reading.where import deletions_of
from dormouse.state.files import garbage
from dormouse.state.files.deletions import Deletions
from dormouse.state.files.facts import PlannedRows
from dormouse.state.history.retention import PastDeletion
from dormouse.writing import compaction_job, divided_compaction
from dormouse.writing.compaction_job import JobDeletions
from tests.machines import finds_what_is_wrong
from tests.support.api import Instance
from tests.support.reading import Reach
from tests.support.state import Erasure, FileReferenceStore
from tests.writing.test_deletes_model import STEPS, DeletesMachine

Plant = Callable[[pytest.MonkeyPatch], None]


def later_rows(patch: pytest.MonkeyPatch) -> None:
    """Applies a deletion even to rows that were added after it."""
    real = Reach.of
    patch.setattr(Reach, "of", lambda self, till, *facts: real(self, 0, *facts))


def applied_twice(patch: pytest.MonkeyPatch) -> None:
    """Records that no deletion was applied to a job's output, so that readers apply deletions to it again."""
    real = compaction_job._request
    patch.setattr(compaction_job, "_request", lambda *given: replace(real(*given), deletions_till=0))


def lost_in_jobs(patch: pytest.MonkeyPatch) -> None:
    """Skips deletions in jobs, but records them as applied."""
    patch.setattr(compaction_job, "remaining", lambda schema, of_files: [None] * len(of_files))


def seen_too_late(patch: pytest.MonkeyPatch) -> None:
    """Makes jobs look up the deletions at their commit, instead of before they read their inputs."""
    real = compaction_job.commit_output

    def late(context: Any, job: Any, attempt: Any, name: str, facts: Any, till: int, **how: Any) -> None:
        real(context, job, attempt, name, facts, JobDeletions.of(context, job).till, **how)

    for module in (compaction_job, divided_compaction):
        patch.setattr(module, "commit_output", late)


def lost_at_splits(patch: pytest.MonkeyPatch) -> None:
    """Omits deletions from plans, for files to which several partitions refer."""
    real = table_view.plan

    def lost(page: Any, references: Any, deletions: Any = ()) -> QueryPlan:
        listed = list(map(PlannedReference._make, references))
        shared = {one.filename for one in listed if not one.only}
        made = real(page, listed, deletions)
        groups = tuple(
            tuple(replace(scan, deletions=()) if scan.filename in shared else scan for scan in group)
            for group in made.groups
        )
        return replace(made, groups=groups)

    patch.setattr(table_view, "plan", lost)


def retired_early(patch: pytest.MonkeyPatch) -> None:
    """Retires deletions while files still have their rows."""
    every = Query("not_needed", "All.", "select unnest(%(deletion_ids)s::bigint[])")
    patch.setattr(garbage, "_NOT_NEEDED", every)


def unknown_to_moments(patch: pytest.MonkeyPatch) -> None:
    """Reads earlier moments without the deletions that came before them."""
    real = FileReferenceStore.planned_at

    def none(self: FileReferenceStore, *given: Any, **more: Any) -> tuple[int, bool, PlannedRows]:
        *known, rows = real(self, *given, **more)
        return *known, PlannedRows(rows.references, ())

    patch.setattr(FileReferenceStore, "planned_at", none)


def known_to_all_moments(patch: pytest.MonkeyPatch) -> None:
    """Reads earlier moments with the deletions that came after them, too."""
    real = FileReferenceStore.planned_at

    def every(self: FileReferenceStore, *given: Any, **more: Any) -> tuple[int, bool, PlannedRows]:
        *known, rows = real(self, *given, **more)
        earlier = {row[0]: tuple(row) for row in rows.deletions}
        pending = {one.deletion_id: (one.deletion_id, one.condition) for one in Deletions(self).list()}
        return *known, PlannedRows(rows.references, [*{**pending, **earlier}.values()])

    patch.setattr(FileReferenceStore, "planned_at", every)


def lost_by_looks(patch: pytest.MonkeyPatch) -> None:
    """Omits the row count of one file, when files are searched for rows that match a condition."""
    real = scan_session.count_rows
    patch.setattr(scan_session, "count_rows", lambda *given: dict(list(real(*given).items())[1:]))


def not_restored(patch: pytest.MonkeyPatch) -> None:
    """Leaves deletions unchanged when a table is restored."""
    patch.setattr(Deletions, "restore", lambda self, snapshot, conn: None)


def deleted_twice_in_changes(patch: pytest.MonkeyPatch) -> None:
    """Reports rows in the changes as deleted that an earlier deletion had already removed."""
    real = changes.plan_query
    patch.setattr(changes, "plan_query", lambda *given, **how: real(*given, **how | {"deletions_before": 0}))


def history_kept(patch: pytest.MonkeyPatch) -> None:
    """Leaves out of an erasure the files without a reference."""
    real = Erasure.candidates

    def live(self: Erasure) -> Iterator[Sequence[Any]]:
        known = {one.filename for one in self._store.file_references()}
        for page in real(self):
            if some := [one for one in page if one.filename in known]:
                yield some

    patch.setattr(Erasure, "candidates", live)


def output_not_searched(patch: pytest.MonkeyPatch) -> None:
    """Leaves earlier jobs running during an erasure, and does not search their outputs."""
    patch.setattr(Erasure, "release_others", lambda self, *, running_too: 0)
    patch.setattr(Erasure, "referenced", lambda self: (0, 0))


def applied_to_later_files(patch: pytest.MonkeyPatch) -> None:
    """Applies deletions in jobs even to inputs that were added after them."""
    real = JobDeletions.of

    def every(context: Any, job: Any) -> JobDeletions:
        found = real(context, job)
        rows = [(one.deletion_id, one.condition) for one in context.deletions.list()]
        pending = deletions_of(context.schema, rows)
        return replace(found, of_inputs=tuple(pending for _ in found.of_inputs))

    patch.setattr(JobDeletions, "of", staticmethod(every))


def missing_in_changes(patch: pytest.MonkeyPatch) -> None:
    """Omits deletions from the changes of a table."""
    real = changes.events_between

    def others(*given: Any) -> list[Any]:
        return [one for one in real(*given) if not isinstance(one, PastDeletion)]

    patch.setattr(changes, "events_between", others)


def writers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Ignores running writers in an erasure, which has not seen the writers' files."""
    patch.setattr(_Erasing, "end_writers", lambda self, *, abandon: [])


FAULTS = {
    applied_to_later_files: "delete_rows_that_come_again",
    missing_in_changes: "delete_listed_between_cuts",
    writers_forgotten: "begin_ingest erase",
    later_rows: "delete_rows_that_come_again",
    applied_twice: "delete_rows_that_come_again",
    lost_in_jobs: "delete_rows_that_come_again",
    seen_too_late: "delete_amid_jobs",
    lost_at_splits: "ingest divide delete",
    retired_early: "ingest delete collect",
    unknown_to_moments: "delete_listed_between_cuts",
    known_to_all_moments: "delete_listed_between_cuts",
    lost_by_looks: "delete_few_of_many",
    not_restored: "ingest delete_and_restore",
    deleted_twice_in_changes: "delete_rows_twice",
    history_kept: "ingest compact erase",
    output_not_searched: "erase_amid_jobs",
}
"""The rules of the machine that reach each fault."""
EXAMPLES_MAX = 20


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_model_finds_a_planted_fault(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    finds_what_is_wrong(DeletesMachine, instance, FAULTS[plant], EXAMPLES_MAX, STEPS)
