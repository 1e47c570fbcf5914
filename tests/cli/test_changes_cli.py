"""The commands for changes, acknowledgements, consumers and retention, locally and over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from histories import age
from serving import metric, serving

import dormouse as dm
from dormouse.cli import output
from dormouse.client import connect
from dormouse.errors import InvalidCut
from tests.standard import OF_KEYS
from tests.support.api import Table
from tests.support.state import record_cut

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
Cli = Callable[..., tuple[int, str, str]]
Shell = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def table(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    objects = f"file://{tmp_path}/objects"
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", objects)
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", OF_KEYS)
        record_cut(table.context, "start")
        table.consumer("etl")
        table.ingest(pa.table({"key": [1, 2]}))
        yield table


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", line.replace("dormouse", DORMOUSE)]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    return run


def behind(table: Table) -> int | None:
    return table.consumers()[0].rows_behind


def test_changes_as_lines_csv_and_parquet(table: Table, cli: Cli, tmp_path: Path) -> None:
    lines = '{"key":1,"_change":"insert"}\n{"key":2,"_change":"insert"}\n'
    assert cli("changes", "t", "--after", "start")[1] == lines
    assert cli("changes", "t", "--after", "beginning")[1] == lines
    assert json.loads(cli("changes", "t", "--after", "start", "--json")[1])[1]["key"] == 2
    assert cli("changes", "t", "--after", "start", "--till", "start")[1] == ""
    text = cli("changes", "t", "--after", "start", "--format", "csv", "--columns", "key")[1]
    assert text == '"key","_change"\n1,"insert"\n2,"insert"\n'
    assert cli("changes", "t", "--after", "start", "--format", "parquet", "-o", "new.parquet")[0] == 0
    assert pq.read_table(tmp_path / "new.parquet")["key"].to_pylist() == [1, 2]
    assert behind(table) == 2


@pytest.mark.slow
def test_a_consumer_is_acknowledged_only_after_all_rows_are_written(
    table: Table, shell: Shell, tmp_path: Path
) -> None:
    for where, left in ((">/dev/full", 2), ("| exec 0<&-", 2), ("-o new.json", 0)):
        shell(f"dormouse changes t --consumer etl {where}")
        assert behind(table) == left, where
    assert (tmp_path / "new.json").read_text().count("insert") == 2
    assert shell("dormouse changes t --consumer etl").stdout == ""


@pytest.mark.slow
def test_a_pipe_closed_early_acknowledges_nothing(table: Table, shell: Shell) -> None:
    table.ingest(pa.table({"key": list(range(50_000))}))
    assert shell("dormouse changes t --consumer etl | head -1").stdout == '{"key":0,"_change":"insert"}\n'
    assert behind(table) == 50_002


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "give --after, or --consumer NAME to continue where that consumer stopped"),
        ("--after start --consumer etl", "give --after, or --consumer NAME"),
        ("--consumer etl --till start", "leave --till out: a consumer always reads up to now"),
        (
            "--after start --till beginning",
            "--till cannot be the beginning, before which there are no changes",
        ),
        (
            "--after 0001-01-01",
            "the time 0001-01-01 cannot be converted from this machine's time zone: add its offset",
        ),
        ("--after 0001-01-01T00:00+01:00", "is in no year from 1 to 9999 in UTC"),
        ("--after start --from start", "--from needs --consumer NAME"),
        ("--after never", "no cut 'never'; its named cuts are 'start'"),
        ("--after 2999-01-01", "is in the future"),
    ],
)
def test_mistakes_are_one_line_errors(table: Table, cli: Cli, options: str, message: str) -> None:
    code, _, err = cli("changes", "t", *options.split())
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.slow
def test_history_of_consumers_and_retention(table: Table, shell: Shell) -> None:
    [consumer] = json.loads(shell("dormouse history consumers t --json").stdout)
    assert (consumer["name"], consumer["rows_behind"], consumer["is_expired"]) == ("etl", 2, False)
    assert "etl" in shell("dormouse history consumers t").stdout
    assert "consumer 'etl' keeps the history" in shell("dormouse status").stdout
    done = shell("dormouse history retain t --for 7d --dry-run")
    assert done.stdout == "no part of the history of t is beyond the limits\n"
    done = shell("dormouse history retain t --bytes 0")
    assert done.stdout.startswith("the history of t begins at 20"), done.stderr
    assert shell("dormouse history truncate t start").stdout == "the history of t already began at start\n"
    done = shell("dormouse history retain t --seconds 5")
    assert "shorter than the gc_delay_seconds" in done.stderr
    assert shell("dormouse history drop-consumer t etl").returncode == 0
    assert shell("dormouse history consumers t").stdout == "table t has no consumers\n"


@pytest.mark.slow
def test_a_cut_is_recorded_read_listed_and_dropped(table: Table, cli: Cli) -> None:
    assert cli("history", "cut", "t", "release-4")[1].startswith(
        "recorded the cut release-4 of table t at 20"
    )
    code, out, err = cli("history", "cut", "t", "release-4")
    assert (code, out) == (2, "")
    assert "has a cut 'release-4' already" in err
    assert json.loads(cli("history", "cut", "t", "--json")[1])["name"] is None
    table.ingest(pa.table({"key": [3]}))
    assert cli("query", "t", "--as-of", "release-4", "-f", "csv")[1] == '"key"\n1\n2\n'
    cuts = json.loads(cli("history", "cuts", "t", "--json")[1])
    assert [cut["name"] for cut in cuts] == [None, "release-4", "start"]
    assert "release-4" in cli("history", "cuts", "t")[1]
    done = cli("history", "drop-cut", "t", "release-4")
    assert done == (0, "cut release-4 of table t is dropped\n", "")
    code, out, err = cli("history", "drop-cut", "t", "release-4")
    assert (code, out) == (2, "")
    assert "no cut 'release-4'; its named cuts are 'start'" in err


def test_a_new_consumer_begins_at_the_given_moment(table: Table, cli: Cli) -> None:
    assert cli("changes", "t", "--consumer", "new", "--from", "start", "--columns", "key")[1].count("\n") == 2
    assert cli("changes", "t", "--consumer", "new", "--from", "start")[1] == ""
    code, _, err = cli("changes", "t", "--consumer", "other", "--from", "never")
    assert (code, "no cut 'never'" in err) == (2, True)
    assert [one.name for one in table.consumers()] == ["etl", "new"]


def test_progress_counts_the_rows_written_to_a_file(
    table: Table, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = []

    @contextmanager
    def progress(what: str, *, unit: str) -> Iterator[Callable[[int, int | None], None]]:
        yield lambda done, total: reported.append((what, done, total, unit))

    monkeypatch.setattr(output, "progress", progress)
    assert cli("changes", "t", "--after", "start", "-o", "new.json")[1] == "wrote 2 rows to new.json\n"
    assert reported[-1] == ("write new.json", 2, None, "rows")


@pytest.mark.slow
def test_changes_over_http(table: Table, dsn: str, tmp_path: Path) -> None:
    with (
        dm.connect(dsn, f"file://{tmp_path}/objects", read_only=True) as instance,
        serving(instance) as url,
        connect(url) as client,
    ):
        remote = client.table("t")
        found = remote.changes("start").read_all()
        assert found.to_pylist() == [{"key": key, "_change": "insert"} for key in (1, 2)]
        assert remote.changes(None, columns=["key"]).read_all().num_rows == 2
        assert remote.changes("start", "start").read_all().num_rows == 0
        with pytest.raises(InvalidCut, match="no cut 'never'"):
            remote.changes("never")
        status = remote.status()
        assert [one.name for one in status.consumers] == ["etl"]
        assert [str(holder) for holder in status.history_held_by] == ["cut 'start'", "consumer 'etl'"]
        assert replace(status, consumers=()) == replace(table.status(), consumers=())


@pytest.mark.slow
def test_a_metric_of_the_service_shows_how_far_consumers_are_behind(
    table: Table, dsn: str, tmp_path: Path
) -> None:
    behind = partial(metric, name="dormouse_consumer_rows_behind", table="t", consumer="etl")
    with dm.connect(dsn, f"file://{tmp_path}/objects") as instance, serving(instance) as url:
        assert behind(url) == 0
        with connect(url) as client:
            assert client.table("t").status().consumers[0].rows_behind == 2
            assert behind(url) == 2
            table.drop_consumer("etl")
            client.table("t").status()
            assert behind(url) == 0


@pytest.mark.slow
def test_a_dry_run_of_a_truncation_lists_what_would_be_dropped(
    table: Table, cli: Cli, dsn: str, tmp_path: Path
) -> None:
    """Garbage collection prints later which epochs it forgot."""
    with dm.connect(dsn, f"file://{tmp_path}/objects") as instance:
        empty = instance.create_table("u", table.schema)
        empty.history.record_cut()
        empty.partitions.split("root", 2)
        for _ in range(2):
            whole = empty.partitions.merge([leaf.partition_id for leaf in empty.partitions.leaves()])
            empty.partitions.split(whole.partition_id, 2)
        empty.history.record_cut("release-4")
        before = list(empty.history.cuts())
        would = "the history of u would begin at release-4; 1 cut would be dropped, 5 epochs can be deleted\n"
        assert cli("history", "truncate", "u", "release-4", "--dry-run")[1] == would
        plan = json.loads(cli("history", "truncate", "u", "release-4", "--dry-run", "--json")[1])
        assert (plan["truncated"], plan["dry_run"], plan["epochs"]) == (True, True, 5)
        assert plan["at"]["name"] == "release-4"
        assert (list(empty.history.cuts()), empty.history.first_epoch()) == (before, 0)
        done = "the history of u begins at release-4; 1 cut dropped, 5 epochs can be deleted\n"
        assert cli("history", "truncate", "u", "release-4")[1] == done
        code, _, err = cli("history", "epochs", "u", "--to", "1970-01-02T00:00")
        assert (code, err.count("\n")) == (1, 1)
        assert "is not kept: the history of table 'u' is truncated at epoch 5" in err
        assert [one["epoch"] for one in json.loads(cli("history", "epochs", "u", "--json")[1])] == [5]
        assert "older epoch" not in cli("history", "show", "u")[1]
        age(empty.context)
        assert "; forgot 5 old epochs, 6 partitions" in cli("gc", "u")[1]
        assert cli("check")[0] == 0
