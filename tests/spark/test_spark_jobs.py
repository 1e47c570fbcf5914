"""The program for spark-submit, run with the Spark session of the tests."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import dormouse as dm
from dormouse.datasource import job
from dormouse.errors import InvalidInput
from dormouse.verbs.rounds import CompactRequest
from tests.small_tables import keys
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance, Table

SCHEMA = OF_K_AND_NUMBERS
PROPERTIES = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def table(instance: Instance) -> Table:
    return instance.create_table("t", SCHEMA, split_points=[50], properties=PROPERTIES)


@pytest.fixture
def files(tmp_path: Path) -> str:
    pq.write_table(pa.table({"k": range(100), "v": range(100)}), tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


@pytest.fixture
def run(
    spark: SparkSession,
    instance: Instance,
    dsn: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Returns a function that runs the program, and returns its exit code and the printed JSON."""
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", instance._tables.objects.url)

    def done(*arguments: str) -> tuple[int, Any]:
        code = job.main(arguments)
        said = capsys.readouterr().out
        return code, json.loads(said) if said else None

    return done


def test_an_ingest_is_applied_once_and_compacted(table: Table, run: Run, files: str) -> None:
    code, report = run("ingest", "t", files, "--ingest-id", "monday")
    assert (code, report["rows"], report["applied"]) == (0, 100, True)
    assert run("ingest", "t", files, "--ingest-id", "monday")[1]["applied"] is False
    run("ingest", "t", files)
    code, report = run("compact", "t")
    assert (code, report["jobs_run"], report["given_up"]) == (0, 2, 0)
    assert keys(table) == sorted([*range(100)] * 2)


@pytest.mark.slow
def test_a_full_compaction_makes_each_leaf_one_file(table: Table, run: Run, files: str) -> None:
    for _ in range(2):
        run("ingest", "t", files)
    table.set_properties(compaction_batch_files=10)
    assert run("compact", "t")[1]["jobs_run"] == 0
    assert run("compact", "t", "--full")[1]["jobs_run"] == 2
    assert table.status().files == 2
    assert keys(table) == sorted([*range(100)] * 2)


@pytest.mark.slow
def test_points_divide_the_rows_evenly(run: Run, files: str) -> None:
    code, found = run("split-points", files, "--row-key", "k", "--leaves", "4")
    assert code == 0
    assert found["split_points"] == pytest.approx([25, 50, 75], abs=12)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ingest", "u", "{files}"], 1, "table 'u' does not exist"),
        (["ingest", "t", "{files}x"], 2, "rows.parquetx"),
        (["split-points", "{files}", "--row-key", "kk", "--leaves", "4"], 2, "kk"),
        (
            ["compact", "t", "--instance", "x", "--dsn", "y"],
            2,
            "give the option instance, or dsn and objects",
        ),
    ],
)
def test_a_failure_is_reported_in_one_line(
    table: Table,
    run: Run,
    files: str,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert run(*(one.format(files=files) for one in arguments)) == (code, None)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert message in line and "\n" not in line
    assert keys(table) == []


def test_spark_logs_no_dsn(spark: SparkSession) -> None:
    """The sessions are those of Dormouse and of spark-submit. A user's own pattern for redaction is kept."""
    name = "spark.sql.redaction.options.regex"
    assert spark.conf.get(name) == "(?i)url|dsn"
    try:
        for given, kept in (("(?i)url", "(?i)url|dsn"), ("(?i)url|dsn|key", "(?i)url|dsn|key")):
            spark.conf.set(name, given)
            assert job._session(Namespace(name="compact")).conf.get(name) == kept
    finally:
        spark.conf.set(name, "(?i)url|dsn")


def test_options_have_the_types_of_their_fields() -> None:
    class Probe(CompactRequest):
        rows_min: int = 3

    given = Namespace(full=True, rows_min="5")
    assert job._arguments(given, Probe) == {"full": True, "rows_min": 5}
    assert job._arguments(Namespace(full=False, rows_min=None), Probe) == {"full": False, "rows_min": 3}
    with pytest.raises(InvalidInput, match="rows_min"):
        job._arguments(Namespace(full=False, rows_min="many"), Probe)
