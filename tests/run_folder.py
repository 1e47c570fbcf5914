"""All that a run of the tests makes is below one folder, and goes with it, however the run ends.

The run sets TMPDIR to the folder, and an environment variable, by which the processes that it started are
known. A watchdog, which is no part of the run, waits for the end of pytest: then it ends what is left, and
removes the folder. A run that leaves a process behind fails. What a watchdog that was killed has left, the
next run removes when it starts.
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
    """The plugin of the process that runs pytest; workers get the environment from it."""

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self._seconds_max = seconds_max  # that processes may take to end by themselves
        self._before = {name: os.environ.get(name) for name in (RUN, "TMPDIR")}
        self._left: list[str] = []
        temporary = Path(tempfile.gettempdir())
        for stale in temporary.glob(f"{PREFIX}*"):
            if _is_unlocked(stale):
                remove(stale)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
        self.folder.chmod(0o711)  # some tests act as another user in it
        spread(self.folder)
        self._lock = (self.folder / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "tests.run_folder", str(self.folder)]
        # a session of its own: Ctrl-C is for the tests
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
        """Not what ends with this process: Python's helpers, Spark's Java, the CDK's Node."""
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
        multiprocessing.util._run_finalizers()  # as at exit, while its temporary folder is there
        self._watchdog.communicate(timeout=9 * SECONDS_MAX)
        self._lock.close()
        for name, value in self._before.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}
        tempfile.tempdir = None


def spread(folder: Path) -> None:
    """Has ext4 put each folder in this one elsewhere on the disk; other file systems do as they do.

    In the same place, each new file is looked for a number that no file had in the last seconds, among the
    thousands of those that the tests have just removed.
    """
    with suppress(OSError):
        subprocess.run(["chattr", "+T", folder], check=False, stderr=subprocess.DEVNULL)


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that a run has started, but for the one that asks and its parents."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [one for one in psutil.process_iter() if one.pid not in mine and _belongs_to(one, str(folder))]


def remove(folder: Path) -> None:
    """Ends the processes of a run, and removes its folder."""
    left = processes_of(folder)
    for one in left:
        with suppress(psutil.Error):
            # PostgreSQL takes its shared memory with it, when it is asked
            one.send_signal(signal.SIGQUIT if one.name() == "postgres" else signal.SIGKILL)
    # not until their parents have heard of it, which may wait for this process
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
    """Its name may be that of a thread, as Node's."""
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
    """The watchdog: its input ends with the process that runs pytest, but for a fork of that one."""
    parent = psutil.Process().ppid()
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1)[0]:
        pass
    remove(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
