"""A proxy between clients and PostgreSQL that cuts their connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from psycopg.conninfo import conninfo_to_dict, make_conninfo

Passes = Callable[[bytes], int]
"""How many bytes of what came still pass; fewer than all: the connection is cut."""


class CuttingProxy:
    """Asks for each direction of each connection anew what passes."""

    def __init__(self, dsn: str, new_passes: Callable[[], Passes]) -> None:
        server = conninfo_to_dict(dsn)
        self._server = f"{server['host']}/.s.PGSQL.{server['port']}"
        self._new_passes = new_passes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server)
            except OSError:  # it was killed, and another is not there yet
                client.close()
                server.close()
                continue
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(*ends, self._new_passes()), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, passes: Passes) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                room = passes(data)
                target.sendall(data[:room])
                if room < len(data):
                    break
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def until(answer: bytes) -> Callable[[], Passes]:
    """All passes before the server says this."""
    return lambda: lambda data: 0 if answer in data else len(data)


def after(bytes_of: Callable[[], int]) -> Callable[[], Passes]:
    """So many bytes pass, asked for each direction."""

    def new_passes() -> Passes:
        left = bytes_of()

        def passes(data: bytes) -> int:
            nonlocal left
            room = min(left, len(data))
            left -= room
            return room

        return passes

    return new_passes
