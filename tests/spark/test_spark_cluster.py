"""Work on a Spark cluster, with PostgreSQL over TCP and objects in S3, which survives killed processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

import dormouse as dm
from tests.cluster import SECONDS_MAX, Cluster, Victim, cluster, wait_for
from tests.databases import Databases
from tests.embedded import on_tcp
from tests.held import WRITES, held_in
from tests.on_cluster import ROWS, Work, result_in
from tests.small_tables import keys
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance, Table
from tests.support.embedded import EmbeddedPostgres

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCHEMA = OF_K_AND_NUMBERS
CHANGES = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG), dm.Field("_change", dm.STRING)])
PROPERTIES = dm.TableProperties(
    compaction_strategy="basic", compaction_batch_files=2, gc_delay_seconds=0, attempt_expiry_seconds=0
)
POINTS = [ROWS // 4, ROWS // 2, 3 * ROWS // 4]


@pytest.fixture(scope="module")
def environment(s3_endpoint: str) -> dict[str, str]:
    """Returns the environment of drivers, workers and executors."""
    return {
        "PYTHONPATH": str(ROOT),
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }


@pytest.fixture(scope="module")
def of_two(
    environment: dict[str, str], quick_java: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), environment) as started:
        yield started


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    options = {**on_tcp(), "fsync": "off", "autovacuum": "off"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), options=options) as server:
        with psycopg.connect(server.dsn) as conn:
            conn.execute("alter role current_user password 'test'")
        yield Databases(make_conninfo(server.dsn, host="127.0.0.1", password="test"))  # noqa: S106


@pytest.fixture(scope="module")
def dsn(databases: Databases) -> Iterator[str]:
    with databases.lent() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def url(s3_endpoint: str) -> str:
    return f"s3://dormouse-test/{uuid4().hex}/lake"


@pytest.fixture(scope="module")
def instance(
    dsn: str, url: str, s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
    staging = str(tmp_path_factory.mktemp("staging"))
    with dm.connect(dsn, url, endpoint=s3_endpoint, staging_dir=staging, **keys) as opened:
        yield opened


@pytest.fixture
def table(instance: Instance) -> Table:
    name = f"t{len(instance.tables())}"
    return instance.create_table(name, SCHEMA, split_points=POINTS, properties=PROPERTIES)


def loaded(table: Table, times: int = 1) -> Table:
    for _ in range(times):
        table.ingest(pa.table({"k": range(ROWS), "v": [2 * k for k in range(ROWS)]}))
    return table


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of the file that makes the next write or read of a task hang."""
    return tmp_path_factory.mktemp("hanging") / "next"


@pytest.fixture(scope="module")
def driver(
    environment: dict[str, str], of_two: Cluster, dsn: str, url: str, hanging: Path, instance: Instance
) -> Iterator[subprocess.Popen[str]]:
    """Yields a driver on the cluster. It does the work of all tests, because its start takes longer."""
    named = {"DORMOUSE_DSN": dsn, "DORMOUSE_OBJECTS": url, "DORMOUSE_SPARK_MASTER": of_two.url}
    ours = {**os.environ, **environment, **named, "SPARK_LOCAL_IP": "127.0.0.1", WRITES: str(hanging)}
    command = [sys.executable, "-m", "tests.on_cluster"]
    with subprocess.Popen(command, env=ours, cwd=ROOT, stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


Run = Callable[..., Any]


@pytest.fixture
def run(of_two: Cluster, driver: subprocess.Popen[str], hanging: Path, table: Table, tmp_path: Path) -> Run:
    """Returns a function that does one kind of work on the cluster, and kills a process of the
    waiting task.
    """

    def text_of(path: Path) -> str | None:
        assert driver.poll() is None, of_two.logs()
        return path.read_text() or None if path.exists() else None

    def done(kind: str, victim: Victim, *, reads: bool = False) -> Any:
        held_in(hanging).unlink(missing_ok=True)
        hanging.touch()
        work = Work(kind, table.name, str(tmp_path), str(hanging) if reads else "")
        assert driver.stdin is not None
        print(json.dumps(asdict(work)), file=driver.stdin, flush=True)
        of_two.kill(int(wait_for(lambda: text_of(held_in(hanging)))), victim)
        return json.loads(wait_for(lambda: text_of(result_in(tmp_path))))

    return done


def check_nothing_else(instance: Instance, *tables: Table) -> None:
    """Checks that the files of dead processes are deleted, and that all other files are complete."""
    for table in tables:
        for _ in range(2):
            assert table.collect_garbage().failed == ()
        live = {reference.filename for reference in table.files.file_references()}
        objects = instance._objects.list(table.context.table.object_prefix)
        assert {name.removesuffix(".sketches") for name, _ in objects} == live
    assert instance.check(deep=True).problems == ()


@pytest.mark.parametrize("victim", ["executor", "worker"])
def test_an_ingest_survives_a_killed_process(
    table: Table, run: Run, instance: Instance, victim: Victim
) -> None:
    assert run("ingest", victim) == ROWS
    assert keys(table) == list(range(ROWS))
    check_nothing_else(instance, table)


def test_a_compaction_survives_a_killed_process(table: Table, run: Run, instance: Instance) -> None:
    loaded(table, 2)
    assert run("compaction", "worker") == [len(POINTS) + 1, 0]
    assert keys(table) == sorted([*range(ROWS)] * 2)
    assert len(list(table.files.file_references())) == len(POINTS) + 1
    check_nothing_else(instance, table)


def test_a_read_survives_a_killed_process(table: Table, run: Run) -> None:
    expected = keys(loaded(table))
    assert run("source", "worker", reads=True) == expected


@pytest.mark.parametrize("reads", [True, False])
def test_a_write_survives_a_killed_process(table: Table, run: Run, instance: Instance, reads: bool) -> None:
    """Kills a task in the middle of its rows, or after it has written them."""
    run("sink", "worker", reads=reads)
    assert keys(table) == list(range(ROWS))
    if not reads:
        check_nothing_else(instance, table)


@pytest.mark.parametrize("reads", [True, False])
def test_streams_survive_a_killed_process(table: Table, run: Run, instance: Instance, reads: bool) -> None:
    loaded(table)
    copied = instance.create_table(
        f"{table.name}_copied", CHANGES, split_points=POINTS, properties=PROPERTIES
    )
    run("streams", "worker", reads=reads)
    assert keys(copied) == list(range(ROWS))
    if not reads:
        check_nothing_else(instance, table, copied)


@pytest.fixture
def driver_error(environment: dict[str, str], dsn: str, tmp_path: Path) -> Callable[..., str]:
    """Returns a function that runs work that fails, with changed variables, and returns the driver's
    error.
    """

    def said(kind: str, table: str, master: str, **other: str) -> str:
        named = {"DORMOUSE_DSN": dsn, "DORMOUSE_SPARK_MASTER": master, "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.on_cluster"],
            input=json.dumps(asdict(Work(kind, table, str(tmp_path)))),
            env={**os.environ, **environment, **named, **other},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode != 0
        return done.stderr

    return said


def test_missing_credentials_of_workers_are_reported_in_one_line(
    table: Table,
    instance: Instance,
    environment: dict[str, str],
    driver_error: Callable[..., str],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the driver's environment has credentials."""
    keys_of_aws = {name for name in environment if name.endswith(("KEY", "KEY_ID"))}
    for name in keys_of_aws:
        monkeypatch.delenv(name, raising=False)
    without = {name: value for name, value in environment.items() if name not in keys_of_aws}
    nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
    (tmp_path / "workers").mkdir()
    with cluster(tmp_path / "workers", {**without, **nowhere}, 1) as of_one:
        given = {"DORMOUSE_OBJECTS": url, "TASK_FAILURES_MAX": "1"}
        line = driver_error("sink", table.name, of_one.url, **given).splitlines()
    assert any(f"in {url}: there are no AWS credentials: set AWS_" in one for one in line), line
    assert keys(table) == []
    check_nothing_else(instance, table)


def test_a_missing_bucket_is_reported_in_one_line(table: Table, driver_error: Callable[..., str]) -> None:
    line = driver_error(
        "ingest", table.name, "local[1]", DORMOUSE_OBJECTS="s3://not-there/lake"
    ).splitlines()[-1]
    assert line.startswith("dormouse.errors.ObjectStoreError: Cannot read object 'instance.json' in s3://not")
    assert line.endswith(": The specified bucket does not exist")
