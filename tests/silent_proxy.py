"""A TCP proxy before a server's socket that can fall silent, as a network that loses all packets does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class SilentProxy:
    """Forwards connections until `fall_silent`; from then on it takes bytes and answers none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_silent = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        self._is_silent.set()

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                self._sockets += [client, server]
                server.connect(self._path)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if not self._is_silent.is_set():
                    target.sendall(data)
            if not self._is_silent.is_set():
                target.shutdown(socket.SHUT_RDWR)


@contextmanager
def silent_proxy(dsn: str) -> Iterator[tuple[SilentProxy, str]]:
    """Gives a proxy before the server of a DSN, and the DSN by which it is reached."""
    given = conninfo_to_dict(dsn)
    proxy = SilentProxy(f"{given['host']}/.s.PGSQL.{given['port']}")
    try:
        yield proxy, make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
    finally:
        proxy.close()
