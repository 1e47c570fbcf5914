"""The code blocks of the documentation. Each runs unchanged, or gives the reason why it is skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import boto3
import duckdb
import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict

import dormouse as dm
from tests.pages import DRAWN, PAGES, READ, ROOT, Page, blocks, free_port, parsed_blocks
from tests.support.embedded import EmbeddedPostgres

SPARK = {"docs/how-to/spark.md", "docs/how-to/back-up.md", "docs/how-to/query-service.md"}
FAST = {"README.md", "docs/quickstart.md"}
NOT_RUN = 45
"""The number of blocks marked `<!-- skip: next "why" -->`. They need AWS or a program that tests do
not have.
"""

QUICK = {"fsync": "off", "full_page_writes": "off", "track_commit_timestamp": "on"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [
    pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) not in FAST))
    for page in PAGES
    if blocks(page)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields the folder where pages run. It has two instances with running servers, `lake` and
    `demo-lake`.
    """
    folder = tmp_path_factory.mktemp("pages")
    with dm.local(folder / "lake"):
        pass
    subprocess.run(["cp", "-a", folder / "lake", folder / "demo-lake"], check=True)
    with ExitStack() as running:
        for name in ("lake", "demo-lake"):
            running.enter_context(EmbeddedPostgres(folder / name, options=QUICK))
        load_demo(folder)
        yield folder


def load_demo(folder: Path) -> None:
    """Loads the flights of one January into the tables that `dormouse demo` would make."""
    from dormouse.demo.datasets import AIRLINES, FLIGHTS, Flights

    with dm.local(folder / "demo-lake") as instance, duckdb.connect() as db:
        Flights().prepare(db, folder, lambda _: None)
        for name, schema in (("flights", FLIGHTS), ("airlines", AIRLINES)):
            columns = ", ".join(schema.names)
            where = "where month = 1" if name == "flights" else ""
            rows = db.execute(f"select {columns} from {name} {where}").to_arrow_table()
            instance.create_table(name, schema).ingest(rows)


@pytest.fixture(scope="module")
def aws(aws_endpoint: str) -> dict[str, str]:
    """Returns the environment variables for a simulated AWS with the bucket that the pages name."""
    variables = {
        "AWS_ENDPOINT_URL": aws_endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    s3 = boto3.client("s3", endpoint_url=aws_endpoint, region_name="us-east-1", **keys)
    s3.create_bucket(Bucket="bucket")
    return variables


def start_again(instance: dm.Instance) -> Any:
    """Drops all tables and makes the README's table, with which the guides begin."""
    for table in instance.tables():
        instance.drop_table(table.name)
    # the page about the commit queue writes an object that becomes an orphan when its table is dropped
    shutil.rmtree("lake/objects/mine", ignore_errors=True)
    schema = dm.Schema(
        row_keys=[dm.Field("carrier", dm.STRING), dm.Field("flight", dm.LONG)],
        sort_keys=[dm.Field("time", dm.LONG)],
        values=[dm.Field("delay", dm.INT, nullable=True)],
    )
    table = instance.create_table("flights", schema)
    rows = {"carrier": ["AA", "UA", "UA"], "flight": [7, 15, 1545], "time": [3, 2, 1], "delay": [None, 4, 65]}
    table.ingest(pa.table(rows))
    return table


def psql(statement: str) -> None:
    """Runs a statement on the server of `lake`, as `psql` would."""
    with EmbeddedPostgres("lake") as server, psycopg.connect(server.dsn) as connection:
        connection.execute(statement).fetchall()


@pytest.mark.parametrize("path", WITH_CODE)
def test_the_code_of_a_page_runs(
    path: Path,
    folder: Path,
    aws: dict[str, str],
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # started before `chdir`: Spark finds modules that are not installed by the folder where it starts
    spark = request.getfixturevalue("spark") if name_of(path) in SPARK else None
    monkeypatch.chdir(folder)
    for left in folder.iterdir():
        if left.name not in {"lake", "demo-lake"}:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    port = str(free_port())
    places = {
        "127.0.0.1:8088": f"127.0.0.1:{port}",
        "/mnt/backups": str(folder / "mnt-backups"),
        "/srv/lake": str(folder / ("lake" if path.stem == "run-unattended" else "srv-lake")),
        'token="…"': 'token="any"',
        "--port 9000": f"--port {free_port()}",
        "postgresql://user@host/dormouse": f"postgresql:///?{urlencode(conninfo_to_dict(dsn))}",
    }
    programs = Path(sys.executable).parent
    variables = {
        **aws,
        "DORMOUSE_SERVICE_PORT": port,
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
    }
    with dm.local("lake") as instance:
        names = {"dm": dm, "instance": instance, "start_again": lambda: start_again(instance), "psql": psql}
        if name_of(path).startswith(("docs/how-to/", "docs/reference/", "docs/explanation/")):
            names["table"] = start_again(instance)
        if spark is not None:
            names["spark"] = spark
            # Spark's server stays in the folder where it was started
            places |= {one: str(folder / one) for one in ("./lake", "./checkpoint")}
        began = datetime.now(UTC) + timedelta(milliseconds=1)
        places |= {
            "2026-11-20 14:00": began.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f"),
            "2026-11-20T14:00:00Z": began.isoformat(),
            "datetime(2026, 11, 23, 9, tzinfo=UTC)": "datetime.now(UTC)",
        }
        Page(path, folder, variables, places).run(names)


def test_each_block_is_in_a_known_language_and_is_parsed() -> None:
    known = {"python", "sh", "sql", *READ, *DRAWN}
    found = {name_of(page): blocks(page) for page in PAGES}
    assert {
        name: languages - known for name, kinds in found.items() if (languages := set(kinds)) - known
    } == {}
    missed = {
        name_of(page): (count, parsed_blocks(page))
        for page in PAGES
        if (count := sum(n for kind, n in blocks(page).items() if kind not in DRAWN)) > parsed_blocks(page)
    }
    assert missed == {}


def test_the_number_of_skipped_blocks_does_not_grow() -> None:
    marked = {name_of(page): page.read_text("utf-8").count("<!-- skip: next") for page in PAGES}
    assert sum(marked.values()) == NOT_RUN, {name: count for name, count in marked.items() if count}
