"""Full leaves that cannot be divided because all rows have one key, and the messages about them."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.cli import main
from dormouse.client import connect
from tests.serving import serving
from tests.standard import OF_KEYS
from tests.support.api import Instance, Table

PROPERTIES = dm.TableProperties(split_threshold_rows=10, split_min_rows=2)
LINE = "is full and cannot be divided: all its rows have one key"


@pytest.fixture
def table(instance: Instance) -> Table:
    return instance.create_table("t", OF_KEYS, properties=PROPERTIES)


def fill(table: Table, *keys: int) -> None:
    table.ingest(pa.table({"key": list(keys)}))


@pytest.mark.slow
def test_status_names_one_key_leaves_while_they_are_full(instance: Instance, table: Table) -> None:
    fill(table, *[7] * 9)
    table.split()
    assert table.status().one_key_partitions == ()
    fill(table, 7)
    assert table.split().one_key_partitions == ("root",)
    assert table.split().one_key_partitions == ()  # the leaf is examined again only after a change
    assert table.status().one_key_partitions == ("root",)
    with serving(instance, job_threads=0, shutdown_seconds_max=10) as url, connect(url) as client:
        assert client.table("t").status() == table.status()
    table.delete({"key": 7})
    table.compact(full=True)
    assert table.status().one_key_partitions == ()
    fill(table, *[8] * 10)
    table.split()
    fill(table, *[8] * 10, 9)
    assert table.status().one_key_partitions == ("root",)
    assert len(table.split().partitions_split) == 1
    left, right = table.partitions.leaves()
    assert table.status().one_key_partitions == ()
    assert table.split().one_key_partitions == (left.partition_id,)
    assert table.status().one_key_partitions == (left.partition_id,)
    assert right.partition_id not in table.status().one_key_partitions


@pytest.mark.slow
def test_maintenance_reports_each_one_key_leaf_once(instance: Instance, table: Table) -> None:
    fill(table, *[7] * 10)
    lines: list[str] = []
    done = instance.maintain(once=True, tell=lines.append)
    assert (done.failed, done.one_key_partitions, lines) == (0, ["t: root"], [f"t: partition root {LINE}"])
    again = instance.maintain(once=True, tell=lines.append)
    assert (again.one_key_partitions, len(lines)) == ([], 1)


@pytest.mark.slow
def test_the_commands_show_one_key_leaves(
    instance: Instance,
    table: Table,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: str) -> tuple[str, str]:
        where = ["--dsn", dsn, "--objects", instance.objects.url]
        monkeypatch.setattr("sys.argv", ["dormouse", *arguments, *where])
        capsys.readouterr()
        assert main() == 0
        out, err = capsys.readouterr()
        return out, err

    fill(table, *[7] * 10)
    assert run("split", "t")[0].endswith(f"\npartition root {LINE}\n")
    shown = run("status")[0]
    assert shown.count(f"\nt: partition root {LINE}\n") == shown.count(LINE) == 1
    assert json.loads(run("status", "t", "--json")[0])[0]["one_key_partitions"] == ["root"]
    other = instance.create_table("u", table.schema, properties=PROPERTIES)
    fill(other, *[7] * 10)
    out, err = run("maintain", "--once")
    assert f"u: partition root {LINE}" in err and LINE not in out
