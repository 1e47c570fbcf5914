"""Files below a folder in which others write: opened without a link being followed, and pinned while used."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""`O_NONBLOCK`: the open of a FIFO does not wait for a writer."""

LINK = "it is a link, or reached by one, or no regular file: put the file itself there"
_REFUSALS = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENODEV})
"""What the kernel answers to an open of a link, a FIFO, a socket or a device."""


def pin_beneath(folder: Path, name: str, target: Path) -> None:
    """Makes `target` the regular file that a relative name below a folder leads to.

    No link is followed, at no part of the name, also not one that is put there meanwhile. `target` is a hard
    link to the file that was opened, or a copy of its bytes where the file system allows no such link. Nobody
    who may write below the folder can make it another file. Raises `FileNotFoundError`; `OSError` with the
    text `LINK`.
    """
    parts = PurePosixPath(name).parts
    try:
        with _opened(os.open(folder, _FOLDER & ~os.O_NOFOLLOW), parts[:-1]) as at:
            file = os.open(parts[-1], _FILE, dir_fd=at)
            try:
                _pin(file, at, parts[-1], target)
            finally:
                os.close(file)
    except OSError as error:
        if error.errno in _REFUSALS:
            raise OSError(errno.ELOOP, LINK) from None
        raise


@contextmanager
def _opened(folder: int, parts: tuple[str, ...]) -> Iterator[int]:
    """The folder that some parts below an open folder lead to, which is closed."""
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _pin(file: int, at: int, name: str, target: Path) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP, LINK)
    with suppress(OSError):  # another file system, or another user's file
        os.link(name, target, src_dir_fd=at, follow_symlinks=False)
        if os.path.samestat(target.lstat(), status):
            return
        target.unlink()  # what stands there by now is another file
    with os.fdopen(os.dup(file), "rb") as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
