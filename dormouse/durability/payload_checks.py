"""Whether the objects that payloads need are there, and are what was written."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import islice

from dormouse.errors import ObjectNotFound
from dormouse.model.table import Problem
from dormouse.objects import ObjectStore
from dormouse.payloads.pack import FOLDER, written
from dormouse.postgres.connection import Supplier

PROBLEMS_MAX = 1_000


def payload_problems(supplier: Supplier, objects: ObjectStore, *, deep: bool) -> list[Problem]:
    """What is found, and found again: what was collected meanwhile is no problem."""
    first = list(islice(_found(supplier, objects, deep), PROBLEMS_MAX))
    if not first:
        return []
    again = {one.filename for one in _found(supplier, objects, deep)}
    return [one for one in first if one.filename in again]


def _found(supplier: Supplier, objects: ObjectStore, deep: bool) -> Iterator[Problem]:
    sizes = dict(objects.list(FOLDER))
    for name, size, digest, needed in written(supplier):
        found = sizes.get(name)
        if not needed:
            continue
        if found is None:
            yield Problem("object_missing", None, None, name, "the store does not have it")
        elif found != size:
            detail = f"it has {found:,} bytes, and was written with {size:,}"
            yield Problem("object_size", None, None, name, detail)
        elif deep and _digest(objects, name) != digest:
            yield Problem("object_digest", None, None, name, "its bytes are not those that were written")


def _digest(objects: ObjectStore, name: str) -> bytes | None:
    try:
        return sha256(objects.get(name)).digest()
    except ObjectNotFound:
        return None
