"""Takes a backup of an instance while everything runs.

Collection is held first, then the database is copied, then the objects that its tables refer to: what the
copy of the database knows is older than the list of the objects, and held, so all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dormouse.catalog import Catalog
from dormouse.commits.body_names import OBJECT_PREFIX
from dormouse.durability.backups import Backup, BackupWriter, Progress, Wanted
from dormouse.durability.ownership import FOLDER, MARKER
from dormouse.errors import TableNotFound
from dormouse.files.holds import held
from dormouse.files.store import FileReferenceStore
from dormouse.objects import ObjectStore
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

PAGE_FILES = 10_000
_QUERIES = load(__file__, "backing_up")


def back_up(
    supplier: Supplier,
    catalog: Catalog,
    objects: ObjectStore,
    target: ObjectStore,
    base_backup: Callable[[Path], None],
    *,
    since: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Backup:
    """`base_backup` writes the database's to a path. What fails leaves no backup."""
    writer = BackupWriter(target, catalog.instance_id(), since)
    try:
        with held(supplier, f"backup {writer.name}"):
            writer.database(base_backup)
            records = (name for folder in (FOLDER, OBJECT_PREFIX) for name, _ in objects.list(folder))
            writer.objects(objects, wanted(supplier, catalog, records), progress)
            gone = (name for prefix in _dropped(supplier) for name, _ in objects.list(prefix))
            writer.objects(objects, map(Wanted, gone), progress)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def wanted(supplier: Supplier, catalog: Catalog, records: Iterable[str]) -> Iterator[Wanted]:
    """The instance's own of the names in `records`, bodies of requests too; and the files of all tables."""
    yield Wanted(MARKER, needed=True)
    yield from (Wanted(name) for name in records if name.startswith((f"{FOLDER}/", OBJECT_PREFIX)))
    for table in catalog.tables():
        store = FileReferenceStore(supplier, table)
        after: str | None = None
        while True:
            try:
                page = store.page(after, PAGE_FILES)
            except TableNotFound:  # dropped meanwhile: its objects are held
                break
            for file in page:
                digest = None if file.digest is None else file.digest.hex()
                yield Wanted(file.filename, file.unreferenced_at is None, file.byte_count, digest)
                yield Wanted(file.filename + SKETCHES_SUFFIX)
            if len(page) < PAGE_FILES:
                break
            after = page[-1].filename


def _dropped(supplier: Supplier) -> list[str]:
    """Where the objects of tables are that are gone, which the copy of the database may have."""
    return [
        prefix for (prefix,) in run_lookup(supplier, rows_of(_QUERIES["dropped"]), operation="dropped tables")
    ]
