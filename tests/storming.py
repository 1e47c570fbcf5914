"""Faults for storms: processes, servers and connections that die, freeze or stop answering."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from dormouse.errors import CommitOutcomeUnknown, ConnectionsExhausted, TooManyRetries
from dormouse.postgres import session
from tests import forks
from tests.cutting import CAN_VANISH, IMPATIENT, CuttingProxy, after

PATIENCE_SECONDS = 600
STORM_SECONDS = 4.0
"""The duration of a storm in which all that it counts has happened. Raise it to look for rare faults."""
TURNS_A_KILL = 5
KILLS_MIN = 3
VANISHING = 0.2
"""The share of cut connections whose peers vanish instead of closing the connection."""
IDLE_MS = 1_500
LOST = (psycopg.OperationalError, CommitOutcomeUnknown, ConnectionsExhausted, TooManyRetries)
"""The errors of calls that lost their connections several times."""


@contextmanager
def failing_network(dsn: str, rng: random.Random, bytes_mean: int) -> Iterator[tuple[CuttingProxy, str]]:
    """Yields a proxy in front of a server, and the DSN of the proxy.

    On average, `bytes_mean` bytes pass before a connection is cut or its peer vanishes.
    """
    passes = after(lambda: int(rng.expovariate(1 / bytes_mean)))
    with closing(CuttingProxy(dsn, passes, lambda: CAN_VANISH and rng.random() < VANISHING)) as proxy:
        yield proxy, make_conninfo(proxy.dsn, **IMPATIENT)


def hurry() -> None:
    """Sets a short idle timeout for transactions.

    If this process is frozen in a transaction, the server then ends the transaction.
    """
    for kind in (session.SHORT, session.COMMIT, session.ALONE):
        kind[session.IDLE] = IDLE_MS  # type: ignore[index]


def freeze(process: BaseProcess, seconds: float) -> None:
    """Freezes a process at any point, and continues it after `seconds`."""
    forks.send(process, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        forks.send(process, signal.SIGCONT)


def kill_server(main: psutil.Process) -> None:
    """Kills all processes of a server."""
    processes = [main, *main.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)[1]


def kill_postmaster(main: psutil.Process, rng: random.Random) -> psutil.Process:
    """Kills only a server's first process, and freezes another process of the server.

    Returns the frozen process, which becomes an orphan.
    """
    orphan = rng.choice(main.children())
    with suppress(psutil.NoSuchProcess):  # the backend of a client has just ended
        orphan.suspend()
    main.kill()
    assert not psutil.wait_procs([main], timeout=PATIENCE_SECONDS)[1]
    return orphan


def is_gone(process: psutil.Process) -> bool:
    """Returns whether a process has ended, even if its parent has not collected its exit code."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Workers:
    """Processes that run a program with arguments, the folder and a role, until the file `stop` exists.

    Each process creates a file `begun PID` when it begins its work.
    """

    def __init__(self, program: str, roles: list[str], *arguments: str, folder: Path) -> None:
        self._command = [program, *arguments, str(folder)]
        self._folder, self._roles = folder, roles
        self.running = [self._start(role) for role in roles]
        self._frozen: ForkServerProcess | None = None
        self.killed = 0

    def _start(self, role: str) -> ForkServerProcess:
        return forks.start(*self._command, role, errors=self._folder / "errors")

    def storm(
        self,
        turn: Callable[[int], None],
        seconds: float,
        is_enough: Callable[[], bool],
        rng: random.Random | None,
    ) -> None:
        """Calls `turn` for some seconds, and longer until `is_enough()`, because the machine may be busy.

        With `rng`, at least KILLS_MIN processes are killed. The kills begin when all processes work and
        `is_enough()`, because a killed process may leave work open that keeps the others from being done.
        Every TURNS_A_KILL turns, one process is killed and another is frozen for a few turns. A frozen
        process may be killed too. All processes have ended when this returns.
        """
        began, turns = time.monotonic(), 0
        try:
            kills_min = 0 if rng is None else KILLS_MIN
            while time.monotonic() - began < seconds or self.killed < kills_min or not is_enough():
                assert time.monotonic() - began < PATIENCE_SECONDS
                turn(turns)
                turns += 1
                self.check()
                if rng is not None and turns % TURNS_A_KILL == 0 and self._all_begun() and is_enough():
                    self.kill_one(rng)
                    self.freeze_one(rng)
            self.end()
        finally:
            self.end_all_processes()

    def kill_one(self, rng: random.Random) -> None:
        at = rng.randrange(len(self._roles))
        self.running[at].kill()
        self._ended(self.running[at], -signal.SIGKILL)
        self.running[at] = self._start(self._roles[at])
        self.killed += 1

    def freeze_one(self, rng: random.Random) -> None:
        """Continues the frozen process, if any, and freezes another one, wherever it is in its work.

        A process that has just been started is not frozen: the next kill would wait for its beginning.
        """
        self.go_on()
        self._frozen = rng.choice([one for one in self.running if self._has_begun(one)])
        forks.send(self._frozen, signal.SIGSTOP)

    def go_on(self) -> None:
        if self._frozen is not None:
            forks.send(self._frozen, signal.SIGCONT)  # no effect if it was killed meanwhile
            self._frozen = None

    def _has_begun(self, process: ForkServerProcess) -> bool:
        return (self._folder / f"begun {process.pid}").exists()

    def _all_begun(self) -> bool:
        """Returns whether each process has begun its work.

        Kills before that would leave no process at work on a busy machine.
        """
        return all(map(self._has_begun, self.running))

    def check(self) -> None:
        for process in self.running:
            assert process.exitcode is None, (self._folder / "errors").read_text()

    def end(self) -> None:
        self.go_on()
        (self._folder / "stop").touch()
        for process in self.running:
            self._ended(process, 0)

    def end_all_processes(self) -> None:
        for process in self.running:
            process.kill()
            process.join()

    def _ended(self, process: ForkServerProcess, code: int) -> None:
        process.join()
        assert process.exitcode == code, (self._folder / "errors").read_text()
