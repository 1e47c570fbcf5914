"""A base backup of an embedded PostgreSQL that runs, as one compressed tar; and a data directory of it."""

from __future__ import annotations

import gzip
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from dormouse.embedded.server import _binaries
from dormouse.errors import BackupDamaged, InstanceError

_CHUNK_BYTES = 1 << 20
_AS_DATA: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python has it from 3.11.4 on; Debian 12's does not."""


def base_backup(dsn: str, path: Path) -> None:
    """Writes one to a path, with the write-ahead log that it needs. Raises `InstanceError`."""
    given = conninfo_to_dict(dsn)
    # "-": to stdout, with the manifest that pg_verifybackup reads
    command = [str(_binaries() / "pg_basebackup"), "--pgdata=-", "--format=tar", "--wal-method=fetch"]
    command += ["--checkpoint=fast", "--gzip", "--no-password"]
    command += [f"--host={given['host']}", f"--port={given['port']}", f"--username={given['user']}"]
    with path.open("wb") as file:
        done = subprocess.run(command, check=False, stdout=file, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise InstanceError(f"PostgreSQL cannot be backed up: {reason}")


def extract(path: Path, data: Path) -> None:
    """Makes a data directory of a base backup. Raises `BackupDamaged`, and `OSError` for a full disk."""
    data.mkdir(mode=0o700)
    try:
        with gzip.open(path) as file, tarfile.open(fileobj=file) as tar:
            tar.extractall(data, members=_inside(tar), **_AS_DATA)  # noqa: S202  # members are checked
            while file.read(_CHUNK_BYTES):  # its checksum stands at the end, which tarfile does not read
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of where it is unpacked
            raise
        raise BackupDamaged(f"the database of the backup cannot be unpacked: {error}") from error
    data.chmod(0o700)


def _inside(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files and folders of an archive, which has nothing else, and none beside the place they go to."""
    for member in tar:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
            raise tarfile.ReadError(f"{member.name!r} is no file of a database")
        yield member
