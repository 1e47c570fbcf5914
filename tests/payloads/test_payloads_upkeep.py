"""Payloads in the upkeep of an instance: maintenance, checks, orphans, backups, the lambda."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import dormouse as dm
from dormouse.cli.payloads import figure
from dormouse.durability.maintaining import payload_numbers
from dormouse.errors import PayloadExpired
from dormouse.payloads import cooling, days, exchange, store
from dormouse.payloads.copying import PayloadOptions
from dormouse.payloads.rows import DAYS
from dormouse.postgres import ConnectionSupplier
from lambdas.maintenance import handler
from tests.aws_lambda import Context, metrics_in
from tests.cooling import AT, DAY, Model, collect, key, known_objects, locations, names, stored, tools
from tests.row_indexes import query_when_ready
from tests.stored import query
from tests.support.api import Instance
from tests.support.jobs import PayloadStore, Progress

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(instance: Instance) -> Model:
    made = Model(instance.payloads)
    made.put(*map(key, names(20)))
    return made


def test_a_round_does_all_due_work(instance: Instance, model: Model) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    model.put(key("a", yesterday))
    eager = PayloadStore(instance._supplier, instance._objects, options=PayloadOptions(hot_seconds=0))
    done = eager.maintain()
    assert (done.days_done, done.days_left, done.payloads, done.errors) == (3, 0, 21, ())
    states = {one.day: one.state for one in instance.payloads.days()}
    assert states[DAY] == "folded"  # the day was over long ago
    assert states[yesterday.date()] == "offloaded"
    today = DAYS.today(instance._supplier)
    assert [day for day in DAYS.days(instance._supplier) if day >= today] == [
        today + timedelta(days=n) for n in range(7)
    ]
    model.check()
    assert instance.payloads.maintain(retention_days=30).days_expired == 1
    with pytest.raises(PayloadExpired):
        instance.payloads.get(*key("a0000"))
    assert instance.payloads.get(*key("a", yesterday))["n"] is None


def test_a_day_stays_hot_for_a_while_after_its_end(
    instance: Instance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = DAYS.today(instance._supplier)
    noon = datetime.combine(today, datetime.min.time(), UTC) + timedelta(hours=12)
    before = {n: (noon - timedelta(days=n)).date() for n in range(3)}
    for n in before:
        instance.payloads.put("t", "a", noon - timedelta(days=n), "k", n)

    def hot_for(seconds: float) -> PayloadStore:
        options = PayloadOptions(hot_seconds=seconds)
        return PayloadStore(instance._supplier, instance._objects, options=options)

    def states() -> dict[int, str]:
        found = {one.day: one.state for one in instance.payloads.days()}
        return {n: found[day] for n, day in before.items()}

    kept = hot_for(86_400)  # a payload of yesterday, at any time of day
    assert [one.day for one in kept.offload(dry_run=True).days] == [before[2]]
    assert kept.status().backlog_days == 1
    done = kept.maintain()
    assert (done.days_done, done.backlog_days) == (1, 0)
    midnight = datetime.combine(today, datetime.min.time(), UTC)
    assert done.cools_at == midnight + timedelta(seconds=86_400)
    assert states() == {0: "open", 1: "open", 2: "offloaded"}
    assert [one.day for one in kept.offload(before[1]).days] == [before[1]], "a day that the caller names"
    assert states()[1] == "offloaded"
    hot = midnight + timedelta(days=1, seconds=25_200)
    assert instance.payloads.maintain().cools_at == hot, "the default is seven hours after the end of the day"
    assert instance.payloads._options.hot_seconds == 25_200
    monkeypatch.setenv("DORMOUSE_PAYLOADS_HOT_SECONDS", "0")
    with dm.connect(dsn, instance._objects.url) as other:
        assert other.payloads._options.hot_seconds == 0


def test_maintenance_offloads_payloads_and_records_failures(instance: Instance, model: Model) -> None:
    query(
        instance._supplier,
        "create function payload_20260305_mirror() returns integer language sql as 'select 1'",
    )
    done = instance.maintain(once=True)
    [last] = [one for one in instance.rounds() if one.kind == "payloads"]
    assert "payloads of 2026-03-05: cannot change return type" in str(last.error)
    assert done.failed == 1
    query(instance._supplier, "drop function payload_20260305_mirror(); delete from instance_round")
    assert instance.maintain(once=True).failed == 0
    assert locations(instance) == {}
    model.check()


def fails(request: Any, progress: Progress) -> None:
    raise RuntimeError("it fails")


def test_a_round_lists_all_days_once(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks: list[float] = []
    look = days.days

    def counted(supplier: Any, hot_seconds: float, **how: Any) -> Any:
        looks.append(hot_seconds)
        return look(supplier, hot_seconds, **how)

    for module in (days, exchange, store):
        monkeypatch.setattr(module, "days", counted)
    [*payload_numbers(instance.payloads)]
    assert len(looks) == 1
    cooling._report_round(tools(instance), 0, (), 0, [])
    assert len(looks) == 2


@pytest.mark.slow
def test_maintenance_measures_payloads_jobs_and_indexes(
    instance: Instance, model: Model, tmp_path: Path
) -> None:
    rows = instance.create_row_table("staff", [dm.Column("n", "INTEGER")])
    rows.change([dm.Insert([{"n": 1}])])
    assert len(query_when_ready(rows, "select n from staff").rows) == 1
    ids = [instance.jobs.start("of_others", {}) for _ in range(2)]
    query(instance._supplier, "update job set started_at = now() - interval '1 hour'")
    instance.jobs.cancel(ids[1])
    failed = instance.jobs.start("fails", {})
    instance.jobs.worker({"fails": fails}).run(drain=True)
    assert instance.jobs.status(failed).state == "FAILED"
    metrics = tmp_path / "metrics.prom"

    def measured() -> dict[str, float]:
        assert instance.maintain(once=True, metrics=metrics).failed == 0
        lines = [line for line in metrics.read_text().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    instance._durability.cool_payloads = lambda: None  # type: ignore[method-assign]  # for a day that waits
    found = measured()
    assert found["dormouse_payload_backlog_days"] == 1
    assert found['dormouse_payload_days{state="open"}'] >= 1
    assert found["dormouse_payload_backlog_bytes"] > 0
    assert found["dormouse_payload_mismatches"] == 0
    assert found['dormouse_jobs_waiting{kind="of_others"}'] == 1
    assert found['dormouse_job_oldest_waiting_seconds{kind="of_others"}'] >= 3_600
    assert found['dormouse_job_oldest_waiting_seconds{kind="fails"}'] == 0
    assert found['dormouse_jobs_ended{kind="fails",state="FAILED"}'] == 1
    assert found['dormouse_jobs_ended{kind="fails",state="COMPLETE"}'] == 0
    assert found['dormouse_jobs_ended{kind="of_others",state="CANCELLED"}'] == 1
    assert found['dormouse_row_index_versions_behind{table="staff"}'] == 0
    del instance._durability.cool_payloads
    instance.payloads.maintain()
    rows.change([dm.Insert([{"n": 2}]), dm.Insert([{"n": 3}])])
    query(instance._supplier, "delete from job where job_id is not null")
    found = measured()
    assert found["dormouse_payload_backlog_days"] == 0
    assert found['dormouse_payload_days{state="folded"}'] == 1
    assert found['dormouse_row_index_versions_behind{table="staff"}'] >= 1
    query(instance._supplier, "update row_index set database = 'none_of_ours'")
    assert measured()['dormouse_row_index_versions_behind{table="staff"}'] == float("inf")


def test_a_role_that_may_not_drop_days_makes_them(instance: Instance, model: Model, dsn: str) -> None:
    query(instance._supplier, "create role only_writes; grant usage on schema dormouse to only_writes")
    query(
        instance._supplier,
        "grant select, insert, update, delete on all tables in schema dormouse to only_writes",
    )
    query(instance._supplier, "grant execute on function add_day to only_writes")
    supplier = ConnectionSupplier(make_conninfo(dsn, options="-c role=only_writes"))
    try:
        done = type(instance.payloads)(supplier, instance._objects).maintain()
        assert (done.errors, done.days_done, done.backlog_days) == ((), 0, 1)
        assert len(DAYS.days(supplier)) == 8
    finally:
        supplier.close()
        query(instance._supplier, "drop owned by only_writes; drop role only_writes")


@pytest.mark.slow
def test_the_lambda_offloads_payloads_and_reports_the_backlog(
    instance: Instance,
    model: Model,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", instance._objects.url)
    query(
        instance._supplier,
        "create function payload_20260305_mirror() returns integer language sql as 'select 1'",
    )
    failing = instance.payloads.maintain()
    assert (failing.days_left, len(failing.errors)) == (0, 1)
    handler({}, Context())
    assert metrics_in(capsys.readouterr().out)["PayloadBacklogDays"] == 1
    query(instance._supplier, "drop function payload_20260305_mirror()")
    instance._objects.delete([name for name, _ in instance._objects.list("work")])
    handler({}, Context())
    assert metrics_in(capsys.readouterr().out)["PayloadBacklogDays"] == 0
    model.check()
    assert [one.state for one in instance.payloads.days() if one.day == DAY] == ["folded"]
    today = DAYS.today(instance._supplier)
    instance.payloads.put("t", "a", datetime.combine(today, datetime.min.time(), UTC), "k", 1)
    monkeypatch.setenv("DORMOUSE_PAYLOADS_HOT_SECONDS", "3600")
    instance._objects.delete([name for name, _ in instance._objects.list("work")])
    handler({}, Context())
    [record] = [name for name, _ in instance._objects.list("work/maintenance")]
    due_at = json.loads(instance._objects.get(record))["due_at"]
    assert due_at == f"{today + timedelta(days=1)}T01:00:00+00:00", "the lambda wakes a sleeping database"


@pytest.mark.slow
def test_objects_of_payloads_are_no_orphans(instance: Instance, model: Model) -> None:
    def look(step: str) -> None:
        if step == "uploaded":
            assert [one.name for one in instance.orphans(timedelta(0))] == []

    cooling.offload(tools(instance, look), None, False)
    cooling.fold(tools(instance), DAY)
    assert list(instance.orphans(timedelta(0))) == []
    assert instance.check(deep=True).problems == ()
    instance._objects.put("payloads/2026-03-05/of-nobody", b"x")
    assert [one.name for one in instance.orphans(timedelta(0))] == ["payloads/2026-03-05/of-nobody"]
    assert {one.kind for one in instance.check().problems} == {"object_unknown"}
    assert instance.delete_orphans(timedelta(0)).objects == 1
    model.check()


@pytest.mark.parametrize("deep", [False, True])
def test_a_check_reports_lost_objects_of_payloads(instance: Instance, model: Model, deep: bool) -> None:
    cooling.offload(tools(instance), None, False)
    first, second, third, *_ = sorted(stored(instance))
    for name, data in ((first, None), (second, b"short"), (third, bytes(instance._objects.size(third)))):
        instance._objects.delete([name])
        if data is not None:
            instance._objects.put(name, data)
    found = {(one.kind, one.filename) for one in instance.check(deep=deep).problems}
    expected = {("object_missing", first), ("object_size", second)}
    assert found == expected | ({("object_digest", third)} if deep else set())


def test_held_objects_are_not_deleted(instance: Instance, model: Model) -> None:
    """A backup holds its objects while it is made."""
    cooling.offload(tools(instance), None, False)
    before = stored(instance)
    query(
        instance._supplier,
        "insert into hold (holder, since, until) values ('backup', now() - interval '3 days', 'infinity')",
    )
    instance.payloads.expire(DAY + timedelta(1))
    query(instance._supplier, "update payload_object set changed_at = now() - interval '25 hours'")
    assert instance.payloads.collect().deleted == 0
    assert stored(instance) == before
    query(instance._supplier, "delete from hold")
    assert instance.payloads.collect().deleted == len(before)
    assert known_objects(instance) == {}


@pytest.mark.slow
def test_a_backup_has_the_objects_of_payloads(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        model = Model(instance.payloads)
        for day in range(3):
            model.put(*(key(name, AT + timedelta(days=day)) for name in names(6)))
        cooling.offload(tools(instance), None, False)
        cooling.fold(tools(instance), DAY)
        model.put(key("late"), content="late")
        instance.backup(tmp_path / "backups")
        expected = dict(model.expected)
        instance.payloads.expire(DAY + timedelta(days=3))
        collect(instance)
    dm.restore(tmp_path / "backups", into=tmp_path / "again")
    with dm.local(tmp_path / "again") as again:
        found = Model(again.payloads)
        found.expected = expected
        found.check()
        assert again.check(deep=True).problems == ()


def test_a_copy_of_the_database_copies_its_days_again(instance: Instance, model: Model, dsn: str) -> None:
    """The list of writes has transaction ids of the original cluster, which mean nothing in the copy."""
    with pytest.raises(KeyboardInterrupt):
        cooling.offload(tools(instance, stop), DAY, False)
    assert query(instance._supplier, "select phase from payload_day") == [("verify",)]
    query(instance._supplier, "update migration set written_in = 1 where version = 1")
    with dm.connect(dsn, instance._objects.url):
        assert query(instance._supplier, "select phase from payload_day") == [("prepare",)]
    query(instance._supplier, "update payload_day set leased_until = now()")
    assert instance.payloads.offload().errors == ()
    model.check()
    collect(instance)
    assert known_objects(instance) == {"live": len(stored(instance))}


def stop(step: str) -> None:
    if step == "copied":
        raise KeyboardInterrupt


@pytest.mark.slow
def test_the_commands_print_results_and_errors_in_one_line(
    cli: Cli, instance: Instance, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", instance._objects.url)
    at = "2026-03-05T12:00:00Z"
    instance.payloads.put("t", "i", AT, "k", [1])
    file = tmp_path / "x.json"
    latin = io.TextIOWrapper(io.BytesIO('\ufeff["é"]'.encode()), encoding="latin-1")
    monkeypatch.setattr("sys.stdin", latin)  # JSON is UTF-8 in any locale
    assert cli("payloads", "put", "t", "j", at, "k")[0] == 0
    assert cli("payloads", "get", "t", "j", at, "k") == (0, '["\\u00e9"]\n', "")
    file.write_text('{"a": [1, null]}')
    assert cli("payloads", "put", "t", "j", at, "k", "--file", str(file)) == (
        0,
        "stored k j of t\n",
        "",
    )
    assert cli("payloads", "get", "t", "j", at, "k") == (0, '{"a": [1, null]}\n', "")
    code, out, _ = cli("payloads", "offload", "--dry-run", "--json")
    assert (code, json.loads(out)) == (0, {"would_offload": ["2026-03-05"]})
    code, out, _ = cli("payloads", "offload")
    assert code == 0
    assert out.startswith("2026-03-05 offloaded: 2 payloads in 1 object, ")
    assert "\n2026-03-05 folded: " in out
    assert cli("payloads", "offload") == (0, "nothing to offload or fold\n", "")
    code, out, _ = cli("payloads", "days", "--json")
    assert [(one["day"], one["state"], one["objects"]) for one in json.loads(out)] == [
        ("2026-03-05", "folded", 1)
    ]
    days = cli("payloads", "days")[1]
    assert "2026-03-05" in days
    assert "being done" not in days, "a column without values is left out, as no day has a worker"
    assert json.loads(cli("payloads", "status", "--json")[1])["backlog_days"] == 0
    shown = cli("payloads", "status")[1]
    figures = [line.strip("│┃ ").split("│") for line in shown.splitlines() if "│" in line]
    assert all(value.strip() for _, value in figures), shown
    by_name = {name.strip(): value.strip() for name, value in figures}
    assert (by_name["backlog days"], by_name["cold read ms p50"]) == ("0", "none yet")
    assert by_name["object bytes"].endswith(" B")
    assert figure("swap_lock_ms_max", 12.34567) == "12.3"
    assert figure("payloads_per_second", 13_400.1234) == "13,400"
    assert figure("bytes_in_per_second", 1_234_567) == "1.2 MB"
    code, out, _ = cli("payloads", "verify", "2026-03-05")
    assert (code, out[:33]) == (0, "read 2 payloads of 1 object, 333 "[:29] + out[29:33])
    assert cli("payloads", "rehydrate", "2026-03-05") == (0, "2 payloads copied back into PostgreSQL\n", "")
    assert cli("payloads", "offload", "--day", "2026-03-05")[0] == 0
    assert cli("payloads", "fold", "2026-03-05")[0] == 0
    assert cli("payloads", "expire", "2026-03-06", "--dry-run") == (0, "2026-03-05\n", "")
    assert cli("payloads", "expire", "2026-03-06")[0] == 2
    assert cli("payloads", "expire", "2026-03-06", "--yes")[:2] == (
        0,
        "dropped 1 day; skipped because they are in use: 0\n",
    )
    for arguments, expected, why in (
        (("get", "t", "j", at, "k"), 1, "its day is past its retention"),
        (("get", "t", "j", "2026-03-05T12:00", "k"), 2, "inserted_at must be a datetime with a time zone"),
        (("get", "t", "j", "noon", "k"), 2, "write it like 2026-03-05T12:00:00Z"),
        (("fold", "never"), 2, "write it like 2026-03-05"),
        (("put", "t", "j", at, "k", "--file", str(tmp_path)), 2, "cannot read"),
    ):
        code, out, err = cli("payloads", *arguments)
        assert (code, out, err.count("\n")) == (expected, "", 1)
        assert why in err
    file.write_text("{")
    assert "is not JSON" in cli("payloads", "put", "t", "j", at, "k", "--file", str(file))[2]


@pytest.mark.slow
def test_the_command_reports_a_damaged_day(instance: Instance, model: Model, dsn: str, cli: Cli) -> None:
    cooling.offload(tools(instance), None, False)
    instance._objects.delete(sorted(stored(instance))[:1])
    code, out, err = cli("payloads", "verify", "2026-03-05", "--dsn", dsn, "--objects", instance._objects.url)
    assert code == 1
    assert "it is not there" in out
    assert err.startswith("1 problem; the first: payloads/2026-03-05/") or "1 problem" in err


def test_sessions_are_not_held_between_rounds(instance: Instance, model: Model, dsn: str) -> None:
    """After a round, there is no advisory lock and no open transaction."""
    cooling.offload(tools(instance), None, False)
    with psycopg.connect(dsn) as conn:
        assert conn.execute(
            "select count(*) from pg_locks where locktype = 'advisory' and classid = 723615409"
        ).fetchall() == [(0,)]
