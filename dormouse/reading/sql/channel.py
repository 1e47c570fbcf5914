"""What goes between a worker and its pool: frames on a socket, of which the pool trusts as little as it can.

A statement may have corrupted the memory of its worker: what comes from there is bounded, is of a few plain
classes, and its Arrow is validated.
"""

from __future__ import annotations

import io
import json
import pickle
import socket
import struct
import threading
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa

from dormouse import errors
from dormouse.errors import DormouseError
from dormouse.model.region import Range
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.sql.failures import ReadFailed
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.scans import Enough
from dormouse.reading.sql.wanted import Wanted

CALL, STOP = b"C", b"I"
"""To the worker: a call, pickled; and that the call is given up."""
VALUE, SCHEMA, BATCH, END, FAILURE = b"V", b"S", b"B", b"E", b"F"
"""From it: a value, pickled; an answer's schema, its batches, its end; or an error. All but the first two of
an answer end the call."""

ROW_BYTES_MAX = 64 * 1024 * 1024
FRAME_BYTES_MAX = 2 * ROW_BYTES_MAX
TOGETHER_BYTES_MAX = 16 * 1024
_HEADER = struct.Struct("!cQ")
_OF_KEYS = (datetime, timezone, timedelta, date)
"""Of the values of keys, those that a pickle names by their class."""
_CLASSES = (Parsed, Wanted, Enough, KeyRanges, Range, frozenset, *_OF_KEYS)
_PLAIN = {f"{one.__module__}.{one.__qualname__}": one for one in _CLASSES}
_ERRORS = {
    name: found
    for name, found in {**vars(errors), "ReadFailed": ReadFailed}.items()
    if isinstance(found, type) and issubclass(found, DormouseError)
}


class Channel:
    """One end of the socket; several threads may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, kind: bytes, data: bytes | pa.Buffer = b"") -> None:
        header, view = _HEADER.pack(kind, len(data)), memoryview(data)
        with self._sending:
            if len(view) <= TOGETHER_BYTES_MAX:
                self._socket.sendall(header + view)
                return
            self._socket.sendall(header)
            self._socket.sendall(view)

    def receive(self) -> tuple[bytes, pa.Buffer]:
        """Raises `EOFError` when the other end is gone, `ValueError` when it sends too much at once."""
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {length:,} bytes")
        return kind, self._exactly(length)

    def _exactly(self, length: int) -> pa.Buffer:
        found = pa.allocate_buffer(length)
        view, end = memoryview(found), 0
        while end < length:
            try:
                count = self._socket.recv_into(view[end:], 0, socket.MSG_WAITALL)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            end += count
        return found

    def close(self) -> None:
        self._socket.close()


def failed(error: BaseException) -> bytes:
    """An error as it travels."""
    known = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS), "")
    return json.dumps([known, str(error)]).encode()


def failure_in(data: pa.Buffer) -> DormouseError:
    """The error that travelled."""
    name, message = json.loads(data.to_pybytes())
    return _ERRORS[str(name)](str(message))


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PLAIN[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not expected") from None


def plain_value(data: pa.Buffer) -> Any:
    """A value of the classes that a worker may send."""
    return _Plain(io.BytesIO(data)).load()
