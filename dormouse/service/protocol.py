"""HTTP as uvicorn and llhttp speak it, with what they lack: bounds on connections, heads, slow requests."""

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
    """Bound, and not listening yet; several processes may have the same when `shared`. `InstanceError`."""
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
    """Without what `socket` adds; what a name does not resolve to is no error of the system."""
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)


# How many connections there are at once, of whom; within the file descriptors that the process may have.

FILES_OF_OTHERS = 128
"""File descriptors that queries need: of files, of the database, of processes that run SQL."""


class Connection(typing.Protocol):
    """What can be dropped."""

    def abort(self) -> None: ...


class Connections:
    """Those of a server. When there are too many, the oldest goes that was not let in yet, or the newest."""

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
    """So many, or as many as the process may have files, whose limit is raised as far as it may be.

    As many again may have come and not been counted yet.
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
"""Longer than a load balancer's, which is the one to close."""

STRANGER_SECONDS_MAX = 10.0
"""How long a connection may idle, or take for a request's headers, before it has shown what lets it in."""


class NotHttp(ValueError):
    """A request that two readers could understand differently."""


class _Part(Enum):
    """What a connection is in the middle of."""

    BETWEEN = 0
    HEAD = 1
    BODY = 2
    REST = 3
    """Of a body whose request is answered already."""


class Protocol(HttpToolsProtocol):
    """One connection. `request_seconds_max` is how long a client may take to send a request's headers."""

    request_seconds_max = 60.0
    among: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # an application finds it in its scope's state, as uvicorn copies this
        self.app_state = {**self.app_state, "connection": self}
        self.timeout_keep_alive = STRANGER_SECONDS_MAX  # type: ignore[assignment]
        self.access_log = False  # the service has its own, of which no line can be forged
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
        """Answers a request that the client ended amid its body; the connection is closed in any case."""
        if self._part is _Part.BODY and self.cycle is not None and self.cycle.more_body:
            self.send_400_response("")

    def let_in(self) -> None:
        """A request was let in: from now on the client is the one to close."""
        self.timeout_keep_alive = KEEP_ALIVE_SECONDS_MAX
        self.among.let_in(self)

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return  # what follows is no request
        idles = self.timeout_keep_alive_task is not None
        if idles and self._part is _Part.BETWEEN:
            self._begin(_Part.HEAD)  # what comes now is a head, or what may stand before one
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
        # what comes after a body is no header: nothing has checked it
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEADER_BYTES_MAX:
            raise NotHttp

    def on_headers_complete(self) -> None:
        self._part, self._head_bytes = _Part.BODY, 0
        self._deadline.cancel()  # from here on the request, or the time between two, is bounded
        _check(self.parser, self.headers, len(self.url))
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # what follows is in no protocol that is spoken here

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
        """What was sent and the client has not taken, here and in the kernel, where that tells."""
        found = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError, AttributeError):  # it may be closed
            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            found += struct.unpack("i", answer)[0]
        return found

    @property
    def is_taking(self) -> bool:
        """Whether what is sent now waits for nothing."""
        return not self.flow.write_paused

    def abort(self) -> None:
        """Drops the connection with what the client has not taken."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, after the answers to the requests before it, and ends the connection.

        A request whose own body is broken has no other answer; its application sees a client that has gone.
        """
        self._deadline.cancel()
        self._is_broken = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline:
                self.pipeline.clear()  # the request before these is being answered
                return
            if not cycle.more_body:
                cycle.keep_alive = False  # the answer that is being given is the last one
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
        body = http_problem(400, "this is not HTTP/1.1 as RFC 9112 has it").text.encode("ascii")
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
            self.cycle.keep_alive = False  # it is the next request that is slow
        elif not self.transport.is_closing():
            self.transport.abort()


def _check(parser: httptools.HttpRequestParser, headers: list[tuple[bytes, bytes]], size: int) -> None:
    """Refuses heads that are too long, and requests of which two readers could see different ends.

    RFC 9112, 3.2, 5.2 and 6.1.
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
