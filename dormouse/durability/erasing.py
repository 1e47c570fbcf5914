"""Erasing rows: deleted, merged out of every file that has them, and out of the history and the store, now.

Each step leaves in the database how far it came, so that an erasure that was ended anywhere is gone on with
by asking for it again: that deletes what came since, too, and takes over the files that were found. Those
that have rows are known before any of them goes, and moments that need them are expired from then on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain
from typing import Any

from dormouse.durability.erasing_elsewhere import Elsewhere
from dormouse.errors import InvalidQuery, JobFailed, ObjectNotFound, ObjectStoreError, TableBusy
from dormouse.model.backoff import backoff_seconds
from dormouse.model.keyed import is_keyed
from dormouse.reading.deleting import DeleteWhere, asked_to_delete, bounds_to_delete, names_values
from dormouse.reading.deletions import Deletion
from dormouse.reading.reach import may_hold
from dormouse.reading.schemas import on_current
from dormouse.reading.where import Question
from dormouse.state.context import TableContext
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.erasures import Candidate, Erasure, begin
from dormouse.state.files.holds import holds
from dormouse.writing.compaction_job import CompactionResult
from dormouse.writing.compaction_threads import compact_in_threads
from dormouse.writing.engine import check_engine, choose_engine
from dormouse.writing.looking import Look, count, look_at

RUN_SECONDS = 24 * 3600.0
WAIT_SECONDS = 60.0
IGNORED_HOLDS = ("metadata backup ", "reader ")
Progress = Callable[[int, int | None], object]
"""Called with the files that were looked at."""

RunsJobsOf = Callable[..., Generator[CompactionResult, None, None]]
"""As `compact_in_threads`, which takes `run_id`."""


@dataclass(frozen=True, slots=True)
class EraseReport:
    """The proof of an erasure.

    `files_looked_at` of the table and its history, and `objects_looked_at` that the store has beside them.
    `rows` of the deletion were found in `files` of these, once for each copy: these files are deleted.
    `versions` of deleted objects went, too. `consumers` did not read the deletion in time, and are told
    `CutExpired`. `backups` still hold rows, or, those of the metadata, keys of them; of a backup that cannot
    be looked at, or is not whole, it says so in brackets. `unreadable` objects are not of the table, and
    could not be looked at. `open` says what may have rows still: attempts of writers
    that began before; erase again when they have ended. Without any the erasure `is_finished`. Of one that
    was only tried there is no `deletion_id` nor `deleted_at`, and only files of the table were looked at.
    """

    deletion_id: int | None
    deleted_at: datetime | None
    files_looked_at: int
    objects_looked_at: int
    files: int
    rows: int
    versions: int
    consumers: tuple[str, ...]
    backups: tuple[str, ...]
    unreadable: tuple[str, ...]
    open: tuple[str, ...]
    seconds: float

    @property
    def is_finished(self) -> bool:
        return self.deletion_id is not None and not self.open

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=lambda value: value.isoformat())

    @staticmethod
    def from_json(text: str) -> EraseReport:
        said: Mapping[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
        at = datetime.fromisoformat(str(said["deleted_at"]))
        return EraseReport(**{**said, **lists, "deleted_at": at})


def erase(
    context: TableContext,
    where: DeleteWhere,
    *,
    engine: str = "auto",
    wait_seconds: float = WAIT_SECONDS,
    abandon_writers: bool = False,
    backups: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
    on_spark: RunsJobsOf | None = None,
) -> EraseReport:
    """Deletes the rows that match, and makes that physical everywhere; `Table.erase` says what it raises."""
    check_engine(engine)
    started = time.monotonic()
    erasure, at, condition = on_current(context, lambda now: _begun(now, where))
    work = _Erasing(context, erasure, engine, wait_seconds, progress, on_spark)
    work.rewrite()
    loads_have_places = is_keyed(context.properties)
    if loads_have_places:
        still = work.end_writers(abandon=abandon_writers)
        # what a load committed meanwhile came before the deletion, as the load did
        work.rewrite()
    late = work.wait_for_readers()
    elsewhere = Elsewhere(context, erasure, condition)
    versions = work.free(elsewhere)
    if not loads_have_places:
        still = work.end_writers(abandon=abandon_writers)
    elsewhere.look(still, lambda more: progress(work.looked + more, None))
    looked, files, rows = erasure.counts()
    report = EraseReport(
        erasure.deletion_id,
        at,
        looked - elsewhere.looked,
        elsewhere.looked,
        files,
        rows,
        versions + elsewhere.versions,
        tuple(late),
        tuple(elsewhere.backups(backups)),
        tuple(elsewhere.unreadable),
        tuple(f"attempt {attempt_id} of a writer, in {prefix}" for attempt_id, prefix in still),
        round(time.monotonic() - started, 3),
    )
    erasure.finish(report.to_json(), is_finished=report.is_finished)
    context.deletions.retire()
    return report


def _begun(context: TableContext, where: DeleteWhere) -> tuple[Erasure, datetime, str]:
    """The erasure of the rows, when they were deleted, and by which condition."""
    asked, condition = _asked(context, where)
    bounds, by_values = bounds_to_delete(context, asked)
    found, at, older = begin(context.store, context.deletions, condition, bounds, by_values=by_values)
    for one in older:
        context.jobs.release_run(one.run_id)  # what still runs of it commits nothing
    return found, at, condition


def _asked(context: TableContext, where: DeleteWhere) -> tuple[Question, str]:
    if is_keyed(context.properties) and names_values(context, where):
        raise InvalidQuery(
            f"erase from table {context.table.name!r}, which keeps one row a key: name row keys, as its "
            "older rows have other values; table.query tells the keys"
        )
    return asked_to_delete(context, where)


def would_erase(context: TableContext, where: DeleteWhere, progress: Progress) -> EraseReport:
    """What is in the files of the table and its history; changes nothing."""
    return on_current(context, lambda now: _would_erase(now, where, progress))


def _would_erase(context: TableContext, where: DeleteWhere, progress: Progress) -> EraseReport:
    started = time.monotonic()
    asked, _ = _asked(context, where)
    deletion = Deletion(0, "", asked.ranges, asked.conditions)
    looked = files = rows = 0
    for file in chain.from_iterable(context.store.pages()):
        if may_hold(context.schema, file.min_key, file.max_key, asked.ranges):
            found = sum(count(context, file.filename, file.byte_count, [deletion]).values())
            looked, files, rows = looked + 1, files + bool(found), rows + found
            progress(looked, None)
    seconds = round(time.monotonic() - started, 3)
    return EraseReport(None, None, looked, 0, files, rows, 0, (), (), (), (), seconds)


class _Erasing:
    """One run of an erasure; `looked` files were looked at."""

    def __init__(
        self,
        context: TableContext,
        erasure: Erasure,
        engine: str,
        wait_seconds: float,
        progress: Progress,
        on_spark: RunsJobsOf | None,
    ) -> None:
        self._context = context
        self._erasure = erasure
        self._engine = engine
        self._until = time.monotonic() + wait_seconds
        self._progress = progress
        self._on_spark = on_spark
        self.looked = 0

    def rewrite(self) -> None:
        """Merges all files that have rows and that partitions refer to.

        What comes from jobs that began before is looked at, too: it is done when no file with rows was
        referenced, and a look after that finds no other.
        """
        jobs, run_id = self._context.jobs, self._erasure.run_id
        tries = 0
        while True:
            references, free = self._erasure.referenced()
            found = self._look()
            if not references and not found:
                return
            self._check_not_undone()
            if free or found:
                tries = 0
                while jobs.create_of_erased(run_id, RUN_SECONDS):
                    self._run_jobs(run_id)
            left = self._erasure.release_others(running_too=time.monotonic() > self._until)
            if left or not (free or found):
                tries += 1
                time.sleep(backoff_seconds(tries))

    def _look(self) -> int:
        """Looks at the files that may have rows; gives how many have some of which that was not known."""
        found = 0
        for page in self._erasure.candidates():
            unknown = [one for one in page if not one.is_found]
            if unknown:
                found += sum(bool(self._rows(look)) for look in self._looks(unknown))
                self.looked += len(unknown)
                self._progress(self.looked, None)
        return found

    def _looks(self, files: Sequence[Candidate]) -> list[Look]:
        try:
            return look_at(self._context, [(one.filename, one.byte_count) for one in files], self._note)
        except ObjectNotFound:
            if len(files) > 1:
                return [look for one in files for look in self._looks([one])]
            if FileChecks(self._context.store.own).referenced([files[0].file_id]):
                raise
            return []  # it is being collected: first the object goes, then its row

    def _note(self, conn: Any, looks: Sequence[Look]) -> None:
        self._erasure.looked({one.filename: self._rows(one) for one in looks}, len(looks), conn)

    def _rows(self, look: Look) -> int:
        if self._erasure.deletion_id in look.unasked:
            raise InvalidQuery(
                f"table {self._context.table.name!r}: a column that the erasure names was dropped while it "
                "ran, and files of the history may have rows: erase them by other columns"
            )
        return look.rows.get(self._erasure.deletion_id, 0)

    def _check_not_undone(self) -> None:
        # retired it may be while files are referenced that have rows of other erasures
        if self._erasure.is_undone() and self._erasure.referenced()[0]:
            raise TableBusy(
                f"table {self._context.table.name!r} was restored to a moment before the erasure while it "
                "ran, which brought rows back: erase them again",
                table=self._context.table.name,
            )

    def _run_jobs(self, run_id: str) -> None:
        due = self._context.jobs.due(run_id)
        run = choose_engine(self._engine, lambda: due.byte_count, compact_in_threads, self._on_spark)
        with closing(run(self._context, int(time.time() * 1000), run_id=run_id)) as results:
            for result in results:
                if result.outcome == "given_up":
                    raise JobFailed(
                        f"table {self._context.table.name!r}: rows are deleted and not erased, as files that "
                        f"have them cannot be merged: {result.error}; mend that, and erase them again"
                    )

    def wait_for_readers(self) -> list[str]:
        """Waits for consumers that did not read the deletion yet, and gives those that are late.

        Raises `TableBusy` when a backup that is being taken, or a way back to another owner, needs the files.
        """
        tries = 0
        while True:
            late = self._erasure.consumers_behind()
            held = [
                one.holder
                for one in holds(self._context.supplier)
                if not one.is_of_history and not one.holder.startswith(IGNORED_HOLDS)
            ]
            if not late and not held:
                return []
            if time.monotonic() > self._until:
                break
            tries += 1
            time.sleep(min(backoff_seconds(tries), 1.0))
        if held:
            raise TableBusy(
                f"table {self._context.table.name!r}: the rows are deleted, and the files that have them are "
                f"not freed, as {held[0]!r} needs them: erase them again when it has ended, or end it by "
                "'dormouse holds --release'",
                table=self._context.table.name,
            )
        return late

    def free(self, elsewhere: Elsewhere) -> int:
        """Deletes the files that had rows, whatever the history keeps; gives how many versions of them went.

        Raises `CheckFailed` while references are lost, and `ObjectStoreError`; erase again then.
        """
        versions = 0
        self._context.garbage.look()
        while names := self._erasure.to_free():
            failed = self._context.garbage.free(names)
            if failed:
                name, why = failed[0]
                raise ObjectStoreError(
                    f"the rows are deleted and not erased: {len(failed)} objects could not be deleted, such "
                    f"as {name}: {why}; erase them again"
                )
            versions += elsewhere.delete_versions(names)
            self._erasure.freed(names)
        return versions

    def end_writers(self, *, abandon: bool) -> list[tuple[str, str]]:
        """Waits for writers that began before; gives those that go on. Then the objects of the dead go."""
        tries = 0
        while (found := self._erasure.writers()) and not abandon and time.monotonic() < self._until:
            tries += 1
            time.sleep(min(backoff_seconds(tries), 1.0))
        if abandon:
            self._context.attempts.abandon_each([attempt_id for attempt_id, _ in found], self._context.table)
            found = self._erasure.writers()
        self._context.attempts.collect(self._context.table)
        with suppress(ObjectStoreError):
            self._context.objects.sweep_staging()
        return found
