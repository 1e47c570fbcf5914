"""Files of this machine that are there whole, whatever happens to it, or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO

from dormouse.errors import InvalidInput


@contextmanager
def whole_file(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """What is written here is the file from the end of the block on, in place of one that is there.

    Where the block raises, nothing has changed. A link stays: what it leads to is written. The rights of a
    file that is there stay. `InvalidInput` when it cannot be written.
    """
    target = Path(os.path.realpath(fspath(path)))
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            with suppress(FileNotFoundError):  # a file that was private stays private
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        with suppress(OSError):  # the file is there; not every folder may be read, or can be synced
            sync(target.parent)
    except OSError as error:
        raise InvalidInput(f"cannot write {fspath(path)!r}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's entries, outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
