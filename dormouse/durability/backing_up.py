"""Takes a backup of an instance while everything runs.

Collection is held first, then the database is copied, then the objects that its tables refer to: what the
copy of the database knows is older than the list of the objects, and held, so all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from dormouse.durability.backups import Backup, BackupWriter, Wanted
from dormouse.durability.incarnations import FOLDER, NOW, on_disk
from dormouse.durability.job_objects import is_answer
from dormouse.durability.ownership import MARKER
from dormouse.errors import DormouseError, InvalidCommitRequest, InvalidName, ObjectNotFound, TableNotFound
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import is_edited
from dormouse.objects.names import ANSWERS, ROW_FILES, SKETCHES_SUFFIX, check_name
from dormouse.objects.store import ObjectStore
from dormouse.payloads.pack import written as payload_objects
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.state.catalog import Catalog
from dormouse.state.commits.pointers import OBJECT_PREFIX, object_of
from dormouse.state.commits.requests import attempt_of, decode, names_of_new_files
from dormouse.state.files.holds import held
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.files.write_streams import PutFiles

PAGE_FILES = 10_000
PAGE_MESSAGES = 100
RECORDED = (f"{FOLDER}/", OBJECT_PREFIX, f"{ROW_FILES}/", f"{ANSWERS}/")
NIL = "00000000-0000-0000-0000-000000000000"
_QUERIES = load(__file__, "backing_up")


def back_up(
    supplier: Supplier,
    catalog: Catalog,
    objects: ObjectStore,
    target: ObjectStore,
    base_backup: Callable[[Path], None],
    *,
    since: str | None = None,
    despite_damage: bool = False,
    progress: Progress = no_progress,
) -> Backup:
    """`base_backup` writes the database's to a path. What fails leaves no backup.

    The database notes the backup before any object is copied: an erasure looks at what it notes, so it never
    misses a backup that is killed, whole or not.
    """
    writer = BackupWriter(target, catalog.instance_id(), since, despite_damage=despite_damage)
    try:
        _note(supplier, "note_backup", target, writer.name)
        with held(supplier, f"backup {writer.name}"):
            # a committer takes away the bodies of what it has applied, which the copy may still have to apply
            writer.objects(objects, (Wanted(name) for name, _ in objects.list(OBJECT_PREFIX)), progress)
            writer.database(base_backup)
            records = (name for folder in RECORDED for name, _ in objects.list(folder))
            writer.objects(objects, wanted(supplier, catalog, records, objects.get), progress)
            gone = (name for prefix in _dropped(supplier) for name, _ in objects.list(prefix))
            writer.objects(objects, map(Wanted, gone), progress)
        return writer.finish()
    except BaseException:
        writer.abandon()
        with suppress(DormouseError):  # a note without a backup does no harm
            _note(supplier, "forget_backup", target, writer.name)
        raise


def _note(supplier: Supplier, query: str, target: ObjectStore, name: str) -> None:
    def work(conn: psycopg.Connection[Any]) -> None:
        on_disk(conn)
        conn.execute(_QUERIES[query].on(), {"place": target.url, "name": name})

    run_transaction(supplier, work, operation="note a backup")


def wanted(
    supplier: Supplier, catalog: Catalog, records: Iterable[str], get: Callable[[str], bytes]
) -> Iterator[Wanted]:
    """The instance's own of the names in `records`: bodies of requests, which `get` gives, and objects of
    jobs, too; and the files of all tables, and of what was submitted and is not applied.
    """
    submitted = set(_submitted(supplier, get))  # first: what is applied meanwhile a table has
    yield Wanted(MARKER, needed=True)
    put = set[str]()
    for table in catalog.tables():
        if is_edited(table.properties):
            for cell_file in PutFiles(supplier, table).noted():
                put.add(cell_file.object_name)
                yield Wanted(cell_file.object_name, needed=True, size=cell_file.byte_count, table=table.name)
    # what is listed of those that were put is wanted as it was put, and no other way
    kept = (name for name in records if not name.startswith(f"{NOW}/") and name not in put)
    for name in kept:
        if name.startswith(RECORDED):
            # when a job has expired, another may have its id
            yield Wanted(name, is_reused=is_answer(name))
    for table in catalog.tables():
        store = FileReferenceStore(supplier, table)
        after: str | None = None
        while True:
            try:
                page = store.page(after, PAGE_FILES)
            except TableNotFound:  # dropped meanwhile: its objects are held
                break
            for file in page:
                submitted.discard(file.filename)
                digest = None if file.digest is None else file.digest.hex()
                yield Wanted(
                    file.filename,
                    file.unreferenced_at is None,
                    file.byte_count,
                    digest,
                    table.name,
                    file.row_count,
                )
                yield Wanted(file.filename + SKETCHES_SUFFIX)
            if len(page) < PAGE_FILES:
                break
            after = page[-1].filename
    # what has died since the copy of the database was made is there, as it is held
    yield from (Wanted(name, needed, size) for name, size, _, needed in payload_objects(supplier))
    for name in sorted(submitted):
        yield from (Wanted(name), Wanted(name + SKETCHES_SUFFIX))


def _submitted(supplier: Supplier, get: Callable[[str], bytes]) -> Iterator[str]:
    """The files that requests would add that wait; not those of writers who wait, too: they write again."""
    after = (NIL, NIL)
    while True:
        values = {"commit_key": after[0], "message_id": after[1], "limit": PAGE_MESSAGES}
        page = run_lookup(supplier, rows_of(_QUERIES["submitted"], values), operation="look at what waits")
        for *_, body in page:
            with suppress(InvalidCommitRequest, InvalidName, ObjectNotFound):  # as the committer will say
                name = object_of(body)
                request = decode(body if name is None else get(name)).request
                if attempt_of(request) is None:
                    yield from map(check_name, names_of_new_files(request))
        if len(page) < PAGE_MESSAGES:
            return
        after = page[-1][:2]


def _dropped(supplier: Supplier) -> list[str]:
    """Where the objects of tables are that are gone, which the copy of the database may have."""
    return [
        prefix for (prefix,) in run_lookup(supplier, rows_of(_QUERIES["dropped"]), operation="dropped tables")
    ]
