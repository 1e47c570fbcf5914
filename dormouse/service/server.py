"""The server: one process, which may share its address with others, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from dormouse.api.instance import Instance
from dormouse.service.app import create_app
from dormouse.service.connections import Connections, connections_possible
from dormouse.service.listening import CONNECTIONS_WAITING_MAX, listening
from dormouse.service.protocol import Protocol
from dormouse.service.security import shown_host, tls_context
from dormouse.service.supervisor import stopped_by_signals
from dormouse.service.terms import PAYLOADS
from dormouse.settings.service import ServiceSettings, read_holders
from dormouse.verbs.long_work import KINDS


def check(settings: ServiceSettings) -> None:
    """Reads the files that the settings name; `InvalidInput` names the one that cannot be used."""
    _ = settings.secret
    if settings.job_tokens_file is not None:
        read_holders(settings.job_tokens_file, (*KINDS, PAYLOADS))
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
