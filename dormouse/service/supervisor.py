"""Several processes that serve one address: started, watched, started again when they crash, ended together.

Each has a listening socket of its own on the same port (SO_REUSEPORT), among which the system spreads
connections. The supervisor holds the port, and no instance: what a request can do to a process it survives.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

from dormouse.service.metrics import FOLDER_VARIABLE, forget_process
from dormouse.service.protocol import listening
from dormouse.settings.process import environment

logger = logging.getLogger("dormouse.service")
AGAIN_SECONDS = 1.0
"""How long a place stays empty whose process has ended."""
STARTS_MAX = 5
"""How often a worker is started that ends before it serves."""
POLL_SECONDS = 0.1
_READY = b"ready\n"


class Supervisor:
    """Runs processes until `stop`. `program` is Python that serves what `worker_given` gives it."""

    def __init__(self, host: str, port: int, program: str, given: Callable[[int, int], Any]) -> None:
        """`given` has the number of a process and the port; `InstanceError` when the port cannot be had."""
        with listening(host, port) as alone:  # it is nobody else's, who could also share it
            port = alone.getsockname()[1]
        self._held = listening(host, port, shared=True)
        self.port = port
        self._command = [sys.executable, "-c", program]
        self._given = given
        self._stops = 0
        self._workers: list[_Worker] = []

    def run(self, processes: int, started: Callable[[], object]) -> int:
        """Serves with so many, after telling `started`; the exit code, which is of one that did not start."""
        with ExitStack() as stack:
            stack.enter_context(self._held)
            stack.enter_context(stopped_by_signals(self.stop))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dormouse-metrics-"))
            self._environment = {**environment(), FOLDER_VARIABLE: folder}
            stack.callback(self._end)
            while len(self._workers) < processes and not self._stops:
                self._workers.append(self._started(len(self._workers)))
            for number in range(len(self._workers)):
                if code := self._wait_ready(number, folder):
                    return code
            if not self._stops:
                started()
            while not self._stops:
                time.sleep(POLL_SECONDS)
                self._replace_ended(folder)
        return 0

    def stop(self) -> None:
        """Ends all; what runs may go on for a while. A second time: at once."""
        self._stops += 1
        for worker in self._workers:
            worker.end()

    def _started(self, number: int) -> _Worker:
        return _Worker(self._command, self._environment, self._given(number, self.port))

    def _wait_ready(self, number: int, folder: str) -> int:
        """Returns 0 when a worker serves, or all are stopped; the exit code of the service when it does not.

        The first that ends by itself has said why, and the others would say the same. One that a signal
        ended, or that ends beside others that serve, is started again.
        """
        for attempt in count(1):
            worker = self._workers[number]
            if worker.wait_ready() or self._stops:
                return 0
            code = worker.process.wait()
            if attempt == STARTS_MAX or (number == 0 and code >= 0):
                logger.error(
                    "worker %d (process %d) %s before it served, at attempt %d; the service does not start",
                    number, worker.process.pid, _how_ended(code), attempt,
                )  # fmt: skip
                return 128 - code if code < 0 else code or 1
            self._replace(number, code, folder)
        raise AssertionError("it returns at the last attempt")

    def _replace_ended(self, folder: str) -> None:
        for number, worker in enumerate(self._workers):
            code = worker.process.poll()
            if code is not None and not self._stops:
                self._replace(number, code, folder)

    def _replace(self, number: int, code: int, folder: str) -> None:
        worker = self._workers[number]
        logger.error(
            "worker %d (process %d) %s; it is started again", number, worker.process.pid, _how_ended(code)
        )
        forget_process(folder, worker.process.pid)
        worker.close()
        time.sleep(AGAIN_SECONDS)
        if not self._stops:
            self._workers[number] = self._started(number)

    def _end(self) -> None:
        """Waits for all; a process bounds by itself how long it goes on."""
        for worker in self._workers:
            if not worker.is_told:  # a second time means at once; one that was being started has heard none
                worker.end()
        for worker in self._workers:
            worker.process.wait()
            worker.close()


class _Worker:
    """A process. A pipe tells it what to do, and its end to end; on another it says that it is ready."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], given: Any) -> None:
        self.is_told = False
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        with suppress(BrokenPipeError):  # it has ended
            pickle.dump(given, self._stdin)
            self._stdin.flush()

    @property
    def _stdin(self) -> Any:
        return self.process.stdin

    def wait_ready(self) -> bool:
        """Whether it serves; not when it has ended."""
        return self.process.stdout is not None and self.process.stdout.readline() == _READY

    def end(self) -> None:
        self.is_told = True
        with suppress(OSError):
            self.process.terminate()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _how_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def worker_given() -> Any:
    """In a process of a supervisor: what it is given. Ctrl-C is the supervisor's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return pickle.load(sys.stdin.buffer)  # noqa: S301


def worker_ready(stop: Callable[[], object]) -> None:
    """Tells the supervisor that this process serves; `stop` is called when that has died."""
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):  # unbuffered: Python ends although a thread reads
            pass
        stop()

    threading.Thread(target=watch, name="dormouse-supervisor", daemon=True).start()


@contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call it, in the main thread; what was ignored when the process began still is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: stop()) for number in heeded}
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
