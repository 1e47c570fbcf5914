"""Processes that work on a table at once, and are killed and started again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE_SECONDS = 600
TURNS_A_KILL = 5


def kill_server(main: psutil.Process) -> None:
    """Kills all processes of a server."""
    processes = [main, *main.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)[1]


def kill_postmaster(main: psutil.Process, rng: random.Random) -> psutil.Process:
    """Kills a server's first process alone, and freezes another, which outlives it: returns this orphan."""
    orphan = rng.choice(main.children())
    with suppress(psutil.NoSuchProcess):  # a client's backend that has just ended
        orphan.suspend()
    main.kill()
    assert not psutil.wait_procs([main], timeout=PATIENCE_SECONDS)[1]
    return orphan


def is_gone(process: psutil.Process) -> bool:
    """Returns whether a process has ended, though nothing may have asked for its exit code."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Workers:
    """Processes that run a program with its arguments, the folder and a role each, until its file `stop`.

    Each makes a file `begun`, with its pid, when it has come to its work.
    """

    def __init__(self, program: str, roles: list[str], *arguments: str, folder: Path) -> None:
        self._command = [sys.executable, "-c", program, *arguments, str(folder)]
        self._folder, self._roles = folder, roles
        self.running = [self._start(role) for role in roles]
        self._frozen: subprocess.Popen[bytes] | None = None

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        with (self._folder / "errors").open("a") as errors:
            return subprocess.Popen([*self._command, role], stderr=errors)

    def storm(
        self,
        turn: Callable[[int], None],
        seconds: float,
        is_enough: Callable[[], bool],
        rng: random.Random | None,
    ) -> None:
        """Turns, amid which all goes on, for a while, and until it is enough on a machine that is busy.

        With random numbers, one of the processes is killed every so many turns, once all work, and another is
        frozen at a random place for a few turns; some of those are killed while they are. In the end all have
        ended.
        """
        began, turns = time.monotonic(), 0
        try:
            while time.monotonic() - began < seconds or not is_enough():
                assert time.monotonic() - began < PATIENCE_SECONDS
                turn(turns)
                turns += 1
                self.check()
                if rng is not None and turns % TURNS_A_KILL == 0 and self._have_begun():
                    self.kill_one(rng)
                    self.freeze_one(rng)
            self.end()
        finally:
            self.leave_nobody()

    def kill_one(self, rng: random.Random) -> None:
        at = rng.randrange(len(self._roles))
        self.running[at].kill()
        self._ended(self.running[at], -signal.SIGKILL)
        self.running[at] = self._start(self._roles[at])

    def freeze_one(self, rng: random.Random) -> None:
        """Has a process that was frozen before go on, and freezes another wherever it is."""
        self.go_on()
        self._frozen = self.running[rng.randrange(len(self._roles))]
        self._frozen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self._frozen is not None:
            self._frozen.send_signal(signal.SIGCONT)  # nothing, when it was killed meanwhile
            self._frozen = None

    def _have_begun(self) -> bool:
        """Whether each has come to its work: on a busy machine none would, if others were killed sooner."""
        return all((self._folder / f"begun {one.pid}").exists() for one in self.running)

    def check(self) -> None:
        for process in self.running:
            assert process.poll() is None, (self._folder / "errors").read_text()

    def end(self) -> None:
        self.go_on()
        (self._folder / "stop").touch()
        for process in self.running:
            self._ended(process, 0)

    def leave_nobody(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def _ended(self, process: subprocess.Popen[bytes], code: int) -> None:
        process.wait()
        assert process.returncode == code, (self._folder / "errors").read_text()
