"""Where an embedded PostgreSQL listens: in its data directory, or else in a private temporary folder."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from dormouse.embedded.owner import barrier
from dormouse.errors import InstanceError

SOCKET_PATH_BYTES_MAX = 107

logger = logging.getLogger(__name__)


def socket_folder(data: Path) -> Path:
    """The data directory, or a short private folder when a socket's path would be too long there.

    Whoever makes a predictable folder first could answer in the server's place: one is only taken when it is
    its owner's alone. Raises `InstanceError`.
    """
    if is_for_sockets(data):
        return data
    owner = data.stat()
    # a folder for temporary files may itself be deep, or ours alone
    above = Path(tempfile.gettempdir())
    if not is_for_sockets(above / f"dormouse-{owner.st_uid}-{'x' * 12}") or barrier(above / "x", owner):
        above = Path("/tmp")  # noqa: S108
    own = above / f"dormouse-{owner.st_uid}"
    folder = own / sha256(f"{data}-{owner.st_ino}".encode()).hexdigest()[:12]
    if _is_private(own, owner) and _is_private(folder, owner):
        return folder
    logger.warning("%s is not a private folder of user %d: another is used", own, owner.st_uid)
    folder = Path(tempfile.mkdtemp(prefix=f"{own.name}-", dir=above))
    if not _is_private(folder, owner):
        raise InstanceError(f"{folder} belongs to another user; remove it")
    return folder


def is_for_sockets(folder: Path) -> bool:
    """Whether the path of a socket in it is short enough, and nothing in it means something to libpq."""
    longest = len(os.fsencode(folder / ".s.PGSQL.65535.lock"))
    return longest <= SOCKET_PATH_BYTES_MAX and bool(re.fullmatch(r"[\w./+@ -]+", str(folder), re.ASCII))


def _is_private(folder: Path, owner: os.stat_result) -> bool:
    """Makes it, or takes what is there, if only its owner can use it; what a link leads to stays as it is."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        state = os.fstat(descriptor)
        if state.st_uid not in {os.geteuid(), owner.st_uid} or state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return False
        if state.st_uid != owner.st_uid:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return True
    finally:
        os.close(descriptor)
