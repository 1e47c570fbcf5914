"""Requests that the middleware `Direct` answers get the same answers as from FastAPI's routes."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.service.declared import Direct, Served
from tests.serving import eventually, http_post, serving
from tests.support.api import Instance

BODIES: list[Any] = [
    {"where": {"k": 1}},
    {"where": {"k": 1}, "columns": ["v"]},
    {"where": {"k": [1, 2, 7]}, "limit": 2, "offset": 1},
    {"where": {"k": {"min": 1}}, "descending": True},
    {},
    # faulty requests
    {"where": {"k": "one"}},
    {"where": {"nothing": 1}},
    {"table": "words", "where": {"k": 1}},
    {"wher": {"k": 1}},
    {"limit": -1},
    {"limit": "1"},
    {"columns": "v"},
    [],
    None,
    "words",
    {"as_of": "not a moment"},
]
TEXTS = [
    b"",
    b"{",
    b'{"where": {"k": 1}, "where": {"k": 2}}',
    b'{"limit": NaN}',
    b"\xff",
    b'{"where": {"k": "\\ud800"}}',
]
HEADERS: list[dict[str, str]] = [
    {"content-type": "application/json"},
    {"content-type": "application/json; charset=utf-8", "accept": "application/json"},
    {"content-type": "application/json", "accept": "text/csv;q=0.5, application/vnd.apache.arrow.stream"},
    {"content-type": "application/json", "accept": "image/png"},
    {"content-type": "text/plain"},
    {"content-type": "application/json", "content-encoding": "gzip"},
    {"content-type": "application/json", "authorization": "Bearer wrong"},
]
PATHS = [
    "/v1/tables/words/query",
    "/v1/tables/words/plan",
    "/v1/tables/w%6Frds/query",
    "/v1/tables/no%2Ftable/query",
    "/v1/tables/words/query?limit=1",
    "/v1/tables//query",
    "/v1/tables/words/query/",
    "/v1/sql",
]


@pytest.fixture
def urls(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Yields the URLs of a service as it is, and of one that answers by FastAPI's routes alone."""
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("v", dm.STRING)])
    instance.create_table("words", schema).ingest(pa.table({"k": [1, 2, 3], "v": ["a", "b", "c"]}))
    with serving(instance, body_bytes_max=200) as direct:
        usual = Direct.__init__
        monkeypatch.setattr(Direct, "__init__", lambda self, app, routes: usual(self, app, []))
        with serving(instance, body_bytes_max=200) as by_routes:
            yield direct, by_routes


def test_the_answers_and_errors_are_the_same(urls: tuple[str, str]) -> None:
    contents = [*(json.dumps(body).encode() for body in BODIES), *TEXTS, b'{"where": {"k": 1}}' + b" " * 300]
    statuses = set()
    for number, path in enumerate(PATHS):
        for content in contents if not number else contents[:6]:
            for headers in HEADERS:
                answers = [http_post(f"{url}{path}", content=content, headers=headers) for url in urls]
                assert _seen(answers[0]) == _seen(answers[1]), (path, content, headers)
                statuses.add(answers[0].status_code)
    assert statuses >= {200, 400, 404, 406, 413, 415}


def _seen(answer: httpx.Response) -> Any:
    # whether an answer is sent in one piece depends on the thread that makes it
    without = ("date", "content-length", "transfer-encoding")
    headers = {name: value for name, value in answer.headers.items() if name not in without}
    return answer.status_code, headers, answer.content


def test_a_look_up_does_not_pass_fastapis_routes(
    urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Any, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a route was asked")

    monkeypatch.setattr(Served, "handle", fail)
    url = f"{urls[0]}/v1/tables/words/query"
    assert http_post(url, json={"where": {"k": 2}}).text == '{"k":2,"v":"b"}\n'
    assert http_post(url, json={"limit": -1}).status_code == 500


def test_a_client_that_leaves_within_a_body_is_no_failure(
    urls: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dormouse.service.access")
    for number, url in enumerate(urls, 1):
        address = urlsplit(url)
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
            client.sendall(
                b"POST /v1/tables/words/query HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                b'content-type: application/json\r\ncontent-length: 50\r\n\r\n{"where"'
            )
        lines = partial(_lines_of, caplog)
        eventually(lambda lines=lines, number=number: len(lines()) == number)  # type: ignore[misc]
    assert len({line.partition(" ms=")[0] for line in lines()}) == 1
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def _lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "dormouse.service.access"]
