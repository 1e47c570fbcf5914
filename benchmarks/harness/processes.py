"""Objects in separate processes, whose methods this process calls. All are forks of one clean process."""

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
"""A picklable function that opens the object in its process."""


class Remote:
    """A proxy of an object in another process. It calls the object's methods, one at a time."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    def call(self, method: str, *values: Any) -> Any:
        self.begin(method, *values)
        return self.result()

    def begin(self, method: str, *values: Any) -> None:
        """Calls a method without waiting; a call of `result` must follow."""
        self._pipe.send((method, values))

    def has_answered(self) -> bool:
        return self._pipe.poll()

    def result(self, seconds_max: float | None = None) -> Any:
        """Waits for the call of `begin` and returns its result.

        Raises RuntimeError if the call failed, the process died, or the call takes longer than `seconds_max`.
        """
        if not self._pipe.poll(seconds_max):
            raise RuntimeError(f"another process did not answer within {seconds_max:g} s")
        try:
            done, answer = self._pipe.recv()
        except EOFError:
            self.process.join(_END_SECONDS_MAX)
            raise RuntimeError(f"another process died, exit code {self.process.exitcode}") from None
        if not done:
            raise RuntimeError(f"another process failed:\n{answer}")
        return answer

    def close(self) -> None:
        """Makes the process close the object and end, without waiting for it."""
        self._pipe.close()

    def end(self) -> None:
        """Waits until the process has ended; kills it if that takes longer than 30 s."""
        self.process.join(_END_SECONDS_MAX)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def remotes(openers: Sequence[Opener]) -> Iterator[list[Remote]]:
    """Opens each object in a new process, all at the same time, and closes them at the end."""
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
    """Opens the object of `make(*values)` in a new process, and closes it at the end."""
    with remotes([partial(make, *values)]) as [made]:
        yield made


def begin_together(workers: Sequence[Remote], method: str = "run") -> None:
    """Calls a method of all workers with the time at which they should begin.

    The time is of the monotonic clock, which all processes share.
    """
    start = time.monotonic() + _TOGETHER_SECONDS
    for worker in workers:
        worker.begin(method, start)


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def resident_bytes(field: str = "VmHWM", process_id: str = "self") -> int:
    """Returns the resident memory of a process in bytes: its peak (`VmHWM`) or its present size (`VmRSS`)."""
    lines = Path(f"/proc/{process_id}/status").read_text("utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return 1_024 * int(line.split()[1])


def _serve(pipe: Connection, opener: Opener) -> None:
    """Runs in the new process: makes one call for each message, until the benchmark closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with opener() as made:
            pipe.send((True, None))
            while (message := _received(pipe)) is not None:
                method, given = message
                pipe.send((True, getattr(made, method)(*given)))
    except Exception:
        with suppress(ConnectionError):  # the benchmark ended
            pipe.send((False, traceback.format_exc()))


def _received(pipe: Connection) -> Any:
    """Returns the next call as (method, values), or None if the benchmark has ended."""
    with suppress(EOFError, ConnectionError):
        return pipe.recv()
    return None
