"""The server: one process, one address, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from dormouse.errors import InstanceError
from dormouse.instance import Instance
from dormouse.service.app import create_app
from dormouse.service.protocol import HEADER_BYTES_MAX, Protocol
from dormouse.service.security import shown_host, tls_context
from dormouse.settings.service import ServiceSettings, read_holders

KEEP_ALIVE_SECONDS_MAX = 4_200
"""Longer than a load balancer's, which is the one to close."""

CONNECTIONS_WAITING_MAX = 1_024


def check(settings: ServiceSettings) -> None:
    """Reads the files that the settings name; `InvalidInput` names the one that cannot be used."""
    _ = settings.secret
    if settings.job_tokens_file is not None:
        read_holders(settings.job_tokens_file)
    if settings.tls_certificate and settings.tls_key:
        tls_context(settings.tls_certificate, settings.tls_key)


class Server:
    """Serves an instance; `run` does until `stop`, which a signal or another thread calls."""

    def __init__(self, instance: Instance, settings: ServiceSettings) -> None:
        """Raises `InvalidInput` for TLS files that cannot be used, `InstanceError` when it cannot listen."""
        certificate, key = settings.tls_certificate, settings.tls_key
        tls = tls_context(certificate, key) if certificate and key else None
        self._socket = _listening(settings.host, settings.port)
        port = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{shown_host(settings.host)}:{port}"
        config = uvicorn.Config(
            create_app(instance, settings),
            http=type("_Protocol", (Protocol,), {"request_seconds_max": settings.client_stall_seconds_max}),
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS_MAX,
            timeout_graceful_shutdown=settings.shutdown_seconds_max,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        )
        config.load()
        config.ssl = tls
        self._server = _Uvicorn(config)
        # it complains of each answer that breaks off, which is logged as what it is
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def run(self, started: Callable[[str], object] = lambda url: None) -> None:
        """Serves, after telling `started` the URL; returns when it was stopped."""
        with self._socket, self._stopped_by_signals():
            self._server.on_start = lambda: started(self.url)
            self._server.run([self._socket])

    def stop(self) -> None:
        """Takes no more requests; what runs may go on for a while. A second time: at once."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in heeded}
        try:
            yield
        finally:
            for number in heeded:
                signal.signal(number, before[number])


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own, which end a process by the signal that they caught."""

    on_start: Callable[[], object] = staticmethod(lambda: None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.create_server(address[:2], family=family, backlog=CONNECTIONS_WAITING_MAX)
        # asyncio does it only for sockets that name their protocol; an answer would wait to be acknowledged
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise InstanceError(f"cannot listen on {host}:{port}: {_reason(error)}") from None
    return found


def _reason(error: OSError) -> str:
    """Without what `socket` adds; what a name does not resolve to is no error of the system."""
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
