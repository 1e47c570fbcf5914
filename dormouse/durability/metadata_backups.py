"""Backups of an instance's metadata in its own store, for the day on which the database is gone.

`backups/<incarnation>/<time>.tar.gz` is a base backup of the database. What a table's files were at that time
is known again from it; files that came later are orphans, and those that were collected since are missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dormouse.errors import InvalidInput
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import METADATA_BACKUP_SECONDS
from dormouse.state.files.holds import held_until_next

FOLDER = "backups"
KIND = "metadata backup"
HELD_SECONDS_MAX = METADATA_BACKUP_SECONDS
"""Two days: should the next one not come, collection goes on."""

_TIME = "%Y-%m-%dT%H%M%SZ"
_NAME = re.compile(rf"{FOLDER}/(\d+)/(\d{{4}}-\d{{2}}-\d{{2}}T\d{{6}}Z)\.tar\.gz")


@dataclass(frozen=True, slots=True)
class MetadataBackup:
    """One backup; `name` is its object's, `made` its time in UTC."""

    name: str
    incarnation: int
    made: str
    byte_count: int


def metadata_backups(objects: ObjectStore) -> list[MetadataBackup]:
    """Those that the store has, the earliest first."""
    found = ((_NAME.fullmatch(name), name, size) for name, size in objects.list(FOLDER))
    listed = [MetadataBackup(name, int(m[1]), m[2], size) for m, name, size in found if m is not None]
    return sorted(listed, key=lambda one: (one.incarnation, one.made))


def take(
    supplier: Supplier,
    objects: ObjectStore,
    incarnation: int,
    base_backup: Callable[[Path], None],
    *,
    keep: int,
) -> MetadataBackup:
    """Takes one, and deletes all but the last `keep`.

    Files that it refers to are held until the next one: else it would be of little use when it is needed.
    """
    made = f"{datetime.now(UTC):{_TIME}}"
    last = max((one.made for one in metadata_backups(objects)), default="")
    if made <= last:  # the clock was ahead: the order says what is deleted, and what is restored
        made = f"{datetime.strptime(last, _TIME) + timedelta(seconds=1):{_TIME}}"
    name = f"{FOLDER}/{incarnation}/{made}.tar.gz"
    with held_until_next(supplier, KIND, HELD_SECONDS_MAX), objects.staged(name) as path:
        base_backup(path)
    found = metadata_backups(objects)
    objects.delete([one.name for one in found[:-keep]])
    return found[-1]


def find(objects: ObjectStore, name: str | None) -> MetadataBackup:
    """The one of this name or time, the last one when there is none. `InvalidInput`."""
    found = metadata_backups(objects)
    for one in reversed(found):
        if name in (None, one.name, one.made):
            return one
    known = ", ".join(one.made for one in found) or "none"
    raise InvalidInput(f"{objects.url} has no such backup of the metadata; there are: {known}")
