"""What is left of backups that were killed, and of the one that failed: it is removed, and nothing else."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice

from dormouse.errors import ObjectAlreadyExists, ObjectNotFound
from dormouse.objects import ObjectStore

MANIFEST, BEGUN = "manifest.json", "begun.json"
SWEPT = "swept.json"
"""Another took it for abandoned: it can be finished no more."""

ABANDONED_AFTER = timedelta(days=1)
"""A backup that has no manifest, and to which nothing was written for so long, is nobody's any more."""

NAME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{6}Z(-\d+)?")
_BATCH = 1_000

logger = logging.getLogger(__name__)


def has_object(store: ObjectStore, name: str) -> bool:
    """Whether a store has an object."""
    with suppress(ObjectNotFound):
        return store.size(name) >= 0
    return False


def sweep(store: ObjectStore, now: datetime) -> set[str]:
    """Removes what is left of backups that were killed, and nothing that no backup has begun.

    Gives what there was: the first part of each name.
    """
    names: set[str] = set()
    written_at: dict[str, datetime] = {}
    for one, _, written in store.list_dated(""):
        name, *rest = one.split("/")
        if len(rest) == 1:  # the marks, and not what is in the backups
            names.add(one)
        written_at[name] = max(written_at.get(name, written), written)
    for name in sorted(written_at):
        if not NAME.fullmatch(name) or f"{name}/{MANIFEST}" in names:
            continue
        if names.isdisjoint((f"{name}/{BEGUN}", f"{name}/{SWEPT}")):
            continue
        if now - written_at[name] <= ABANDONED_AFTER:
            continue
        with suppress(ObjectAlreadyExists):
            store.put(f"{name}/{SWEPT}", b"{}")
        if not has_object(store, f"{name}/{MANIFEST}"):
            logger.info("backup %s was never finished, and is removed", name)
            remove(store, name, SWEPT)
    return set(written_at)


def remove(store: ObjectStore, name: str, mark: str) -> None:
    """Without its `mark`, which goes last, nobody would go on when this is killed."""
    last = f"{name}/{mark}"
    pending: Iterator[str] = (one for one, _ in list(store.list(name)) if one != last)
    while batch := list(islice(pending, _BATCH)):
        store.delete(batch)
    store.delete([last])
    if (folder := store.local_path(name)) is not None:
        shutil.rmtree(folder, ignore_errors=True)  # folders without objects
