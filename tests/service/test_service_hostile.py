"""Requests of a hostile client: broken bodies, ids with unusual characters, and forged lines of the log."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote, unquote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.errors import InvalidCut, InvalidInput
from dormouse.jobs.job import job_key
from tests.serving import SECONDS_MAX, connected, http_get, http_post, read_to_end, serving
from tests.standard import OF_K
from tests.support.api import Instance

JSON_TYPE = {"content-type": "application/json"}
ODD_IDS = ["日本", "é", "a/b/../c", "x" * 200, "..", ".", "a b?c#d&e=f%2F", "%00", "a\\b", '"', "😀"]
FORGED = [
    "x\r\nSet-Cookie: a=1",
    "x\nFAKE 2026-01-01 INFO line",
    "\x1b[31mred",
    "a\tb",
    "\x7f",
    "\x85",
    "\u2028",
]
STATUSES = re.compile(rb"HTTP/1\.1 (\d{3}) ")
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"])
NAMES = st.text(CHARACTERS, min_size=1, max_size=40).filter(lambda name: name.isprintable())

FILE_NAMES = st.text(CHARACTERS.filter(lambda character: character != "/"), min_size=1, max_size=60).filter(
    lambda name: not name.startswith(".")
)


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    module_instance.create_table("t", OF_K)
    module_instance.create_row_table("samples", [dm.Column("name", "STRING"), dm.Column("doc", "FILE")])
    return module_instance


@pytest.fixture(scope="module")
def url(instance: Instance) -> Iterator[str]:
    # a deadline so long that no test reaches it
    with serving(instance, job_threads=0, client_stall_seconds_max=10 * SECONDS_MAX) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with connect(url) as client:
        yield client


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def answered(url: str, *parts: bytes, ends: bool = False) -> bytes:
    """Returns the bytes that a server sends until it closes. With `ends`, the client closes its side
    first.
    """
    with connected(url) as sock:
        sock.settimeout(SECONDS_MAX / 2)
        with suppress(ConnectionError):  # the server refuses the first parts
            for part in parts:
                sock.sendall(part)
            if ends:
                sock.shutdown(socket.SHUT_WR)
        return read_to_end(sock)


BODIES = {
    "/v1/sql": "application/json",
    "/v1/rows/preview": "text/csv",
    "/v1/rows/samples/csv": "text/csv",
    "/v1/rows/samples/files?name=x": "application/octet-stream",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "chunk", [b"5\r\nhello\r\nzz\r\nhello\r\n", b"5\r\nhelloXX", b"-1\r\n", b"5;\x00\r\n"]
)
def test_an_invalid_chunk_is_answered_at_once(url: str, path: str, chunk: bytes) -> None:
    begin = head(path, f"content-type: {BODIES[path]}", "transfer-encoding: chunked")
    found = answered(url, begin, chunk)
    assert STATUSES.findall(found) == [b"400"]
    assert b"connection: close" in found.lower()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("length", ["transfer-encoding: chunked", "content-length: 100"])
def test_a_truncated_body_is_answered_at_once(url: str, path: str, length: str) -> None:
    begin = head(path, f"content-type: {BODIES[path]}", length)
    assert answered(url, begin, b"5\r\nhel", ends=True).startswith(b"HTTP/1.1 400 ")


def test_an_invalid_second_request_is_answered_after_the_first(url: str) -> None:
    body = b'{"kind": "query", "request": {"statement": "select 1"}}'
    first = head("/v1/jobs", "content-type: application/json", f"content-length: {len(body)}") + body
    second = head("/v1/sql", "content-type: application/json", "transfer-encoding: chunked") + b"zz\r\n"
    found = answered(url, first + second)
    assert STATUSES.findall(found) == [b"202", b"400"]


def test_trailers_after_a_body_are_no_headers(instance: Instance) -> None:
    """A proxy may pass on trailers that it would refuse as headers, and their number has no limit."""
    chunked = ["content-type: application/json", "transfer-encoding: chunked"]
    with serving(instance, token="s3cret") as url:  # noqa: S106
        trailer = b"2\r\n{}\r\n0\r\nauthorization: Bearer s3cret\r\n\r\n"
        found = answered(url, head("/v1/sql", "connection: close", *chunked) + trailer)
        assert STATUSES.findall(found) == [b"401"]
        begin = head("/v1/sql", "authorization: Bearer s3cret", *chunked) + b"2\r\n{}\r\n0\r\n"
        assert STATUSES.findall(answered(url, begin, b"a: b\r\n" * 10_000)) == [b"400"]


def test_a_body_with_a_compressed_transfer_encoding_is_refused(url: str) -> None:
    begin = head("/v1/sql", "content-type: application/json", "transfer-encoding: gzip, chunked")
    assert STATUSES.findall(answered(url, begin, b"0\r\n\r\n")) == [b"400"]


@pytest.mark.parametrize("job_id", ODD_IDS)
def test_the_location_of_a_job_with_an_odd_id_is_valid(url: str, client: Client, job_id: str) -> None:
    body = {"kind": "query", "request": {"statement": "select 1"}, "job_id": job_id}
    started = http_post(f"{url}/v1/jobs", json=body)
    assert started.status_code == 202, started.text
    location = started.headers["location"]
    assert location.isascii() and unquote(location) == f"/v1/jobs/{job_id}"
    raw = f"GET {location} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    found = answered(url, raw)
    assert json.loads(found.partition(b"\r\n\r\n")[2])["job_id"] == job_id
    assert client.jobs.status(job_id).job_id == job_id
    assert client.jobs.cancel(job_id).state == "CANCELLED"


@pytest.mark.parametrize("job_id", FORGED)
def test_an_id_with_control_characters_is_refused_everywhere(
    url: str, client: Client, instance: Instance, job_id: str
) -> None:
    body = {"kind": "query", "request": {"statement": "select 1"}, "job_id": job_id}
    refused = http_post(f"{url}/v1/jobs", json=body)
    assert refused.status_code == 400 and "set-cookie" not in refused.headers
    sent = http_post(
        f"{url}/v1/rows/samples/csv",
        params={"job_id": job_id},
        content=b"name\na\n",
        headers={"content-type": "text/csv"},
    )
    assert sent.status_code == 400, sent.text
    for start in (instance.jobs.start, client.jobs.start):
        with pytest.raises(InvalidInput, match=r"job_id .* must be printable"):
            start("query", {"statement": "select 1"}, job_id=job_id)


@pytest.mark.parametrize("job_id", FORGED)
def test_an_existing_job_with_such_an_id_can_be_read(
    url: str, client: Client, instance: Instance, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("dormouse.jobs.store.check_new_id", job_key)  # an older version did not check ids
        instance.jobs.start("query", {"statement": "select 1"}, job_id=job_id)
    found = http_get(f"{url}/v1/jobs/{quote(job_id, safe='')}")
    assert found.status_code == 200 and found.json()["job_id"] == job_id
    assert found.headers["location"] == f"/v1/jobs/{quote(job_id, safe='')}"
    assert "set-cookie" not in found.headers
    assert client.jobs.cancel(job_id).state == "CANCELLED"


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
@example(name="a/b")
@example(name="..")
@example(name="%2F")
def test_every_name_is_reachable_when_quoted(url: str, client: Client, instance: Instance, name: str) -> None:
    """The names are those of jobs, snapshots and cuts, used through the client and through HTTP."""
    job_id = client.jobs.start("query", {"statement": "select 1"}, job_id=name)
    assert client.jobs.status(job_id).job_id == name == instance.jobs.status(name).job_id
    table = instance.row_table("samples")
    if name not in {one.name for one in table.snapshots()}:
        table.snapshot(name)
    page = client.row_table("samples").query("select * from samples", snapshot=name)
    assert page.version == table.store.snapshot(name).version
    with suppress(InvalidCut):  # the name has blanks at its ends, could be a time, or exists already
        instance.table("t").history.record_cut(name)
        assert client.table("t").query(as_of=name).read_all().num_rows == 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=FILE_NAMES)
@example(name='a"; filename="b')
@example(name="日本 é;,=.txt")
def test_the_name_of_a_file_cannot_add_headers(url: str, instance: Instance, name: str) -> None:
    sent = http_post(
        f"{url}/v1/rows/samples/files",
        params={"name": name},
        content=b"bytes",
        headers={"content-type": "application/octet-stream"},
    )
    assert sent.status_code == 201, sent.text
    table = instance.row_table("samples")
    table.change([dm.Insert([{"name": "a", "doc": sent.json()["file"]}])])
    row_id = table.query("select ROW_ID from samples order by ROW_ID desc", wait_seconds=SECONDS_MAX).rows[0][
        0
    ]
    found = http_get(f"{url}/v1/rows/samples/rows/{row_id}/files/doc")
    assert (found.status_code, found.content) == (200, b"bytes")
    assert found.headers["content-disposition"] == f"attachment; filename*=UTF-8''{quote(name, safe='')}"


def test_a_path_cannot_forge_a_line_of_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        http_get(f"{url}/v1/jobs/x%0d%0aFAKE%20INFO%1b[31m")
        answered(url, b"GET /v1/jobs/x\x1b[31mred HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answered(url, b"GET /v1/jobs/x\x85red HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    lines = [record.getMessage() for record in caplog.records]
    assert any("%0d%0aFAKE" in line for line in lines)
    assert all(line.isprintable() and line.isascii() for line in lines if "/v1/jobs/" in line)


def test_only_a_slash_separates_parts_of_a_path(url: str) -> None:
    for path, status in (("/v1%00jobs", 404), ("/v1/jobs/a%00b", 400), ("/v1%2Fjobs", 404)):
        assert http_get(f"{url}{path}").status_code == status
