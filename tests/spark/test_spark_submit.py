"""The program for spark-submit, on one machine and on a standalone cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.datasource import job
from dormouse.spark.session import java_home
from tests.cluster import cluster
from tests.small_tables import keys
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPARK_SUBMIT = Path(sys.executable).with_name("spark-submit")
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
}
SECONDS_MAX = 600
SCHEMA = OF_K_AND_NUMBERS
PROPERTIES = dm.TableProperties(
    compaction_strategy="basic", compaction_batch_files=2, bulk_ingest_leaves_min=4
)
ROWS = 10_000


@pytest.fixture(params=["local", "standalone"])
def master(request: pytest.FixtureRequest, quick_java: None, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield "local[2]"
        return
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", {"PYTHONPATH": str(ROOT)}) as started:
        yield started.url


def test_rows_are_sampled_ingested_and_compacted(
    master: str, instance: Instance, dsn: str, tmp_path: Path
) -> None:
    table = instance.create_table("t", SCHEMA, properties=PROPERTIES)
    (tmp_path / "rows").mkdir()
    for number in range(2):
        part = range(number * ROWS // 2, (number + 1) * ROWS // 2)
        pq.write_table(pa.table({"k": part, "v": part}), tmp_path / "rows" / f"{number}.parquet")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAVA_HOME": str(java_home(os.environ)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "DORMOUSE_DSN": dsn,
        "DORMOUSE_OBJECTS": instance._tables.objects.url,
    }
    settings = [f"--conf={name}={value}" for name, value in SETTINGS.items()]

    def submitted(*arguments: str) -> Any:
        command = [SPARK_SUBMIT, "--master", master, *settings, job.__file__, *arguments]
        done = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        [found] = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(found)

    found = submitted("split-points", "rows", "--row-key", "k", "--leaves", "2")
    assert found["split_points"] == pytest.approx([ROWS // 2], abs=ROWS // 4)
    assert submitted("ingest", "t", "rows")["rows"] == ROWS
    table.ingest(pa.table({"k": range(ROWS), "v": range(ROWS)}))
    leaves = len(table.partitions.leaves())
    assert leaves == 4
    assert submitted("compact", "t")["jobs_run"] == leaves
    assert keys(table) == sorted([*range(ROWS)] * 2)
