"""Digests of files: the XXH3-128 of their bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

from dormouse.objects import ObjectStore

READ_BYTES = 1 << 20
"""What fits a core's cache: hashing it again from there costs less than reading it."""


def digest_of_file(path: Path) -> bytes:
    """Of a file on this machine."""
    with path.open("rb") as file:
        return _digest(file)


def digest_of_object(
    objects: ObjectStore, name: str, go_on: Callable[[], object] = lambda: None
) -> tuple[int, bytes]:
    """Returns an object's size and digest; every byte is read, and `go_on` is called for each megabyte.

    Raises `ObjectNotFound`, `ObjectStoreError`, and what `go_on` raises.
    """
    with objects.reader(name) as file:
        digest = _digest(file, lambda data: go_on())
        return file.tell(), digest


def copied(
    objects: ObjectStore, name: str, path: Path, go_on: Callable[[], object] = lambda: None
) -> tuple[int, bytes]:
    """Copies an object to a path; gives its size and digest. `go_on` is called for each megabyte."""
    with objects.reader(name) as source, path.open("wb") as file:

        def write(data: bytes) -> None:
            go_on()
            file.write(data)

        digest = _digest(source, write)
        return file.tell(), digest


def _digest(file: BinaryIO, use: Callable[[bytes], object] = lambda data: None) -> bytes:
    found = xxhash.xxh3_128()
    while data := file.read(READ_BYTES):
        found.update(data)
        use(data)
    return found.digest()
