"""Folders for temporary files that only their owner can use, whatever another user put in their place before.

A file's name in the folder for temporary files can be foreseen, and any user can take it first.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from dormouse.errors import InstanceError

OTHERS = stat.S_IRWXG | stat.S_IRWXO

logger = logging.getLogger(__name__)


def private_folder(name: str, owner: os.stat_result | None = None, above: Path | None = None) -> Path:
    """Returns the private folder of a user for temporary files of one kind; makes it if there is none.

    It is `<above>/<name>-<user id>`. If another user made that, it is one with a random name, which later
    calls find again. The user is the one that has the file of the state `owner`, or else the caller; `above`
    is the folder for temporary files, if none is given. Raises `OSError` and `InstanceError`.
    """
    above = Path(tempfile.gettempdir()) if above is None else above
    _warn_of_others(above)
    for folder in private_folders(name, owner, above):
        return folder
    own = above / f"{name}-{_uid(owner)}"
    folder = Path(tempfile.mkdtemp(prefix=f"{own.name}-", dir=above))
    logger.warning("%s is not a private folder of user %d: %s is used", own, _uid(owner), folder.name)
    if not make_private(folder, owner):
        raise InstanceError(f"{folder} belongs to another user; remove it")
    return folder


def spill_folder(part: str) -> str:
    """Returns where a part of this process may spill rows, which makes the folder and removes it.

    It is empty, which lets DuckDB spill nothing, where no private folder can be made.
    """
    try:
        return str(private_folder("dormouse-spill") / f"{os.getpid()}-{part}")
    except OSError as error:
        logger.warning("nothing can be spilled: %s", error)
        return ""


def private_folders(
    name: str, owner: os.stat_result | None = None, above: Path | None = None
) -> Iterator[Path]:
    """Yields the private folders that a user has of one kind, and makes the first if its name is free."""
    own = (Path(tempfile.gettempdir()) if above is None else above) / f"{name}-{_uid(owner)}"
    if make_private(own, owner):
        yield own
    for folder in sorted(own.parent.glob(f"{own.name}-*")):
        if is_private(folder, owner):
            yield folder


def make_private(folder: Path, owner: os.stat_result | None = None) -> bool:
    """Makes a folder, or takes the one that is there; returns whether it is its owner's alone.

    A folder of the caller becomes `owner`'s. What a link leads to stays as it is.
    """
    with suppress(OSError):
        folder.mkdir(mode=stat.S_IRWXU)
    return is_private(folder, owner)


def is_private(folder: Path, owner: os.stat_result | None = None) -> bool:
    """Returns whether a path is a folder, and no link, that no other user can use; makes it `owner`'s."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        state = os.fstat(descriptor)
        if state.st_uid not in {os.geteuid(), _uid(owner)} or state.st_mode & OTHERS:
            return False
        if owner is not None and state.st_uid != owner.st_uid:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return True
    finally:
        os.close(descriptor)


def shut_out_others(path: Path) -> None:
    """Makes what was just made its owner's alone, if the umask lets all users read it.

    A umask that shuts out other users says what the group may do, and is heeded.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        path.chmod(mode & ~OTHERS)


def _uid(owner: os.stat_result | None) -> int:
    return os.geteuid() if owner is None else owner.st_uid


@cache
def _warn_of_others(above: Path) -> None:
    """Warns where another user can put a folder in the place of one that was private."""
    state = above.stat()
    of_another = state.st_uid not in {0, os.geteuid()}
    if of_another or (state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX):
        logger.warning("another user can replace folders in %s: set TMPDIR to one with the sticky bit", above)
