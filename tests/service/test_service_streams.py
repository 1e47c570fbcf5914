"""Streams of the query service at the socket level: vanished, stalled or slow clients; limits; failures."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.service.formats import PROBLEM_KEY
from tests.serving import (
    ARROW,
    CSV,
    JSON_LINES,
    SECONDS_MAX,
    Endless,
    Stuck,
    connected,
    eventually,
    http_get,
    http_post,
    metric,
    read_to_end,
    request,
    running,
    serving,
    sql_request,
    stand_in,
)

STATEMENT = {"statement": "select 1"}


def instance(source: Any) -> Any:
    """Returns an instance that answers every statement from one source."""
    return stand_in(sql=source.reader)


def idle(url: str) -> bool:
    return metric(url, "dormouse_queries_running") == 0


@pytest.mark.parametrize("reset", [False, True])
def test_a_query_stops_when_its_client_vanishes(reset: bool) -> None:
    source = Endless()
    with serving(instance(source)) as url:
        sock = connected(url)
        sock.sendall(sql_request())
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        assert source.closed.wait(SECONDS_MAX)
        eventually(lambda: idle(url))
        assert metric(url, "dormouse_queries_total", kind="sql", outcome="client_gone") == 1


def test_a_client_that_vanishes_before_the_first_row_frees_its_slot_when_the_query_ends() -> None:
    source = Stuck()
    with serving(instance(source), queries_max=1, queue_seconds_max=60) as url:
        sock = connected(url)
        sock.sendall(sql_request())
        assert source.begun.wait(SECONDS_MAX)
        sock.close()
        eventually(lambda: metric(url, "dormouse_queries_total", outcome="client_gone") == 1)
        assert metric(url, "dormouse_queries_running") == 1, "the thread of the query still works"
        source.may_end.set()
        assert source.closed.wait(SECONDS_MAX)
        eventually(lambda: idle(url))


def test_a_client_that_vanishes_while_waiting_takes_no_slot() -> None:
    source = Stuck()
    with serving(instance(source), queries_max=1, queue_seconds_max=60) as url:
        first, second = connected(url), connected(url)
        first.sendall(sql_request())
        assert source.begun.wait(SECONDS_MAX)
        second.sendall(sql_request())
        eventually(lambda: metric(url, "dormouse_queries_waiting") == 1)
        second.close()
        eventually(lambda: metric(url, "dormouse_queries_waiting") == 0)
        source.may_end.set()
        assert b"200 OK" in first.recv(1000)
        eventually(lambda: idle(url))
        assert http_post(f"{url}/v1/sql", json=STATEMENT).status_code == 200
        first.close()


@pytest.mark.slow
def test_a_stalled_client_is_cut_off_and_little_is_buffered() -> None:
    source = Endless(text="x" * 1_000)
    with (
        serving(instance(source), client_stall_seconds_max=0.3) as url,
        connected(url, receive_bytes=4096) as sock,
    ):
        sock.sendall(sql_request())
        assert source.closed.wait(SECONDS_MAX)
        assert source.made * 1_000 * 1_000 < 50_000_000, "little more than the buffers of the sockets hold"
        assert not read_to_end(sock).endswith(b"0\r\n\r\n")
        eventually(lambda: idle(url))


@pytest.mark.parametrize("leaves", [False, True])
def test_reading_of_a_file_ends_when_its_client_stalls_or_leaves(leaves: bool) -> None:
    closed = threading.Event()

    def chunks(*_: object) -> Iterator[bytes]:
        try:
            yield from iter(lambda: bytes(1 << 20), b"")
        finally:
            closed.set()

    file = SimpleNamespace(byte_count=1 << 50, name="f", object_name="f")
    table = SimpleNamespace(file=lambda *_: file, files=SimpleNamespace(chunks=chunks))
    objects = SimpleNamespace(size=lambda _: 1, url="s3://bucket")
    source = SimpleNamespace(row_table=lambda _: table, objects=objects, check_reachable=None)
    with (
        serving(source, client_stall_seconds_max=SECONDS_MAX if leaves else 0.3) as url,
        connected(url, receive_bytes=4096) as sock,
    ):
        sock.sendall(b"GET /v1/rows/t/rows/1/files/c HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        if leaves:
            sock.close()
        assert closed.wait(SECONDS_MAX)


@pytest.mark.slow
def test_a_slow_client_gets_the_whole_answer() -> None:
    """The whole answer takes longer than the time for which a client may stall."""
    source = pa.table({"text": ["x" * 1_000] * 20_000})
    with (
        serving(stand_in(sql=lambda *_, **__: source.to_reader(2_000)), client_stall_seconds_max=1) as url,
        connected(url, receive_bytes=4096) as sock,
    ):
        sock.sendall(sql_request("connection: close"))
        received, pause = bytearray(), threading.Event()
        while part := sock.recv(1 << 20):
            received += part
            if len(received) < 5_000_000:
                pause.wait(0.001)
        assert received.endswith(b"0\r\n\r\n")
        assert received.count(b'{"text":"x') == 20_000


def test_too_many_concurrent_queries_are_refused() -> None:
    source = Stuck()
    with serving(instance(source), queries_max=1, queue_seconds_max=0.1) as url, connected(url) as sock:
        sock.sendall(sql_request())
        assert source.begun.wait(SECONDS_MAX)
        refused = http_post(f"{url}/v1/sql", json=STATEMENT)
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:dormouse:too-many-queries")
        assert int(refused.headers["retry-after"]) >= 1
        source.may_end.set()
        assert b"200 OK" in sock.recv(1000)
        eventually(lambda: http_post(f"{url}/v1/sql", json=STATEMENT).status_code == 200)


@pytest.mark.parametrize(("limit", "word"), [("rows_max", "10 rows"), ("bytes_max", "10 bytes")])
def test_an_answer_too_large_at_its_first_rows_is_a_problem(limit: str, word: str) -> None:
    source = Endless()
    with serving(instance(source), **{limit: 10}) as url:
        found = http_post(f"{url}/v1/sql", json=STATEMENT)
        assert (found.status_code, found.json()["type"]) == (413, "urn:dormouse:answer-too-large")
        assert word in found.json()["detail"]
        assert source.closed.wait(SECONDS_MAX)
        eventually(lambda: idle(url))


def arrow_pieces(content: bytes) -> Iterator[tuple[pa.RecordBatch, dict[bytes, bytes] | None]]:
    """Yields the batches of a truncated stream, each with its metadata or None."""
    with pa.ipc.open_stream(content) as reader:
        while True:
            try:
                yield reader.read_next_batch_with_custom_metadata()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "after", "kind"),
    [
        ({"rows_max": 2_500}, None, "answer-too-large"),
        ({}, 3, "object-not-found"),
        pytest.param({"seconds_max": 3}, None, "query-time-over", marks=pytest.mark.slow),
    ],
)
def test_an_answer_that_fails_after_its_first_rows_breaks_off(
    settings: dict[str, Any], after: int | None, kind: str
) -> None:
    """An answer in Arrow ends with an empty batch that has the reason. No format gets its regular ending."""
    for media_type in (ARROW, JSON_LINES, CSV) if not settings.get("seconds_max") else (ARROW,):
        source = Endless(after=after)
        with serving(instance(source), **settings) as url:
            received = bytearray()
            with (
                pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
                httpx.stream(
                    "POST", f"{url}/v1/sql", json=STATEMENT, headers={"accept": media_type}
                ) as found,
            ):
                assert found.status_code == 200
                for part in found.iter_raw():
                    received += part
            assert source.closed.wait(SECONDS_MAX)
            assert metric(url, "dormouse_queries_total", kind="sql", outcome=kind) == 1
            if media_type == ARROW:
                batches = list(arrow_pieces(bytes(received)))
                last, metadata = batches[-1]
                assert last.num_rows == 0
                assert json.loads((metadata or {})[PROBLEM_KEY])["type"] == f"urn:dormouse:{kind}"
                rows = sum(batch.num_rows for batch, _ in batches)
            else:
                rows = received.count(b"x" * 100)
            assert rows == metric(url, "dormouse_query_rows_total", kind="sql")


@pytest.mark.slow
def test_a_time_limit_within_a_piece_is_reported_after_the_piece() -> None:
    """The reason comes after a complete piece. This piece is larger than any buffer of a socket."""
    source = Endless(rows=1, text="x" * 20_000_000)
    with (
        serving(instance(source), seconds_max=2) as url,
        httpx.stream("POST", f"{url}/v1/sql", json=STATEMENT, headers={"accept": ARROW}) as found,
    ):
        threading.Event().wait(2.5)  # the client reads nothing until the time is over
        received = bytearray()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            for part in found.iter_raw():
                received += part
        *batches, (last, metadata) = arrow_pieces(bytes(received))
        assert last.num_rows == 0
        assert json.loads((metadata or {})[PROBLEM_KEY])["type"] == "urn:dormouse:query-time-over"
        assert sum(batch.num_rows for batch, _ in batches) == metric(url, "dormouse_query_rows_total")


@pytest.mark.slow
def test_a_very_slow_client_is_cut_off_soon_after_the_time_limit() -> None:
    source, pause = Endless(rows=1, text="x" * 20_000_000), threading.Event()
    with (
        # enough time for a first row even on a busy machine
        serving(instance(source), seconds_max=2, client_stall_seconds_max=3) as url,
        connected(url) as sock,
    ):
        sock.sendall(sql_request())
        while not source.closed.is_set():
            # at two MB a second the client never stalls, but a piece takes longer than the time limit
            sock.recv(100_000)
            pause.wait(0.05)
        eventually(lambda: idle(url))
        assert metric(url, "dormouse_queries_total", kind="sql", outcome="query-time-over") == 1


def test_a_query_too_slow_to_its_first_row_is_a_problem() -> None:
    source = Stuck()
    with serving(instance(source), seconds_max=0.2) as url:
        found = http_post(f"{url}/v1/sql", json=STATEMENT)
        assert (found.status_code, found.json()["type"]) == (504, "urn:dormouse:query-time-over")
        source.may_end.set()
        assert source.closed.wait(SECONDS_MAX)
        eventually(lambda: idle(url))


def test_an_unexpected_failure_is_not_described_to_the_client() -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("a secret")

    with serving(stand_in(sql=fail, tables=fail, check_reachable=fail)) as url:
        found = http_post(f"{url}/v1/sql", json=STATEMENT)
        assert (found.status_code, found.json()["type"]) == (500, "urn:dormouse:internal-error")
        assert "secret" not in found.text
        assert http_get(f"{url}/v1/tables").status_code == 500
        assert metric(url, "dormouse_http_requests_total", path="/v1/tables", status="500") == 1
        assert http_get(f"{url}/health/ready").status_code == 503
        assert http_get(f"{url}/health").json() == {"status": "ok"}


def test_the_size_of_a_body_is_limited_while_it_is_read() -> None:
    with serving(instance(Endless()), body_bytes_max=1_000) as url:
        large = http_post(f"{url}/v1/sql", json={"statement": "x" * 1_000})
        assert (large.status_code, large.json()["type"]) == (413, "urn:dormouse:body-too-large")
        with connected(url) as sock:
            head = request("/v1/sql", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
            sock.sendall(head + b"3e8\r\n" + b"x" * 1_000 + b"\r\n" + b"1\r\nx\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.slow
def test_a_request_that_never_arrives_completely_times_out() -> None:
    with serving(instance(Endless()), client_stall_seconds_max=0.2) as url:
        with connected(url) as sock:
            sock.sendall(sql_request()[:-5])
            assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")
        with connected(url) as sock:
            sock.sendall(b"POST /v1/sql HTTP/1.1\r\nhost")
            assert read_to_end(sock) == b""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"POST /v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST /v1/sql HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_invalid_http_gets_one_clear_answer(garbage: bytes) -> None:
    with serving(instance(Endless())) as url:
        with connected(url) as sock:
            sock.sendall(garbage)
            answer = sock.recv(1_000)
            assert answer.startswith(b"HTTP/1.1 4"), answer
            assert b"application/problem+json" in answer
        with connected(url) as sock:  # no error can be sent in the middle of an answer
            sock.sendall(sql_request() + garbage)
            assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        eventually(lambda: idle(url))
        assert http_get(f"{url}/health").status_code == 200


def test_data_after_a_request_with_two_lengths_is_not_read() -> None:
    lengths = b"host: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with serving(instance(Endless())) as url:
        for method in (b"POST", b"HEAD"):
            with connected(url) as sock:
                sock.sendall(method + b" /health HTTP/1.1\r\n" + lengths + b"GET /health HTTP/1.1\r\n\r\n")
                answer = read_to_end(sock)
                assert answer.startswith(b"HTTP/1.1 400 ")
                assert answer.count(b"HTTP/1.1") == 1 + (
                    method == b"POST"
                )  # the text of the answer to POST contains it too


def test_a_compressed_body_is_refused() -> None:
    with serving(instance(Endless())) as url:
        for encoding, status in (("gzip", 415), ("br, identity", 415), ("Identity", 400)):
            headers = {"content-type": "application/json", "content-encoding": encoding}
            found = http_post(f"{url}/v1/sql", content=b"{}", headers=headers)
            assert found.status_code == status


@pytest.mark.parametrize(("seconds", "stops"), [(0, 1), (int(SECONDS_MAX), 2)])
def test_a_waiting_client_gets_an_error_when_the_service_ends(seconds: int, stops: int) -> None:
    source = Stuck()
    with running(instance(source), shutdown_seconds_max=seconds) as server:
        with connected(server.url) as sock:
            sock.sendall(sql_request())
            eventually(lambda: not idle(server.url))
            for _ in range(stops):
                server.stop()
            answer = read_to_end(sock)
        source.may_end.set()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"urn:dormouse:service-ends" in answer


def test_an_error_of_dormouse_has_its_name_and_status() -> None:
    errors = {
        dm.errors.InvalidQuery: 400,
        dm.errors.TableNotFound: 404,
        dm.errors.InstanceError: 503,
        dm.errors.ConnectionsExhausted: 503,
        dm.errors.TooManyRetries: 503,
        dm.errors.CommitOutcomeUnknown: 503,
        dm.errors.ObjectNotFound: 503,
    }
    raised: list[Exception] = []

    def fail(*_: object, **__: object) -> Any:
        raise raised.pop()

    with serving(stand_in(sql=fail)) as url:
        for kind, status in errors.items():
            raised.append(kind("a\nline\udcff"))
            found = http_post(f"{url}/v1/sql", json=STATEMENT)
            assert found.status_code == status
            assert found.headers["content-type"] == "application/problem+json"
            assert found.json()["detail"] == "a line\udcff"
            assert found.json()["status"] == status
