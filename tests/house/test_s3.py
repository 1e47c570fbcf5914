"""An instance in S3 (moto) and a real PostgreSQL, end to end: all verbs, failures, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

import dormouse as dm
from dormouse.errors import DormouseError, NotAnInstance
from dormouse.objects import s3
from tests.standard import OF_NAMES
from tests.support.api import Instance

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
SCHEMA = OF_NAMES
PROPERTIES = dm.TableProperties(
    compaction_strategy="basic",
    compaction_batch_files=2,
    gc_delay_seconds=0,
    split_threshold_rows=1_000,
    split_min_rows=10,
)
Connect = Callable[..., Instance]


@pytest.fixture
def url(s3_endpoint: str) -> str:
    return f"s3://dormouse-test/{uuid4().hex}/lake"


@pytest.fixture
def connect(dsn: str, url: str, s3_options: dict[str, str]) -> Iterator[Connect]:
    """A function that connects to the test's instance; all connections are closed at the end."""
    opened: list[Instance] = []

    def connected(dsn: str = dsn, url: str = url, **options: str) -> Instance:
        opened.append(dm.connect(dsn, url, **{**s3_options, **options}))
        return opened[-1]

    yield connected
    for instance in opened:
        instance.close()


def rows(start: int, count: int) -> pa.Table:
    keys = list(range(start, start + count))
    return pa.table({"key": keys, "name": [f"n{key}" for key in keys]})


def s3_client(endpoint: str) -> Any:
    given = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, **given)


def objects(instance: Instance, prefix: str = "data") -> list[str]:
    return [name for name, _ in instance._objects.list(prefix)]


def keys(table: Any) -> list[int]:
    found: list[int] = table.query(columns=["key"]).read_all()["key"].to_pylist()
    return found


@pytest.mark.objects  # a job compacts all inlined files of a leaf
@pytest.mark.slow
def test_every_verb_works_on_s3(connect: Connect, tmp_path: Path, spark: object) -> None:
    instance = connect()
    table = instance.create_table("t", SCHEMA, split_points=[100_000], properties=PROPERTIES)
    assert table.ingest(rows(0, 600)).rows == 600
    pq.write_table(rows(600, 600), tmp_path / "more.parquet")
    assert table.ingest(tmp_path / "more.parquet").rows == 600
    assert table.ingest(tmp_path / "more.parquet", engine="spark", ingest_id="spark").rows == 600
    assert table.ingest(rows(0, 400), ingest_id="last").rows == 400
    assert not table.ingest(rows(0, 400), ingest_id="last").applied
    expected = sorted([*range(1_200), *range(600, 1_200), *range(400)])
    assert keys(table) == expected
    report = table.compact(engine="local")
    assert (report.jobs_run, report.given_up, keys(table)) == (2, 0, expected)
    report = table.compact(engine="spark")
    assert (report.jobs_run, report.given_up, keys(table)) == (1, 0, expected)
    assert len(table.split().partitions_split) == 1
    table.split()
    assert keys(table) == expected
    second = connect().table("t")
    assert second.query({"key": 700}).read_all().num_rows == 2
    assert instance.sql("select count(*) as n from t where key < 400").read_all()["n"].to_pylist() == [800]
    for _ in range(2):
        garbage = table.collect_garbage()
        assert garbage.failed == ()
    live = {reference.filename for reference in table.files.file_references()}
    assert {name.removesuffix(".sketches") for name in objects(instance)} == live
    assert keys(second) == expected
    instance.drop_table("t")
    assert objects(instance) == []
    with pytest.raises(dm.errors.TableNotFound):
        second.ingest(rows(0, 1))


@pytest.mark.slow
def test_a_database_and_a_bucket_of_different_instances_are_refused(
    connect: Connect, empty_dsn: str, url: str, tmp_path: Path
) -> None:
    connect()
    with pytest.raises(NotAnInstance, match=f"{url} belongs to instance"):
        connect(dsn=empty_dsn)


@pytest.mark.objects
@pytest.mark.slow
def test_a_bucket_deleted_during_an_ingest_is_one_clear_error_without_references(
    dsn: str, s3_endpoint: str, connect: Connect
) -> None:
    bucket = f"gone-{uuid4().hex[:8]}"
    client = s3_client(s3_endpoint)
    client.create_bucket(Bucket=bucket)
    instance = connect(url=f"s3://{bucket}/lake")
    table = instance.create_table("t", SCHEMA)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows(0, 10).to_batches()
        for found in client.list_objects_v2(Bucket=bucket)["Contents"]:
            client.delete_object(Bucket=bucket, Key=found["Key"])
        client.delete_bucket(Bucket=bucket)

    with pytest.raises(DormouseError, match=r"bucket") as raised:
        table.ingest(batches())
    assert "\n" not in str(raised.value)
    assert table.files.has_no_files()
    client.create_bucket(Bucket=bucket)
    assert table.ingest(rows(0, 10)).rows == 10


@pytest.mark.objects
@pytest.mark.slow
def test_an_endpoint_that_stops_during_an_ingest_is_one_clear_error_without_references(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dormouse.objects.s3.RETRIES_MAX", 1)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    s3_client(endpoint).create_bucket(Bucket="stops")
    table = connect(url="s3://stops/lake", endpoint=endpoint).create_table("t", SCHEMA)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows(0, 10).to_batches()
        server.stop()

    with pytest.raises(DormouseError) as raised:
        table.ingest(batches())
    assert "\n" not in str(raised.value)
    assert "s3://stops/lake" in str(raised.value)
    assert table.files.has_no_files()


@pytest.mark.slow
def test_the_command_line_uses_the_aws_variables(
    dsn: str, url: str, s3_endpoint: str, tmp_path: Path
) -> None:
    environment = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "PATH": "/usr/bin:/bin",
        "TMPDIR": str(tmp_path),
    }

    def run(*args: str) -> Any:
        command = [DORMOUSE, *args, "--dsn", dsn, "--objects", url, "--json"]
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    run("table", "create", "t", "--row-key", "key:long", "--value", "name:string")
    pq.write_table(rows(0, 10), tmp_path / "rows.parquet")
    assert run("ingest", "t", str(tmp_path / "rows.parquet"))["rows"] == 10
    assert run("sql", "select count(*) as n from t") in ([{"n": 10}], {"rows": [{"n": 10}]})


@pytest.mark.slow
def test_credentials_may_come_from_a_profile(
    dsn: str,
    url: str,
    s3_options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The profile works for obstore and DataFusion, neither of which reads profiles itself."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text("[lake]\naws_access_key_id = test\naws_secret_access_key = test\n")
    (tmp_path / "config").write_text("[profile lake]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    s3._session.cache_clear()
    options = {key: s3_options[key] for key in ("endpoint", "staging_dir")}
    try:
        with dm.connect(dsn, url, **options) as instance:
            table = instance.create_table("t", SCHEMA, properties=PROPERTIES)
            for start in (0, 10):
                table.ingest(rows(start, 10))
            assert table.compact().jobs_run == 1
            assert table.query().read_all().num_rows == 20
    finally:
        s3._session.cache_clear()
