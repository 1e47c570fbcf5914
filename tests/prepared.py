"""Data directories of embedded servers: a process of the tests sets one up, and copies it for all others."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

from dormouse.embedded.server import Server

NOT_DURABLE = "\n# data of tests need not survive a power cut\nfsync = off\nfull_page_writes = off\n"
initialize = Server._initialize


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="dormouse-initialized-"))


def copied(self: Server, staged: Path, *, durable: bool) -> None:
    """Makes a data directory, as `Server._initialize` does, but runs `initdb` only for the first one."""
    if not any(_folder().iterdir()):
        initialize(self, staged, durable=False)
        with (staged / "postgresql.conf").open("a") as file:
            file.write(NOT_DURABLE)
        _copy(staged, _folder())
    else:
        _copy(_folder(), staged)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", f"{source}/.", target], check=True)
