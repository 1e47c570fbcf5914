"""The client in programs that fork, or whose garbage collector runs at an arbitrary point."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pytest
from served import SECONDS_MAX, http_answer, listening, request_on

from dormouse.client import connect
from dormouse.client.http import ARROW, Http
from dormouse.errors import InstanceError

ROWS = pa.table({"n": [1, 2, 3]})


def begun() -> bytes:
    """Returns the beginning of an answer: one batch, and no end."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS.schema) as writer:
        writer.write_table(ROWS)
    return http_answer("200 OK", bytes(sink.getvalue())[:-8], Content_Type=ARROW)


@contextmanager
def beginning() -> Iterator[tuple[str, list[socket.socket]]]:
    """Yields the URL of a service that never ends its answers, and the list of its connections."""
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


@pytest.mark.slow
def test_a_garbage_collected_reader_waits_for_no_lock_of_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with beginning() as (url, connections), connect(url) as client:
        pool = client._http._client._transport._pool  # type: ignore[attr-defined]
        assign = pool._assign_requests_to_connections

        def collect() -> object:
            gc.collect()  # Python may collect at any allocation
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


class Port(BaseHTTPRequestHandler):
    """A handler whose answer is the port of its peer. It keeps the connection open."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps(self.client_address[1]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def in_a_forked_child(work: Callable[[], object]) -> str:
    """Runs `work` in a forked child process, and returns its result as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os.write(writer, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.slow
def test_a_forked_child_has_its_own_connections_and_locks() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        http = Http(f"http://127.0.0.1:{server.server_port}", None, None, 20.0)

        def ask() -> int:
            return int(http.json("GET", "/"))

        def ask_and_close() -> int:
            found = ask()
            http.close()
            return found

        port = ask()
        with http._client._transport._pool._optional_thread_lock:  # type: ignore[attr-defined]
            # another thread may hold the lock at the instant of the fork
            others = [in_a_forked_child(ask_and_close) for _ in range(2)]
            assert in_a_forked_child(http.close) == "None"
        assert not {"", str(port)} & {*others}
        assert ask()
        http.close()
        server.shutdown()


def test_an_answer_is_read_only_by_the_process_that_requested_it() -> None:
    with beginning() as (url, connections), connect(url) as client:
        reader = client.sql("select")
        assert reader.read_next_batch() == ROWS.to_batches()[0]

        def read() -> str:
            try:
                return str(reader.read_next_batch())
            except InstanceError as error:
                reader.close()
                return str(error)

        assert "the process that this one was forked from: ask again" in in_a_forked_child(read)
        connections[0].sendall(b"\xff" * 4 + b"\x00" * 4)
        connections[0].shutdown(socket.SHUT_WR)
        assert reader.read_all().num_rows == 0
