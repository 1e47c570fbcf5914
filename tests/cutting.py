"""A proxy between clients and PostgreSQL that cuts their connections or stops answering."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from psycopg.conninfo import conninfo_to_dict, make_conninfo

Passes = Callable[[bytes], int]
"""A function that returns how many of the received bytes still pass.

If it returns fewer than it received, the connection is cut.
"""
IMPATIENT = {
    "tcp_user_timeout": 2_000,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
}
"""DSN parameters with which a client soon notices that its server has vanished."""
SERVER_SECONDS = 3.0
"""The time after which the server notices a vanished client. The proxy simulates this on the Unix socket."""
CAN_VANISH = sys.platform == "linux"
_SO_ATTACH_FILTER = 26
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)


@dataclass(eq=False)
class Line:
    """A proxied connection: the sockets to its client and to the server."""

    client: socket.socket
    server: socket.socket
    is_silent: bool = False

    def vanish(self) -> None:
        """Drops every later packet from the client, without an acknowledgement.

        The kernel does this for a socket whose filter accepts no packet.
        """
        self.is_silent = True
        if CAN_VANISH:
            code = ctypes.create_string_buffer(_RETURN_0)
            program = struct.pack("HP", 1, ctypes.addressof(code))
            self.client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        notice = threading.Timer(SERVER_SECONDS, end, [self.server])
        notice.daemon = True
        notice.start()


class CuttingProxy:
    """A proxy in front of a server that cuts connections after some bytes.

    Each direction of a connection gets a function from `new_passes`, which decides how many bytes pass. When
    a connection is to be cut, `vanishes` decides if the peer stops answering instead of closing.
    """

    def __init__(
        self,
        dsn: str,
        new_passes: Callable[[], Passes] = lambda: len,
        vanishes: Callable[[], bool] = lambda: False,
    ) -> None:
        server = conninfo_to_dict(dsn)
        self._server = f"{server['host']}/.s.PGSQL.{server['port']}"
        self._new_passes, self._vanishes = new_passes, vanishes
        self._lines: set[Line] = set()
        self._is_silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self._listener.getsockname()[1])
        self.broken = self.vanished = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def fall_silent(self) -> None:
        """Stops answering on all connections, even on those that are opened later."""
        self._is_silent = True
        for line in list(self._lines):
            line.vanish()

    def close(self) -> None:
        end(self._listener)
        self._listener.close()
        for line in list(self._lines):
            end(line.client, line.server)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            line = Line(client, socket.socket(socket.AF_UNIX))
            try:
                line.server.connect(self._server)
            except OSError:  # the server was killed, and its successor does not run yet
                client.close()
                line.server.close()
                continue
            self._lines.add(line)
            if self._is_silent:
                line.vanish()
            for ends in ((client, line.server), (line.server, client)):
                threading.Thread(
                    target=self._copy, args=(line, *ends, self._new_passes()), daemon=True
                ).start()

    def _copy(self, line: Line, source: socket.socket, target: socket.socket, passes: Passes) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if line.is_silent:
                    continue
                room = passes(data)
                target.sendall(data[:room])
                if room < len(data):
                    self.broken += 1
                    if not self._vanishes():
                        break
                    line.vanish()
                    self.vanished += 1
        if line.is_silent:
            end(line.server)  # without notice to the client
        else:
            end(source, target)
            self._lines.discard(line)


def end(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def until(answer: bytes) -> Callable[[], Passes]:
    """Returns a `new_passes` that cuts the connection just before these bytes of the server's answer."""
    return lambda: lambda data: 0 if answer in data else len(data)


def after(bytes_of: Callable[[], int]) -> Callable[[], Passes]:
    """Returns a `new_passes` that lets `bytes_of()` bytes pass in each direction."""

    def new_passes() -> Passes:
        left = bytes_of()

        def passes(data: bytes) -> int:
            nonlocal left
            room = min(left, len(data))
            left -= room
            return room

        return passes

    return new_passes
