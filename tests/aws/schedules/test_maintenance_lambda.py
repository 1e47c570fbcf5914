"""The maintenance lambda: it makes and drops days of the removal log, and lists tables to split."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.aws.schedules import work
from dormouse.aws.schedules.runs import list_name, note_begun, run_id_for
from dormouse.aws.schedules.upkeep import keep_up
from dormouse.aws.schedules.work import Turn, utc_now
from dormouse.objects import store as store_module
from dormouse.postgres.days import DAYS_AHEAD
from lambdas.maintenance import handler
from lambdas.services import MARGIN_SECONDS
from tests.aws_lambda import Context, metrics_in
from tests.standard import OF_KEYS
from tests.stored import assign, file, query, ref
from tests.support.api import Instance
from tests.support.state import PartitionStore

DAYS = "select count(*) from pg_inherits where inhparent = 'removal'::regclass"


@pytest.fixture
def instance(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    url = (tmp_path / "objects").as_uri()
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", url)
    with dm.connect(dsn, url) as instance:
        yield instance


def table(instance: Instance, name: str, *rows: int, threshold: int = 1_000) -> dm.Table:
    """Creates a table with one leaf, and in it one file for each number of `rows`."""
    properties = dm.TableProperties(split_threshold_rows=threshold, split_min_rows=2)
    made = instance.create_table(name, OF_KEYS, properties=properties)
    for number, count in enumerate(rows):
        add(made, f"{name} {number}", count)
    return made


def add(table: dm.Table, filename: str, rows: int) -> None:
    table.files.add_files_with_references([file(filename, ref(filename, rows=rows))])


def call(execution: str | None = "arn:execution:1") -> dict[str, Any]:
    return handler({} if execution is None else {"execution": execution}, Context())


def begin(instance: Instance, created: dict[str, Any], tables: int = 1) -> None:
    """Notes that Spark has begun a run, which has this number of tables."""
    assert created["jobs"] == tables
    note_begun(instance._objects, created["run_id"])


def noted(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_noted", {})
    store_module.note_activity(instance._objects)


def test_tables_with_full_leaves_are_listed(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    table(instance, "full", 600, 600)
    table(instance, "small", 600)
    table(instance, "empty")
    answer = call()
    run_id = run_id_for("arn:execution:1")
    uri = instance._objects.uri(list_name(run_id))
    assert answer == {"run_id": run_id, "kind": "split", "list": uri, "jobs": 1, "tables": 1}
    listed = json.loads(instance._objects.get(list_name(run_id)))
    assert [one["table"] for one in listed["tables"]] == ["full"]
    assert metrics_in(capsys.readouterr().out) == {"TablesToSplit": 1, "PayloadBacklogDays": 0}


def test_tables_with_references_above_leaves_are_listed(instance: Instance) -> None:
    made = table(instance, "t", 10)
    assert call("first") == {"jobs": 0}
    made.partitions.split("root", 5)
    assert made.partitions.count_above_leaves() == 1
    upkeep = keep_up(instance._supplier, instance._objects, turn(), run_id_for("x"), seconds_left=lambda: 60)
    assert upkeep.run is not None and [one.table for one in upkeep.run.tables] == ["t"]


def test_references_assigned_to_a_job_are_not_listed(instance: Instance) -> None:
    """References of a job are pushed down only after the job has ended."""
    made = table(instance, "t", 10)
    made.files.assign_job_ids([assign("j", "root", "t 0")])
    made.partitions.split("root", 5)
    assert call() == {"jobs": 0}


def test_the_same_execution_gets_the_same_list(instance: Instance) -> None:
    table(instance, "t", 2_000)
    first = call("one")
    assert first["jobs"] == 1 and call("one") == first


@pytest.mark.slow
def test_a_leaf_that_a_run_could_not_split_waits_for_a_change_or_a_day(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = table(instance, "t", 2_000)
    begin(instance, call("one"))
    noted(instance, monkeypatch)
    assert call("two") == {"jobs": 0}
    add(made, "another", 10)
    noted(instance, monkeypatch)
    begin(instance, call("three"))
    monkeypatch.setattr(work, "LOOK_HOURS_MAX", 0)
    assert call("four")["jobs"] == 1


def test_while_a_run_waits_to_begin_no_other_is_listed(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = table(instance, "t", 2_000), table(instance, "unchanged", 2_000)
    listed = call("one")
    add(made, "another", 10)
    noted(instance, monkeypatch)
    assert call("two") == {"jobs": 0}
    begin(instance, listed, tables=2)
    instance._objects.delete([name for name, _ in instance._objects.list("activity")])
    # the round while the run waited forgot nothing, and left the next round due
    begin(instance, call("three"))
    assert call("four") == {"jobs": 0}


def test_without_activity_the_database_is_left_asleep(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("one")
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    assert call("two") == {"jobs": 0}


def test_coming_days_are_created_and_old_days_dropped(instance: Instance) -> None:
    with instance._supplier.connection() as conn:
        for (name,) in conn.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'removal'::regclass"
        ).fetchall():
            if name != "removal_default":
                conn.execute(f"drop table {name}")
        conn.execute(
            "create table removal_20200101 partition of removal"
            " for values from ('2020-01-01') to ('2020-01-02')"
        )
    assert call(None) == {"jobs": 0}
    assert query(instance._supplier, DAYS) == [(DAYS_AHEAD + 1,)]


def test_without_an_execution_no_list_is_written(instance: Instance) -> None:
    table(instance, "t", 2_000)
    assert call(None) == {"jobs": 0}
    assert not list(instance._objects.list("runs"))


def test_after_a_call_without_time_the_next_is_due_at_once(instance: Instance) -> None:
    table(instance, "t", 2_000)
    assert handler({"execution": "one"}, Context(seconds=MARGIN_SECONDS)) == {"jobs": 0}
    assert call("two")["jobs"] == 1


def test_a_table_that_cannot_be_examined_does_not_stop_the_others(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table(instance, "a", 2_000)
    table(instance, "b", 2_000)
    table(instance, "small", 1)
    real = PartitionStore.look_for_full_leaves

    def look_for_full_leaves(self: PartitionStore) -> int:
        if self._table.name == "a":
            raise RuntimeError("broken")
        return real(self)

    monkeypatch.setattr(PartitionStore, "look_for_full_leaves", look_for_full_leaves)
    assert call()["tables"] == 1
    assert "table a is not looked at in this round" in caplog.text
    errors = {one.name: [last.error for last in one.status().rounds] for one in instance.tables()}
    # table b has no error here: the run that divides it records its round
    assert errors == {"a": ["broken"], "b": [], "small": [None]}


def turn() -> Turn:
    return Turn("activity", utc_now() - timedelta(minutes=1), None, ())
