"""HTTP as uvicorn speaks it, with what it lacks: dropping a connection, a bound on slow requests."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dormouse.service.problems import MEDIA_TYPE, http_problem

HEADER_BYTES_MAX = 32 * 1024
WRITE_BUFFER_BYTES_MAX = 64 * 1024


class _Connection(h11.Connection):
    """Refuses requests of which two readers could see different ends (RFC 9112, 6.1)."""

    is_head = False

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.is_head = event.method == b"HEAD"
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("the request has two lengths")
        return event


class Protocol(H11Protocol):
    """One connection. `request_seconds_max` is how long a client may take to send a request's headers."""

    conn: _Connection
    request_seconds_max = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # an application finds it in its scope's state, as uvicorn copies this
        self.app_state = {**self.app_state, "connection": self}
        self.conn = _Connection(h11.SERVER, self.config.h11_max_incomplete_event_size or HEADER_BYTES_MAX)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._deadline = self.loop.call_later(self.request_seconds_max, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            self._deadline.cancel()  # from here on the request, or the time between two, is bounded

    @property
    def untaken_bytes(self) -> int:
        """What was sent and the client has not taken, here and in the kernel, where that tells."""
        found = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError, AttributeError):  # it may be closed
            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            found += struct.unpack("i", answer)[0]
        return found

    def abort(self) -> None:
        """Drops the connection with what the client has not taken."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
            self.transport.abort()  # in the middle of an answer nothing can be said
            return
        body = http_problem(400, "this is not HTTP/1.1 as RFC 9112 has it").text.encode("ascii")
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode("ascii"))
        if not self.conn.is_head:
            self.transport.write(body)
        self.transport.close()

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()
