"""A folder that contains all files of a test run. It is deleted at the end of the run, even after a crash.

The run sets TMPDIR to the folder, and sets an environment variable that identifies the processes that it
started. A watchdog outside of the run waits for the end of pytest. Then it ends the processes that are left
and removes the folder. A run that leaves a process behind fails. If the watchdog was killed, the next run
removes the folder when it starts.
"""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

RUN = "DORMOUSE_TEST_RUN"
PREFIX = "dormouse-run-"
SECONDS_MAX = 20
LOCK = "lock"
ROOT = Path(__file__).parents[1]
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


class RunFolder:
    """The plugin of the process that runs pytest; xdist workers inherit its environment."""

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self._seconds_max = seconds_max  # the time that processes have to end by themselves
        self._before = {name: os.environ.get(name) for name in (RUN, "TMPDIR")}
        self._left: list[str] = []
        temporary = Path(tempfile.gettempdir())
        for stale in temporary.glob(f"{PREFIX}*"):
            if _is_unlocked(stale):
                remove(stale)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
        self.folder.chmod(0o711)  # some tests act as another user in the folder
        spread(self.folder)
        self._lock = (self.folder / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "tests.run_folder", str(self.folder)]
        # in its own session, so that Ctrl-C reaches only the tests
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True)
        os.environ |= {RUN: str(self.folder), "TMPDIR": str(self.folder)}
        tempfile.tempdir = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        deadline = time.monotonic() + self._seconds_max
        while (left := self._left_behind()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self._left = left
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _left_behind(self) -> list[str]:
        """Returns a line for each process that the run left behind.

        Python's helpers, Spark's Java and the CDK's Node are not listed, because they end with this process.
        """
        ours = [one for one in psutil.Process().children() if _program(one) in {"java", "node"}]
        ending = {one.pid for each in ours for one in (each, *each.children(recursive=True))}
        left = (one for one in processes_of(self.folder) if one.pid not in ending)
        lines = [f"process {one.pid}: {_command(one)}" for one in left]
        return [line for line in lines if not any(name in line for name in _HELPERS)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.section("the tests have left behind", red=True)
            for line in self._left:
                terminalreporter.write_line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        multiprocessing.util._run_finalizers()  # as at exit, but while the temporary folder still exists
        self._watchdog.communicate(timeout=9 * SECONDS_MAX)
        self._lock.close()
        for name, value in self._before.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}
        tempfile.tempdir = None


def spread(folder: Path) -> None:
    """Makes ext4 spread new folders below this one over the disk. Has no effect on other file systems.

    Tests free thousands of inodes. ext4 does not reuse an inode for some seconds after it was freed. If all
    folders were in one place, ext4 would search among all these inodes for each new file.
    """
    with suppress(OSError):
        subprocess.run(["chattr", "+T", folder], check=False, stderr=subprocess.DEVNULL)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Returns the processes that a run has started, except this process and its parents."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [one for one in psutil.process_iter() if one.pid not in mine and _belongs_to(one, str(folder))]


def remove(folder: Path) -> None:
    """Ends the processes of a run, and removes its folder."""
    left = processes_of(folder)
    for one in left:
        with suppress(psutil.Error):
            # on SIGQUIT, PostgreSQL removes its shared memory
            one.send_signal(signal.SIGQUIT if one.name() == "postgres" else signal.SIGKILL)
    # wait until the parents have collected their exit codes, but not for long: they may wait for this process
    deadline = time.monotonic() + SECONDS_MAX / 4
    while any(_belongs_to(one, str(folder)) for one in left) and time.monotonic() < deadline:
        time.sleep(0.02)
    for one in processes_of(folder):
        with suppress(psutil.Error):
            one.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _belongs_to(process: psutil.Process, folder: str) -> bool:
    with suppress(psutil.Error):
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        with suppress(psutil.AccessDenied):
            if process.environ().get(RUN) == folder:
                return True
        return any(part.startswith(folder + "/") for part in process.cmdline())
    return False


def _program(process: psutil.Process) -> str:
    """Returns the name of a process's program. (The name of a process may be that of a thread, as
    with Node.)
    """
    with suppress(psutil.Error):
        return Path(process.exe()).name
    return ""


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return "which has just ended"


def _is_unlocked(folder: Path) -> bool:
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def main(folder: Path) -> None:
    """Runs the watchdog, which waits until its input or its parent ends.

    Its input alone is not enough, because a fork may keep it open.
    """
    parent = psutil.Process().ppid()
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1)[0]:
        pass
    remove(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
