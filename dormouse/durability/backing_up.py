"""Backups of an instance that are taken while everything runs.

First a hold stops garbage collection. Then the database is copied, and then the objects to which its tables
refer. So each object to which the copied database refers still exists when the objects are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from dormouse.durability.backups import Backup, BackupWriter
from dormouse.durability.incarnations import FOLDER, NOW, on_disk
from dormouse.durability.ledgers import Ledgers
from dormouse.durability.ownership import MARKER
from dormouse.errors import DormouseError, InvalidCommitRequest, InvalidName, ObjectNotFound
from dormouse.model.file_reference import is_inlined
from dormouse.model.loops import Progress, no_progress
from dormouse.objects.ledger import LedgerObject
from dormouse.objects.names import ANSWERS, ROW_FILES, SKETCHES_SUFFIX, check_name
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.state.commits.pointers import OBJECT_PREFIX, object_of
from dormouse.state.commits.requests import attempt_of, decode, names_of_new_files
from dormouse.state.files.holds import held

PAGE_MESSAGES = 100
RECORDED = (f"{FOLDER}/", OBJECT_PREFIX, f"{ROW_FILES}/", f"{ANSWERS}/")
NIL = "00000000-0000-0000-0000-000000000000"
_QUERIES = load(__file__, "backing_up")


def back_up(
    ledgers: Ledgers,
    target: ObjectStore,
    base_backup: Callable[[Path], None],
    *,
    since: str | None = None,
    despite_damage: bool = False,
    progress: Progress = no_progress,
) -> Backup:
    """Takes a backup and returns its description. If this function fails, it removes the unfinished backup.

    `base_backup` writes a copy of the database to a path. The database records the backup before any object
    is copied. So an erasure, which reads these records, never misses a backup, even one whose process was
    killed.
    """
    supplier, objects = ledgers.supplier, ledgers.objects
    writer = BackupWriter(target, ledgers.catalog.instance_id(), since, despite_damage=despite_damage)
    try:
        _note(supplier, "note_backup", target, writer.name)
        with held(supplier, f"backup {writer.name}"):
            # first, as a committer deletes the bodies that it has applied, and the copy may still need them
            writer.objects(objects, (LedgerObject(name) for name, _ in objects.list(OBJECT_PREFIX)), progress)
            writer.database(base_backup)
            records = (name for folder in RECORDED for name, _ in objects.list(folder))
            writer.objects(objects, wanted(ledgers, records, objects.get), progress)
            of_dropped = (name for prefix in _dropped(supplier) for name, _ in objects.list(prefix))
            writer.objects(objects, map(LedgerObject, of_dropped), progress)
        return writer.finish()
    except BaseException:
        writer.abandon()
        with suppress(DormouseError):  # a record without a backup does no harm
            _note(supplier, "forget_backup", target, writer.name)
        raise


def _note(supplier: Supplier, query: str, target: ObjectStore, name: str) -> None:
    def work(conn: psycopg.Connection[Any]) -> None:
        on_disk(conn)
        conn.execute(_QUERIES[query].on(), {"place": target.url, "name": name})

    run_transaction(supplier, work, operation="record a backup")


def wanted(ledgers: Ledgers, records: Iterable[str], get: Callable[[str], bytes]) -> Iterator[LedgerObject]:
    """Yields the objects that a backup needs.

    - The objects in `records`: records of the instance, bodies of commit requests, and objects of jobs.
    - The objects that a ledger has, such as the files of all tables.
    - The files that commit requests in the queue would add. `get` reads the bodies of large requests.
    """
    submitted = set(_submitted(ledgers.supplier, get))  # first: files applied meanwhile are found in tables
    yield LedgerObject(MARKER, needed=True)
    cell_files = set[str]()
    # before the steps that take long, as a committer deletes bodies
    for name in records:
        if name.startswith(f"{ROW_FILES}/"):
            cell_files.add(name)
        elif name.startswith(RECORDED) and not name.startswith(f"{NOW}/"):
            yield LedgerObject(name)
    # objects that lost their last reference since the copy of the database are still there, as they are held
    for written in ledgers.written():
        submitted.discard(written.name)
        cell_files.discard(written.name)
        yield written
    # files of cells that were written and not yet recorded in the database
    yield from map(LedgerObject, sorted(cell_files))
    for name in sorted(submitted):
        yield from (LedgerObject(name), LedgerObject(name + SKETCHES_SUFFIX))


def _submitted(supplier: Supplier, get: Callable[[str], bytes]) -> Iterator[str]:
    """Yields the names of the files that waiting commit requests would add.

    Skips the requests of write attempts, because their writers wait for an answer and would write again.
    """
    after = (NIL, NIL)
    while True:
        values = {"commit_key": after[0], "message_id": after[1], "limit": PAGE_MESSAGES}
        page = run_lookup(
            supplier, rows_of(_QUERIES["submitted"], values), operation="read waiting commit requests"
        )
        for *_, body in page:
            with suppress(InvalidCommitRequest, InvalidName, ObjectNotFound):  # the committer reports these
                name = object_of(body)
                request = decode(body if name is None else get(name)).request
                if attempt_of(request) is None:
                    # the request, and so the copy of the database, has the content of inlined files
                    names = (name for name in names_of_new_files(request) if not is_inlined(name))
                    yield from map(check_name, names)
        if len(page) < PAGE_MESSAGES:
            return
        after = page[-1][:2]


def _dropped(supplier: Supplier) -> list[str]:
    """Returns the object prefixes of dropped tables, which the copy of the database may still have."""
    return [
        prefix for (prefix,) in run_lookup(supplier, rows_of(_QUERIES["dropped"]), operation="dropped tables")
    ]
