"""Row tables over HTTP: the client's calls, CSV uploads and downloads, tokens, and jobs that start once."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.client.rows import RemoteRowTable
from dormouse.errors import (
    InstanceError,
    InvalidColumn,
    InvalidData,
    InvalidInput,
    InvalidPage,
    InvalidQuery,
    InvalidRow,
    JobForbidden,
    NotARowTable,
    RowConflict,
    RowNotFound,
    SnapshotExists,
    SnapshotNotFound,
    TableAlreadyExists,
    TableNotFound,
)
from tests.serving import eventually, http_get, http_post, metric, serving
from tests.standard import OF_K
from tests.support.api import Instance
from tests.support.verbs import rows as row_verbs
from tests.working import until

COLUMNS = [
    dm.Column("name", "STRING", size_max=100),
    dm.Column("n", "INTEGER", default=7),
    dm.Column("x", "DOUBLE"),
    dm.Column("data", "JSON"),
]
ALL = "select * from samples order by n"


@pytest.fixture
def url(instance: Instance) -> Iterator[str]:
    with serving(instance, job_threads=2, shutdown_seconds_max=10) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with connect(url) as found:
        yield found


@pytest.fixture
def rows(client: Client) -> RemoteRowTable:
    return client.create_row_table("samples", COLUMNS)


def test_a_table_is_made_changed_queried_and_described(client: Client, rows: RemoteRowTable) -> None:
    done = rows.change([dm.Insert([{"name": "a", "x": math.nan, "data": [1]}, {"name": "b", "n": 2}])])
    assert (done.row_ids, dict(done.changed)["inserted"]) == ([1, 2], 2)
    rows.change([dm.Patch([{"ROW_ID": 2, "ROW_VERSION": 1, "n": 3}]), dm.AddColumn(dm.Column("c", "DATE"))])
    text = "select * from samples where n < $least order by n desc"
    page = rows.query(text, parameters={"least": 8}, wait_seconds=60)
    assert math.isnan(page.rows[0][2])
    assert [(row[0], row[1], row[3]) for row in page.rows] == [("a", 7, [1]), ("b", 3, None)]
    assert (page.count, page.row_ids, page.row_versions) == (2, [1, 2], [1, 2])
    assert rows.row(2, 1) == {"ROW_ID": 2, "ROW_VERSION": 1, "name": "b", "n": 2, "x": None, "data": None}
    assert math.isnan(rows.row(1)["x"])
    assert [column.name for column in rows.columns()] == ["name", "n", "x", "data", "c"]
    assert [column.name for column in rows.columns(1)] == ["name", "n", "x", "data"]
    assert [(one.first_version, one.inserted, one.updated) for one in rows.history()] == [
        (2, 0, 1),
        (1, 2, 0),
    ]
    assert [one.name for one in client.row_tables()] == ["samples"]


@pytest.mark.slow
def test_a_dry_run_changes_nothing_and_a_change_is_made_once(rows: RemoteRowTable) -> None:
    insert = [dm.Insert([{"name": "a"}])]
    assert rows.change(insert, dry_run=True).changed["inserted"] == 1
    assert rows.version() == 0
    first = rows.change(insert, change_id="one")
    assert rows.change(insert, change_id="one") == first
    assert rows.version() == 1


@pytest.mark.slow
def test_rows_are_found_by_columns(rows: RemoteRowTable) -> None:
    rows.change([dm.Insert([{"name": "a", "n": 1}, {"name": "b", "n": 2}])])
    done = rows.upsert([{"name": "a", "n": 1}, {"name": "b", "n": 5}, {"name": "c"}], on=["name"])
    assert dict(done.changed) == {"inserted": 1, "updated": 1, "deleted": 0, "unchanged": 1}


@pytest.mark.slow
def test_rows_are_counted_at_the_version_of_their_page(rows: RemoteRowTable) -> None:
    rows.change([dm.Insert([{"name": "a"}, {"name": "b"}])])
    pages = [rows.query(ALL, size, wait_seconds=60) for size in (None, 1)]
    pages.append(rows.query(page=pages[1].next_page))
    rows.change([dm.Insert([{"name": "c"}])])
    assert [page.count for page in pages] == [2, 2, 2]


@pytest.mark.slow
def test_snapshots(rows: RemoteRowTable) -> None:
    rows.change([dm.Insert([{"name": "a"}])])
    assert rows.snapshot("v1").version == 1
    rows.change([dm.Remove([(1, 1)])])
    assert rows.query("select name from samples", snapshot="v1").rows == [("a",)]
    assert [one.name for one in rows.snapshots()] == ["v1"]
    with pytest.raises(SnapshotExists):
        rows.snapshot("v1")
    rows.drop_snapshot("v1")
    with pytest.raises(SnapshotNotFound):
        rows.drop_snapshot("v1")


@pytest.mark.slow
def test_download_edit_upload(rows: RemoteRowTable, tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("name\tn\n" + "".join(f'"row\n{n}"\t{n}\n' for n in range(30_000)), "utf-8")
    assert rows.preview_csv(path).row_count == 30_000
    assert rows.upload_csv(path, dry_run=True).changed["inserted"] == 30_000
    done = rows.upload_csv(path)
    assert (len(done.row_ids), list(done.versions)) == (30_000, [1, 2])
    assert rows.download_csv(path) == 30_000
    text = path.read_text("utf-8").replace('1\t1\t"row\n0"\t0', '1\t1\t"edited"\t0')
    path.write_text(text, "utf-8")
    assert rows.upload_csv(path).changed["inserted"] == 0
    text = "select name from samples where n = $n"
    assert rows.download_csv(path, text, parameters={"n": 5}, header=False) == 1
    assert rows.download_csv(path, text, parameters={"n": 0}) == 1
    assert path.read_text("utf-8") == '"ROW_ID"\t"ROW_VERSION"\t"name"\n1\t3\t"edited"\n'
    assert [one.name for one in tmp_path.glob(".*")] == []


@pytest.mark.slow
def test_a_file_that_is_sent_again_with_its_id_changes_once(rows: RemoteRowTable, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("name\na\n", "utf-8")
    first = rows.upload_csv(path, change_id="one")
    assert rows.upload_csv(path, change_id="one") == first
    assert (rows.version(), first.row_ids) == (1, [1])


@pytest.mark.slow
def test_a_sent_file_is_deleted_when_it_was_loaded(
    rows: RemoteRowTable, instance: Instance, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("name\na\n", "utf-8")
    rows.upload_csv(path)
    path.write_text("nme\na\n", "utf-8")
    with pytest.raises(InvalidData):
        rows.upload_csv(path)
    assert list(instance.objects.list("answers/")) == []


@pytest.mark.slow
def test_errors_have_their_class_and_their_message(
    client: Client, rows: RemoteRowTable, instance: Instance, tmp_path: Path
) -> None:
    rows.change([dm.Insert([{"name": "a"}])])
    rows.change([dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "n": 8}])])
    with pytest.raises(RowConflict, match=r"row 1 \(sent 1, now 2\)"):
        rows.change([dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "n": 9}])])
    with pytest.raises(InvalidRow, match=r"row 1, column 'n' .INTEGER.: 'x' is not a whole number"):
        rows.change([dm.Insert([{"n": "x"}])])
    path = tmp_path / "rows.csv"
    path.write_text("n,name\n1,a\n2\n", "utf-8")
    with pytest.raises(InvalidData) as caught:
        rows.upload_csv(path)
    assert str(caught.value) == (
        "the file, line 3: the file ends in the middle of it: it has 1 cell, not 2 as the others"
    )
    with pytest.raises(InvalidData, match=r"^the file, line 3: "):
        rows.preview_csv(path)
    with pytest.raises(InvalidInput, match="separator must be one ASCII character"):
        rows.upload_csv(path, separator="::")
    with pytest.raises(InvalidInput, match=r"cannot read .*none\.csv"):
        rows.upload_csv(tmp_path / "none.csv")
    with pytest.raises(RowNotFound):
        rows.row(17)
    with pytest.raises(TableNotFound):
        client.row_table("none")
    with pytest.raises(TableAlreadyExists):
        client.create_row_table("samples", COLUMNS)
    with pytest.raises(InvalidColumn, match="there is no column 'z'"):
        rows.change([dm.DropColumn("z")])
    with pytest.raises(InvalidInput, match="load_csv is not taken here: upload the file"):
        rows.change([dm.LoadCsv("/etc/passwd")])
    with pytest.raises(InvalidQuery):
        rows.query("drop table samples")
    instance.create_table("plain", OF_K)
    with pytest.raises(NotARowTable):
        client.row_table("plain")


@pytest.mark.slow
def test_tokens_of_pages(client: Client, rows: RemoteRowTable) -> None:
    """Later pages show the version of the first page. A changed token, or another table's token, is
    refused.
    """
    rows.change([dm.Insert([{"name": f"row {n}", "n": n} for n in range(25)])])
    first = rows.query(ALL, 10, wait_seconds=60)
    rows.change([dm.Insert([{"n": -1}]), dm.Remove([(20, 1)])])
    pages = [first]
    while pages[-1].next_page:
        pages.append(rows.query(page=pages[-1].next_page))
    assert [row[1] for page in pages for row in page.rows] == list(range(25))
    assert {page.version for page in pages} == {1}
    token = str(first.next_page)
    other = client.create_row_table("other", COLUMNS)
    for table, wrong in (
        (rows, token[:-2] + ("AA" if token[-2:] != "AA" else "BB")),
        (rows, token[:10] + ("x" if token[10] != "x" else "y") + token[11:]),
        (rows, "x" * 100),
        (rows, token + "é"),
        (other, token),
    ):
        with pytest.raises(InvalidPage):
            table.query(page=wrong)


@pytest.mark.slow
def test_changes_wait_for_other_changes_and_may_be_cancelled(
    client: Client, rows: RemoteRowTable, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_verbs, "_LOCK_SECONDS", 0.05)
    change = {"table": "samples", "changes": [{"insert": [{"name": "a"}]}]}
    with instance.row_table("samples").locks.write():
        ids = [client.jobs.start("row_change", change) for _ in range(2)]
        for one in ids:
            eventually(lambda one=one: "is changing it" in str(client.jobs.status(one).message))  # type: ignore[misc]
        client.jobs.cancel(ids[0])
        eventually(lambda: client.jobs.status(ids[0]).has_ended)
    eventually(lambda: client.jobs.status(ids[1]).has_ended)
    assert [client.jobs.status(one).state for one in ids] == ["CANCELLED", "COMPLETE"]
    assert rows.version() == 1


@pytest.mark.slow
def test_the_same_query_as_a_job_is_the_same_job(client: Client, rows: RemoteRowTable) -> None:
    rows.change([dm.Insert([{"n": 1}])])
    asked = {"table": "samples", "sql": ALL}
    job_id = start(client, asked)
    until(lambda: client.jobs.status(job_id).has_ended)
    assert client.jobs.result(job_id)["rows"] == [[None, 1, None, None]]
    assert start(client, asked) == job_id
    assert start(client, asked | {"page_rows": 5}) != job_id
    other = start(client, asked | {"sql": "select n from samples where n = $1", "parameters": [1]})
    until(lambda: client.jobs.status(other).has_ended)
    assert client.jobs.result(other)["rows"] == [[1]]
    rows.change([dm.Insert([{"n": 2}])])
    again = start(client, asked)
    assert again != job_id
    until(lambda: client.jobs.status(again).has_ended)
    assert len(client.jobs.result(again)["rows"]) == 2


def start(client: Client, request: dict[str, Any]) -> str:
    body = {"kind": "row_query", "request": request}
    return str(client._http.json("POST", "/v1/jobs", body)["job_id"])


def test_a_body_that_breaks_off_starts_nothing(
    url: str, rows: RemoteRowTable, instance: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    parts = urlsplit(url)
    head = (
        f"POST /v1/rows/samples/csv HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: text/csv\r\n"
        "Content-Length: 1000\r\n\r\nname\na\n"
    )
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head.encode())
    eventually(lambda: metric(url, "dormouse_http_requests_total", method="POST", status="400") == 1)
    assert "a request failed" not in caplog.text
    assert rows.version() == 0
    assert list(instance.objects.list("answers/")) == []
    assert [job.kind for job in instance.jobs.list()] == ["row_create"]


def test_invalid_bodies_are_refused(instance: Instance, tmp_path: Path) -> None:
    instance.create_row_table("samples", COLUMNS)
    with serving(instance, job_threads=1, upload_bytes_max=100, shutdown_seconds_max=10) as url:
        where = f"{url}/v1/rows/samples/csv"

        def send(content: bytes, **headers: str) -> httpx.Response:
            return http_post(where, content=content, headers=headers)

        assert send(b"{}", **{"content-type": "application/json"}).status_code == 415
        assert send(b"name\n", **{"content-type": "text/csv", "content-encoding": "gzip"}).status_code == 415
        assert send(b"x" * 101, **{"content-type": "text/csv"}).status_code == 413
        chunked = http_post(where, content=iter([b"x" * 60] * 2), headers={"content-type": "text/csv"})
        assert (chunked.status_code, "100 bytes" in chunked.json()["detail"]) == (413, True)
        assert send(b"name\n\xff\n", **{"content-type": "text/csv"}).status_code == 202
        assert (
            http_post(f"{url}/v1/rows/none/csv", content=b"a\n", headers={"content-type": "text/csv"})
            .json()["type"]
            .endswith("table-not-found")
        )


def put_file(url: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return http_post(f"{url}/v1/rows/samples/files?name=a.bin", content=b"bytes", headers=named)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content_type": "text/plain"},
        {"content_type": "multipart/form-data; boundary=a"},
        {"content_type": "application/octet-stream", "content_encoding": "gzip"},
    ],
)
def test_a_file_of_another_media_type_is_not_put(
    url: str, rows: RemoteRowTable, instance: Instance, headers: dict[str, str]
) -> None:
    """Any web page in a browser can send requests with the media types of forms."""
    refused = put_file(url, **headers)
    assert (refused.status_code, refused.json()["type"]) == (415, "urn:dormouse:unsupported-media-type")
    assert list(instance.objects.list("row_files/")) == []
    assert put_file(url, content_type="application/octet-stream").status_code == 201
    assert len(list(instance.objects.list("row_files/"))) == 1


@pytest.mark.slow
def test_without_a_token_pages_of_other_sites_cannot_upload(
    url: str, rows: RemoteRowTable, instance: Instance
) -> None:
    port = urlsplit(url).port
    for foreign in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"http://127.0.0.1:{port}0"},
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ):
        refused = put_file(url, content_type="application/octet-stream", **foreign)
        assert (refused.status_code, refused.json()["type"]) == (403, "urn:dormouse:cross-site-request")
        assert "another site" in refused.json()["detail"]
    assert list(instance.objects.list("row_files/")) == []
    for own in ({"origin": url}, {"origin": "null", "sec_fetch_site": "same-origin"}):
        assert put_file(url, content_type="application/octet-stream", **own).status_code == 201
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert http_get(f"{url}/docs", headers=linked).status_code == 200
    assert http_get(f"{url}/v1/rows", headers={"origin": "https://evil.example"}).status_code == 403


def test_with_a_token_pages_of_other_sites_may_send_requests(instance: Instance) -> None:
    instance.create_row_table("samples", COLUMNS)
    with serving(instance, token="s3cret-token") as url:  # noqa: S106
        asked = {"authorization": "Bearer s3cret-token", "origin": "https://apps.example"}
        assert http_get(f"{url}/v1/rows", headers=asked).status_code == 200


@pytest.mark.slow
def test_tokens_grant_their_rights_only(instance: Instance, tmp_path: Path) -> None:
    rows = instance.create_row_table("samples", COLUMNS)
    tokens = tmp_path / "tokens"
    tokens.write_text("reader row_query READER-0123456789abcdef\neditor * EDITOR-0123456789abcdef\n")
    tokens.chmod(0o600)
    with serving(instance, job_threads=1, job_tokens_file=tokens, shutdown_seconds_max=10) as url:
        with connect(url, "EDITOR-0123456789abcdef") as editor:
            editor.row_table("samples").change([dm.Insert([{"name": "a"}])])
        assert rows.history()[0].changed_by == "editor"
        path = tmp_path / "rows.csv"
        path.write_text("name\nb\n")
        with connect(url, "READER-0123456789abcdef") as reader:
            table = reader.row_table("samples")
            assert table.query(ALL, wait_seconds=60).count == 1
            for forbidden in (lambda: table.upload_csv(path), lambda: table.change([dm.Insert([{}])])):
                with pytest.raises((JobForbidden, InstanceError), match="reader"):
                    forbidden()
        with connect(url, "WRONG-0123456789abcdef") as stranger, pytest.raises(InstanceError, match="token"):
            stranger.row_table("samples")


def test_a_service_without_jobs_can_read(instance: Instance) -> None:
    rows = instance.create_row_table("samples", COLUMNS)
    rows.change([dm.Insert([{"name": "a"}])])
    assert rows.query(ALL, wait_seconds=60).count == 1
    with serving(instance) as url, connect(url) as client:
        assert client.row_table("samples").query(ALL).rows[0][0] == "a"
        sent = http_post(f"{url}/v1/rows/samples/csv", content=b"a", headers={"content-type": "text/csv"})
        assert sent.status_code == 405


@pytest.mark.slow
def test_the_openapi_document_has_all_routes(url: str) -> None:
    found = http_get(f"{url}/openapi.json").json()["paths"]
    assert {path for path in found if path.startswith("/v1/rows")} == {
        "/v1/rows",
        "/v1/rows/preview",
        "/v1/rows/{table}",
        "/v1/rows/{table}/csv",
        "/v1/rows/{table}/rows",
        "/v1/rows/{table}/files",
        "/v1/rows/{table}/history",
        "/v1/rows/{table}/query",
        "/v1/rows/{table}/rows/{row_id}",
        "/v1/rows/{table}/rows/{row_id}/files/{column}",
    }
    sent = found["/v1/rows/{table}/csv"]["post"]
    assert list(sent["requestBody"]["content"]) == ["text/csv"]
    assert {"202", "401", "403", "413"} <= sent["responses"].keys()
