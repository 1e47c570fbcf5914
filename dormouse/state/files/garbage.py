"""Garbage collection: deletes files some time after their last reference was removed.

Stage one stamps the files that lost their last reference since the last run. Its cost depends on the number
of these files. Stage two deletes files that were stamped long enough ago: first the object, then the row. So
after a crash, the row is left, and the deletion is tried again.

Garbage collection also forgets old epochs: those before a truncation, which can no longer be read. It deletes
them piece by piece, each in a short transaction. An interrupted round continues later. It keeps:

- the partitions that were in the tree at the truncation or were added later;
- the epochs from the truncation on, and the earlier ones that made the leaves of that time.

Ids of partitions are never reused, since each contains its epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import psycopg

from dormouse.errors import CheckFailed, FileHasReferences, FileNotFound, InvalidName
from dormouse.model.file_reference import is_inlined
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import Problem, TableRecord
from dormouse.model.text import plural
from dormouse.objects.inlined import InlinedFiles
from dormouse.objects.names import SKETCHES_SUFFIX, check_file_name
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_alone, run_transaction
from dormouse.state.files import removal_log
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.holds import MARGIN_SECONDS as HOLDS_MARGIN_SECONDS
from dormouse.state.files.holds import deletable_before, let_go, lock_history
from dormouse.state.files.layout import MAY_BE_OF
from dormouse.state.files.round_reports import LastRounds
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.files.totals import Difference

NAMES_MAX = 10_000
EPOCHS_SECONDS_MAX = 30.0
"""The longest time, in seconds, that one round spends on old epochs.

So old epochs do not delay other work.
"""
PIECE_EPOCHS = 1_000
PIECE_PARTITIONS = 10_000
"""The number of partitions, sealed or created, at which a piece ends; a single epoch may have more."""
MARGIN_SECONDS = 60.0
"""A time in seconds that is longer than each of two delays.

One is from an epoch's time to its commit. The other is from a read of the tree to the write attempt that uses
it.
"""
RETIRED_MAX = 100
"""The number of deletions for which one round checks whether they are still needed."""
_QUERIES = load(__package__ or "", "garbage")
_NOT_NEEDED = _QUERIES["not_needed"].including(may_be_of=MAY_BE_OF)


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The results of a round of garbage collection.

    - `deleted_files` and `failed` contain the first 10,000 names; `deleted` and `failures` are the full
      counts.
    - `failed` has objects that could not be deleted, with the reasons. The next round retries them.
    - `epochs` and `partitions` count what was forgotten from before the truncation. `epochs_left` counts the
      epochs that are still to check.
    """

    newly_unreferenced: int
    deleted_files: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    abandoned_attempts: int
    whole: bool = True
    """False if the round ran out of time before all was done."""
    deleted: int = 0
    failures: int = 0
    epochs: int = 0
    partitions: int = 0
    epochs_left: int = 0

    def with_more(self, deleted: Sequence[str], failed: Sequence[tuple[str, str]]) -> GarbageReport:
        """Returns the report with the results of another batch added.

        Keeps at most 10,000 names of each kind.
        """
        return replace(
            self,
            deleted_files=(*self.deleted_files, *deleted)[:NAMES_MAX],
            failed=(*self.failed, *failed)[:NAMES_MAX],
            deleted=self.deleted + len(deleted),
            failures=self.failures + len(failed),
        )


class GarbageCollector:
    """A collector of one table's garbage, which also retires the deletions that no file needs."""

    def __init__(
        self, supplier: Supplier, store: FileReferenceStore, objects: ObjectStore, attempts: WriteAttempts
    ) -> None:
        self._supplier = supplier
        self._store = store
        self._objects = objects
        self._attempts = attempts

    def collect(
        self,
        is_over: Callable[[], bool] = lambda: False,
        progress: Progress = no_progress,
        *,
        rolls_log: bool = True,
    ) -> GarbageReport:
        """Runs one round of garbage collection.

        The round runs both stages. It also deletes the objects of dead writers, expired commits, unneeded
        days of the removal log and old epochs. It stops after the batch of files during which `is_over`
        becomes true. It calls `progress` with the number of old epochs that are done, and the number of all.

        A round over all tables rolls the log itself, once, and passes False for `rolls_log`.

        If references of the table were lost, the round deletes no file, because a file may have the only copy
        of some rows. It then raises `CheckFailed`.
        """
        with LastRounds(self._supplier, self._store.table).round("collection") as current:
            report = self._collect(is_over, progress, rolls_log)
            current.outcome = f"{plural(report.deleted, 'file')} deleted"
            done = (report.newly_unreferenced, report.deleted, report.abandoned_attempts, report.partitions)
            current.worked = any(done)
            if report.failed:
                name, reason = min(report.failed)
                objects = "1 object" if report.failures == 1 else f"{report.failures:,} objects"
                current.errors.append(f"{objects} could not be deleted, first {name}: {reason}")
        return report

    def _collect(self, is_over: Callable[[], bool], progress: Progress, rolls_log: bool) -> GarbageReport:
        # first, while the files about to be deleted can still be looked up
        self._store.totals.bring_forward(daily=True)
        report = GarbageReport(self._store.stamp_unreferenced(), (), (), 0)
        lost = self._store.differences.remembered()
        for batch in self._batches() if not lost else ():
            if is_over():
                return replace(report, whole=False)
            report = report.with_more(*self._delete(batch))
        report = replace(report, abandoned_attempts=self._attempts.collect(self._store.table))
        self._forget_commits()
        self.retire_deletions()
        if rolls_log:
            removal_log.roll(self._supplier)
        report = self._forget_epochs(report, is_over, progress)
        self._refuse(lost)
        return report

    def _forget_epochs(
        self,
        report: GarbageReport,
        is_over: Callable[[], bool],
        progress: Progress,
    ) -> GarbageReport:
        """Forgets old epochs for at most `EPOCHS_SECONDS_MAX`; returns the report with what was forgotten."""
        ends, first = time.monotonic() + EPOCHS_SECONDS_MAX, None
        for piece in forget_epochs(self._supplier, self._store.table):
            first = piece.since if first is None else first
            left = piece.bound - piece.till
            report = replace(
                report,
                epochs=report.epochs + piece.epochs,
                partitions=report.partitions + piece.partitions,
                epochs_left=left,
            )
            progress(piece.till - first, piece.bound - first)
            if left and (is_over() or time.monotonic() > ends):
                return replace(report, whole=False)
        return report

    def retire_deletions(self) -> int:
        """Retires deletions that no file needs, and deletes retired ones that the history does not need.

        A file needs each deletion that was recorded after the file was added and may match its rows. Checks
        at most `RETIRED_MAX` deletions. Returns the number of deletions that were retired.
        """
        own = self._store.own
        key, rows = {"table_id": own.table.table_id}, partial(own.rows, operation="retire deletions")
        some = _first_column(rows(_QUERIES["some_pending"], {"limit": RETIRED_MAX}))
        free = _first_column(rows(_NOT_NEEDED, {"deletion_ids": some})) if some else []
        if free:

            def work(conn: psycopg.Connection[Any]) -> None:
                # checked again without writers, so that files added meanwhile are seen
                self._store.keep_writers_out(conn)
                still = conn.execute(own.on(_NOT_NEEDED), {**key, "deletion_ids": free}).fetchall()
                conn.execute(_QUERIES["retire"].on(), {**key, "deletion_ids": _first_column(still)})

            name = f"retire deletions of table {own.table.name!r}"
            own.following(lambda: run_alone(self._supplier, work, operation=name))
        self._forget_deletions()
        return len(free)

    def _forget_deletions(self) -> None:
        table = self._store.table
        values = {
            "table_id": table.table_id,
            "kept_seconds": table.properties.history_retention_seconds,
            "margin_seconds": HOLDS_MARGIN_SECONDS,
        }

        def work(conn: psycopg.Connection[Any]) -> None:
            lock_history(conn, table.table_id)
            conn.execute(_QUERIES["forget_deletions"].on(), values)

        run_transaction(self._supplier, work, operation="forget deletions")

    def ready(self) -> Iterator[str]:
        """Returns the names of stamped files that `collect` would delete now.

        Raises `CheckFailed` if references of the table were lost.
        """
        self._refuse(self._store.differences.remembered())
        return self._store.files_ready_for_gc(self._due_before())

    def look(self) -> None:
        """Stamps files that lost their last reference, and deletes nothing.

        Raises `CheckFailed` if references of the table were lost.
        """
        self._store.totals.bring_forward(daily=True)
        self._store.stamp_unreferenced()
        self._refuse(self._store.differences.remembered())

    def free(self, filenames: list[str]) -> list[tuple[str, str]]:
        """Deletes unreferenced files, even if a hold keeps them.

        Returns the names of the objects that could not be deleted, with the reasons.
        """
        errors = self._delete(filenames)[1]
        if any(map(is_inlined, filenames)):
            self._store.inlined.vacuum()
            if isinstance(self._objects, InlinedFiles):
                self._objects.forget_bundles(filenames)
        return errors

    def _refuse(self, lost: Sequence[Difference]) -> None:
        if lost:
            table = self._store.table.name
            raise CheckFailed(
                [Problem("totals", table, each.partition_id, each.filename, each.detail) for each in lost],
                "no file of the table is deleted until 'dormouse check --table "
                f"{table} --accept' accepts the current state as right",
            )

    def _due_before(self) -> datetime:
        # by the database's clock, which stamped the removals
        return deletable_before(self._supplier, self._store.table)

    def _forget_commits(self) -> None:
        limit = self._store.table.properties.gc_batch_files
        while self._store.forget_expired_commits(limit) == limit:
            pass

    def _batches(self) -> Iterator[list[str]]:
        if next(self._store.files_ready_for_gc(self._due_before()), None) is None:
            return
        before = let_go(self._supplier, self._store.table)
        ready = self._store.files_ready_for_gc(before) if before is not None else iter(())
        while batch := list(islice(ready, self._store.table.properties.gc_batch_files)):
            yield batch

    def _delete(self, filenames: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
        errors: list[tuple[str, str]] = []
        names = []
        for filename in filenames:
            try:
                names += [
                    check_file_name(filename, self._store.table.object_prefixes),
                    filename + SKETCHES_SUFFIX,
                ]
            except InvalidName as error:  # tracked by an older version, which did not check names
                errors.append((filename, str(error)))
        errors += [(name, str(error)) for name, error in self._objects.delete(names)]
        kept = {name for name, _ in errors}
        done = [name for name in filenames if kept.isdisjoint((name, name + SKETCHES_SUFFIX))]
        return self._forget(done), errors

    def _forget(self, filenames: list[str]) -> list[str]:
        try:
            self._store.delete_collected_files(filenames)
        except (FileNotFound, FileHasReferences):
            # another collector deleted some of them first
            return [filename for filename in filenames if self._forget_one(filename)]
        return filenames

    def _forget_one(self, filename: str) -> bool:
        try:
            return self._store.delete_collected_files([filename])
        except (FileNotFound, FileHasReferences):
            return False


def _first_column(rows: Sequence[Any]) -> list[int]:
    return [row[0] for row in rows]


class Piece(NamedTuple):
    """The numbers of epochs and partitions that one piece deleted, and the progress over all pieces.

    Epochs up to `since` were done before, and those up to `till` are done now. `bound` is the last epoch to
    do.
    """

    epochs: int
    partitions: int
    since: int
    till: int
    bound: int


def forget_epochs(supplier: Supplier, table: TableRecord) -> Iterator[Piece]:
    """Deletes old epochs piece by piece, and yields each piece, until nothing is left to delete.

    Each piece is deleted when the caller requests the next item.
    """
    values: dict[str, Any] = {
        "table_id": table.table_id,
        "delay_seconds": table.properties.gc_delay_seconds,
        "margin_seconds": MARGIN_SECONDS,
        "epochs_max": PIECE_EPOCHS,
        "partitions_max": PIECE_PARTITIONS,
    }

    def work(conn: psycopg.Connection[Any]) -> list[Any]:
        lock_history(conn, table.table_id)
        return conn.execute(_QUERIES["forget"].on(), values).fetchall()

    while rows := run_transaction(supplier, work, operation="forget old epochs"):
        piece = Piece(*rows[0])
        if piece.till == piece.since:
            return
        yield piece
