"""The client with services that are busy or missing, with servers of other kinds, and with cut-off
answers.
"""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import SECONDS_MAX, answering, http_answer, listening, request_on

from dormouse.client import Client, connect
from dormouse.client.http import ARROW, Http
from dormouse.client.rows import RemoteRowTable
from dormouse.errors import (
    BatchFailed,
    DormouseError,
    FileNotFound,
    IndexNotReady,
    InstanceError,
    InvalidQuery,
    ObjectNotFound,
)

# values whose bytes look like the marker at the end of a stream
ROWS = pa.table({"n": pa.array([0, -1, -1], pa.int32()), "text": ["", "a", "\u00ff" * 100]})


def stream(batches: int = 3, problem: dict[str, Any] | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, ROWS.schema)
    for _ in range(batches):
        writer.write_table(ROWS)
    if problem is None:
        writer.close()
    else:
        writer.write_batch(
            pa.RecordBatch.from_pylist([], schema=ROWS.schema),
            custom_metadata={"dormouse.problem": json.dumps(problem)},
        )
    return bytes(sink.getvalue())


def chunked(body: bytes, size: int = 50) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def problem(kind: str, status: int, detail: str = "so it is") -> dict[str, Any]:
    return {"type": f"urn:dormouse:{kind}", "title": "A title.", "status": status, "detail": detail}


def problem_answer(kind: str, status: int, **headers: str) -> bytes:
    body = json.dumps(problem(kind, status)).encode()
    return http_answer(f"{status} No", body, Content_Type="application/problem+json", **headers)


OK = http_answer("200 OK", stream(), Content_Type=ARROW)
OK_CHUNKED = http_answer("200 OK", chunked(stream()), Content_Type=ARROW, Transfer_Encoding="chunked")
WHOLE = pa.concat_tables([ROWS] * 3)


class Script:
    """A service that gives prepared answers one after another, and then repeats the last."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []

    def __call__(self, request: bytes) -> bytes:
        self.requests.append(request)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Client, Callable[[bytes], None]]]:
    """Yields a client, and a function that sets the answer of the client's service."""
    now = [OK]
    with answering(lambda _: now[0]) as url, connect(url) as client:
        yield client, lambda answer: now.__setitem__(0, answer)


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("whole", [OK, OK_CHUNKED], ids=["until-closed", "chunked"])
def test_an_answer_truncated_at_any_byte_is_an_error(shared: Any, data: st.DataObject, whole: bytes) -> None:
    """Some cuts leave bytes that look complete: after a message, or after its -1 and zeros."""
    client, answer_with = shared
    head = whole.index(b"\r\n\r\n") + 4
    ends = [at + 8 for at in range(head, len(whole)) if whole.startswith(b"\xff" * 4, at)]
    cut = data.draw(st.integers(0, len(whole)) | st.sampled_from([*ends, len(whole)]))
    answer_with(whole[:cut])
    # bytes after the marker do not belong to the answer
    needed = len(OK) if whole is OK else whole.rindex(b"\xff" * 4) + 8
    if cut >= needed:
        assert client.sql("select").read_all() == WHOLE
    else:
        with pytest.raises(InstanceError, match=r"^the connection to http|^http.* answered|^cannot connect"):
            client.sql("select").read_all()


@pytest.mark.slow
def test_an_almost_complete_answer_is_an_error(shared: Any) -> None:
    """The answer is cut at each byte of the last message and of the end marker."""
    client, answer_with = shared
    for short in range(1, 300):
        answer_with(OK[:-short])
        reader = client.sql("select")
        with pytest.raises(InstanceError, match="was cut in the middle of an answer"):
            reader.read_all()


@pytest.mark.parametrize("read", ["read_all", "batches", "c_stream"])
def test_a_problem_in_the_middle_of_an_answer_is_raised_after_its_rows(shared: Any, read: str) -> None:
    client, answer_with = shared
    failure = problem("object-not-found", 503, "file 'x' does not exist")
    answer_with(http_answer("200 OK", stream(2, failure), Content_Type=ARROW))
    reader = client.sql("select")
    if read == "read_all":
        with pytest.raises(ObjectNotFound, match=r"^file 'x' does not exist$"):
            reader.read_all()
    elif read == "batches":
        assert [reader.read_next_batch().num_rows for _ in range(2)] == [3, 3]
        with pytest.raises(ObjectNotFound, match=r"^file 'x' does not exist$"):
            reader.read_next_batch()
    else:
        with pytest.raises(OSError, match="file 'x' does not exist"):
            pa.RecordBatchReader.from_stream(reader).read_all()


def test_rows_that_mention_problems_are_rows(shared: Any) -> None:
    client, answer_with = shared
    sink = pa.BufferOutputStream()
    named = pa.table({"dormouse.problem": ["dormouse.problem"]}, metadata={"dormouse.problem": "{}"})
    with pa.ipc.new_stream(sink, named.schema) as writer:
        writer.write_table(named)
        writer.write_batch(named.to_batches()[0], custom_metadata={"other": "dormouse.problem"})
    answer_with(http_answer("200 OK", bytes(sink.getvalue()), Content_Type=ARROW))
    assert client.sql("select").read_all().to_pydict() == {"dormouse.problem": ["dormouse.problem"] * 2}


@pytest.mark.parametrize(
    ("kind", "status", "error_type", "message"),
    [
        ("invalid-query", 400, InvalidQuery, "^so it is$"),
        ("object-not-found", 503, ObjectNotFound, "^so it is$"),
        ("file-not-found", 500, FileNotFound, "^so it is$"),
        ("batch-failed", 500, BatchFailed, "^so it is$"),
        ("dormouse-error", 500, DormouseError, "^so it is$"),
        ("query-time-over", 504, InstanceError, "^http://.*/v1/sql answered 504: so it is$"),
        ("no-class-at-all", 418, InstanceError, "^http://.*/v1/sql answered 418: so it is$"),
        ("sequence", 500, InstanceError, "^http://.*/v1/sql answered 500: so it is$"),
    ],
)
def test_a_problem_becomes_the_error_of_its_type(
    shared: Any, kind: str, status: int, error_type: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dormouse.client.http.ATTEMPTS_MAX", 1)
    client, answer_with = shared
    answer_with(problem_answer(kind, status))
    with pytest.raises(DormouseError, match=message) as error:
        client.sql("select")
    assert type(error.value) is error_type


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http_answer("200 OK", b"<html>"), r"/v1/tables did not answer in JSON: is it the query service"),
        (http_answer("404 Not Found", b"<html>"), r"/v1/tables answered 404 Not Found: is it the query serv"),
        (http_answer("302 Found", Location="/login"), r"answered 302 Found"),
        (http_answer("500 No", b"{", Content_Type="application/problem+json"), "answered 500 No"),
        (http_answer("500 No", b"[]", Content_Type="application/problem+json"), "answered 500 No"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the connection to http.* broke"),
        (b"", "the connection to http.* broke"),
    ],
)
def test_an_answer_of_another_server_is_an_error(shared: Any, answer: bytes, message: str) -> None:
    client, answer_with = shared
    answer_with(answer)
    with pytest.raises(InstanceError, match=message):
        client.tables()


def test_an_answer_that_is_not_arrow_is_an_error(shared: Any) -> None:
    client, answer_with = shared
    for body in (b"<html>" * 100, b"", b"\x00" * 8):
        answer_with(http_answer("200 OK", body))
        with pytest.raises(InstanceError, match=r"did not answer in Arrow|was cut in the middle"):
            client.sql("select").read_all()


@pytest.mark.slow
def test_requests_to_a_busy_service_are_retried() -> None:
    """The client waits for the time in Retry-After, and retries only before the first row."""
    busy = problem_answer("too-many-queries", 429, Retry_After="1")
    script = Script(busy, problem_answer("connections-exhausted", 503), OK)
    with answering(script) as url, connect(url) as client:
        began = time.monotonic()
        assert client.sql("select").read_all() == WHOLE
        assert time.monotonic() - began >= 1
    assert len(script.requests) == 3


def test_retries_of_a_busy_service_end_after_a_while() -> None:
    busy = problem_answer("too-many-queries", 429, Retry_After="3600")
    with (
        answering(lambda _: busy) as url,
        connect(url) as client,
        pytest.raises(InstanceError, match="so it"),
    ):
        client.sql("select")


def test_other_failures_are_not_retried() -> None:
    read_only, cut = problem_answer("instance-read-only", 503), http_answer("200 OK", stream()[:-9])
    behind = problem_answer("index-not-ready", 503)
    for answer in (problem_answer("invalid-query", 400), read_only, behind, cut, b""):
        script = Script(answer, OK)
        with answering(script) as url, connect(url) as client, pytest.raises(DormouseError):
            client.sql("select").read_all()
        assert len(script.requests) == 1


@pytest.mark.slow
def test_a_service_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dormouse.client.http.ATTEMPTS_MAX", 2)
    with listening() as (_, url):
        pass
    for address in (url, "http://nowhere.invalid:1"):
        with connect(address) as client, pytest.raises(InstanceError, match=f"cannot connect to {address}: "):
            client.tables()


def test_a_request_of_a_closed_client_is_an_error() -> None:
    client = connect("http://127.0.0.1:1")
    client.close()
    with pytest.raises(InstanceError, match="is closed: connect again"):
        client.tables()


def test_a_reader_of_a_closed_client_is_an_error() -> None:
    with listening() as (server, url):
        client = connect(url)
        waiting = Waiting(server, client)
        with closing(waiting.connection) as connection:
            connection.sendall(OK[:-100])
            reader = waiting.reader()
            client.close()
            with pytest.raises(InstanceError, match=r"^the client of http.* was closed before this answer"):
                reader.read_all()


def test_a_service_that_starts_during_the_retries_is_reached() -> None:
    # A bound socket refuses connections until it listens, and no other process gets its port.
    late = socket.socket()
    late.bind(("127.0.0.1", 0))
    found: list[Any] = []
    with closing(late), connect(f"http://127.0.0.1:{late.getsockname()[1]}") as client:
        asking = threading.Thread(target=lambda: found.append(client.sql("select").read_all()))
        asking.start()
        late.listen()
        connection, _ = late.accept()
        with closing(connection):
            request_on(connection)
            connection.sendall(OK)
        asking.join(SECONDS_MAX)
    assert found == [WHOLE]


def test_a_service_that_never_answers_is_an_error() -> None:
    with listening() as (_, url), connect(url, timeout_seconds=0.2) as client:
        with pytest.raises(InstanceError) as found:
            client.tables()
        assert str(found.value) == f"{url} sent nothing for 0.2 seconds"


class Waiting:
    """A client that waits for an answer, and the test's end of the connection for it."""

    def __init__(self, server: socket.socket, client: Client) -> None:
        self._found: list[pa.RecordBatchReader] = []
        self._asking = threading.Thread(target=lambda: self._found.append(client.sql("select")))
        self._asking.start()
        self.connection, _ = server.accept()
        self.connection.settimeout(SECONDS_MAX)
        request_on(self.connection)

    def reader(self) -> pa.RecordBatchReader:
        self._asking.join(SECONDS_MAX)
        return self._found.pop()


@pytest.mark.few(1)
@pytest.mark.parametrize("end", ["close", "drop", "with", "client"])
def test_the_connection_ends_with_its_reader(end: str) -> None:
    """The service then stops working on an answer that has no reader."""
    with listening() as (server, url), connect(url) as client:
        waiting = Waiting(server, client)
        with closing(waiting.connection) as connection:
            connection.sendall(OK[:-100])
            reader = waiting.reader()
            assert reader.read_next_batch().num_rows == 3
            if end == "close":
                reader.close()
            elif end == "with":
                with reader:
                    pass
            elif end == "client":
                client.close()
            else:
                del reader
                gc.collect()
            assert connection.recv(1) == b""
        if end == "close":
            with pytest.raises(InstanceError, match="was closed before"):
                reader.read_all()


def test_an_answer_is_streamed() -> None:
    """The client holds only a few batches in memory. The other batches wait in the network or at the
    service.
    """
    batch = pa.record_batch({"n": pa.array(range(100_000))})
    head, one = stream_parts(batch)
    sent = [0]

    def send(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(http_answer("200 OK", head, Content_Type=ARROW))
            while sent[0] < 200:
                connection.sendall(one)
                sent[0] += 1

    with listening() as (server, url), connect(url) as client:
        waiting = Waiting(server, client)
        with closing(waiting.connection) as connection:
            sending = threading.Thread(target=send, args=(connection,), daemon=True)
            sending.start()
            reader = waiting.reader()
            before = pa.total_allocated_bytes()
            for _ in range(100):
                reader.read_next_batch()
                assert pa.total_allocated_bytes() - before < 10 * len(one)
            assert sent[0] < 200
            reader.close()
            sending.join(SECONDS_MAX)


def stream_parts(batch: pa.RecordBatch) -> tuple[bytes, bytes]:
    """Returns the bytes of a stream before its batches, and the bytes of a batch."""
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, batch.schema)
    writer.write_batch(batch)
    whole = bytes(sink.getvalue())
    first = pa.ipc.MessageReader.open_stream(whole).read_next_message().serialize().size
    return whole[:first], whole[first:]


def test_the_client_waits_for_an_index_longer_than_a_service_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats the request until the client's own waiting time is over."""
    waits: list[float] = []
    naps: list[float] = []

    def behind(http: Http, method: str, path: str, body: Any) -> Any:
        waits.append(body["wait_seconds"])
        raise IndexNotReady("ask again")

    monkeypatch.setattr("dormouse.verbs.rows.SERVED_WAIT_SECONDS_MAX", 50)
    clock = SimpleNamespace(monotonic=lambda: 1_000 + sum(waits), sleep=naps.append)
    monkeypatch.setattr("dormouse.model.loops.time", clock)
    monkeypatch.setattr(Http, "json", behind)
    table = RemoteRowTable(Http("http://localhost:1", None, None, 1.0), "t")
    with pytest.raises(IndexNotReady):
        table.query("select * from t", wait_seconds=120)
    assert (waits, naps) == ([50, 50, 20], [1, 1])
