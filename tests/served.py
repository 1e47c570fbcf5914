"""A query service in a thread, and servers whose answers a test defines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from dormouse.api.instance import Instance
from dormouse.service.app import Server
from dormouse.settings.service import load_service_settings

SECONDS_MAX = 60


@contextmanager
def service(instance: Instance, **settings: Any) -> Iterator[str]:
    """Serves an instance on a free port of loopback; yields the URL."""
    server = Server(instance, load_service_settings(port=0, **settings))
    started = threading.Event()
    thread = threading.Thread(target=lambda: server.run(lambda _: started.set()), daemon=True)
    thread.start()
    assert started.wait(SECONDS_MAX)
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Yields the URL of a server that reads one request on each connection, answers, and closes it.

    `answer` returns the bytes of the answer.
    """
    with listening() as (server, url):
        thread = threading.Thread(target=_serve, args=(server, answer), daemon=True)
        thread.start()
        yield url
        server.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """Yields a listening socket and its URL."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server, f"http://127.0.0.1:{server.getsockname()[1]}"


def _serve(server: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    with suppress(OSError):  # until it is shut down
        while True:
            connection, _ = server.accept()
            with closing(connection), suppress(OSError):
                connection.sendall(answer(request_on(connection)))
                connection.shutdown(socket.SHUT_WR)


def request_on(connection: socket.socket) -> bytes:
    """Reads a request from a connection; if it has a content length, its body too."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(65_536) or b"\r\n\r\n"
    head, _, body = text.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = sum(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
    while len(body) < length and (more := connection.recv(65_536)):
        body += more
    return head + b"\r\n\r\n" + body


def http_answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    """Returns an HTTP answer whose body ends when the connection closes."""
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body
