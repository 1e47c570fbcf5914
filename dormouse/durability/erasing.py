"""Erasing rows: deleted, merged out of every file that has them, and out of the history and the store, now.

Each step leaves in the database how far it came, so that an erasure that was ended anywhere is gone on with
by asking for it again: that deletes what came since, too, and takes over the files that were found. Those
that have rows are known before any of them goes, and moments that need them are expired from then on.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from dormouse.aws.versions import Version, Versions
from dormouse.durability.backups import (
    FOLDER,
    backup_of,
    listed_backups,
    metadata_backups,
    objects_in,
    objects_of,
)
from dormouse.errors import (
    DormouseError,
    InvalidQuery,
    JobFailed,
    ObjectNotFound,
    ObjectStoreError,
    TableBusy,
)
from dormouse.model.loops import Progress, backoff_seconds, no_progress
from dormouse.model.table import is_keyed
from dormouse.objects.ledger import unknown_pages
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore, open_store
from dormouse.reading.checked_files import on_current
from dormouse.reading.planner import may_hold
from dormouse.reading.scan_session import Look, count_rows, look_at
from dormouse.reading.where import DeleteWhere, Deletion, Question, deletions_of
from dormouse.state.context import TableContext
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.deletions import Candidate, Erasure, backups_taken, begin_erasure
from dormouse.state.files.holds import holds
from dormouse.writing.compaction import compact_in_threads
from dormouse.writing.compaction_job import CompactionResult
from dormouse.writing.deleting import asked_to_delete, bounds_to_delete, names_values
from dormouse.writing.ingest import check_engine, choose_engine

# Where else a table's rows may be: unknown objects, versions of deleted ones, backups.

PAGE_NAMES = 1_000
UNREADABLE_MAX = 1_000
RUN_SECONDS = 24 * 3600.0
WAIT_SECONDS = 60.0
IGNORED_HOLDS = ("metadata backup ", "reader ")
RunsJobsOf = Callable[..., Generator[CompactionResult, None, None]]
"""As `compact_in_threads`, which takes `run_id`."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A version of a deleted object, as the store's `list` does not show it."""

    name: str
    byte_count: int
    version: Version


class HiddenVersions:
    """Those of a store; a folder has none. Raises `InstanceError` when S3 may not be asked for them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._prefix = ""
        self._versions: Versions | None = None
        if objects.url.startswith("s3://"):
            bucket, _, prefix = objects.url.removeprefix("s3://").partition("/")
            self._prefix = f"{prefix}/" if prefix else ""
            self._versions = Versions(bucket, objects.options)

    def below(self, prefix: str) -> Iterator[Hidden]:
        """Of the objects whose names begin with a prefix."""
        if self._versions is None:
            return
        for one in self._versions.below(self._prefix + prefix):
            if one.byte_count is not None and not one.is_latest:
                yield Hidden(one.key.removeprefix(self._prefix), one.byte_count, one)

    def fetch(self, hidden: Hidden, path: Path) -> None:
        """Writes its bytes to a path."""
        if self._versions is not None:
            self._versions.fetch(hidden.version, path)

    def delete(self, names: Iterable[str]) -> int:
        """Deletes all that is kept of objects, which are deleted themselves; gives how many versions."""
        if self._versions is None:
            return 0
        found = [
            one
            for name in names
            for one in self._versions.below(self._prefix + name)
            if one.key == self._prefix + name
        ]
        # of an object that is there again, nothing is lost
        gone = [
            one for _, versions in groupby(found, attrgetter("key")) for one in _of_deleted(list(versions))
        ]
        self._versions.delete(gone)
        return sum(one.byte_count is not None for one in gone)

    def replicas(self) -> list[str]:
        """Where copies of the store's objects stay, whatever is deleted here."""
        return [] if self._versions is None else self._versions.replicas()


def _of_deleted(versions: list[Version]) -> list[Version]:
    """All versions of a key, but for the object that is there."""
    return [one for one in versions if not (one.is_latest and one.byte_count is not None)]


class Elsewhere:
    """What is looked at beside the table's files: `looked` objects, of which `versions` went.

    Objects that the database does not know may be another timeline's, or left by programs that died.
    """

    def __init__(self, context: TableContext, erasure: Erasure, condition: str) -> None:
        self._context = context
        self._erasure = erasure
        self._hidden = HiddenVersions(context.objects)
        self._deletion = [(erasure.deletion_id, condition)]
        self.looked = 0
        self.versions = 0
        self.unreadable: list[str] = []

    def delete_versions(self, filenames: Iterable[str]) -> int:
        """Deletes what the store keeps of deleted files and their sketches; gives how many versions."""
        return self._hidden.delete(part for name in filenames for part in (name, name + SKETCHES_SUFFIX))

    def look(self, writers: Sequence[tuple[str, str]], progress: Progress) -> None:
        """Looks at all that is below the table's prefixes and no file of it; what has rows is deleted.

        `writers` are attempts that go on, whose objects are theirs.
        """
        own = tuple(prefix for _, prefix in writers)
        for prefix in self._context.table.object_prefixes:
            for name, size in self._unknown(prefix.rstrip("/")):
                if not name.startswith(own or ("/",)):
                    self._look_at(name, size)
                    progress(self.looked, None)
            for hidden in self._hidden.below(prefix):
                if not hidden.name.endswith(SKETCHES_SUFFIX):
                    with tempfile.TemporaryDirectory(prefix="dormouse-erase-") as folder:
                        copy = Path(folder) / "hidden.parquet"
                        self._hidden.fetch(hidden, copy)
                        rows = self._rows(hidden.name, hidden.byte_count, open_store(folder), copy.name)
                    self._note(hidden.name, rows)
                    if rows:
                        self.versions += self.delete_versions([hidden.name])
                    progress(self.looked, None)

    def backups(self, places: Sequence[str]) -> Iterator[str]:
        """Yields the backups that still hold rows, by name, and those that may, with why it is not known.

        It looks in each place that a backup of the instance was begun in, and in `places`. Files of a backup
        that the table does not have any more are read; of the others it is known.
        """
        files = set(self._erasure.filenames())
        known = backups_taken(self._context.supplier)
        for place in dict.fromkeys([*known, *(open_store(place).url for place in places)]):
            for name, problem in self._in_place(place, known.get(place, ()), files):
                yield f"{place}/{name}" + (f" ({problem})" if problem else "")
        for metadata in metadata_backups(self._context.objects):
            yield f"{self._context.objects.url}/{metadata.name} (keys of files, and no rows)"
        if files:
            yield from self._hidden.replicas()

    def _in_place(
        self, place: str, noted: Sequence[str], files: set[str]
    ) -> Iterator[tuple[str, str | None]]:
        """Yields the name of each backup that holds rows, and of each that may, with why that is not known.

        `noted` are the names of backups of this instance that were begun there.
        """
        try:
            store = open_store(place)
            whole, unfinished = listed_backups(store)
        except DormouseError as error:
            yield from ((name, f"cannot be looked at: {error}") for name in noted or ["?"])
            return
        for name in whole:
            try:
                if self._holds(store, name, list(objects_of(store, backup_of(store, name))), files):
                    yield name, None
            except DormouseError as error:
                yield name, f"cannot be looked at: {error}"
        for name in unfinished:
            try:
                if name in noted or self._holds(store, name, objects_in(store, name), files):
                    yield name, "not whole: it is being taken, or was killed; it may hold rows"
            except DormouseError as error:
                yield name, f"not whole, and cannot be looked at: {error}"

    def _holds(self, store: ObjectStore, backup: str, objects: Iterable[str], files: set[str]) -> bool:
        """Returns whether any of the objects of a backup has rows of the erasure."""
        own = [
            name
            for name in objects
            if name.startswith(self._context.table.object_prefixes) and not name.endswith(SKETCHES_SUFFIX)
        ]
        if not files.isdisjoint(own):
            return True
        folder = open_store(f"{store.url}/{backup}/{FOLDER}", **store.options)
        checks = FileChecks(self._context.store.own)
        pages = (own[start : start + PAGE_NAMES] for start in range(0, len(own), PAGE_NAMES))
        return any(self._rows(name, None, folder) for page in pages for name in checks.unknown(page))

    def _unknown(self, prefix: str) -> Iterator[tuple[str, int]]:
        """The objects of the store that are no files of the table, nor their sketches, and of no attempt."""
        checks = FileChecks(self._context.store.own)
        attempts = self._context.attempts
        listed = (one for one in self._context.objects.list(prefix) if not one[0].endswith(SKETCHES_SUFFIX))
        # attempts first: what one has committed meanwhile the table knows
        pages = unknown_pages(listed, lambda names: checks.unknown(attempts.unknown(names)), PAGE_NAMES)
        return chain.from_iterable(pages)

    def _look_at(self, name: str, size: int) -> None:
        rows = self._rows(name, size)
        self._note(name, rows)
        if rows:
            failed = self._context.objects.delete([name, name + SKETCHES_SUFFIX])
            if failed:
                raise ObjectStoreError(f"{failed[0][0]} has rows, and could not be deleted: {failed[0][1]}")
            self.versions += self.delete_versions([name])

    def _rows(self, name: str, size: int | None, objects: ObjectStore | None = None, copy: str = "") -> int:
        """How many rows of the erasure an object has, of which there may be a copy in another store."""
        context = self._context if objects is None else replace(self._context, objects=objects)
        place = copy or name
        try:
            # what is in no file of the table came before it
            found = on_current(
                context, lambda now: count_rows(now, place, size, deletions_of(now.schema, self._deletion))
            )
        except ObjectNotFound:
            return 0  # deleted meanwhile
        except DormouseError as error:
            self.unreadable = [*self.unreadable, f"{name}: {error}"][:UNREADABLE_MAX]
            return 0
        return sum(found.values())

    def _note(self, name: str, rows: int) -> None:
        self.looked += 1
        self._erasure.looked({name: rows}, 1, is_freed=True)


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
    progress: Progress = no_progress,
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
    elsewhere.look(still, lambda more, _: progress(work.looked + more, None))
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
    context.garbage.retire_deletions()
    return report


def _begun(context: TableContext, where: DeleteWhere) -> tuple[Erasure, datetime, str]:
    """The erasure of the rows, when they were deleted, and by which condition."""
    asked, condition = _asked(context, where)
    bounds, by_values = bounds_to_delete(context, asked)
    found, at, older = begin_erasure(context.store, context.deletions, condition, bounds, by_values=by_values)
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
    for file in FileChecks(context.store.own).files():
        if may_hold(context.schema, file.min_key, file.max_key, asked.ranges):
            found = sum(count_rows(context, file.name, file.byte_count, [deletion]).values())
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
