"""The supervisor of several processes that serve one address. It starts, watches, restarts and ends them.

Each process has its own listening socket on the same port (SO_REUSEPORT), and the system distributes
connections among the sockets. The supervisor holds the port but opens no instance and handles no request, so
a request that crashes a process cannot crash the supervisor.
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
"""The pause before a process that has ended is started again."""
STARTS_MAX = 5
"""The number of starts of a worker process that ends each time before it serves."""
POLL_SECONDS = 0.1
_READY = b"ready\n"


class Supervisor:
    """A supervisor that runs worker processes until `stop` is called.

    `program` is the Python code of a worker process. It gets its arguments from `worker_given`.
    """

    def __init__(self, host: str, port: int, program: str, given: Callable[[int, int], Any]) -> None:
        """Reserves the port. Raises `InstanceError` if it is not available.

        `given` is a function of a worker's number and the port. It returns the worker's arguments.
        """
        # bound without sharing first: this fails if another program already shares the port
        with listening(host, port) as unshared:
            port = unshared.getsockname()[1]
        self._held = listening(host, port, shared=True)
        self.port = port
        self._command = [sys.executable, "-c", program]
        self._given = given
        self._stops = 0
        self._workers: list[_Worker] = []

    def run(self, processes: int, started: Callable[[], object]) -> int:
        """Runs this number of workers until `stop` is called. Calls `started` when all of them serve.

        Returns 0, or the exit code of the first worker that did not start.
        """
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
        """Ends all workers. They may finish running requests first; a second call ends them at once."""
        self._stops += 1
        for worker in self._workers:
            worker.end()

    def _started(self, number: int) -> _Worker:
        return _Worker(self._command, self._environment, self._given(number, self.port))

    def _wait_ready(self, number: int, folder: str) -> int:
        """Waits until a worker serves or `stop` is called, and returns 0. Returns an exit code if that fails.

        It starts a worker that ends again, up to STARTS_MAX times in all. Worker 0 is an exception: if it
        exits by itself, the start fails at once. It has logged the reason, and the others would fail, too.
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
        raise AssertionError("the last attempt returns")

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
        """Ends all workers and waits for them, without a timeout, because each worker limits its own end."""
        for worker in self._workers:
            # a second signal means "at once", so only a worker that has had none (it was starting) gets one
            if not worker.was_ended:
                worker.end()
        for worker in self._workers:
            worker.process.wait()
            worker.close()


class _Worker:
    """A worker process and two pipes.

    The worker reads its arguments from the first pipe, and ends when that pipe is closed. On the second pipe,
    the worker reports that it is ready.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], given: Any) -> None:
        self.was_ended = False
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
        """Waits until the worker serves, and returns True. Returns False if the worker has ended."""
        return self.process.stdout is not None and self.process.stdout.readline() == _READY

    def end(self) -> None:
        self.was_ended = True
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
    """Returns the arguments that the supervisor sent to this process. Ignores Ctrl-C from now on.

    Ctrl-C reaches all processes of a terminal, but only the supervisor decides which processes to stop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return pickle.load(sys.stdin.buffer)  # noqa: S301


def worker_ready(stop: Callable[[], object]) -> None:
    """Reports to the supervisor that this process serves, and calls `stop` if the supervisor dies."""
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):  # unbuffered: Python ends although a thread reads
            pass
        stop()

    threading.Thread(target=watch, name="dormouse-supervisor", daemon=True).start()


@contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` on SIGTERM and Ctrl-C, in the main thread only.

    A signal that was ignored when the process began stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: stop()) for number in handled}
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
