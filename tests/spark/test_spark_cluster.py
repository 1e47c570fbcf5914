"""Work on a Spark cluster, with PostgreSQL over TCP and objects in S3, which survives killed processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from tests.held import WRITES
from tests.on_cluster import ROWS
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
def of_two(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), environment) as started:
        yield started


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    options = {**on_tcp(), "fsync": "off", "autovacuum": "off"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), options=options) as server:
        with psycopg.connect(server.dsn) as conn:
            conn.execute("alter role current_user password 'test'")
        yield Databases(make_conninfo(server.dsn, host="127.0.0.1", password="test"))  # noqa: S106


@pytest.fixture
def url(s3_endpoint: str) -> str:
    return f"s3://dormouse-test/{uuid4().hex}/lake"


@pytest.fixture
def instance(dsn: str, url: str, s3_options: dict[str, str]) -> Iterator[Instance]:
    with dm.connect(dsn, url, **s3_options) as opened:
        yield opened


@pytest.fixture
def table(instance: Instance) -> Table:
    return instance.create_table("t", SCHEMA, split_points=POINTS, properties=PROPERTIES)


def loaded(table: Table, times: int = 1) -> Table:
    for _ in range(times):
        table.ingest(pa.table({"k": range(ROWS), "v": [2 * k for k in range(ROWS)]}))
    return table


Run = Callable[..., Any]


@pytest.fixture
def run(
    environment: dict[str, str], of_two: Cluster, dsn: str, url: str, tmp_path: Path, instance: Instance
) -> Run:
    """Returns a function that does one kind of work on the cluster, and kills a process of the
    waiting task.
    """
    named = {"DORMOUSE_DSN": dsn, "DORMOUSE_OBJECTS": url, "DORMOUSE_SPARK_MASTER": of_two.url}
    ours = {**os.environ, **environment, **named, "SPARK_LOCAL_IP": "127.0.0.1"}

    def done(work: str, victim: Victim, *, reads: bool = False) -> Any:
        held = tmp_path / "held"
        given = [] if reads else {WRITES: str(held)}
        command = [
            sys.executable,
            "-m",
            "tests.on_cluster",
            work,
            str(tmp_path),
            *([str(held)] if reads else []),
        ]
        with subprocess.Popen(command, env=ours | dict(given), cwd=ROOT) as driver:
            try:

                def is_held() -> str | None:
                    assert driver.poll() is None, of_two.logs()
                    return held.read_text() if held.exists() and held.read_text() else None

                of_two.kill(int(wait_for(is_held)), victim)
                assert driver.wait(SECONDS_MAX) == 0, of_two.logs()
            finally:
                driver.kill()
        return json.loads((tmp_path / "found.json").read_text())

    return done


def check_nothing_else(instance: Instance) -> None:
    """Checks that the files of dead processes are deleted, and that all other files are complete."""
    live: set[str] = set()
    for table in instance.tables():
        for _ in range(2):
            assert table.collect_garbage().failed == ()
        live |= {reference.filename for reference in table.files.file_references()}
    left = {name.removesuffix(".sketches") for name, _ in instance._objects.list("data")}
    assert left == live
    assert instance.check(deep=True).problems == ()


@pytest.mark.parametrize("victim", ["executor", "worker"])
def test_an_ingest_survives_a_killed_process(
    table: Table, run: Run, instance: Instance, victim: Victim
) -> None:
    assert run("ingest", victim) == ROWS
    assert keys(table) == list(range(ROWS))
    check_nothing_else(instance)


def test_a_compaction_survives_a_killed_process(table: Table, run: Run, instance: Instance) -> None:
    loaded(table, 2)
    assert run("compaction", "worker") == [len(POINTS) + 1, 0]
    assert keys(table) == sorted([*range(ROWS)] * 2)
    assert len(list(table.files.file_references())) == len(POINTS) + 1
    check_nothing_else(instance)


def test_a_read_survives_a_killed_process(table: Table, run: Run) -> None:
    expected = keys(loaded(table))
    assert run("source", "worker", reads=True) == expected


@pytest.mark.parametrize("reads", [True, False])
def test_a_write_survives_a_killed_process(table: Table, run: Run, instance: Instance, reads: bool) -> None:
    """Kills a task in the middle of its rows, or after it has written them."""
    run("sink", "worker", reads=reads)
    assert keys(table) == list(range(ROWS))
    if not reads:
        check_nothing_else(instance)


@pytest.mark.parametrize("reads", [True, False])
def test_streams_survive_a_killed_process(table: Table, run: Run, instance: Instance, reads: bool) -> None:
    loaded(table)
    copied = instance.create_table("copied", CHANGES, split_points=POINTS, properties=PROPERTIES)
    run("streams", "worker", reads=reads)
    assert keys(copied) == list(range(ROWS))
    if not reads:
        check_nothing_else(instance)


@pytest.fixture
def driver_error(environment: dict[str, str], dsn: str, tmp_path: Path) -> Callable[..., str]:
    """Returns a function that runs work that fails, with changed variables, and returns the driver's
    error.
    """

    def said(work: str, master: str, **other: str) -> str:
        named = {"DORMOUSE_DSN": dsn, "DORMOUSE_SPARK_MASTER": master, "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.on_cluster", work, str(tmp_path)],
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
        line = driver_error("sink", of_one.url, DORMOUSE_OBJECTS=url).splitlines()
    assert any(f"in {url}: there are no AWS credentials: set AWS_" in one for one in line), line
    assert keys(table) == []
    check_nothing_else(instance)


def test_a_missing_bucket_is_reported_in_one_line(table: Table, driver_error: Callable[..., str]) -> None:
    line = driver_error("ingest", "local[1]", DORMOUSE_OBJECTS="s3://not-there/lake").splitlines()[-1]
    assert line.startswith("dormouse.errors.ObjectStoreError: Cannot read object 'instance.json' in s3://not")
    assert line.endswith(": The specified bucket does not exist")
