"""A forwarded port, as Session Manager's plugin opens it, without Session Manager."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def forwarded(address: str, host: str, port: int) -> Iterator[None]:
    """Forwards a port of a local address to the same port of a host."""
    with socket.create_server((address, port)) as listener:
        threading.Thread(target=_serve, args=(listener, host, port), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, host: str, port: int) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            server = socket.create_connection((host, port))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
