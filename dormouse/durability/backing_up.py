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

from dormouse.durability.backups import Backup, BackupWriter
from dormouse.durability.incarnations import FOLDER, NOW, on_disk
from dormouse.durability.ledgers import Ledgers
from dormouse.durability.ownership import MARKER
from dormouse.errors import DormouseError, InvalidCommitRequest, InvalidName, ObjectNotFound
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
    """`base_backup` writes the database's to a path. What fails leaves no backup.

    The database notes the backup before any object is copied: an erasure looks at what it notes, so it never
    misses a backup that is killed, whole or not.
    """
    supplier, objects = ledgers.supplier, ledgers.objects
    writer = BackupWriter(target, ledgers.catalog.instance_id(), since, despite_damage=despite_damage)
    try:
        _note(supplier, "note_backup", target, writer.name)
        with held(supplier, f"backup {writer.name}"):
            # a committer takes away the bodies of what it has applied, which the copy may still have to apply
            writer.objects(objects, (LedgerObject(name) for name, _ in objects.list(OBJECT_PREFIX)), progress)
            writer.database(base_backup)
            records = (name for folder in RECORDED for name, _ in objects.list(folder))
            writer.objects(objects, wanted(ledgers, records, objects.get), progress)
            gone = (name for prefix in _dropped(supplier) for name, _ in objects.list(prefix))
            writer.objects(objects, map(LedgerObject, gone), progress)
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


def wanted(ledgers: Ledgers, records: Iterable[str], get: Callable[[str], bytes]) -> Iterator[LedgerObject]:
    """The instance's own of the names in `records`: bodies of requests, which `get` gives, and objects of
    jobs, too; and the files of all tables, and of what was submitted and is not applied.
    """
    submitted = set(_submitted(ledgers.supplier, get))  # first: what is applied meanwhile a table has
    yield LedgerObject(MARKER, needed=True)
    cell_files = set[str]()
    # before all that takes long: a committer takes bodies away
    for name in records:
        if name.startswith(f"{ROW_FILES}/"):
            cell_files.add(name)
        elif name.startswith(RECORDED) and not name.startswith(f"{NOW}/"):
            yield LedgerObject(name)
    # what has died since the copy of the database was made is there, as it is held
    for one in ledgers.written():
        submitted.discard(one.name)
        cell_files.discard(one.name)
        yield one
    # files of cells that were put before they were noted
    yield from map(LedgerObject, sorted(cell_files))
    for name in sorted(submitted):
        yield from (LedgerObject(name), LedgerObject(name + SKETCHES_SUFFIX))


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
