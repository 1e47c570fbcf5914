"""The check of an object: does it exist, with the size and the digest with which it was written?

The length of a digest shows its kind. An XXH3-128 detects damage of Dormouse's own content. A SHA-256 is for
content from outside, whose senders could profit from finding other content with the same XXH3-128.
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
"""The size of one read: it fits a core's cache, so hashing costs less than reading."""

XXH3, SHA256 = 16, 32
"""The kinds of digests, by their length in bytes."""

FaultKind = Literal["object_missing", "object_size", "object_digest", "object_unreadable"]
GoOn = Callable[[], object]
"""A callback for each megabyte that is read; if it raises, the reading ends."""


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object as it was written: its name, size and digest. A fact that was not recorded is None."""

    name: str
    byte_count: int | None = None
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A difference between an object and its record. `text` continues a sentence that begins with the
    object's name.
    """

    kind: FaultKind
    text: str

    def __str__(self) -> str:
        return self.text


MISSING = Fault("object_missing", "is not there")


def fault_of(
    objects: ObjectStore, written: WrittenObject, *, deep: bool = False, go_on: GoOn = lambda: None
) -> Fault | None:
    """Returns the difference between an object and its record, or None.

    With `deep`, every byte is read. Raises `ObjectStoreError` if the store cannot be read.
    """
    try:
        if deep and written.digest is not None:
            return compared(written, *digest_of_object(objects, written.name, go_on, len(written.digest)))
        return compared(written, objects.size(written.name))
    except ObjectNotFound:
        return MISSING


def read_back(objects: ObjectStore, written: WrittenObject) -> tuple[bytes, Fault | None]:
    """Returns the bytes of an object, which must fit into memory, and its fault or None.

    Every byte is compared, as in a deep `fault_of`.
    """
    try:
        data, was = objects.get(written.name), written.digest
    except ObjectNotFound:
        return b"", MISSING
    return data, compared(written, len(data), was and new_digest(len(was), data).digest())


def compared(written: WrittenObject, size: int | None, digest: bytes | None = None) -> Fault | None:
    """Returns the difference between a size and a digest and their record, or None.

    Without a size, the object is reported as missing. Digests of two kinds cannot be compared and count as
    equal.
    """
    if size is None:
        return MISSING
    if written.byte_count not in (None, size):
        return Fault("object_size", f"has {size:,} bytes, and was written with {written.byte_count:,}")
    was = written.digest
    if was is None or digest is None or len(was) != len(digest) or was == digest:
        return None
    said = f"its digest is {digest.hex()}, and was {was.hex()}"
    return Fault("object_digest", f"does not have the bytes that were written: {said}")


def unreadable(why: BaseException) -> Fault:
    """Returns the fault of an object that exists but cannot be read."""
    return Fault("object_unreadable", f"cannot be read: {one_line(why)}")


def digest_of_object(
    objects: ObjectStore, name: str, go_on: GoOn = lambda: None, kind: int = XXH3
) -> tuple[int, bytes]:
    """Returns an object's size and digest. Raises `ObjectNotFound` and `ObjectStoreError`."""
    with objects.reader(name) as file:
        digest = digest_of(file, lambda data: go_on(), kind)
        return file.tell(), digest


def copied(objects: ObjectStore, name: str, path: Path, go_on: GoOn = lambda: None) -> tuple[int, bytes]:
    """Copies an object to a path; returns its size and digest. Raises the errors of `digest_of_object`."""
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
    """Returns the digest of the rest of a file; `use` is called with each piece."""
    digest = new_digest(kind)
    while data := file.read(READ_BYTES):
        digest.update(data)
        use(data)
    found: bytes = digest.digest()
    return found


def new_digest(kind: int = XXH3, data: bytes = b"") -> Any:
    """Returns a `hashlib`-like digest of some bytes, to which more can be added."""
    if kind == SHA256:
        return sha256(data)
    import xxhash

    return xxhash.xxh3_128(data)
