"""The one check of an object: whether it is there, of the size and the digest with which it was written.

A digest tells by its length what it is. An XXH3-128 finds damage, of content that is Dormouse's own. A
SHA-256 is for content that strangers send: one of them could profit from other content of the same XXH3-128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal

from dormouse.errors import ObjectNotFound, one_line
from dormouse.objects.store import ObjectStore

READ_BYTES = 1 << 20
"""What fits a core's cache: hashing it again from there costs less than reading it."""

XXH3, SHA256 = 16, 32
"""The kinds of digests, by their bytes."""

FaultKind = Literal["object_missing", "object_size", "object_digest", "object_unreadable"]
GoOn = Callable[[], object]
"""Called for each megabyte that is read; what it raises ends the reading."""


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object as it was written; None where that is not recorded."""

    name: str
    byte_count: int | None = None
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """How an object is not what was written; `text` follows its name, or "it"."""

    kind: FaultKind
    text: str

    def __str__(self) -> str:
        return self.text


MISSING = Fault("object_missing", "is not there")


def fault_of(
    objects: ObjectStore, written: WrittenObject, *, deep: bool = False, go_on: GoOn = lambda: None
) -> Fault | None:
    """Returns how an object differs from what was written, as far as that is recorded; None: not at all.

    With `deep`, every byte is read. Raises `ObjectStoreError` when the store cannot tell.
    """
    try:
        if deep and written.digest is not None:
            return compared(written, *digest_of_object(objects, written.name, go_on, len(written.digest)))
        return compared(written, objects.size(written.name))
    except ObjectNotFound:
        return MISSING


def read_back(objects: ObjectStore, written: WrittenObject) -> tuple[bytes, Fault | None]:
    """As a deep `fault_of`, for an object that fits memory; also returns its bytes."""
    try:
        data, was = objects.get(written.name), written.digest
    except ObjectNotFound:
        return b"", MISSING
    return data, compared(written, len(data), was and new_digest(len(was), data).digest())


def compared(written: WrittenObject, size: int | None, digest: bytes | None = None) -> Fault | None:
    """Returns how an object of a size and a digest differs from what was written; without a size, it is gone.

    Digests of two kinds tell nothing of each other.
    """
    if size is None:
        return MISSING
    if written.byte_count not in (None, size):
        return Fault("object_size", f"has {size:,} bytes, and was written with {written.byte_count:,}")
    was = written.digest
    if was is None or digest is None or len(was) != len(digest) or was == digest:
        return None
    said = f"its digest is {digest.hex()}, and was {was.hex()}"
    return Fault("object_digest", f"has not the bytes that were written: {said}")


def unreadable(why: BaseException) -> Fault:
    """Returns the fault of an object that is there, and cannot be read."""
    return Fault("object_unreadable", f"cannot be read: {one_line(why)}")


def digest_of_object(
    objects: ObjectStore, name: str, go_on: GoOn = lambda: None, kind: int = XXH3
) -> tuple[int, bytes]:
    """Returns an object's size and digest. Raises `ObjectNotFound` and `ObjectStoreError`."""
    with objects.reader(name) as file:
        digest = digest_of(file, lambda data: go_on(), kind)
        return file.tell(), digest


def copied(objects: ObjectStore, name: str, path: Path, go_on: GoOn = lambda: None) -> tuple[int, bytes]:
    """Copies an object to a path; returns its size and digest. Raises as `digest_of_object`."""
    with objects.reader(name) as source, path.open("wb") as file:

        def write(data: bytes) -> None:
            go_on()
            file.write(data)

        digest = digest_of(source, write)
        return file.tell(), digest


def digest_of_file(path: Path, kind: int = XXH3) -> bytes:
    """Returns the digest of a file on this machine."""
    with path.open("rb") as file:
        return digest_of(file, kind=kind)


def digest_of(file: BinaryIO, use: Callable[[bytes], object] = lambda data: None, kind: int = XXH3) -> bytes:
    """Returns the digest of what is left of a file; `use` is called with each piece of it."""
    digest = new_digest(kind)
    while data := file.read(READ_BYTES):
        digest.update(data)
        use(data)
    found: bytes = digest.digest()
    return found


def new_digest(kind: int = XXH3, data: bytes = b"") -> Any:
    """Returns the digest of some bytes, to which others can be added, as one of `hashlib`."""
    if kind == SHA256:
        return sha256(data)
    import xxhash

    return xxhash.xxh3_128(data)
