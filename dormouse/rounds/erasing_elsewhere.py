"""Where else a table's rows may be: unknown objects, versions of deleted ones, backups."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dormouse.context import TableContext
from dormouse.durability.backups import FOLDER, Backup, objects_of
from dormouse.durability.backups import backups as backups_in
from dormouse.durability.metadata_backups import metadata_backups
from dormouse.errors import BackupDamaged, DormouseError, ObjectNotFound, ObjectStoreError
from dormouse.files.checks import FileChecks
from dormouse.files.erasures import Erasure, backups_taken
from dormouse.objects import ObjectStore, open_store
from dormouse.objects.hidden import HiddenVersions
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.query.deletions import deletions_of
from dormouse.query.schemas import on_current
from dormouse.rounds.looking import count

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
        """The backups that still hold rows, by name: of those that are known, and those in some other places.

        Files of a backup that the table does not have any more are read; of the others it is known.
        """
        files = set(self._erasure.filenames())
        known = backups_taken(self._context.supplier)
        for place in dict.fromkeys([*known, *(open_store(place).url for place in places)]):
            try:
                store = open_store(place)
                for one in backups_in(store):
                    if self._holds(store, one, files):
                        yield f"{place}/{one.name}"
            except BackupDamaged as error:
                yield f"{place}: {error}"
            except (ObjectStoreError, DormouseError) as error:
                yield from (
                    f"{place}/{name} (cannot be looked at: {error})" for name in known.get(place, ["?"])
                )
        for metadata in metadata_backups(self._context.objects):
            yield f"{self._context.objects.url}/{metadata.name} (keys of files, and no rows)"
        if files:
            yield from self._hidden.replicas()

    def _holds(self, store: ObjectStore, backup: Backup, files: set[str]) -> bool:
        own = [
            name
            for name in objects_of(store, backup)
            if name.startswith(self._context.table.object_prefixes) and not name.endswith(SKETCHES_SUFFIX)
        ]
        if not files.isdisjoint(own):
            return True
        folder = open_store(f"{store.url}/{backup.name}/{FOLDER}", **store.options)
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
