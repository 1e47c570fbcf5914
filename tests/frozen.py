"""A process that freezes itself before each commit, until the test continues it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

_PROGRAM = """
import signal, sys
from contextlib import contextmanager
import dormouse as dm
from dormouse.postgres import session, transaction
from dormouse.rows.store import RowLocks

for kind in (session.SHORT, session.COMMIT, session.ALONE, session.LONG, session.PAGED, session.KEPT):
    kind[session.IDLE] = 300
session.KEPT_PULSE_SECONDS = 0.05
RowLocks.__init__.__defaults__ = (1.0,)
seen = set()

def freeze(operation):
    if operation not in seen:
        seen.add(operation)
        print(operation, flush=True)
        signal.raise_signal(signal.SIGSTOP)

commit = transaction._commit
def frozen_commit(conn, operation):
    freeze(operation)
    commit(conn, operation)
transaction._commit = frozen_commit

"""


class Frozen:
    """A process that runs `_PROGRAM`, and then a given program.

    In it, `freeze(name)` stops the process, once for each name.
    """

    def __init__(self, program: str, *arguments: str) -> None:
        command = [sys.executable, "-c", _PROGRAM + program, *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said: list[str] = []

    def stops(self) -> Iterator[str]:
        """Yields the name of each place where the process is frozen; then continues the process.

        Ends when the process ends.
        """
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if (said := line.strip()).startswith("said: "):
                    self.said.append(said.removeprefix("said: "))
                    continue
                _, status = os.waitpid(self._process.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)
                yield said
                self._process.send_signal(signal.SIGCONT)
            assert self._process.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
