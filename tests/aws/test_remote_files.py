"""Files by URL and from standard input: copied, read and deleted. No redirect leads to a private address."""

from __future__ import annotations

import io
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dormouse.errors import InvalidData
from dormouse.sources import data_files
from dormouse.sources.data_files import _is_name_of_data, find_files, staged
from tests.standard import OF_K
from tests.support.objects import open_store
from tests.support.writing import open_source

SCHEMA = OF_K


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/gone"):
            self.send_error(404)
            return
        self.send_response(200)
        if self.path.startswith("/cut"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ff\r\nk\n1\n")
            return
        self.send_header("Content-Length", str(6 if self.path.startswith("/x") else 60))
        self.end_headers()
        self.wfile.write(b"k\n1\n2\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_a_url_is_read_as_a_file_and_its_copy_deleted(server: str) -> None:
    [file] = find_files(f"{server}/x.csv?raw=1")
    assert (file.kind, file.path.read_bytes()) == ("csv", b"k\n1\n2\n")
    path = file.path
    del file
    assert not path.exists()
    assert [len(b) for b in open_source(f"{server}/x.csv", SCHEMA).batches] == [2]


def test_a_missing_or_truncated_url_is_one_line(server: str) -> None:
    for name, message in (
        ("gone.csv", "the server says 404"),
        ("short.csv", "cannot be read|broke off"),
        ("cut.csv", "cannot be read"),
        ("a b.csv", "cannot be read"),
    ):
        with pytest.raises(InvalidData, match=rf"{name}.*({message})"):
            find_files(f"{server}/{name}")
    with pytest.raises(InvalidData, match="a URL of https:// or s3://"):
        find_files("ftp://example.com/x.csv")


def test_a_redirect_from_a_public_to_a_private_address_is_refused() -> None:
    request = urllib.request.Request("https://203.0.113.7.example/x.csv")
    handler = data_files._Redirects()
    for target, message in (
        ("https://10.0.0.1/x.csv", "private address"),
        ("http://a.example/x", "not https"),
    ):
        with pytest.raises(InvalidData, match=message):
            handler.redirect_request(request, io.BytesIO(), 302, "", {}, target)


def test_the_format_of_standard_input_follows_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, rows in (
        (b"k\n1\n2\n", 2),
        (b'{"k": 1}\n', 1),
        (b'{\n  "k": 1\n}\n{\n  "k": 2\n}\n', 2),
        (b'\xef\xbb\xbf{ "k": 1}\n', 1),
        (b'[\n  {\n    "k": 1\n  }\n]\n', 1),
    ):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        assert sum(batch.num_rows for batch in open_source("-", SCHEMA).batches) == rows


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/data/", ["archive/part-0", "part-0"]),
        ("s3://b/data", ["archive/part-0", "part-0"]),
        ("s3://b/data/*.parquet", ["part-0"]),
        ("s3://b/data/*/*.parquet", ["archive/part-0"]),
        ("s3://b/data/**/*.parquet", ["archive/part-0", "part-0"]),
        ("s3://b/*/part-?.parquet", ["part-0"]),
    ],
)
def test_patterns_match_objects_as_they_match_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, expected: list[str]
) -> None:
    store = open_store(tmp_path.as_uri())
    for name in ("part-0", "archive/part-0", "_temporary/0/task/part-0", ".hidden/part-0", "_started"):
        store.put(f"data/{name}.parquet", b"")
    monkeypatch.setattr(data_files, "open_store", lambda url: store)
    found = [name for _, name, _ in staged(url, _is_name_of_data)]
    assert found == [f"s3://b/data/{name}.parquet" for name in expected]
