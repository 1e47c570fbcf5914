"""The client in programs whose collector runs anywhere, and that fork."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
import pytest
from served import SECONDS_MAX, http_answer, listening, request_on

from dormouse.client import connect
from dormouse.client.streams import ARROW

ROWS = pa.table({"n": [1, 2, 3]})


def begun() -> bytes:
    """An answer that has a batch, and goes on."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS.schema) as writer:
        writer.write_table(ROWS)
    return http_answer("200 OK", bytes(sink.getvalue())[:-8], Content_Type=ARROW)


@contextmanager
def beginning() -> Iterator[tuple[str, list[socket.socket]]]:
    """A service that begins answers, and the connections that they are on."""
    with listening() as (server, url):
        found: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):  # until it is shut down
                while True:
                    connection, _ = server.accept()
                    connection.settimeout(SECONDS_MAX)
                    found.append(connection)
                    request_on(connection)
                    connection.sendall(begun())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield url, found
        server.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS_MAX)
        for connection in found:
            connection.close()


def test_a_reader_that_is_collected_waits_for_no_lock_of_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with beginning() as (url, connections), connect(url) as client:
        pool = client._http._client._transport._pool  # type: ignore[attr-defined]
        assign = pool._assign_requests_to_connections

        def collect() -> object:
            gc.collect()  # as Python may where anything is made
            return assign()

        gc.disable()
        try:
            cycle: list[object] = [client.sql("select")]
            cycle.append(cycle)
            del cycle
            monkeypatch.setattr(pool, "_assign_requests_to_connections", collect)
            asking = threading.Thread(target=lambda: client.sql("select").close(), daemon=True)
            asking.start()
            asking.join(10)
            if hangs := asking.is_alive():
                pool._optional_thread_lock._lock.release()  # so that this test ends
            assert not hangs
        finally:
            gc.enable()
        assert connections[0].recv(1) == b""
