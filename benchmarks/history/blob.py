"""The design that PDP-32 replaced: a history in one value, always read and written whole.

The value contains each epoch's number, its time, its number of leaves, and their ids.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import psycopg

from benchmarks.history.operations import Call
from dormouse.postgres import load

_HEAD = struct.Struct(">QQI")
_ID_BYTES = 8
_SQL = load(__file__, "blob")


class Blob:
    """A history in one value, with the same number of leaves at each epoch."""

    def __init__(self, conn: psycopg.Connection[Any], epochs: int, leaves: int) -> None:
        self._conn = conn
        self._epochs = epochs
        self._one = bytes(_ID_BYTES * leaves)
        self._leaves = leaves
        content = b"".join(self._record(epoch) for epoch in range(epochs + 1))
        conn.execute(_SQL["make_blob"].on())
        conn.execute(_SQL["write_blob"].on(), {"content": content})

    def epoch_at(self, chosen: random.Random) -> Call:
        time = chosen.randrange(self._epochs)

        def call() -> int:
            return max(number for number, at in self._records(self._read()) if at <= time)

        return call

    def split(self, _: random.Random) -> Call:
        def call() -> None:
            content = self._read()
            number = max(number for number, _ in self._records(content)) + 1
            self._conn.execute(_SQL["write_blob"].on(), {"content": content + self._record(number)})

        return call

    def bytes_per_epoch(self) -> float:
        return len(self._read()) / (self._epochs + 1)

    def _record(self, epoch: int) -> bytes:
        return _HEAD.pack(epoch, epoch, self._leaves) + self._one

    def _read(self) -> bytes:
        row = self._conn.execute(_SQL["read_blob"].on(), binary=True).fetchone()
        return bytes(row[0]) if row else b""

    def _records(self, content: bytes) -> Iterator[tuple[int, int]]:
        """Yields the number and the time of each epoch."""
        at = 0
        while at < len(content):
            number, time, leaves = _HEAD.unpack_from(content, at)
            yield number, time
            at += _HEAD.size + _ID_BYTES * leaves
