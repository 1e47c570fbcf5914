"""The commands `dormouse erase` and `dormouse erasures`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import dormouse as dm
from dormouse.cli.program import whole

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(dsn: str, tmp_path: Path) -> Run:
    objects = f"file://{tmp_path}/objects"
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table(
            "customers", dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("email", dm.STRING)])
        )
        table.ingest(pa.table({"k": [1, 2, 3], "email": ["a@x.org", "b@x.org", "a@x.org"]}))

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(whole(), [*words, "--dsn", dsn, "--objects", objects])
        return done.exit_code, done.output.strip()

    return run


def test_erase_reports_the_erased_rows(run: Run) -> None:
    where = ["customers", "--where", "email=a@x.org"]
    code, output = run("erase", *where, "--dry-run")
    assert code == 0
    what = "the rows of table customers with email=a@x.org"
    found = "2 rows in 1 file of 1 file that may contain such rows, in the table and its history"
    assert output == f"would erase {what}: {found}"
    code, output = run("erase", *where)
    assert code == 2
    assert f"--yes is needed to erase {what}" in output
    assert run("erase", "customers", "--yes")[1].endswith(
        "give --where to choose the rows to erase, or --all for all of them"
    )
    assert run("erasures", "customers") == (0, "nothing of table customers was erased")
    code, output = run("erase", *where, "--yes", "--json")
    proof = json.loads(output)
    assert code == 0
    assert (proof["finished"], proof["rows"], proof["files"], proof["deletion_id"]) == (True, 2, 1, 1)
    assert json.loads(run("erasures", "customers", "--json")[1]) == [proof]
    assert run("erasures", "customers")[1].startswith("erased deletion 1 of ")
    code, output = run("erase", "customers", "--all", "--yes")
    assert "found and deleted 1 row in 1 file" in output
    assert json.loads(run("query", "customers", "--json")[1]) == []


@pytest.mark.slow
def test_an_open_write_attempt_ends_an_erase_with_an_error(run: Run, dsn: str, tmp_path: Path) -> None:
    with dm.connect(dsn, f"file://{tmp_path}/objects") as instance:
        context = instance.table("customers").context
        attempt = context.attempts.begin(context.table)
    code, output = run("erase", "customers", "--all", "--yes", "--wait-seconds", "0")
    assert code == 1
    assert output.startswith("erasure not finished: all rows of table customers (deletion 1")
    assert f"may still contain rows:\n  attempt {attempt.attempt_id} of a writer" in output
    code, output = run("erase", "customers", "--all", "--yes", "--abandon-writers")
    assert code == 0
    assert output.startswith("erased all rows of table customers (deletion 2")


@pytest.mark.objects
@pytest.mark.slow
def test_backups_with_the_erased_rows_are_named(tmp_path: Path) -> None:
    """The named backups are those that the instance recorded, those in given places, and metadata backups."""
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table(
            "t", dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("who", dm.LONG)])
        )
        table.ingest(pa.table({"k": [1, 2], "who": [1, 2]}))
        first = instance.backup(tmp_path / "backups")
        moved = instance.backup(tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / "elsewhere")
        instance.maintain(once=True)
        report = table.erase({"who": 1}, wait_seconds=0.0, backups=[str(tmp_path / "elsewhere")])
        after = instance.backup(tmp_path / "backups")
        again = table.erase({"who": 2}, wait_seconds=0.0)
        last = table.erase({"who": 3}, wait_seconds=0.0)
    place = f"file://{tmp_path}"
    assert report.is_finished
    assert report.backups[0] == f"{place}/backups/{first.name}"
    assert report.backups[1].startswith(f"{place}/other/{moved.name} (could not be checked: ")
    assert report.backups[2] == f"{place}/elsewhere/{moved.name}"
    assert [name.endswith("(keys of files, and rows of inlined files)") for name in report.backups[3:]] == [
        True
    ]
    assert f"{place}/backups/{after.name}" in again.backups
    assert f"{place}/backups/{first.name}" in again.backups, (
        "the row is in a file that the table no longer uses"
    )
    assert f"{place}/backups/{after.name}" not in report.backups
    assert not any(name.startswith(f"{place}/backups/") for name in last.backups), (
        "these backups have no such row"
    )
