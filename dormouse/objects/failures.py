"""What goes wrong in an object store, as one line that names the object, the store and the cause."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dormouse.errors import ObjectAlreadyExists, ObjectNotFound, ObjectStoreError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def taken(name: str, store: str) -> ObjectAlreadyExists:
    return ObjectAlreadyExists(f"Object {name!r} exists already in {store}")


def missing(name: str, store: str) -> ObjectNotFound:
    return ObjectNotFound(f"Object {name!r} does not exist in {store}", filename=name)


def failed(verb: str, name: str, store: str, cause: str) -> ObjectStoreError:
    what = f"objects below {name!r}" if verb == "list" else f"object {name!r}"
    return ObjectStoreError(f"Cannot {verb} {what} in {store}: {cause}")


def whole_range(found: bytes, length: int, name: str, store: str) -> bytes:
    """The bytes of a range, if it is whole."""
    if len(found) < length:
        raise failed("read", name, store, "it ends before the bytes that were asked for")
    return found


@contextmanager
def reporting_full_disk(name: str, store: str) -> Iterator[None]:
    """Report a full disk as the store's failure; what else goes wrong while writing is the writer's own."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise failed("write", name, store, os.strerror(error.errno)) from error
