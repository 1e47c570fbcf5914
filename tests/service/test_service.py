"""The query service of a real instance. It answers like the Python API, and its errors name the mistake."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import httpx
import pyarrow as pa
import pytest
from trees import partitions_of

import dormouse as dm
from dormouse.model.file_reference import FileReference, FileWithReferences
from tests.serving import ARROW, CSV, JSON_LINES, SCHEMA, http_get, http_post, serving
from tests.support.model import json_value
from tests.support.reading import arrow_schema

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)


def row(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "carrier": rng.choice(["", "AA", "DL", "o'\"\\", "\x00", "é😀", "UA"]),
        "flight": rng.choice([-(2**63), 0, 2**53 + 1, 2**63 - 1]),
        "time": number,
        "delay": rng.choice([None, -0.5, math.nan, math.inf, -math.inf, 1e300]),
        "late": rng.choice([True, False]),
        "code": rng.choice([b"", b"\x00\xff", b"abc"]),
        "at": rng.choice([None, NOON]),
        "tags": rng.choice([None, [], ["x", None, 'a"b']]),
        "counts": rng.choice([None, [], [("k", 1), ("l", None)]]),
    }


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    rng = random.Random(3)
    table = module_instance.create_table("flights", SCHEMA, split_points=["B", "UA"])
    rows = [row(rng, number) for number in range(2_000)]
    table.ingest(pa.Table.from_pylist(rows, schema=arrow_schema(SCHEMA)))
    module_instance.create_table("empty", dm.Schema(row_keys=[dm.Field("key", dm.BYTES)]))
    return module_instance


@pytest.fixture(scope="module")
def url(instance: dm.Instance) -> Iterator[str]:
    with serving(instance) as url:
        yield url


def ask(url: str, accept: str = JSON_LINES, *, table: str = "flights", **body: Any) -> httpx.Response:
    found = http_post(f"{url}/v1/tables/{table}/query", json=body, headers={"accept": accept}, timeout=60)
    assert found.status_code == 200, found.text
    return found


def in_json(value: Any) -> Any:
    """Returns a value of a row in the form of JSON lines."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return [in_json(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.slow
def test_each_format_has_the_rows_of_the_table(url: str, instance: dm.Instance) -> None:
    expected = instance.table("flights").query().read_all()
    rows = [{name: in_json(value) for name, value in row.items()} for row in expected.to_pylist()]
    lines = ask(url)
    assert lines.headers["content-type"] == JSON_LINES
    assert [json.loads(line) for line in lines.text.split("\n")[:-1]] == rows
    arrow = pa.ipc.open_stream(ask(url, ARROW).content).read_all()
    assert arrow.schema.equals(expected.schema, check_metadata=True)
    assert repr(arrow.to_pylist()) == repr(expected.to_pylist())
    [names, *texts] = csv.reader(io.StringIO(ask(url, CSV).text, newline=""))
    assert (tuple(names), len(texts)) == (SCHEMA.names, expected.num_rows)
    column = {name: number for number, name in enumerate(names)}
    for text, row in zip(texts, rows, strict=True):
        assert text[column["carrier"]] == row["carrier"]
        assert int(text[column["flight"]]) == row["flight"]
        assert text[column["code"]] == row["code"]
        assert text[column["at"]] == (row["at"] or "")
        assert text[column["tags"]] == (
            "" if row["tags"] is None else json.dumps(row["tags"], separators=(",", ":"))
        )


@pytest.mark.parametrize("accept", [JSON_LINES, ARROW, CSV])
def test_an_answer_without_rows_has_its_columns(url: str, accept: str) -> None:
    found = ask(url, accept, table="empty").content
    if accept == ARROW:
        assert pa.ipc.open_stream(found).read_all().to_pydict() == {"key": []}
    else:
        assert found == (b"" if accept == JSON_LINES else b'"key"\n')


@pytest.mark.parametrize(
    ("where", "same"),
    [
        ({"carrier": "AA"}, {"carrier": "AA"}),
        ({"carrier": ["AA", "UA"]}, {"carrier": ["AA", "UA"]}),
        ({"carrier": {"min": "AA", "max": "UA"}}, {"carrier": dm.Range("AA", "UA")}),
        (
            {"carrier": {"min": "AA", "max": "UA", "min_inclusive": False, "max_inclusive": True}},
            {"carrier": dm.Range("AA", "UA", min_inclusive=False, max_inclusive=True)},
        ),
        ({"flight": 2**63 - 1}, {"flight": 2**63 - 1}),
        ({"flight": {"max": 0}}, {"flight": dm.Range(max=0)}),
        ({"carrier": "\x00"}, {"carrier": "\x00"}),
        ({"code": "AP8="}, {"code": b"\x00\xff"}),
        ({"at": "2024-01-01T12:00:00Z"}, {"at": NOON}),
        ({"at": "2024-01-01T13:00:00+01:00"}, {"at": NOON}),
        ({"at": ["2024-01-01T12:00:00", None]}, {"at": [NOON, None]}),
        ({"at": None}, {"at": None}),
        ({"delay": "NaN"}, {"delay": math.nan}),
        ({"delay": ["Infinity", -0.5]}, {"delay": [math.inf, -0.5]}),
        ({"late": True, "carrier": "AA"}, {"late": True, "carrier": "AA"}),
        (None, None),
    ],
)
def test_conditions_work_as_in_python(url: str, instance: dm.Instance, where: Any, same: Any) -> None:
    table = instance.table("flights")
    body = {"where": where, "columns": ["time", "carrier"], "limit": 1_500}
    expected = table.query(same, ["time", "carrier"], limit=1_500).read_all()
    assert expected.num_rows
    assert pa.ipc.open_stream(ask(url, ARROW, **body).content).read_all().equals(expected)
    planned = http_post(f"{url}/v1/tables/flights/plan", json={"where": where})
    assert planned.json() == asdict(table.explain(same))


@pytest.mark.parametrize(
    ("body", "kind", "word"),
    [
        ({"where": {"carier": "AA"}}, "invalid-query", "did you mean 'carrier'"),
        ({"where": {"flight": "1"}}, "invalid-query", "'flight'"),
        ({"where": {"flight": 1.5}}, "invalid-query", "'flight'"),
        ({"where": {"flight": True}}, "invalid-query", "'flight'"),
        ({"where": {"flight": 2**63}}, "invalid-query", "'flight'"),
        ({"where": {"flight": {"min": 5, "max": 1}}}, "invalid-range", "is empty"),
        ({"where": {"flight": {"min": 5, "maximum": 9}}}, "invalid-query", "'maximum'"),
        ({"where": {"flight": {}}}, "invalid-query", "min, max or both"),
        ({"where": {"flight": {"min": 1, "min_inclusive": 1}}}, "invalid-query", "true or false"),
        ({"where": {"code": "*"}}, "invalid-query", "base64"),
        ({"where": {"code": "é"}}, "invalid-query", "base64"),
        ({"where": {"code": 5}}, "invalid-query", "base64"),
        ({"where": {"at": "noon"}}, "invalid-query", "ISO 8601"),
        ({"where": {"at": 5}}, "invalid-query", "ISO 8601"),
        ({"where": {"delay": "many"}}, "invalid-query", "a number"),
        ({"where": {"delay": 10**400}}, "invalid-query", "a number"),
        ({"where": {"delay": True}}, "invalid-query", "a number"),
        ({"where": {"carrier": None}}, "invalid-query", "never null"),
        ({"where": {"carrier": [["AA"]]}}, "invalid-query", "'carrier'"),
        ({"where": {"tags": ["a"]}}, "invalid-query", "no order"),
        ({"where": {"x" * 100_000: 1}}, "invalid-query", "unknown column"),
        ({"where": ["AA"]}, "invalid-input", "body.where"),
        ({"columns": ["nix"]}, "invalid-query", "unknown column 'nix'"),
        ({"columns": []}, "invalid-query", "columns is empty"),
        ({"columns": "time"}, "invalid-input", "body.columns"),
        ({"columns": ["time", "time"]}, "invalid-query", "twice"),
        ({"limit": -1}, "invalid-input", "body.limit"),
        ({"limit": 1.5}, "invalid-input", "body.limit"),
        ({"limit": 2**63}, "invalid-input", "body.limit"),
        ({"order": "time"}, "invalid-input", "body.order"),
        ([], "invalid-input", "body"),
    ],
)
def test_an_invalid_query_is_one_clear_line(url: str, body: Any, kind: str, word: str) -> None:
    found = http_post(f"{url}/v1/tables/flights/query", json=body)
    problem = found.json()
    assert (found.status_code, problem["type"]) == (400, f"urn:dormouse:{kind}")
    assert word in problem["detail"]
    assert "\n" not in problem["detail"]
    assert len(found.content) < 10_000


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "body: Field required"),
        (b"{", "not valid JSON"),
        (b'{"limit": NaN}', "JSON has no NaN"),
        (b'{"parameters": [NaN]}', '{"double": "NaN"} as a parameter'),
        (b'{"limit": 1, "limit": 2}', "'limit' is named twice"),
        (b'{"where": {"carrier": "\\ud800"}}', "not valid Unicode"),
        (b'{"where": {"carrier": "\xff"}}', "not valid Unicode"),
        (b"[" * 500_000, "nested too deeply"),
        (b'{"limit": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_an_invalid_body_is_one_clear_line(url: str, content: bytes, word: str) -> None:
    headers = {"content-type": "application/json"}
    found = http_post(f"{url}/v1/tables/flights/query", content=content, headers=headers)
    assert (found.status_code, found.json()["type"]) == (400, "urn:dormouse:invalid-input")
    assert word in found.json()["detail"]


@pytest.mark.slow
def test_long_lists_are_answered(url: str) -> None:
    many = {"flight": list(range(100_000))}
    assert ask(url, where=many, limit=1).status_code == 200
    assert ask(url, where={"time": list(range(100_000))}, limit=1).text.count("\n") == 1


@pytest.mark.slow
def test_long_statements_are_answered_or_refused_within_the_time_limit(instance: dm.Instance) -> None:
    """DuckDB takes quadratic time to plan some statements, and cannot be interrupted meanwhile."""
    with serving(instance, sql_workers=1, seconds_max=3) as url:
        for more in ("+1" * 400_000, "(" * 500_000, " union all select 1" * 20_000, " and 1=1" * 50_000):
            found = http_post(f"{url}/v1/sql", json={"statement": f"select 1{more}"}, timeout=60)
            assert found.status_code in {200, 400, 504}, found.text
        assert http_post(f"{url}/v1/sql", json={"statement": "select 1"}, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/tables/nix", 404, "table-not-found"),
        ("GET", "/v1/tables/nix/partitions", 404, "table-not-found"),
        ("GET", "/v1/tables/%00", 404, "table-not-found"),
        ("GET", "/v1/tables/%ff%fe/files", 400, "invalid-input"),
        ("GET", "/v1/nix", 404, "not-found"),
        ("GET", "/../../etc/passwd", 404, "not-found"),
        ("DELETE", "/v1/tables/flights", 405, "method-not-allowed"),
        ("POST", "/health", 405, "method-not-allowed"),
        ("GET", "/v1/tables/flights/files?limit=0", 400, "invalid-input"),
        ("GET", "/v1/tables/flights/files?limit=99999999", 400, "invalid-input"),
        ("GET", "/v1/tables/flights?counts=perhaps", 400, "invalid-input"),
        ("POST", "/v1/sql", 415, "unsupported-media-type"),
    ],
)
def test_unknown_paths_and_parameters_are_problems(
    url: str, method: str, path: str, status: int, kind: str
) -> None:
    found = httpx.request(method, f"{url}{path}")
    assert (found.status_code, found.json()["type"]) == (status, f"urn:dormouse:{kind}")
    assert found.headers["content-type"] == "application/problem+json"


def test_head_of_health_has_no_body(url: str) -> None:
    head, get = httpx.head(f"{url}/health"), http_get(f"{url}/health")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_a_long_name_is_shortened_in_an_error(url: str) -> None:
    detail = http_get(f"{url}/v1/tables/{'x' * 1_000}").json()["detail"]
    assert "xxx…' does not exist" in detail
    assert len(detail) < 250


def test_an_unknown_format_is_refused(url: str) -> None:
    found = http_post(f"{url}/v1/sql", json={"statement": "select 1"}, headers={"accept": "image/png"})
    assert (found.status_code, found.json()["type"]) == (406, "urn:dormouse:not-acceptable")
    assert all(media_type in found.json()["detail"] for media_type in (ARROW, CSV, JSON_LINES))


def test_sql_and_its_plan(url: str, instance: dm.Instance) -> None:
    statement = "select carrier, count(*) as n from flights where carrier < 'B' group by carrier order by 1"
    found = http_post(f"{url}/v1/sql", json={"statement": statement})
    assert [json.loads(line) for line in found.text.splitlines()] == instance.sql(
        statement
    ).read_all().to_pylist()
    plans = http_post(f"{url}/v1/sql/plan", json={"statement": statement}).json()["tables"]
    assert plans == {name: asdict(plan) for name, plan in instance.explain_sql(statement).items()}
    for bad in ("drop table flights", "selec", "select * from nix", "select nix from flights", "\x00", ""):
        refused = http_post(f"{url}/v1/sql", json={"statement": bad})
        assert (refused.status_code, refused.json()["type"]) == (400, "urn:dormouse:invalid-query")


def test_tables_are_described(url: str, instance: dm.Instance) -> None:
    names = [table["name"] for table in http_get(f"{url}/v1/tables").json()["tables"]]
    assert names == ["empty", "flights"]
    found = http_get(f"{url}/v1/tables/flights").json()
    assert dm.Schema.from_json(found["schema"]) == SCHEMA
    assert dm.TableProperties(**found["properties"]) == instance.table("flights").properties
    assert "counts" not in found
    counted = http_get(f"{url}/v1/tables/flights?counts=true").json()["counts"]
    assert counted == json_value(instance.table("flights").status())


def paged(url: str, path: str, items: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = http_get(f"{url}/v1/tables/{path}", params={**query, **after}).json()
        assert len(page[items]) <= query["limit"]
        found += page[items]
        if page["next"] is None:
            return found
        after = {"after": page["next"]}


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_partitions_are_listed_in_pages(url: str, instance: dm.Instance, limit: int) -> None:
    tree = instance.table("flights").partitions.tree()
    found = paged(url, "flights/partitions", "partitions", limit=limit)
    assert [one["partition_id"] for one in found] == sorted(one.partition_id for one in partitions_of(tree))
    for one in found:
        same = tree[one["partition_id"]]
        assert (one["parent_id"], tuple(one["child_ids"]), one["is_leaf"]) == (
            same.parent_id, same.child_ids, same.is_leaf,
        )  # fmt: skip
        ends = one["region"].get("carrier", {"min": None, "max": None})
        assert (ends["min"], ends["max"]) == (
            same.region.range("carrier").min,
            same.region.range("carrier").max,
        )
    leaves = paged(url, "flights/partitions", "partitions", limit=limit, leaves=True)
    assert [one["partition_id"] for one in leaves] == sorted(one.partition_id for one in tree.leaves)


@pytest.mark.parametrize("layout", ["file_table", "salted_counts", "dummy_reference"])
def test_files_are_listed_in_pages(url: str, instance: dm.Instance, layout: str) -> None:
    name = f"files_{layout}"
    table = instance.create_table(name, dm.Schema(row_keys=[dm.Field("key", dm.BYTES)]), layout=layout)
    files = [
        FileWithReferences(
            filename=f"data/{n}.parquet",
            references=(FileReference(filename=f"data/{n}.parquet", partition_id="root", row_count=n),),
            byte_count=n,
            row_count=n,
            min_key=b"\x00\x01\x00\x00",
            max_key=None,
        )
        for n in range(7)
    ]
    table.files.add_files_with_references(files)
    for limit in (1, 3, 7, 100):
        found = paged(url, f"{name}/files", "files", limit=limit)
        assert sorted(one["filename"] for one in found) == sorted(file.filename for file in files)
    assert {(one["byte_count"], one["row_count"], one["unreferenced_at"]) for one in found} == {
        (n, n, None) for n in range(7)
    }
    assert http_get(f"{url}/v1/tables/{name}/files?after=%00").json() == {"files": [], "next": None}
    instance.drop_table(name)
