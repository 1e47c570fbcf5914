"""The erasure of rows: they are deleted, and removed from all files, the history and the object store.

Each step records its progress in the database. If an erasure is interrupted, another call continues it, and
also deletes rows that were added since. The other call does not read the same files again. The erasure
records the files with rows before it deletes the first of them. From then on, moments that need these files
have expired.
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
from dormouse.model.file_reference import is_inlined
from dormouse.model.loops import Progress, backoff_seconds, no_progress
from dormouse.model.table import is_keyed
from dormouse.objects.ledger import unknown_pages
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.staging import temporary_folder
from dormouse.objects.store import ObjectStore, open_store
from dormouse.reading.checked_files import on_current
from dormouse.reading.scan_session import Look, count_rows, look_at
from dormouse.reading.where import DeleteWhere, Deletion, Question, deletions_of, may_hold
from dormouse.state.context import TableContext
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.deletions import Candidate, Erasure, NewDeletion, backups_taken, begin_erasure
from dormouse.state.files.holds import holds
from dormouse.writing.compaction import compact_in_threads
from dormouse.writing.compaction_job import CompactionResult
from dormouse.writing.deleting import asked_to_delete, names_values
from dormouse.writing.engines import check_engine, choose_engine

# A table's rows may also be in unknown objects, in old versions of deleted objects, and in backups.

PAGE_NAMES = 1_000
UNREADABLE_MAX = 1_000
RUN_SECONDS = 24 * 3600.0
WAIT_SECONDS = 60.0
IGNORED_HOLDS = ("metadata backup ", "reader ")
RunsJobsOf = Callable[..., Generator[CompactionResult, None, None]]
"""A function that runs the compaction jobs of a run, and yields their results. It takes `run_id`."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A version of a deleted or overwritten object in an S3 bucket. The store's `list` does not return it."""

    name: str
    byte_count: int
    version: Version


class HiddenVersions:
    """The versions of deleted objects that an S3 bucket keeps. A store in a folder has none.

    Methods raise `InstanceError` if S3 refuses the access.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._prefix = ""
        self._versions: Versions | None = None
        if objects.url.startswith("s3://"):
            bucket, _, prefix = objects.url.removeprefix("s3://").partition("/")
            self._prefix = f"{prefix}/" if prefix else ""
            self._versions = Versions(bucket, objects.options)

    def below(self, prefix: str) -> Iterator[Hidden]:
        """Yields the hidden versions of objects whose names begin with a prefix."""
        if self._versions is None:
            return
        for version in self._versions.below(self._prefix + prefix):
            if version.byte_count is not None and not version.is_latest:
                yield Hidden(version.key.removeprefix(self._prefix), version.byte_count, version)

    def fetch(self, hidden: Hidden, path: Path) -> None:
        """Writes the bytes of a hidden version to a path."""
        if self._versions is not None:
            self._versions.fetch(hidden.version, path)

    def delete(self, names: Iterable[str]) -> int:
        """Deletes all versions of the named objects, except the current version of an object that exists.

        Returns the number of deleted versions.
        """
        if self._versions is None:
            return 0
        every = [
            version
            for name in names
            for version in self._versions.below(self._prefix + name)
            if version.key == self._prefix + name
        ]
        # the latest version stays if the object exists again
        old = [
            version
            for _, versions in groupby(every, attrgetter("key"))
            for version in _of_deleted(list(versions))
        ]
        self._versions.delete(old)
        return sum(version.byte_count is not None for version in old)

    def replicas(self) -> list[str]:
        """Returns the places to which the store's objects are copied; they keep deleted objects."""
        return [] if self._versions is None else self._versions.replicas()


def _of_deleted(versions: list[Version]) -> list[Version]:
    """Returns the versions of one key, without the version that is the current object."""
    return [each for each in versions if not (each.is_latest and each.byte_count is not None)]


class Elsewhere:
    """The search for an erasure's rows in backups, and in objects that are not files of the table.

    Such objects may belong to another timeline, or were left by programs that died. `looked` counts the
    objects that were read. `versions` counts the old versions that were deleted.
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
        """Deletes the versions that the store keeps of deleted files and their sketches.

        Returns their number.
        """
        return self._hidden.delete(part for name in filenames for part in (name, name + SKETCHES_SUFFIX))

    def look(self, writers: Sequence[tuple[str, str]], progress: Progress) -> None:
        """Reads the objects below the table's prefixes that are not its files.

        Deletes objects with rows of the erasure.

        Skips the objects of `writers`: write attempts that still run, as (attempt id, prefix) pairs.
        """
        own = tuple(prefix for _, prefix in writers)
        for prefix in self._context.table.object_prefixes:
            for name, size in self._unknown(prefix.rstrip("/")):
                if not name.startswith(own or ("/",)):
                    self._look_at(name, size)
                    progress(self.looked, None)
            for hidden in self._hidden.below(prefix):
                if not hidden.name.endswith(SKETCHES_SUFFIX):
                    with tempfile.TemporaryDirectory("-erase", dir=temporary_folder()) as folder:
                        copy = Path(folder) / "hidden.parquet"
                        self._hidden.fetch(hidden, copy)
                        rows = self._rows(hidden.name, hidden.byte_count, open_store(folder), copy.name)
                    self._note(hidden.name, rows)
                    if rows:
                        self.versions += self.delete_versions([hidden.name])
                    progress(self.looked, None)

    def backups(self, places: Sequence[str]) -> Iterator[str]:
        """Yields the names of the backups that have rows of the erasure.

        If a backup may have rows but could not be checked, a reason in brackets follows its name. Searches
        `places`, and each place in which a backup of the instance was begun. Reads only those files of a
        backup that the table no longer has, because the erasure already knows the others.
        """
        files = set(self._erasure.filenames())
        known = backups_taken(self._context.supplier)
        for place in dict.fromkeys([*known, *(open_store(place).url for place in places)]):
            for name, problem in self._in_place(place, known.get(place, ()), files):
                yield f"{place}/{name}" + (f" ({problem})" if problem else "")
        for metadata in metadata_backups(self._context.objects):
            yield f"{self._context.objects.url}/{metadata.name} (keys of files, and rows of inlined files)"
        if files:
            yield from self._hidden.replicas()

    def _in_place(
        self, place: str, noted: Sequence[str], files: set[str]
    ) -> Iterator[tuple[str, str | None]]:
        """Yields the backups in a place that have or may have rows of the erasure, as (name, problem) pairs.

        The problem is None if the backup has rows. Otherwise it says why the backup only may have rows.
        `noted` are the names of the backups that this instance has begun in the place.
        """
        try:
            store = open_store(place)
            whole, unfinished = listed_backups(store)
        except DormouseError as error:
            yield from ((name, f"could not be checked: {error}") for name in noted or ["?"])
            return
        for name in whole:
            try:
                if self._holds(store, name, list(objects_of(store, backup_of(store, name))), files):
                    yield name, None
            except DormouseError as error:
                yield name, f"could not be checked: {error}"
        for name in unfinished:
            try:
                if name in noted or self._holds(store, name, objects_in(store, name), files):
                    yield name, "incomplete: it is still being made, or was interrupted; it may contain rows"
            except DormouseError as error:
                yield name, f"incomplete, and could not be checked: {error}"

    def _holds(self, store: ObjectStore, backup: str, objects: Iterable[str], files: set[str]) -> bool:
        """Returns whether a backup may have rows of the erasure, also in inlined files of its database."""
        own = [
            name
            for name in objects
            if name.startswith(self._context.table.object_prefixes) and not name.endswith(SKETCHES_SUFFIX)
        ]
        may_be_inlined = self._context.properties.inline_bytes_max or any(map(is_inlined, files))
        if may_be_inlined or not files.isdisjoint(own):
            return True
        folder = open_store(f"{store.url}/{backup}/{FOLDER}", **store.options)
        checks = FileChecks(self._context.store.own)
        pages = (own[start : start + PAGE_NAMES] for start in range(0, len(own), PAGE_NAMES))
        return any(self._rows(name, None, folder) for page in pages for name in checks.unknown(page))

    def _unknown(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yields objects that are neither files of the table nor sketches nor of a write attempt.

        Each is a (name, size in bytes) pair.
        """
        checks = FileChecks(self._context.store.own)
        attempts = self._context.attempts
        objects = self._context.objects.list(prefix)
        listed = (item for item in objects if not item[0].endswith(SKETCHES_SUFFIX))
        # attempts first: if one commits in between, the table knows its files
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
        """Returns the number of rows in an object that the erasure must remove.

        With `objects`, reads the object `copy` of that store instead. If the object cannot be read, adds it
        to `unreadable` and returns 0.
        """
        context = self._context if objects is None else replace(self._context, objects=objects)
        place = copy or name
        try:
            # an object that is no file of the table is older than the deletion, so that applies to it
            counts = on_current(
                context, lambda now: count_rows(now, place, size, deletions_of(now.schema, self._deletion))
            )
        except ObjectNotFound:
            return 0  # deleted meanwhile
        except DormouseError as error:
            self.unreadable = [*self.unreadable, f"{name}: {error}"][:UNREADABLE_MAX]
            return 0
        return sum(counts.values())

    def _note(self, name: str, rows: int) -> None:
        self.looked += 1
        self._erasure.looked({name: rows}, 1, is_freed=True)


@dataclass(frozen=True, slots=True)
class EraseReport:
    """The proof of an erasure.

    - `deletion_id`, `deleted_at`: the id and time of the deletion. Both are None for a dry run, which reads
      only files of the table.
    - `files_looked_at`: the number of files of the table and its history that were read.
    - `objects_looked_at`: the number of other objects of the store that were read.
    - `files`: the number of files and objects that had rows, and were deleted.
    - `rows`: the number of rows found in these files. Each copy of a row counts.
    - `versions`: the number of old versions of these objects that were also deleted.
    - `consumers`: the consumers that did not read the deletion in time. Their next read raises `CutExpired`.
    - `backups`: the backups that still have rows, and the metadata backups with keys of such rows. If a
      backup is incomplete or cannot be read, a reason in brackets follows its name.
    - `unreadable`: the objects outside the table that could not be read.
    - `open`: the write attempts that began before the deletion, still run, and may add rows. Erase again when
      they have ended. If there is none, the erasure `is_finished`.
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
        fields: Mapping[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        at = datetime.fromisoformat(str(fields["deleted_at"]))
        return EraseReport(**{**fields, **lists, "deleted_at": at})


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
    """Deletes the rows that match a condition, removes them from all files, and returns the proof.

    Raises the errors of `Table.erase`.
    """
    check_engine(engine)
    started = time.monotonic()
    erasure, at, condition = on_current(context, lambda now: _begun(now, where))
    work = _Erasing(context, erasure, engine, wait_seconds, progress, on_spark)
    work.rewrite()
    loads_have_places = is_keyed(context.properties)
    if loads_have_places:
        still = work.end_writers(abandon=abandon_writers)
        # a load that was announced before the deletion is subject to it, also if it committed meanwhile
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
    """Begins an erasure, or continues one with the same condition.

    Returns the erasure, the time of its deletion, and the deletion's condition.
    """
    _, deletion = _question(context, where)
    erasure, at, older = begin_erasure(context.store, context.deletions, deletion)
    for each in older:
        context.jobs.release_run(each.run_id)  # its jobs that still run can no longer commit
    return erasure, at, deletion.condition


def _question(context: TableContext, where: DeleteWhere) -> tuple[Question, NewDeletion]:
    if is_keyed(context.properties) and names_values(context, where):
        raise InvalidQuery(
            f"erase from table {context.table.name!r}, which keeps one row per key: give conditions on row "
            f"keys only, because older rows of a key may have other values; table.query finds the keys"
        )
    return asked_to_delete(context, where)


def would_erase(context: TableContext, where: DeleteWhere, progress: Progress) -> EraseReport:
    """Returns the report of a dry run, which counts rows in the files of the table and its history."""
    return on_current(context, lambda now: _would_erase(now, where, progress))


def _would_erase(context: TableContext, where: DeleteWhere, progress: Progress) -> EraseReport:
    started = time.monotonic()
    question, _ = _question(context, where)
    deletion = Deletion(0, "", question.ranges, question.conditions)
    looked = files = rows = 0
    for file in FileChecks(context.store.own).files():
        if may_hold(context.schema, file.min_key, file.max_key, question.ranges):
            matches = sum(count_rows(context, file.name, file.byte_count, [deletion]).values())
            looked, files, rows = looked + 1, files + bool(matches), rows + matches
            progress(looked, None)
    seconds = round(time.monotonic() - started, 3)
    return EraseReport(None, None, looked, 0, files, rows, 0, (), (), (), (), seconds)


class _Erasing:
    """One run of an erasure. `looked` counts the files that it has read."""

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
        """Merges all referenced files that have rows of the erasure into files without these rows.

        Compaction jobs that began before the deletion may meanwhile add files with such rows. So the method
        repeats until no referenced file has such rows, and no new file with such rows is found.
        """
        jobs, run_id = self._context.jobs, self._erasure.run_id
        tries = 0
        while True:
            references, free = self._erasure.referenced()
            new_files = self._look()
            if not references and not new_files:
                return
            self._check_not_undone()
            if free or new_files:
                tries = 0
                while jobs.create_of_erased(run_id, RUN_SECONDS):
                    self._run_jobs(run_id)
            left = self._erasure.release_others(running_too=time.monotonic() > self._until)
            if left or not (free or new_files):
                tries += 1
                time.sleep(backoff_seconds(tries))

    def _look(self) -> int:
        """Reads the files that may have rows of the erasure and were not read before.

        Returns the number of files that have such rows.
        """
        with_rows = 0
        for page in self._erasure.candidates():
            unknown = [each for each in page if not each.is_found]
            if unknown:
                with_rows += sum(bool(self._rows(look)) for look in self._looks(unknown))
                self.looked += len(unknown)
                self._progress(self.looked, None)
        return with_rows

    def _looks(self, files: Sequence[Candidate]) -> list[Look]:
        try:
            return look_at(self._context, [(each.filename, each.byte_count) for each in files], self._note)
        except ObjectNotFound:
            if len(files) > 1:
                return [look for each in files for look in self._looks([each])]
            if FileChecks(self._context.store.own).referenced([files[0].file_id]):
                raise
            return []  # it is being collected: the object is deleted before its row

    def _note(self, conn: Any, looks: Sequence[Look]) -> None:
        self._erasure.looked({look.filename: self._rows(look) for look in looks}, len(looks), conn)

    def _rows(self, look: Look) -> int:
        if self._erasure.deletion_id in look.unchecked:
            raise InvalidQuery(
                f"table {self._context.table.name!r}: a column that the erasure names was dropped while it "
                "ran, and files of the history may have rows: erase them by other columns"
            )
        return look.rows.get(self._erasure.deletion_id, 0)

    def _check_not_undone(self) -> None:
        # only a restore undoes the deletion; that it was retired is no reason to stop
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
                        f"table {self._context.table.name!r}: the rows are deleted but not erased, because "
                        f"files that contain them cannot be merged: {result.error}; fix the cause, and "
                        f"erase them again"
                    )

    def wait_for_readers(self) -> list[str]:
        """Waits until all consumers have read the deletion.

        Returns the consumers that did not read it in time.

        Raises `TableBusy` if a hold still keeps the files, for example of a running backup or of an adoption.
        """
        tries = 0
        while True:
            late = self._erasure.consumers_behind()
            held = [
                hold.holder
                for hold in holds(self._context.supplier)
                if not hold.is_of_history and not hold.holder.startswith(IGNORED_HOLDS)
            ]
            if not late and not held:
                return []
            if time.monotonic() > self._until:
                break
            tries += 1
            time.sleep(min(backoff_seconds(tries), 1.0))
        if held:
            raise TableBusy(
                f"table {self._context.table.name!r}: the rows are deleted but not erased, because "
                f"{held[0]!r} still needs files that contain them: erase them again when it has ended, or "
                f"end it by "
                "'dormouse holds --release'",
                table=self._context.table.name,
            )
        return late

    def free(self, elsewhere: Elsewhere) -> int:
        """Deletes the files that had rows of the erasure, also those that the history keeps.

        Returns the number of old object versions that were deleted with the files. Raises `CheckFailed` while
        the table has lost references, and `ObjectStoreError`. After either error, another erasure must
        follow.
        """
        versions = 0
        self._context.garbage.look()
        while names := self._erasure.to_free():
            failed = self._context.garbage.free(names)
            if failed:
                name, why = failed[0]
                raise ObjectStoreError(
                    f"the rows are deleted but not erased: {len(failed)} objects could not be deleted, such "
                    f"as {name}: {why}; erase them again"
                )
            versions += elsewhere.delete_versions(names)
            self._erasure.freed(names)
        return versions

    def end_writers(self, *, abandon: bool) -> list[tuple[str, str]]:
        """Waits for writers that began before the deletion; with `abandon`, ends their attempts instead.

        Then deletes the objects of abandoned attempts. Returns the writers that still run, as (attempt id,
        object prefix) pairs.
        """
        tries = 0
        while (writers := self._erasure.writers()) and not abandon and time.monotonic() < self._until:
            tries += 1
            time.sleep(min(backoff_seconds(tries), 1.0))
        if abandon:
            attempt_ids = [attempt_id for attempt_id, _ in writers]
            self._context.attempts.abandon_each(attempt_ids, self._context.table)
            writers = self._erasure.writers()
        self._context.attempts.collect(self._context.table)
        with suppress(ObjectStoreError):
            self._context.objects.sweep_staging()
        return writers
