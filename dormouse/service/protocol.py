"""The HTTP protocol of uvicorn and llhttp, with limits on connections, head sizes and slow clients."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import struct
import termios
import typing
from contextlib import suppress
from enum import Enum

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dormouse.errors import InstanceError
from dormouse.service.problems import MEDIA_TYPE, http_problem

# The socket that a service listens on.

CONNECTIONS_WAITING_MAX = 1_024


def listening(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a socket that is bound to the address and not listening yet.

    If `shared`, several processes may bind the same address. Raises `InstanceError` if binding fails.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.bind(address[:2])
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise InstanceError(f"cannot listen on {host}:{port}: {_reason(error)}") from None
    return found


def _reason(error: OSError) -> str:
    """Returns the reason of an error, without the address that `socket` adds to the message.

    An error of name resolution needs its own text, because its code is not an errno.
    """
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)


# The limit on connections, within the file descriptors that the process may have.

FILES_OF_OTHERS = 128
"""The number of file descriptors that are reserved for files, database connections and SQL processes."""


class Connection(typing.Protocol):
    """A connection that can be aborted."""

    def abort(self) -> None: ...


class Connections:
    """The open connections of a server, at most `count_max`.

    A connection is admitted after its first accepted request. If one connection too many is added, the oldest
    one that is not admitted is aborted. If all older ones are admitted, the new connection is aborted.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._all: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        self._all.add(connection)
        self._strangers[connection] = None
        if len(self._all) > self._count_max:
            oldest = next(iter(self._strangers))
            self.discard(oldest)
            oldest.abort()

    def let_in(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)

    def discard(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._strangers.pop(connection, None)


def connections_possible(wanted: int) -> int:
    """Returns the number of connections to allow: `wanted`, or fewer if the limit on open files is too low.

    It raises the process's soft limit on open files if possible. It plans two descriptors for each
    connection, because as many connections may have been accepted but not counted yet.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + FILES_OF_OTHERS
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(min(wanted, (soft - FILES_OF_OTHERS) // 2), 1)


HEADER_BYTES_MAX = 32 * 1024
WRITE_BUFFER_BYTES_MAX = 64 * 1024
KEEP_ALIVE_SECONDS_MAX = 4_200
"""The idle timeout. It is longer than those of load balancers, so that they close idle connections first.

Otherwise a request could arrive on a connection that the service is closing.
"""

STRANGER_SECONDS_MAX = 10.0
"""The time that a new connection may idle, or take to send a request's head.

The limit ends with the connection's first admitted request.
"""


class NotHttp(ValueError):
    """An invalid or ambiguous request, which a proxy and the service could understand differently."""


class _Part(Enum):
    """The part of a request that a connection is receiving."""

    BETWEEN = 0
    HEAD = 1
    BODY = 2
    REST = 3
    """The rest of the body of a request that was answered already."""


class Protocol(HttpToolsProtocol):
    """The HTTP protocol of one connection.

    `request_seconds_max` is the time that a client may take to send a request's head.
    """

    request_seconds_max = 60.0
    among: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # uvicorn copies app_state into the scope's state, where the application finds the connection
        self.app_state = {**self.app_state, "connection": self}
        self.timeout_keep_alive = STRANGER_SECONDS_MAX  # type: ignore[assignment]
        self.access_log = False  # the service has its own, in which clients cannot forge lines
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._head_bytes = 0
        self._part = _Part.HEAD
        self._is_broken = False
        self._deadline = self.loop.call_later(self._request_seconds, self._too_slow)
        self.among.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.among.discard(self)
        self._deadline.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Answers 400 if the client stopped sending within a body. The connection is closed in any case."""
        if self._part is _Part.BODY and self.cycle is not None and self.cycle.more_body:
            self.send_400_response("")

    def let_in(self) -> None:
        """Records an admitted request, and extends the idle timeout, so that the client closes first."""
        self.timeout_keep_alive = KEEP_ALIVE_SECONDS_MAX
        self.among.let_in(self)

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return  # bytes after a broken request are not a request
        idles = self.timeout_keep_alive_task is not None
        if idles and self._part is _Part.BETWEEN:
            self._begin(_Part.HEAD)  # the next bytes are a head, or empty lines before one
        elif idles and self._part is _Part.BODY:
            self._begin(_Part.REST)
        super().data_received(data)
        if self._part is _Part.HEAD and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEADER_BYTES_MAX:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._part is not _Part.HEAD:
            self._begin(_Part.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is _Part.HEAD:
            super().on_header(name, value)
            return
        # these are trailers after a body: they are dropped, because _check has not seen them
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEADER_BYTES_MAX:
            raise NotHttp

    def on_headers_complete(self) -> None:
        self._part, self._head_bytes = _Part.BODY, 0
        self._deadline.cancel()  # from here on, other limits apply: of the request, then of keep-alive
        _check(self.parser, self.headers, len(self.url))
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the client may go on in a protocol that is not supported

    def on_message_complete(self) -> None:
        was, self._part = self._part, _Part.BETWEEN
        self._deadline.cancel()
        super().on_message_complete()
        if was is _Part.REST and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def untaken_bytes(self) -> int:
        """The number of bytes that wait for the client, in buffers of this process and of the kernel.

        If the socket is closed, those of the kernel do not count.
        """
        byte_count = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError, AttributeError):  # the socket may be closed
            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            byte_count += struct.unpack("i", answer)[0]
        return byte_count

    @property
    def is_taking(self) -> bool:
        """True if the client can take more data at once."""
        return not self.flow.write_paused

    def abort(self) -> None:
        """Closes the connection at once, and discards data that the client has not taken."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with 400, after the answers to earlier requests, and closes the connection.

        If the body of a request is broken, this is the only answer to that request, and its endpoint learns
        that the client has disconnected.
        """
        self._deadline.cancel()
        self._is_broken = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline:
                self.pipeline.clear()  # only the request that is being answered still gets an answer
                return
            if not cycle.more_body:
                cycle.keep_alive = False  # the current answer is the last one
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        self._refuse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_broken and not self.transport.is_closing():
            self._refuse()

    def _refuse(self) -> None:
        body = http_problem(400, "the request is not valid HTTP/1.1 (RFC 9112)").text.encode("ascii")
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode("ascii"))
        if self.parser.get_method() != b"HEAD":
            self.transport.write(body)
        self.transport.close()

    @property
    def _request_seconds(self) -> float:
        return min(self.request_seconds_max, self.timeout_keep_alive)

    def _begin(self, part: _Part) -> None:
        self._part = part
        self._head_bytes = 0
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self._request_seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the slow request is the next one: finish this answer first
        elif not self.transport.is_closing():
            self.transport.abort()


def _check(parser: httptools.HttpRequestParser, headers: list[tuple[bytes, bytes]], size: int) -> None:
    """Raises `NotHttp` for a head that is too long or ambiguous.

    If a proxy and the service saw different ends of a request, a client could smuggle a second request. See
    RFC 9112, sections 3.2, 5.2 and 6.1.
    """
    names = [name for name, _ in headers]
    version = parser.get_http_version()
    size += sum(len(name) + len(value) + 4 for name, value in headers)
    transfer = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    has_two_lengths = bool(transfer) and (b"content-length" in names or version != "1.1")
    is_packed = transfer not in ([], [b"chunked"])
    wrong_host = names.count(b"host") > 1 or (version == "1.1" and b"host" not in names)
    folded = any(b"\n" in value or b"\r" in value for _, value in headers)
    is_unclear = has_two_lengths or is_packed or wrong_host or folded
    if size > HEADER_BYTES_MAX or is_unclear or version not in {"1.0", "1.1"}:
        raise NotHttp
