"""Objects in processes of their own, forked from one clean process, called from here."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FORKSERVER = multiprocessing.get_context("forkserver")
_OPEN_SECONDS_MAX = 120.0
_END_SECONDS_MAX = 30.0
_TOGETHER_SECONDS = 0.1

Opener = Callable[[], AbstractContextManager[Any]]
"""Opens an object in its process, so it must travel there."""


class Remote:
    """Calls the object's methods, one at a time."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    def call(self, method: str, *values: Any) -> Any:
        self.begin(method, *values)
        return self.result()

    def begin(self, method: str, *values: Any) -> None:
        """Calls it without waiting; `result` must follow."""
        self._pipe.send((method, values))

    def has_answered(self) -> bool:
        return self._pipe.poll()

    def result(self, seconds_max: float | None = None) -> Any:
        """What the call gave; RuntimeError when it failed there, or takes longer."""
        if not self._pipe.poll(seconds_max):
            raise RuntimeError(f"another process did not answer within {seconds_max:g} s")
        try:
            done, found = self._pipe.recv()
        except EOFError:
            self.process.join(_END_SECONDS_MAX)
            raise RuntimeError(f"another process died, exit code {self.process.exitcode}") from None
        if not done:
            raise RuntimeError(f"another process failed:\n{found}")
        return found

    def close(self) -> None:
        """Begins to close the object and its process."""
        self._pipe.close()

    def end(self) -> None:
        """Waits until the process has ended; kills it if that takes long."""
        self.process.join(_END_SECONDS_MAX)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def remotes(openers: Sequence[Opener]) -> Iterator[list[Remote]]:
    """Opens each in a new process, all at once, and closes them at the end."""
    made: list[Remote] = []
    try:
        for opener in openers:
            ours, theirs = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=_serve, args=(theirs, opener), daemon=True)
            process.start()
            theirs.close()
            made.append(Remote(process, ours))
        for each in made:
            each.result(_OPEN_SECONDS_MAX)
        yield made
    except BaseException:
        for each in made:
            each.kill()
        raise
    finally:
        for each in made:
            each.close()
        for each in made:
            each.end()


@contextmanager
def remote(make: Callable[..., AbstractContextManager[Any]], *values: Any) -> Iterator[Remote]:
    """The one that `make(*values)` opens."""
    with remotes([partial(make, *values)]) as [made]:
        yield made


def begin_together(workers: Sequence[Remote], method: str = "run") -> None:
    """Calls a method of all with the moment, of the clock that processes share, when they should begin."""
    start = time.monotonic() + _TOGETHER_SECONDS
    for worker in workers:
        worker.begin(method, start)


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def resident_bytes(field: str = "VmHWM", process_id: str = "self") -> int:
    """Of a process: at the most, or now (`VmRSS`)."""
    lines = Path(f"/proc/{process_id}/status").read_text("utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return 1_024 * int(line.split()[1])


def _serve(pipe: Connection, opener: Opener) -> None:
    """A process's main: a call for each message, until the benchmark ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with opener() as made:
            pipe.send((True, None))
            while (asked := _received(pipe)) is not None:
                method, given = asked
                pipe.send((True, getattr(made, method)(*given)))
    except Exception:
        with suppress(ConnectionError):  # the benchmark ended
            pipe.send((False, traceback.format_exc()))


def _received(pipe: Connection) -> Any:
    """The next call; nothing when the benchmark ended."""
    with suppress(EOFError, ConnectionError):
        return pipe.recv()
    return None
