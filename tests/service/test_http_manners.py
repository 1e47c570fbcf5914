"""Tests of HTTP conventions: methods, HEAD, media types, parameters, ranges, pages, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.objects.names import hiding, without_paths
from tests.serving import serving
from tests.support.api import Instance, Table
from tests.working import until


@pytest.fixture
def http(instance: Instance, table_t: Table) -> Iterator[httpx.Client]:
    table_t.ingest({"key": [1, 2, 3]})
    instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    with serving(instance, job_threads=1) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ended(http: httpx.Client, kind: str, **request: Any) -> str:
    """Starts a job and waits for its end; returns the job's path."""
    answer = http.post("/v1/jobs", json={"kind": kind, "request": request})
    assert answer.status_code == 202, answer.text
    path = f"/v1/jobs/{answer.json()['job_id']}"
    until(lambda: http.get(path).json()["state"] != "PROCESSING")
    return path


def refused(answer: httpx.Response, status: int, kind: str) -> str:
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:dormouse:{kind}"), answer.text
    return str(answer.json()["detail"])


@pytest.mark.slow
def test_a_refused_method_is_answered_with_the_allowed_methods(http: httpx.Client) -> None:
    for method, path, allowed in [
        ("DELETE", "/v1/tables", "GET, HEAD"),
        ("GET", "/v1/sql", "POST"),
        ("HEAD", "/v1/sql", "POST"),
        ("OPTIONS", "/v1/jobs", "GET, HEAD, POST"),
        ("PUT", "/v1/jobs/a%2Fb", "DELETE, GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ]:
        answer = http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.slow
def test_an_unknown_version_of_a_row_table_is_refused(http: httpx.Client, instance: Instance) -> None:
    rows = instance.row_table("r")
    rows.change([dm.Insert([{"n": 1}])])
    for path in ("/v1/rows/r", "/v1/rows/r/csv"):
        detail = refused(http.get(path, params={"version": 99}), 400, "invalid-query")
        assert detail == "table 'r' has no version 99; the newest is 1"
        assert http.get(path, params={"version": 1}).status_code == 200
    with connect(str(http.base_url)) as client:
        for table in (rows, client.row_table("r")):
            with pytest.raises(dm.InvalidQuery, match="has no version 99"):
                table.columns(99)
            assert table.columns(0) == table.columns(1) == table.columns()


@pytest.mark.slow
def test_a_page_token_is_valid_only_for_its_query(http: httpx.Client, instance: Instance) -> None:
    instance.row_table("r").change([dm.Insert([{"n": n} for n in range(3)])])
    instance.row_table("r").change([dm.Insert([{"n": n} for n in range(3)])])
    query = {"sql": "select n from r order by n", "version": 1, "wait_seconds": 60}
    path = "/v1/rows/r/query"
    token = http.post(path, json={**query, "page_rows": 1}).json()["next_page"]
    assert http.post(path, json={**query, "page": token}).json()["rows"] == [[1]]
    for other in ({"sql": "select n from r"}, {"version": 2}, {"parameters": [1]}):
        refused(http.post(path, json={**query, **other, "page": token}), 400, "invalid-page")


def test_the_service_waits_for_an_index_at_most_a_minute(http: httpx.Client) -> None:
    body = {"sql": "select n from r", "wait_seconds": 60.5}
    detail = refused(http.post("/v1/rows/r/query", json=body), 400, "invalid-input")
    assert (
        detail == "wait_seconds must be at most 60, not 60.5: the query service waits no longer, so ask again"
    )


@pytest.mark.slow
def test_the_last_page_has_no_next(http: httpx.Client, instance: Instance, table_t: Table) -> None:
    table_t.ingest({"key": [4]})
    for _ in range(2):
        instance.row_table("r").change([dm.Insert([{"n": 1}])])
        ended(http, "query", statement="select 1")
    for path, name, following in [
        ("/v1/rows/r/history", "changes", "before"),
        ("/v1/tables/t/files", "files", "after"),
        ("/v1/tables/t/partitions", "partitions", "after"),
        ("/v1/jobs", "jobs", "after"),
    ]:
        whole = http.get(path).json()
        assert whole["next"] is None
        assert http.get(path, params={"limit": len(whole[name])}).json() == whole
        pages = [http.get(path, params={"limit": 1}).json()]
        while pages[-1]["next"] is not None:
            assert len(pages) < len(whole[name])
            more = {following: pages[-1]["next"]}
            pages.append(http.get(path, params={"limit": 1, **more}).json())
        assert [one for page in pages for one in page[name]] == whole[name]
        assert http.get(path, params={"limit": 10_000}).status_code == 200


@pytest.mark.slow
def test_head_is_answered_as_get_without_a_body(http: httpx.Client) -> None:
    """Every path that accepts GET accepts HEAD."""
    job = ended(http, "query", statement="select * from t")
    fixed = ["/health", "/docs", "/v1/tables", "/v1/tables/t", "/v1/tables/t/files", "/v1/jobs"]
    fixed += [f"{job}/result", f"{job}/answer", "/v1/tables/none"]
    for path in [*fixed, "/metrics", "/v1/rows/r/csv"]:
        head, got = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        if path in fixed:
            assert head.headers.get("content-length") == got.headers.get("content-length")


@pytest.mark.slow
def test_rows_are_sent_as_a_json_array_on_request(http: httpx.Client) -> None:
    accept = {"accept": "application/json"}
    for path, body in [
        ("/v1/sql", {"statement": "select key from t order by key"}),
        ("/v1/tables/t/query", {}),
    ]:
        answer = http.post(path, json=body, headers=accept)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == [{"key": 1}, {"key": 2}, {"key": 3}]
    assert http.post("/v1/sql", json={"statement": "select 1 where false"}, headers=accept).json() == []
    default = http.post("/v1/sql", json={"statement": "select 1 as n"}, headers={"accept": "*/*"})
    assert default.headers["content-type"] == "application/x-ndjson"


@pytest.mark.slow
def test_an_unknown_query_parameter_is_refused(http: httpx.Client) -> None:
    """A misspelt limit must not be ignored, because the answer would have additional rows."""
    assert "did you mean 'limit'" in refused(http.get("/v1/tables/t/files?limt=1"), 400, "invalid-input")
    assert "'x'" in refused(http.post("/v1/sql?x=1", json={"statement": "select 1"}), 400, "invalid-input")
    assert "twice" in refused(http.get("/v1/jobs?limit=1&limit=2"), 400, "invalid-input")
    sent = http.post("/v1/rows/r/csv?dryrun=true", content=b"n\n1\n", headers={"content-type": "text/csv"})
    assert "'dry_run'" in refused(sent, 400, "invalid-input")
    assert http.get("/v1/tables/t/files?limit=1").status_code == 200
    assert http.get("/health?probe=1").status_code == 200


@pytest.mark.few(1)
@pytest.mark.parametrize("bad", ["%ff", "%fe", "%c3%28", "%ed%b0%af", "a%2F%ff"])
def test_a_path_or_query_that_is_not_utf8_is_refused(http: httpx.Client, bad: str) -> None:
    """Otherwise several paths could name the same thing."""
    at = "2026-03-05T12:00:00Z"
    for method, path in [
        ("PUT", f"/v1/payloads/acme/{bad}/{at}/k"),
        ("GET", f"/v1/payloads/{bad}/1/{at}/k"),
        ("GET", f"/v1/tables/{bad}"),
        ("GET", f"/v1/rows/{bad}"),
        ("GET", f"/v1/tables?after={bad}"),
        ("GET", f"/v1/tables?{bad}=1"),
        ("DELETE", f"/v1/jobs/{bad}"),
        ("GET", f"/{bad}"),
    ]:
        detail = refused(
            http.request(method, path, **({"json": 1} if method == "PUT" else {})), 400, "invalid-input"
        )
        assert detail == "the path and the query must be UTF-8, percent-encoded"
    assert http.get("/v1/tables?after=%C3%A9").status_code == 200


DEEP = 480
"""A depth of nested lists that JSON parsers still accept."""


NESTED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/sql", {"statement": "select $1", "parameters": "deep"}),
    ("POST", "/v1/sql", {"statement": "select $a", "parameters": {"a": "deep"}}),
    ("POST", "/v1/sql/plan", {"statement": "select $1", "parameters": "deep"}),
    ("POST", "/v1/tables/t/query", {"where": {"key": "deep"}}),
    ("POST", "/v1/tables/t/query", {"where": {"key": {"min": "deep"}}}),
    ("POST", "/v1/tables/t/plan", {"where": {"key": "deep"}}),
    ("POST", "/v1/rows/r/query", {"sql": "select * from r where n = $1", "parameters": "deep"}),
    ("POST", "/v1/rows/r/changes", {"changes": "deep"}),
    ("POST", "/v1/rows/r/changes", {"changes": [{"kind": "insert", "rows": [{"n": "deep"}]}]}),
    ("PUT", "/v1/rows/r2", {"columns": [{"name": "n", "type": "INTEGER", "default": "deep"}]}),
    (
        "POST",
        "/v1/rows",
        {"name": "r2", "columns": [{"name": "n", "type": "INTEGER", "default": "deep"}]},
    ),
    ("POST", "/v1/jobs", {"kind": "query", "request": {"statement": "select $1", "parameters": "deep"}}),
    ("POST", "/v1/jobs", {"kind": "query", "request": {"table": "t", "where": {"key": "deep"}}}),
    ("POST", "/v1/jobs", {"kind": "deep", "request": "deep"}),
]


@pytest.mark.slow
def test_a_deeply_nested_body_is_refused(http: httpx.Client) -> None:
    for (method, path, place), depth in product(NESTED, (150, DEEP, 900, 5_000)):
        body = json.dumps(place).replace('"deep"', "[" * depth + "1" + "]" * depth)
        answer = http.request(method, path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 404, 405), (depth, answer.text[:300])
        assert len(answer.json()["detail"]) < 700


@pytest.mark.slow
def test_a_statement_that_cannot_be_parsed_starts_no_job(http: httpx.Client, instance: Instance) -> None:
    before = instance.jobs.list()  # on a slow machine, the list may contain a long ingest
    for kind, request in [
        ("query", {"statement": "selct 1"}),
        ("query", {"statement": "drop table t"}),
        ("row_query", {"table": "r", "sql": "select from where"}),
        ("row_query", {"table": "r"}),
    ]:
        refused(http.post("/v1/jobs", json={"kind": kind, "request": request}), 400, "invalid-query")
    assert instance.jobs.list() == before


UNANSWERABLE: list[tuple[str, dict[str, Any]]] = [
    ("query", {"statement": "select * from none"}),
    ("query", {"statement": "select nope from t"}),
    ("query", {"statement": "select * from t where nope = 1"}),
    ("query", {"statement": "select * from t", "as_of": "2001-01-01T00:00:00Z"}),
    ("query", {"statement": "select * from t", "as_of": "no such cut"}),
    ("query", {"statement": "select $1 + key from t"}),
    ("query", {"table": "t", "where": {"nope": 1}}),
    ("query", {"table": "t", "where": {"key": "text"}}),
    ("query", {"table": "t", "columns": ["nope"]}),
    ("query", {"table": "t", "as_of": "2001-01-01T00:00:00Z"}),
    ("row_query", {"table": "r", "sql": "select nope from r"}),
    ("row_query", {"table": "r", "sql": "selct 1"}),
    ("row_query", {"table": "r", "sql": "select * from other"}),
    ("row_query", {"table": "r", "sql": "select * from r where n = $1"}),
]


@pytest.mark.slow
def test_a_query_that_cannot_be_answered_starts_no_job(http: httpx.Client) -> None:
    def jobs() -> list[Any]:
        found = http.get("/v1/jobs").json()["jobs"]
        # ingests are reported a moment after they end
        return [one for one in found if not one["kind"].startswith("round:")]

    before = jobs()
    for kind, request in UNANSWERABLE:
        answer = http.post("/v1/jobs", json={"kind": kind, "request": request})
        assert answer.status_code in (400, 404), (request, answer.text)
    assert jobs() == before


@pytest.mark.slow
def test_the_error_of_a_failed_job_begins_with_its_class(http: httpx.Client, instance: Instance) -> None:
    for kind, request in [
        ("query", {"statement": "select 1 + 'a'::integer"}),
        ("row_query", {"table": "r", "sql": "select nope from r"}),
    ]:
        job = instance.jobs.start(kind, request)
        until(lambda: instance.jobs.status(job).has_ended)  # noqa: B023
        assert str(instance.jobs.status(job).error).startswith("InvalidQuery: ")


@pytest.mark.slow
def test_a_statement_is_parsed_in_the_process_that_runs_statements(instance: Instance) -> None:
    """A statement may be hostile, so a separate process parses it."""
    with (
        serving(instance, job_threads=1, sql_workers=1) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        body = {"kind": "query", "request": {"statement": "selct 1"}}
        until(lambda: http.post("/v1/sql", json={"statement": "select 1"}).status_code == 200)
        refused(http.post("/v1/jobs", json=body), 400, "invalid-query")
        ended(http, "query", statement="select 1")


@pytest.mark.slow
def test_a_part_of_an_answer_is_fetched_by_a_range(http: httpx.Client) -> None:
    path = f"{ended(http, 'query', statement='select * from t')}/answer"
    whole = http.get(path)
    tag, size = whole.headers["etag"], len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes"
    for range_, start, end in [
        ("0-3", 0, 4),
        ("4-", 4, size),
        ("-4", size - 4, size),
        (f"1-{size + 9}", 1, size),
    ]:
        part = http.get(path, headers={"range": f"bytes={range_}", "if-range": tag})
        assert (part.status_code, part.content) == (206, whole.content[start:end])
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert part.headers["etag"] == tag
    for range_, tags in [("bytes=0-3", '"other"'), ("bytes=0-1,3-4", tag), ("rows=1-2", tag)]:
        headers = {"range": range_, "if-range": tags}
        assert http.get(path, headers=headers).content == whole.content
    behind = http.get(path, headers={"range": f"bytes={size}-"})
    refused(behind, 416, "range-not-satisfiable")
    assert behind.headers["content-range"] == f"bytes */{size}"
    for tags in (tag, f'"other", W/{tag}', "*"):
        same = http.get(path, headers={"if-none-match": tags})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    assert http.get(path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.slow
def test_a_plan_contains_no_path_of_the_service(http: httpx.Client, instance: Instance) -> None:
    folder = instance.objects.url.removeprefix("file://")
    for how in ("analyze", "(analyze, format json)", "(analyze, format html)", ""):
        for select in ("select * from t", "select * from t a join t b on a.key = b.key + 1"):
            answer = http.post("/v1/sql", json={"statement": f"explain {how} {select}"})
            assert answer.status_code in (200, 400), answer.text
            shown = answer.text.replace("│", "").replace(" ", "").replace("\\n", "")
            assert "parquet," not in shown and "/data/" not in shown, answer.text
            assert folder not in answer.text
    refused(http.post("/v1/sql", json={"statement": "select filename from t"}), 400, "invalid-query")


def test_a_result_contains_no_path_of_the_service(instance: Instance) -> None:
    path = instance.objects.url.removeprefix("file://")
    found = {"errors": [f"file '{path}/data/x.parquet' is missing"], "n": 1, "none": None}
    shown = without_paths(found, hiding(instance.objects.url))
    assert shown == {"errors": ["file 'data/x.parquet' is missing"], "n": 1, "none": None}


@pytest.mark.slow
def test_lists_are_divided_into_pages(http: httpx.Client, instance: Instance) -> None:
    """Each page names the beginning of the next page, and all pages together are the whole list."""

    def pages(path: str, name: str, cursor: str = "after") -> list[list[Any]]:
        found, following = [], ""
        while following is not None:
            page = http.get(path, params={"limit": 2, **({cursor: following} if following else {})}).json()
            found.append(page[name])
            following = page["next"]
        return found

    for name in ("s", "u"):
        instance.create_row_table(name, [dm.Column("n", "INTEGER")])
    for number in range(3):
        instance.row_table("r").change([dm.Insert([{"n": number}])])
    for path, length in (("/v1/tables", 4), ("/v1/rows", 3)):
        found = pages(path, "tables")
        assert [one for page in found for one in page] == http.get(path).json()["tables"]
        assert max(map(len, found)) == 2 and sum(map(len, found)) == length
    versions = [
        one["last_version"] for page in pages("/v1/rows/r/history", "changes", "before") for one in page
    ]
    assert versions == [3, 2, 1]
    for _ in range(2):
        ended(http, "query", statement="select 1")
    instance._tables.reports.close()  # so that no thread records the fixture's ingest between two lists
    waiting = [instance.jobs.start("nothing", None) for _ in range(3)]
    listed = [job["job_id"] for page in pages("/v1/jobs", "jobs") for job in page]
    assert listed == [job["job_id"] for job in http.get("/v1/jobs").json()["jobs"]]
    assert listed[:3] == waiting[::-1] and len(listed) == len(set(listed)) >= 5
    first = instance.jobs.list(limit=4)
    assert [job.job_id for job in [*first, *instance.jobs.list(after=first[-1])]] == listed
    for wrong in ("x", "_2026-01-01T00:00:00_00", "__"):
        refused(http.get("/v1/jobs", params={"after": wrong}), 400, "invalid-input")


@pytest.mark.slow
def test_an_error_carries_its_data(http: httpx.Client, instance: Instance) -> None:
    """A program can read the rows in conflict from the data, without parsing the message."""
    rows = instance.row_table("r")
    rows.change([dm.Insert([{"n": 1}, {"n": 2}])])
    rows.change([dm.Update([{"ROW_ID": 2, "ROW_VERSION": 1, "n": 3}])])
    late = [{"update": [{"ROW_ID": row_id, "ROW_VERSION": 1, "n": 4} for row_id in (1, 2)]}]
    path = ended(http, "row_change", table="r", changes=late)
    problem = http.get(f"{path}/result")
    assert "RowConflict" in refused(problem, 409, "job-failed")
    assert (problem.json()["table"], problem.json()["rows"]) == ("r", [[2, 1, 2]])
    with connect(str(http.base_url)) as client, pytest.raises(dm.RowConflict) as conflict:
        client.row_table("r").change([dm.Remove([(2, 1)])])
    assert (conflict.value.table, conflict.value.rows) == ("r", [(2, 1, 2)])
    failed = ended(http, "row_change", table="r", changes=[{"remove": [[9, 9]]}])
    assert "rows" not in http.get(f"{failed}/result").json()
