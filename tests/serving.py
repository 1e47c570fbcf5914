"""Helpers for tests of the query service: an instance with a table, and a real server for it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pyarrow as pa

import dormouse as dm
from dormouse.service.app import Server
from dormouse.service.running import Runner
from dormouse.service.security import Place
from dormouse.settings.service import load_service_settings
from tests.pauses import pauses
from tests.support.api import Instance

SECONDS_MAX = 60.0
SMALL: dict[str, Any] = {"port": 0, "shutdown_seconds_max": 0, "sql_workers": 0}
"""Settings of a server that starts and stops without a wait, and runs SQL in the process of the test."""
# the server has no TLS: do not load certificates in each call
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
http_get, http_post = partial(httpx.get, verify=_NO_TLS), partial(httpx.post, verify=_NO_TLS)
ARROW, CSV, JSON_LINES = "application/vnd.apache.arrow.stream", "text/csv", "application/x-ndjson"
SCHEMA = dm.Schema(
    row_keys=[dm.Field("carrier", dm.STRING), dm.Field("flight", dm.LONG)],
    sort_keys=[dm.Field("time", dm.INT)],
    values=[
        dm.Field("delay", dm.DOUBLE, nullable=True),
        dm.Field("late", dm.BOOLEAN),
        dm.Field("code", dm.BYTES),
        dm.Field("at", dm.TIMESTAMP, nullable=True),
        dm.Field("tags", dm.LIST(dm.STRING), nullable=True),
        dm.Field("counts", dm.MAP(dm.STRING, dm.LONG), nullable=True),
    ],
)


def stand_in(**parts: Any) -> Any:
    """Returns a substitute for an instance, with only the parts that a test needs."""
    return SimpleNamespace(
        **{"check_reachable": lambda: None, "objects": SimpleNamespace(url="s3://bucket"), **parts}
    )


def with_one_row(instance: Instance) -> Instance:
    """Returns the instance after it has got table t, with key k 1 and v 'old'."""
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.STRING, nullable=True)])
    instance.create_table("t", schema).ingest([{"k": 1, "v": "old"}])
    return instance


@contextmanager
def serving(instance: Any, **settings: Any) -> Iterator[str]:
    """Runs a server for an instance on a free port; yields its URL."""
    with running(instance, **settings) as server:
        yield server.url


@contextmanager
def running(instance: Any, **settings: Any) -> Iterator[Server]:
    server = Server(instance, load_service_settings(**{**SMALL, **settings}))
    started = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda url: started.set(),), name="server")
    thread.start()
    try:
        assert started.wait(SECONDS_MAX)
        yield server
    finally:
        server.stop()
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()


def runner_of(server: Server, place: Place) -> Runner:
    """Returns the runner of a place of a server. A test may change its time limit, `seconds_max`."""
    app: Any = server._server.config.app
    found: Runner = app.state.service.runners[place]
    return found


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; fails after SECONDS_MAX."""
    for _ in pauses(SECONDS_MAX):
        if condition():
            return
    raise AssertionError("it never came to be")


def computes_nothing() -> bool:
    """Returns whether this process uses almost no processor time."""
    before = time.process_time()
    time.sleep(0.2)
    return time.process_time() - before < 0.02


class Endless:
    """An endless source of batches. It counts the batches, and records when its reader is closed."""

    schema = pa.schema([("n", pa.int64()), ("text", pa.string())])

    def __init__(self, rows: int = 1_000, text: str = "x" * 100, after: int | None = None) -> None:
        self.made = 0
        self.closed = threading.Event()
        self._batch = pa.record_batch({"n": list(range(rows)), "text": [text] * rows}, schema=self.schema)
        self._fails_after = after

    def reader(self, *_: object, **__: object) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            while self.made != self._fails_after:
                self.made += 1
                yield self._batch
            raise dm.errors.ObjectNotFound("file 'f' was deleted")
        finally:
            self.closed.set()


class Stuck:
    """A query that returns no row until `may_end` is set."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.closed = (threading.Event() for _ in range(3))

    def reader(self, *_: object, **__: object) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(Endless.schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            self.begun.set()
            assert self.may_end.wait(SECONDS_MAX)
            yield pa.record_batch({"n": [1], "text": ["x"]}, schema=Endless.schema)
        finally:
            self.closed.set()


def connected(url: str, *, receive_bytes: int | None = None) -> socket.socket:
    """Returns a socket that is connected to a server; `receive_bytes` sets the size of its receive buffer."""
    parts = urlsplit(url)
    found = socket.socket(socket.AF_INET)
    found.settimeout(SECONDS_MAX)
    if receive_bytes is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    found.connect((parts.hostname or "", parts.port or 0))
    return found


def read_to_end(sock: socket.socket) -> bytes:
    """Returns all bytes until the connection is closed or reset.

    A server that closes a connection with unread bytes resets it, after its answer.
    """
    found = bytearray()
    try:
        while part := sock.recv(1 << 20):
            found += part
    except ConnectionResetError:
        pass
    return bytes(found)


def request(path: str, body: bytes, *headers: str) -> bytes:
    """Returns an HTTP request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def sql_request(*headers: str) -> bytes:
    return request("/v1/sql", b'{"statement": "select 1"}', *headers)


def metric(url: str, name: str, **labels: str) -> float:
    """Returns the value of a metric, or 0 if it does not exist."""
    text = http_get(f"{url}/metrics").text
    for line in text.splitlines():
        key, _, value = line.rpartition(" ")
        if key.partition("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
            return float(value)
    return 0.0
