"""Several processes that serve one address: started, watched, started again when they crash, ended together.

Each has a listening socket of its own on the same port (SO_REUSEPORT), among which the system spreads
connections. The supervisor holds the port, and no instance: what a request can do to a process it survives.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import uvicorn

from dormouse.api.instance import Instance
from dormouse.service.app import create_app
from dormouse.service.metrics import FOLDER_VARIABLE, forget_process
from dormouse.service.protocol import (
    CONNECTIONS_WAITING_MAX,
    Connections,
    Protocol,
    connections_possible,
    listening,
)
from dormouse.service.security import PAYLOADS, shown_host, tls_context
from dormouse.settings.process import environment
from dormouse.settings.service import ServiceSettings, read_holders
from dormouse.verbs.jobs import kinds

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


# The server: one process, which may share its address with others, until SIGTERM or Ctrl-C.


def check(settings: ServiceSettings) -> None:
    """Reads the files that the settings name; `InvalidInput` names the one that cannot be used."""
    _ = settings.secret
    if settings.job_tokens_file is not None:
        read_holders(settings.job_tokens_file, (*kinds(), PAYLOADS))
    if settings.tls_certificate and settings.tls_key:
        tls_context(settings.tls_certificate, settings.tls_key)


class Server:
    """Serves an instance; `run` does until `stop`, which a signal or another thread calls."""

    def __init__(self, instance: Instance, settings: ServiceSettings) -> None:
        """Raises `InvalidInput` for TLS files that cannot be used, `InstanceError` when it cannot listen."""
        certificate, key = settings.tls_certificate, settings.tls_key
        tls = tls_context(certificate, key) if certificate and key else None
        connections_max = connections_possible(-(-settings.connections_max // settings.workers))
        self._socket = listening(settings.host, settings.port, shared=settings.workers > 1)
        self._socket.listen(min(connections_max, CONNECTIONS_WAITING_MAX))
        # asyncio does it only for sockets that name their protocol; an answer would wait to be acknowledged
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = self._socket.getsockname()[1]
        self.url = url_of(settings, port)
        config = uvicorn.Config(
            create_app(instance, settings),
            http=type(
                "_Protocol",
                (Protocol,),
                {
                    "request_seconds_max": settings.client_stall_seconds_max,
                    "among": Connections(connections_max),
                },
            ),
            loop="uvloop",
            backlog=min(connections_max, CONNECTIONS_WAITING_MAX),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_seconds_max,
        )
        config.load()
        config.ssl = tls
        self._server = _Uvicorn(config)
        # it complains of each answer that breaks off, which is logged as what it is
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def run(self, started: Callable[[str], object] = lambda url: None) -> None:
        """Serves, after telling `started` the URL; returns when it was stopped."""
        with self._socket, stopped_by_signals(self.stop):
            self._server.on_start = lambda: started(self.url)
            self._server.run([self._socket])

    def stop(self) -> None:
        """Takes no more requests; what runs may go on for a while. A second time: at once."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True


def url_of(settings: ServiceSettings, port: int) -> str:
    """Where a service is asked."""
    return f"{'https' if settings.tls_certificate else 'http'}://{shown_host(settings.host)}:{port}"


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own, which end a process by the signal that they caught."""

    on_start: Callable[[], object] = staticmethod(lambda: None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()
