"""The terms of each path, which are its right, slots and deadline; and previews of hostile CSV files."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Response
from fastapi.routing import APIRoute

import dormouse as dm
from dormouse.rows import csv_preview
from dormouse.rows.csv_preview import preview_csv
from dormouse.service import rows
from dormouse.service.app import create_app
from dormouse.service.declared import Served
from dormouse.service.security import Place, Right, served
from dormouse.sources.text_format import text_format
from tests.serving import SECONDS_MAX, connected, eventually, http_get, http_post, serving, stand_in
from tests.support.api import Instance
from tests.support.settings import load_service_settings

CSV_TYPE = {"content-type": "text/csv"}
SMALL = b"a,b\n1,2\n"
PUBLIC = {
    "/health",
    "/openapi.json",
    "/docs",
    "/docs/begin.js",
    "/docs/swagger-ui.css",
    "/docs/swagger-ui-bundle.js",
}
NOTHING: Any = stand_in()


def app() -> FastAPI:
    return create_app(NOTHING, load_service_settings(job_threads=0, sql_workers=0))


def routes_of(routes: Any) -> Iterator[Any]:
    """Yields the routes of an app and of its inner routers."""
    for route in routes:
        within = getattr(route, "original_router", route)
        if hasattr(within, "routes"):
            yield from routes_of(within.routes)
        else:
            yield route


def test_every_path_has_a_right_slots_and_a_deadline() -> None:
    made = app()
    found = list(routes_of(made.routes))
    assert len(found) > 25
    runners = made.state.service.runners
    for route in found:
        assert isinstance(route, Served), route
        assert isinstance(route.terms.right, Right), route.path
        for place in route.terms.places:
            if place is not Place.LOOP:
                assert runners[place].slots._count > 0
                assert 0 < runners[place].seconds_max < math.inf
    assert {route.path for route in found if route.terms.right is Right.PUBLIC} == PUBLIC
    with serving(NOTHING, token="t", job_threads=None) as url:  # noqa: S106
        for route in found:
            answer = httpx.request(min(route.methods), f"{url}{route.path}")
            assert (answer.status_code != 401) == (route.path in PUBLIC), route.path


def test_a_route_without_terms_cannot_be_created() -> None:
    router = APIRouter(route_class=Served)

    async def bare() -> Response:
        return Response()

    def waits() -> Response:
        return Response()

    for make in (router.get("/x"), app().get("/x")):
        with pytest.raises(TypeError, match=r"/x has no terms"):
            make(bare)
    with pytest.raises(TypeError, match="only a coroutine"):
        router.get("/x")(served(Right.HOLDER, Place.LOOP)(waits))
    assert all(route.path != "/x" for route in router.routes if isinstance(route, APIRoute))


@pytest.mark.slow
def test_a_slow_lookup_is_a_problem_and_frees_its_slot() -> None:
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def tables() -> list[Any]:
        begun.release()
        assert may_end.wait(SECONDS_MAX)
        return []

    stuck = stand_in(tables=tables)
    with serving(stuck, seconds_max=0.2, queue_seconds_max=0.2) as url:
        statuses = []
        asking = [
            threading.Thread(target=lambda: statuses.append(http_get(f"{url}/v1/tables").status_code))
            for _ in range(20)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(SECONDS_MAX)
        assert set(statuses) == {504, 429}, "16 requests have a thread each, and the others wait for one"
        assert http_get(f"{url}/health").status_code == 200
        may_end.set()
        eventually(lambda: http_get(f"{url}/v1/tables").status_code == 200)


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    module_instance.create_row_table("samples", [dm.Column("name", "STRING"), dm.Column("doc", "FILE")])
    return module_instance


def preview(url: str, content: bytes, **more: Any) -> httpx.Response:
    headers = CSV_TYPE | more.pop("headers", {})
    return http_post(f"{url}/v1/rows/preview", content=content, headers=headers, timeout=60, **more)


def put(url: str) -> int:
    headers = {"content-type": "application/octet-stream"}
    return http_post(f"{url}/v1/rows/samples/files?name=x", content=b"x", headers=headers).status_code


def test_a_preview_needs_the_right_to_upload(instance: Instance, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("weak query weakweak\nstrong row_upload strongstrong\n")
    tokens.chmod(0o600)
    with serving(instance, job_threads=0, job_tokens_file=tokens) as url:
        for token, status in (("weakweak", 403), ("strongstrong", 200)):
            found = preview(url, SMALL, headers={"authorization": f"Bearer {token}"})
            assert found.status_code == status, found.text


@pytest.mark.parametrize("header", [True, False])
def test_a_file_with_too_many_columns_is_refused_in_one_line(instance: Instance, header: bool) -> None:
    width = 100_000 if header else 150_000
    first = b",".join(b"c%d" % n for n in range(width)) if header else b",".join([b"1"] * width)
    with serving(instance, job_threads=0) as url:
        found = preview(url, first + b"\n" + (b"1," * (width - 1) + b"1\n") * 5, params={"header": header})
    assert (found.status_code, found.json()["type"]) == (400, "urn:dormouse:invalid-data")
    assert found.json()["detail"] == f"the file has {width:,} columns; a row table has at most 152"


class Preview:
    """A preview of a file that lasts until it is interrupted."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, *_: Any, check: Callable[[], object], **__: Any) -> Any:
        self.begun.set()
        try:
            while not self.ended.wait(0.01):
                check()
        finally:
            self.ended.set()


def test_a_preview_ends_with_its_client_and_frees_its_slot(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Preview()
    monkeypatch.setattr(rows, "preview_csv", running)
    with serving(instance, job_threads=0, files_max=1, queue_seconds_max=0.1) as url:
        lines = ["POST /v1/rows/preview HTTP/1.1", "host: localhost", "content-type: text/csv"]
        with connected(url) as sock:
            sock.sendall("\r\n".join([*lines, f"content-length: {len(SMALL)}", "", ""]).encode() + SMALL)
            assert running.begun.wait(SECONDS_MAX)
            assert put(url) == 429
        assert running.ended.wait(SECONDS_MAX)
        eventually(lambda: put(url) == 201)


@pytest.mark.slow
def test_a_preview_ends_at_its_deadline(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Preview()
    monkeypatch.setattr(rows, "preview_csv", running)
    with serving(instance, job_threads=0, files_max=1, seconds_max=0.2, queue_seconds_max=SECONDS_MAX) as url:
        found = preview(url, SMALL)
        assert (found.status_code, found.json()["type"]) == (504, "urn:dormouse:query-time-over")
        assert running.ended.wait(SECONDS_MAX)
        assert put(url) == 201


@pytest.mark.slow
def test_a_slow_upload_ends_at_its_deadline(instance: Instance, tmp_path: Path) -> None:
    with (
        serving(instance, job_threads=0, files_max=1, file_seconds_max=0.3) as url,
        connected(url) as sock,
    ):
        lines = ["POST /v1/rows/samples/csv HTTP/1.1", "host: localhost", "content-type: text/csv"]
        sock.sendall("\r\n".join([*lines, "content-length: 1000", "", "name\n"]).encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
        eventually(lambda: put(url) == 201)
    assert list(instance.objects.list("answers/")) == []


def test_a_preview_can_be_interrupted_between_columns(tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_text("a,b,c\n1,2,3\n")
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise dm.errors.DormouseError("the query was interrupted")

    with pytest.raises(dm.errors.DormouseError, match="interrupted"):
        preview_csv(path, text_format(), check=check)
    assert len(calls) == 2


def test_the_size_of_a_preview_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.csv"
    long = '"[' + "1, " * 100_000 + '1]"'
    path.write_text("a,b\n" + f"é,{long}\n" * 5)
    found = preview_csv(path, text_format())
    assert [len(row[1] or "") for row in found.rows] == [csv_preview.SHOWN_CHARACTERS_MAX + 1] * 5
    assert {(row[0], (row[1] or "")[-1]) for row in found.rows} == {("é", "…")}
    monkeypatch.setattr(csv_preview, "SHOWN_BYTES_MAX", 10_000)
    assert (len(preview_csv(path, text_format()).rows), found.row_count) == (2, 5)
