"""Tests of all routes in the service's description, so that a new route is covered automatically."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import dormouse as dm
from dormouse.service.app import create_app
from tests.serving import serving, stand_in
from tests.standard import OF_KEYS
from tests.support.api import Instance
from tests.support.settings import load_service_settings
from tests.working import until

APP = create_app(stand_in(check_reachable=None), load_service_settings(sql_workers=0, job_threads=0))
PATHS: dict[str, dict[str, Any]] = APP.openapi()["paths"]
METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
ROUTES = [(method.upper(), path) for path, methods in PATHS.items() for method in methods]
READ = [path for path, methods in PATHS.items() if "get" in methods]
AT = "2026-03-05T12:00:00Z"
VALUES = {
    "column": "f", "id": "1", "inserted_at": AT, "kind": "k", "name": "x.txt", "row": "1:1", "row_id": "1",
    "tenant": "t",
}  # fmt: skip
"""The value for each parameter of a path. A new parameter needs one here."""


def schema_of(path: str, method: str = "get", status: str = "200") -> dict[str, Any]:
    """Returns the schema of an answer in JSON, or an empty dict if the answer has none."""
    content = PATHS[path][method]["responses"].get(status, {}).get("content", {})
    name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    return dict(APP.openapi()["components"]["schemas"].get(name, {}))


LISTS = [path for path in READ if "next" in schema_of(path).get("properties", {})]
STREAMS = [
    (method, path)
    for method, path in ROUTES
    if "application/x-ndjson" in PATHS[path][method.lower()]["responses"].get("200", {}).get("content", {})
]


class Served:
    """A running service with at least one item for each path."""

    def __init__(self, http: httpx.Client, instance: Instance, job_id: str) -> None:
        self.http, self.instance = http, instance
        self._values = {**VALUES, "job_id": job_id}

    def url(self, path: str) -> str:
        """Returns a path with values for its parameters and its required query parameters."""
        first = next(iter(PATHS[path].values()))
        values = {**self._values, "table": "r" if path.startswith("/v1/rows") else "t"}
        given = [one for one in first.get("parameters", ()) if one["required"] and one["in"] == "query"]
        query = "&".join(f"{one['name']}={values[one['name']]}" for one in given)
        return re.sub(r"{(\w+)}", lambda match: values[match[1]], path) + (f"?{query}" if query else "")


@pytest.fixture(scope="module")
def served(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("secret-place")
    file = Path(folder / "x.txt")
    file.write_bytes(b"0123456789")
    with dm.connect(new_database(template_database), (folder / "objects").as_uri()) as instance:
        for name in ("t", "u"):
            table = instance.create_table(name, OF_KEYS, split_points=[2])
            table.ingest({"key": [1, 2, 3]})
        for name in ("r", "s"):
            rows = instance.create_row_table(name, [dm.Column("f", "FILE")])
            rows.change([dm.Insert([{"f": rows.put_file(file)}])])
            rows.change([dm.Insert([{}])])
        instance.payloads.put("t", "1", datetime.fromisoformat(AT), "k", {"n": 1})
        with (
            serving(instance, job_threads=1, shutdown_seconds_max=10) as url,
            httpx.Client(base_url=url) as http,
        ):
            jobs = []
            for _ in range(2):
                request = {"kind": "query", "request": {"statement": "select * from t"}}
                jobs.append(http.post("/v1/jobs", json=request).json()["job_id"])
            until(lambda: all(http.get(f"/v1/jobs/{one}").json()["ended_at"] for one in jobs))
            yield Served(http, instance, jobs[0])


@pytest.mark.parametrize("path", PATHS)
def test_unknown_methods_are_refused_with_the_allowed_methods(served: Served, path: str) -> None:
    url = served.url(path).partition("?")[0]
    there = {method for method, other in ROUTES if re.fullmatch(re.sub(r"{\w+}", "[^/]+", other), url)}
    expected = there | ({"HEAD"} if "GET" in there else set())
    for method in {*METHODS, "HEAD"} - expected:
        answer = served.http.request(method, served.url(path))
        assert (answer.status_code, answer.headers["allow"]) == (405, ", ".join(sorted(expected))), method


@pytest.mark.parametrize("path", READ)
def test_head_is_answered_as_get(served: Served, path: str) -> None:
    head, got = served.http.head(served.url(path)), served.http.get(served.url(path))
    assert (got.status_code, head.status_code, head.content) == (200, 200, b""), got.text
    for name in ("content-type", "etag", "accept-ranges", "content-disposition", "x-content-type-options"):
        assert head.headers.get(name) == got.headers.get(name)
    if path != "/metrics":  # this path counts its own requests
        assert head.headers.get("content-length") == got.headers.get("content-length")


@pytest.mark.parametrize(("method", "path"), [one for one in ROUTES if one[1].startswith("/v1/")])
def test_an_unknown_parameter_is_named(served: Served, method: str, path: str) -> None:
    url = served.url(path)
    answer = served.http.request(method, f"{url}{'&' if '?' in url else '?'}no_such=1")
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:dormouse:invalid-input")
    assert "'no_such'" in answer.json()["detail"]
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("path", LISTS)
def test_each_list_is_divided_into_pages(served: Served, path: str) -> None:
    known = {one["name"] for one in PATHS[path]["get"]["parameters"]}
    [cursor] = known & {"after", "before"}
    [name] = schema_of(path)["properties"].keys() - {"next"}
    whole = served.http.get(served.url(path)).json()
    assert whole["next"] is None
    assert len(whole[name]) > 1
    found: list[Any] = []
    following: Any = ""
    while following is not None:
        page = served.http.get(
            served.url(path), params={"limit": 1, **({cursor: following} if found else {})}
        )
        found += page.json()[name]
        following = page.json()["next"]
        assert len(page.json()[name]) <= 1
    assert found == whole[name]


def test_every_list_has_pages() -> None:
    """A list without pages is found by the schema of its answer: one array, and no `next`."""
    for path in READ:
        properties = schema_of(path).get("properties", {})
        arrays = [name for name, one in properties.items() if one.get("type") == "array"]
        assert len(properties) != 1 or not arrays, f"{path} has a list without pages"
    assert {"/v1/tables", "/v1/rows", "/v1/jobs"} <= set(LISTS)


BODIES = {"/v1/sql": {"statement": "select 1 as n"}, "/v1/tables/{table}/changes": {"after": None}}


@pytest.mark.parametrize(("method", "path"), STREAMS)
def test_rows_are_sent_in_the_accepted_media_type(served: Served, method: str, path: str) -> None:
    def ask(accept: str) -> httpx.Response:
        body = BODIES.get(path, {})
        return served.http.request(method, served.url(path), json=body, headers={"accept": accept})

    for accept, kind in [
        ("application/json;q=0.9", "application/json"),
        ("application/json; q=0.9, text/csv;q=0.5", "application/json"),
        ("text/html, application/json;q=0.9, */*;q=0.8", "application/json"),
        ("*/*", "application/x-ndjson"),
        ("", "application/x-ndjson"),
        ("application/*", "application/x-ndjson"),
        ("application/*, application/x-ndjson;q=0", "application/vnd.apache.arrow.stream"),
        ("text/csv", "text/csv"),
        ("TEXT/*", "text/csv"),
        ("text/csv;header=present", "text/csv"),
        ("application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.stream"),
    ]:
        answer = ask(accept)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].partition(";")[0] == kind, accept
        assert answer.headers["vary"].lower() == "accept"
    for accept in ("image/png", "application/json;q=0", "nonsense"):
        answer = ask(accept)
        assert (answer.status_code, answer.json()["type"]) == (406, "urn:dormouse:not-acceptable")
        for offered in ("application/x-ndjson", "application/vnd.apache.arrow.stream", "text/csv"):
            assert offered in answer.json()["detail"]


RANGED = [path for path in READ if "206" in PATHS[path]["get"]["responses"]]


@pytest.mark.parametrize("path", RANGED)
def test_parts_of_an_answer_are_fetched_by_ranges(served: Served, path: str) -> None:
    whole = served.http.get(served.url(path))
    tag, size = whole.headers["etag"], len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes"
    assert re.fullmatch(r'"[^"]+"', tag)
    for range_, start, end in [("0-3", 0, 4), ("4-", 4, size), ("-4", size - 4, size), ("-999999", 0, size)]:
        for method in ("GET", "HEAD"):
            part = served.http.request(method, served.url(path), headers={"range": f"bytes={range_}"})
            if method == "HEAD":  # ranges are defined for GET alone
                assert part.status_code in (200, 206)
            else:
                assert (part.status_code, part.content) == (206, whole.content[start:end])
                assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
                assert int(part.headers["content-length"]) == end - start
    for range_ in (f"bytes={size}-", "bytes=999999-", "bytes=-0"):
        behind = served.http.get(served.url(path), headers={"range": range_})
        assert (behind.status_code, behind.headers["content-range"]) == (416, f"bytes */{size}"), range_
    for range_ in ("bytes=5-2", "bytes=x-y", "bytes=", "lines=1-2", "bytes=0-1,3-4"):
        same = served.http.get(served.url(path), headers={"range": range_})
        assert (same.status_code, same.content) == (200, whole.content), range_
    for condition, status in [(tag, 206), ('"other"', 200), (f"W/{tag}", 200), (AT, 200)]:
        part = served.http.get(served.url(path), headers={"range": "bytes=0-3", "if-range": condition})
        assert part.status_code == status, condition
    for tags, status in [(tag, 304), (f'"other", W/{tag}', 304), ("*", 304), ('"other"', 200)]:
        for method in ("GET", "HEAD"):
            answer = served.http.request(method, served.url(path), headers={"if-none-match": tags})
            assert (answer.status_code, answer.headers["etag"]) == (status, tag)
    assert (
        served.http.get(served.url(path), headers={"if-none-match": tag, "range": "bytes=0-1"}).status_code
        == 304
    )


def test_paths_of_binary_objects_support_ranges() -> None:
    """These paths return an object unchanged, so the size of the answer is known."""
    binary = [
        path
        for path in READ
        if any(
            one.get("schema", {}).get("format") == "binary"
            for one in PATHS[path]["get"]["responses"]["200"].get("content", {}).values()
        )
    ]
    assert set(binary) == set(RANGED)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_answer_contains_a_path_of_the_server(served: Served, method: str, path: str) -> None:
    """Errors about unknown names and invalid bodies are tested too."""
    place = served.instance.objects.url.removeprefix("file://")
    bodies: list[Any] = [None] if method == "GET" else [None, {}, {"statement": f"select * from '{place}'"}]
    url = served.url(path)
    for target in (url, re.sub(r"/(t|r|1)(?=[/?]|$)", "/none", url)):
        for body in bodies:
            if method == "DELETE" and "none" not in target:
                continue  # later tests read these items
            answer = served.http.request(method, target, **({} if body is None else {"json": body}))
            text = (
                answer.text.replace(f"'{place}'", "") if body else answer.text
            )  # the answer repeats the statement
            assert place not in text, (target, body)
            assert answer.status_code != 500
