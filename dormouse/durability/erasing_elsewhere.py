"""Where else a table's rows may be: unknown objects, versions of deleted ones, backups."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dormouse.durability.backups import FOLDER, backup_of, listed_backups, objects_in, objects_of
from dormouse.durability.hidden import HiddenVersions
from dormouse.durability.metadata_backups import metadata_backups
from dormouse.errors import DormouseError, ObjectNotFound, ObjectStoreError
from dormouse.objects import ObjectStore, open_store
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.reading.deletions import deletions_of
from dormouse.reading.schemas import on_current
from dormouse.state.context import TableContext
from dormouse.state.files.checks import FileChecks
from dormouse.state.files.erasures import Erasure, backups_taken
from dormouse.writing.looking import count

PAGE_NAMES = 1_000
UNREADABLE_MAX = 1_000


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

    def look(self, writers: Sequence[tuple[str, str]], progress: Callable[[int], object]) -> None:
        """Looks at all that is below the table's prefixes and no file of it; what has rows is deleted.

        `writers` are attempts that go on, whose objects are theirs.
        """
        own = tuple(prefix for _, prefix in writers)
        for prefix in self._context.table.object_prefixes:
            for name, size in self._unknown(prefix.rstrip("/")):
                if not name.startswith(own or ("/",)):
                    self._look_at(name, size)
                    progress(self.looked)
            for hidden in self._hidden.below(prefix):
                if not hidden.name.endswith(SKETCHES_SUFFIX):
                    with tempfile.TemporaryDirectory(prefix="dormouse-erase-") as folder:
                        copy = Path(folder) / "hidden.parquet"
                        self._hidden.fetch(hidden, copy)
                        rows = self._rows(hidden.name, hidden.byte_count, open_store(folder), copy.name)
                    self._note(hidden.name, rows)
                    if rows:
                        self.versions += self.delete_versions([hidden.name])
                    progress(self.looked)

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
        listed = (one for one in self._context.objects.list(prefix) if not one[0].endswith(SKETCHES_SUFFIX))
        while page := dict(islice(listed, PAGE_NAMES)):
            # attempts first: what one has committed meanwhile the table knows
            for name in checks.unknown(self._context.attempts.of_none(list(page))):
                yield name, page[name]

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
                context, lambda now: count(now, place, size, deletions_of(now.schema, self._deletion))
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
