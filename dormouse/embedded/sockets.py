"""Where an embedded PostgreSQL listens: in its data directory, or else in a private temporary folder."""

from __future__ import annotations

import os
import re
import tempfile
from hashlib import sha256
from pathlib import Path

from dormouse.embedded.owner import barrier
from dormouse.errors import InstanceError
from dormouse.private_folder import make_private, private_folder

SOCKET_PATH_BYTES_MAX = 107


def socket_folder(data: Path) -> Path:
    """The data directory, or a short private folder when a socket's path would be too long there.

    A user that makes a predictable folder first could answer in the server's place, so that one is only taken
    when it is its owner's alone. Raises `InstanceError`.
    """
    if is_for_sockets(data):
        return data
    owner = data.stat()
    # a folder for temporary files may itself be deep, or ours alone
    above = Path(tempfile.gettempdir())
    longest = above / f"dormouse-{owner.st_uid}-{'x' * 8}" / ("x" * 12)
    if not is_for_sockets(longest) or barrier(above / "x", owner):
        above = Path("/tmp")  # noqa: S108
    own = private_folder("dormouse", owner, above)
    folder = own / sha256(f"{data}-{owner.st_ino}".encode()).hexdigest()[:12]
    if not make_private(folder, owner):
        raise InstanceError(f"{folder} is not a private folder of user {owner.st_uid}; remove it")
    return folder


def is_for_sockets(folder: Path) -> bool:
    """Whether the path of a socket in it is short enough, and nothing in it means something to libpq."""
    longest = len(os.fsencode(folder / ".s.PGSQL.65535.lock"))
    return longest <= SOCKET_PATH_BYTES_MAX and bool(re.fullmatch(r"[\w./+@ -]+", str(folder), re.ASCII))
