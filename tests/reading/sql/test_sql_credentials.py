"""Temporary credentials that expire while a statement reads S3: the statement is repeated with new ones."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dormouse.objects import s3
from dormouse.reading.sql.engine import Engine
from dormouse.reading.sql.results import ReadFailed
from tests.support.objects import open_store
from tests.support.reading import Interruption

FILES = 5


class Bucket(ThreadingHTTPServer):
    """A fake S3 server of a folder's objects, which accepts only requests with the current key."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.folder = folder
        self.key = "first"
        self.keys_used: set[str] = set()
        self.ends_at = "never"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if name == self.server.ends_at:
            self.server.key, self.server.ends_at = "second", "never"
        found = re.search(r"Credential=(\w+)/", self.headers.get("Authorization", ""))
        if found is None or found[1] != self.server.key:
            self._send(403, b"", {})
            return
        self.server.keys_used.add(found[1])
        whole = (self.server.folder / name).read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None:
            self._send(200, whole if with_body else b"", {"Content-Length": str(len(whole))})
            return
        first, last = int(part[1]), min(int(part[2]), len(whole) - 1)
        self._send(206, whole[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(whole)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"x"', **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    for number in range(FILES):
        pq.write_table(pa.table({"k": range(1_000)}), tmp_path / f"{number}.parquet")
    with Bucket(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def engine(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Returns an engine with the credentials that the bucket currently accepts."""
    monkeypatch.setattr(
        s3,
        "s3_options",
        lambda _: {
            "access_key_id": bucket.key,
            "secret_access_key": "secret",
            "region": "us-east-1",
            "endpoint": bucket.url,
        },
    )
    engine = Engine(open_store("s3://bucket/lake", endpoint=bucket.url, region="us-east-1"))
    yield engine
    engine.close()


def count(engine: Engine) -> int:
    names = ", ".join(f"'s3://bucket/lake/{number}.parquet'" for number in range(FILES))
    session = engine.session(Interruption())
    [batch] = session.rows({"t": f"FROM read_parquet([{names}])"}, "SELECT sum(k)::BIGINT FROM t", []).batches
    session.close()
    [[answer]] = batch.to_pydict().values()
    return int(answer)


@pytest.mark.slow
def test_a_statement_outlives_its_credentials(engine: Engine, bucket: Bucket) -> None:
    bucket.ends_at = f"{FILES - 1}.parquet"
    assert count(engine) == FILES * sum(range(1_000))
    assert bucket.keys_used == {"first", "second"}


@pytest.mark.slow
def test_the_next_statement_has_new_credentials(engine: Engine, bucket: Bucket) -> None:
    assert count(engine) == FILES * sum(range(1_000))
    bucket.key = "second"
    assert count(engine) == FILES * sum(range(1_000))


@pytest.mark.slow
def test_credentials_that_are_refused_are_an_error(
    engine: Engine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.ends_at = f"{FILES - 1}.parquet"
    monkeypatch.setattr(Engine, "renew", lambda _: False)
    with pytest.raises(ReadFailed, match="403"):
        count(engine)
