"""The PostgreSQL server of an instance's folder, shared by every process that opens the folder.

Each process holds a shared lock (flock) on the folder's lease file. The kernel drops the lock when the
process dies, in any way. A process that leaves tries to lock the file exclusively. If it succeeds, it was the
last process and stops the server. A mutex file prevents simultaneous starts and stops. The server has its own
lease (`dormouse.embedded.running`), so that a process that cannot see the server does not start a second one.

If every process is killed, the server runs on until the folder is opened and closed again.
"""

from __future__ import annotations

import atexit
import fcntl
import gzip
import logging
import os
import stat
import subprocess
import tarfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any, Self

from psycopg.conninfo import conninfo_to_dict

from dormouse.embedded.running import (
    HeldElsewhere,
    check_honoured,
    close_lock,
    open_lock,
    try_lock,
    unwritable,
)
from dormouse.embedded.server import Server, StillRecovering, _binaries
from dormouse.errors import BackupDamaged, InstanceError, InstanceLocked, NotAnInstance
from dormouse.model.loops import tries

# A base backup of a running embedded PostgreSQL, as one compressed tar; and a data directory made from it.

_CHUNK_BYTES = 1 << 20
_AS_DATA: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""The option that makes extraction safe; Python has it from 3.11.4 on, but that of Debian 12 has not."""


def base_backup(dsn: str, path: Path) -> None:
    """Writes a base backup to a path, with the write-ahead log that it needs. Raises `InstanceError`."""
    given = conninfo_to_dict(dsn)
    # "-" writes to stdout, with the manifest that pg_verifybackup reads
    command = [str(_binaries() / "pg_basebackup"), "--pgdata=-", "--format=tar", "--wal-method=fetch"]
    command += ["--checkpoint=fast", "--gzip", "--no-password"]
    command += [f"--host={given['host']}", f"--port={given['port']}", f"--username={given['user']}"]
    with path.open("wb") as file:
        done = subprocess.run(command, check=False, stdout=file, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise InstanceError(f"PostgreSQL cannot be backed up: {reason}")


def extract(path: Path, data: Path) -> None:
    """Makes a data directory from a base backup. Raises `BackupDamaged`, and `OSError` for a full disk."""
    data.mkdir(mode=0o700)
    try:
        with gzip.open(path) as file, tarfile.open(fileobj=file) as tar:
            tar.extractall(data, members=_inside(tar), **_AS_DATA)  # noqa: S202  # members are checked
            while file.read(
                _CHUNK_BYTES
            ):  # read to the end: gzip's checksum is there, which tarfile does not read
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the target folder
            raise
        raise BackupDamaged(f"the database of the backup cannot be unpacked: {error}") from error
    data.chmod(0o700)


def _inside(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the files and folders of an archive.

    Raises ReadError for anything else, or a path that leaves it.
    """
    for member in tar:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
            raise tarfile.ReadError(f"{member.name!r} is not a file of a database")
        yield member


logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
LEAVING_SECONDS_MAX, LEAVING_POLL_SECONDS = 1.0, 0.1


class EmbeddedPostgres:
    """PostgreSQL 18 in `<folder>/postgres`. Use it as a context manager, or call `start()` and `stop()`.

    The server listens only on a Unix socket. `options` are server settings for this start. `seconds_max`
    bounds each wait: for a recovery, for another process that sets the folder up, and for an orderly stop.
    """

    def __init__(
        self, folder: Path | str, *, options: Mapping[str, str] | None = None, seconds_max: float = 60
    ) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.joined = False
        """True if other processes had the folder open at the start.

        If False, all earlier writers are dead, even if the server still runs.
        """
        self._options = dict(options or {})
        self._seconds_max = seconds_max
        self._share: _Share | None = None

    def start(self) -> str:
        """Starts or joins the server and returns its DSN.

        Raises InstanceLocked, InstanceReadOnly, InstanceTooNew, NotAnInstance, or InstanceError with the end
        of the server's log.
        """
        with _process_lock:
            if self._share is not None:
                raise InstanceError(f"the server of {self.folder} was started by this object already")
            share = _shares.get(self.folder)
            if share is None:
                _make_folder(self.folder)
                share = _Share(self.folder, self._seconds_max)
            self.joined = share.enter(self._options)
            self._share = _shares[self.folder] = share
        try:
            return self.dsn
        except BaseException:
            self.stop()
            raise

    def revive(self) -> bool:
        """Starts the server again if it died; returns whether it had died. Does nothing in a fork.

        Raises InstanceLocked, or InstanceError with the end of the server's log.
        """
        share = self._share
        return share is not None and share.revive(self._options)

    def stop(self) -> None:
        """Leaves the server; the last process to leave stops it.

        Does nothing when called again, or in a fork.
        """
        with _process_lock:
            share, self._share = self._share, None
            if share is not None and share.leave():
                _shares.pop(self.folder, None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def dsn(self) -> str:
        if self._share is None:
            raise InstanceError(f"the server of {self.folder} was not started")
        return self._share.server.dsn()


class _Share:
    """This process's share in the server of one folder. It counts the users of the server in this process."""

    def __init__(self, folder: Path, seconds_max: float) -> None:
        self.server = Server(folder)
        self._folder = folder
        self._seconds_max = seconds_max
        self._users = 0
        self._lease: int | None = None

    def enter(self, options: Mapping[str, str]) -> bool:
        """Takes the lease and starts the server if necessary; returns whether other processes use the folder.

        If a server that cannot be seen from here is being stopped, it waits a moment, and releases the mutex
        meanwhile.
        """
        for _ in tries(LEAVING_SECONDS_MAX, pause=LEAVING_POLL_SECONDS):
            try:
                return self._enter(options)
            except HeldElsewhere as error:
                failure = str(error)
        raise InstanceLocked(failure)

    def _enter(self, options: Mapping[str, str]) -> bool:
        with self._mutex() as path:
            check_honoured(path)
            joined = self._take_lease()
            try:
                self.server.start(self._seconds_max, options)
            except StillRecovering:
                self._drop_lease_if_unused()  # no stop, which would undo the recovery's work
                raise
            except BaseException:
                self._stop_if_last()
                self._drop_lease_if_unused()
                raise
            self._users += 1
            if self._users == 1:
                self.server.log.watch()
            return joined

    def revive(self, options: Mapping[str, str]) -> bool:
        # a new empty database in place of a deleted one would only hide the loss
        if self._lease is None or self.server.is_running() or not self.server.data.exists():
            return False
        with _process_lock, self._mutex():
            if self._lease is None:  # the last user left meanwhile
                return False
            if not self.server.is_running():
                logger.warning("PostgreSQL of %s died and is started again", self._folder)
            self.server.start(self._seconds_max, options)
        return True

    def leave(self) -> bool:
        """Leaves the server; returns whether this process has no other user of it."""
        if self._lease is None:
            return True
        self._users -= 1
        if self._users > 0:
            return False
        self.server.log.unwatch()
        try:
            # a deleted folder cannot be opened again, so its server must be stopped without a mutex
            with self._mutex() if self._folder.exists() else nullcontext():
                self._stop_if_last()
        except InstanceError as error:
            logger.warning("left without stopping the server of %s: %s", self._folder, error)
        finally:
            self._drop_lease_if_unused()
        return True

    def forget(self) -> None:
        """Forgets the lease in a forked child, because the lease belongs to the parent."""
        self._users, self._lease = 0, None

    def _take_lease(self) -> bool:
        """Takes a shared lease; returns whether other processes hold one."""
        if self._lease is not None:
            return True
        lease = open_lock(self._folder / "postgres.lease")
        alone = try_lock(lease)
        fcntl.flock(lease, fcntl.LOCK_SH)
        self._lease = lease
        return not alone

    def _stop_if_last(self) -> None:
        if self._users == 0 and self._lease is not None and try_lock(self._lease):
            self.server.stop(self._seconds_max)

    def _drop_lease_if_unused(self) -> None:
        if self._users == 0 and self._lease is not None:
            lease, self._lease = self._lease, None
            close_lock(lease)

    @contextmanager
    def _mutex(self) -> Iterator[Path]:
        path = self._folder / "postgres.lock"
        mutex = open_lock(path)
        try:
            if not any(try_lock(mutex) for _ in tries(self._seconds_max, pause=POLL_SECONDS)):
                raise InstanceLocked(
                    f"another process has been starting or stopping the server of {self._folder} for "
                    f"{self._seconds_max:g} s; try again, or end that process"
                )
            yield path
        finally:
            close_lock(mutex)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotAnInstance(f"{folder} is not a folder") from None
    except OSError as error:
        raise unwritable(folder, error) from None


_process_lock = threading.RLock()
_shares: dict[Path, _Share] = {}


def _leave_all() -> None:
    with _process_lock:
        for share in _shares.values():
            while not share.leave():
                pass
        _shares.clear()


def _after_fork_in_child() -> None:
    global _process_lock  # noqa: PLW0603  # another thread of the parent may hold it forever
    _process_lock = threading.RLock()
    for share in _shares.values():
        share.forget()
    _shares.clear()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
