"""Tests of recorded rounds: given-up jobs, failed rounds, and what `dormouse status` shows of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_files import SKETCHES, add_file, as_a_user_without_rights

import dormouse as dm
from dormouse.errors import CommitQueueFull, DormouseError, InvalidData
from dormouse.objects.store import GuardedStore
from dormouse.postgres import ConnectionSupplier
from dormouse.state.files.round_reports import LastRound, LastRounds, rounds_failing
from tests.standard import OF_KEYS
from tests.stored import at_once, query, remove
from tests.support.api import Instance
from tests.support.objects import ObjectStore
from tests.support.state import LAYOUTS, Catalog, TableContext
from tests.support.writing import compact, split

NewTable = Callable[..., TableContext]
PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}
SCHEMA = OF_KEYS


def last(table: TableContext, kind: str) -> LastRound:
    [found] = [one for one in table.last_rounds.read()[0] if one.kind == kind]
    return found


def damage(objects: ObjectStore, name: str) -> Callable[[], None]:
    """Replaces an object by garbage; returns a function that restores it."""
    path = Path(objects.url.removeprefix("file://")) / name
    whole = path.read_bytes()
    path.write_bytes(b"PAR1 no more")
    return lambda: path.write_bytes(whole) and None


def versions(table: TableContext) -> list[Any]:
    """Returns the rows of recorded rounds, each with the transaction that wrote it."""
    return query(
        table.supplier,
        "select kind, xmin::text from last_round where table_id = %s order by 1",
        table.table.table_id,
    )


def test_there_is_no_last_round_before_the_first_one(new_table: NewTable) -> None:
    rounds, given_up = new_table().last_rounds.read()
    assert (rounds, given_up.jobs, given_up.reason, given_up.at) == ((), 0, None, None)


def test_a_round_records_when_it_began_and_ended(new_table: NewTable) -> None:
    table = new_table(**PAIRS)
    for name in "ab":
        add_file(table, name, [1])
    compact(table)
    split(table)
    table.garbage.collect()
    rounds, given_up = table.last_rounds.read()
    assert [one.kind for one in rounds] == ["collection", "compaction", "split"]
    for one in rounds:
        assert one.began_at is not None
        assert one.ended_at is not None
        assert one.began_at < one.ended_at
        assert (one.error, one.failures, one.failing_since) == (None, 0, None)
    assert given_up.jobs == 0


def test_a_damaged_file_is_reported_until_it_is_repaired(new_table: NewTable) -> None:
    table = new_table(**PAIRS, compaction_attempts_max=2)
    damaged = add_file(table, "a", [1])
    add_file(table, "b", [2])
    mend = damage(table.objects, damaged)
    assert compact(table).given_up == 1
    first = last(table, "compaction")
    assert first.error is not None
    assert damaged in first.error
    assert "\n" not in first.error
    assert (first.failures, compact(table).given_up) == (1, 1)
    again, given_up = last(table, "compaction"), table.last_rounds.read()[1]
    assert (again.failures, again.failing_since) == (2, first.failing_since)
    assert (given_up.jobs, given_up.reason) == (2, again.error)
    assert given_up.at is not None
    assert rounds_failing(table.supplier) >= 1
    mend()
    assert compact(table).jobs_run == 1
    now, kept = last(table, "compaction"), table.last_rounds.read()[1]
    assert (now.error, now.failures, now.failing_since) == (None, 0, None)
    assert kept == given_up


def test_several_jobs_that_are_given_up_in_a_round_are_one_failure(new_table: NewTable) -> None:
    table = new_table(split_points=[10], **PAIRS, compaction_attempts_max=1)
    for leaf in ("0-0", "0-1"):
        for number in range(2):
            damage(table.objects, add_file(table, f"{leaf}-{number}", [1], [leaf]))
    compact(table)
    found = last(table, "compaction")
    assert str(found.error).endswith("(and 1 more)")
    assert (found.failures, table.last_rounds.read()[1].jobs) == (1, 2)


@pytest.mark.slow
def test_a_job_whose_runners_died_is_counted_even_if_its_round_is_never_recorded(instance: Instance) -> None:
    properties = dm.TableProperties(**PAIRS, compaction_attempts_max=2)
    table = instance.create_table("t", SCHEMA, properties=properties).context
    for name in "ab":
        add_file(table, name, [1])
    table.jobs.create()
    take = f"dm.connect({table.dsn!r}, {table.objects.url!r}).table('t').context.jobs.take(1, 0)"
    dies = f"import dormouse as dm, os; assert {take}; os.kill(os.getpid(), 9)"
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", dies], check=False).returncode == -signal.SIGKILL
    assert table.jobs.take(1) == []
    found, given_up = last(table, "compaction"), table.last_rounds.read()[1]
    assert (found.ended_at, found.failures, given_up.jobs) == (None, 0, 1)
    assert found.error == given_up.reason
    assert str(found.error).endswith("died, at every attempt")
    # a process that still runs it, or notices late that it died, does not count it again
    assert table.jobs.count() == (0, 0)
    assert compact(table).jobs_run == 1
    assert last(table, "compaction").error is None


def test_a_job_is_counted_in_the_transaction_that_releases_its_files(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(**PAIRS, compaction_attempts_max=1)
    for name in "ab":
        add_file(table, name, [1])
    table.jobs.create()
    [job] = table.jobs.take(1)

    unassign, seen = table.store.unassign_job, []

    def watched(*args: Any, conn: Any, **more: Any) -> None:
        seen.extend(conn.execute("select pg_current_xact_id()::text").fetchone())
        unassign(*args, conn=conn, **more)

    monkeypatch.setattr(table.store, "unassign_job", watched)
    assert table.jobs.fail(job, "b\0a\nd") == "given_up"
    assert versions(table) == [("compaction", seen[0])]
    assert table.jobs.fail(job, "bad") == "superseded"
    assert (table.jobs.count()[0], table.last_rounds.read()[1].jobs) == (0, 1)
    assert table.last_rounds.read()[1].reason == "ba d"


@pytest.mark.slow
def test_jobs_that_are_given_up_at_once_are_all_counted(new_table: NewTable) -> None:
    table = new_table(**PAIRS, compaction_attempts_max=1)
    for number in range(16):
        add_file(table, f"{number}", [1])
    table.jobs.create()
    jobs = table.jobs.take(8)
    at_once(*[lambda job=job: table.jobs.fail(job, "bad") for job in jobs])
    assert table.last_rounds.read()[1].jobs == len(jobs) == 8


def test_a_leaf_that_cannot_be_divided_is_reported(new_table: NewTable) -> None:
    table = new_table(split_threshold_rows=10, split_min_rows=2)
    name = add_file(table, "a", range(100))
    mends = [damage(table.objects, one) for one in (name, name + SKETCHES)]
    report = split(table)
    assert report.partitions_split == ()
    [error] = report.errors
    found = last(table, "split")
    assert found.error == " ".join(error.split())
    assert "partition root is not divided" in error
    assert found.failures == 1
    for mend in mends:
        mend()
    assert len(split(table).partitions_split) == 1
    assert last(table, "split").error is None


def test_a_round_that_raises_is_recorded(new_table: NewTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table()

    def fails() -> int:
        raise InvalidData("no\nmore")

    with monkeypatch.context() as broken:
        broken.setattr(table.partitions, "look_for_full_leaves", fails)
        with pytest.raises(InvalidData):
            split(table)
    assert (last(table, "split").error, last(table, "split").failures) == ("no more", 1)


def test_objects_that_cannot_be_deleted_are_reported(instance: Instance) -> None:
    properties = dm.TableProperties(gc_delay_seconds=0)
    table = instance.create_table("t", SCHEMA, properties=properties).context
    name = add_file(table, "a", [1])
    remove(table.store, name)
    path = Path(table.objects.url.removeprefix("file://")) / name
    guarded = table.inlined.store
    assert isinstance(guarded, GuardedStore)
    table = replace(table, objects=guarded.store)  # whose owner that user could not look up
    with as_a_user_without_rights(path.parent):
        report = table.garbage.collect()
    assert report.failures == 2
    found = last(table, "collection")
    assert str(found.error).startswith(f"2 objects could not be deleted, first {name}: ")
    table.garbage.collect()
    assert last(table, "collection").error is None


def test_rounds_without_work_write_once_a_minute(new_table: NewTable) -> None:
    table = new_table()

    def rounds() -> list[Any]:
        compact(table)
        split(table)
        table.garbage.collect()
        return versions(table)

    before = rounds()
    assert [kind for kind, _ in before] == ["collection", "compaction", "split"]
    assert rounds() == before
    earlier = (
        "update last_round set ended_at = ended_at - interval '61 seconds' where table_id = %s returning 1"
    )
    query(table.supplier, earlier, table.table.table_id)
    assert {one for one in rounds() if one in before} == set()


def test_a_round_without_work_ends_what_failed(new_table: NewTable) -> None:
    table = new_table()
    with pytest.raises(InvalidData), table.last_rounds.round("split"):
        raise InvalidData("bad")
    with table.last_rounds.round("split") as current:
        current.goes_on = True
    assert last(table, "split").error == "bad"
    split(table)
    assert last(table, "split").error is None


def test_an_interrupted_round_is_not_recorded(new_table: NewTable) -> None:
    table = new_table()
    with pytest.raises(KeyboardInterrupt), table.last_rounds.round("split"):
        raise KeyboardInterrupt
    assert versions(table) == []


def test_a_round_that_cannot_be_recorded_does_not_fail(
    new_table: NewTable, caplog: pytest.LogCaptureFixture
) -> None:
    table = new_table()
    with closing(ConnectionSupplier("postgresql://nobody@127.0.0.1:1/none")) as nowhere:
        with LastRounds(nowhere, table.table).round("split") as current:
            current.worked = True
        assert "could not be recorded" in caplog.text
        with pytest.raises(InvalidData, match="bad"), LastRounds(nowhere, table.table).round("split"):
            raise InvalidData("bad")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_keeps_last_rounds_and_a_clear_removes_them(new_table: NewTable, layout: str) -> None:
    table = new_table(**PAIRS, compaction_attempts_max=1)
    damage(table.objects, add_file(table, "a", [1]))
    add_file(table, "b", [2])
    compact(table)
    catalog = Catalog(table.supplier, table.attempts)
    catalog.convert_layout(table.table, layout)
    assert (last(table, "compaction").failures, table.last_rounds.read()[1].jobs) == (1, 1)
    # a table that does not know of the conversion yet
    assert compact(table).given_up == 1
    assert (last(table, "compaction").failures, table.last_rounds.read()[1].jobs) == (2, 2)
    table.store.clear()
    assert versions(table) == []
    split(table)
    catalog.drop(table.table.name)
    assert versions(table) == []
    with table.last_rounds.round("split") as current:
        current.worked = True
    assert versions(table) == []


def broken_table(instance: Instance) -> dm.Table:
    """Returns a table whose only job was given up."""
    properties = dm.TableProperties(**PAIRS, compaction_attempts_max=1)
    table = instance.create_table("t", SCHEMA, properties=properties)
    for name in "ab":
        damage(instance._objects, add_file(table.context, name, [1]))
    assert table.compact().given_up == 1
    return table


def test_a_tables_status_has_running_and_given_up_jobs_and_last_rounds(instance: Instance) -> None:
    table = broken_table(instance)
    table.context.jobs.create()
    table.context.jobs.take(1)
    found = table.status()
    assert (found.compaction_jobs, found.jobs_running, found.jobs_given_up) == (1, 1, 1)
    assert found.given_up_reason == found.rounds[0].error
    assert found.given_up_at is not None
    assert [one.kind for one in found.rounds] == ["compaction"]


def test_a_queue_that_is_full_is_no_failed_round(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    table = instance.create_table("t", SCHEMA)

    def full(*_: Any) -> None:
        raise CommitQueueFull("full")

    monkeypatch.setattr(table._tables.commits, "wait_for_room", full)
    with pytest.raises(DormouseError, match="full"):
        table.compact()
    assert table.status().rounds == ()


@pytest.mark.slow
def test_the_status_command_shows_failures_since_when_and_remedies(
    instance: Instance, cli: Callable[..., tuple[int, str, str]], dsn: str
) -> None:
    where = ("--dsn", dsn, "--objects", instance._objects.url)
    instance.create_table("well", SCHEMA).compact()
    code, out, _ = cli("status", *where)
    assert (code, "!" in out) == (0, False)
    table = broken_table(instance)
    status = table.status()
    code, out, _ = cli("status", *where)
    [line] = [line for line in out.splitlines() if line.startswith("!")]
    assert (code, out.index("garbage") < out.index("!")) == (0, True)
    assert line.startswith("! t: compaction has failed since 20")
    assert str(status.given_up_reason) in line
    assert "1 job given up in all, the last 20" in line
    assert line.count(str(status.given_up_reason)) == 1
    assert ". Files are not merged: fix the cause, then run: dormouse compact t" in line
    assert line.endswith("then run: dormouse compact t")
    with pytest.raises(InvalidData), table.context.last_rounds.round("collection"):
        raise InvalidData("[red]bad[/red]")
    with pytest.raises(InvalidData), table.context.last_rounds.round("collection"):
        raise InvalidData("[red]bad[/red]")
    code, out, _ = cli("status", "t", *where)
    [gc, _] = [line for line in out.splitlines() if line.startswith("!")]
    assert "garbage collection has failed since" in gc
    assert ", 2 times in a row: [red]bad[/red]." in gc
    assert gc.endswith("then run: dormouse gc t")
    code, out, _ = cli("status", "t", "--json", *where)
    [found] = json.loads(out)
    assert (found["jobs_given_up"], found["given_up_reason"]) == (1, status.given_up_reason)
    assert [(one["kind"], one["failures"]) for one in found["rounds"]] == [
        ("collection", 2),
        ("compaction", 1),
    ]
    assert found["rounds"][0]["ended_at"].endswith("Z")


def test_the_command_that_cannot_divide_a_leaf_fails(
    instance: Instance, cli: Callable[..., tuple[int, str, str]], dsn: str
) -> None:
    properties = dm.TableProperties(split_threshold_rows=10, split_min_rows=2)
    table = instance.create_table("t", SCHEMA, properties=properties)
    name = add_file(table.context, "a", range(100))
    for one in (name, name + SKETCHES):
        damage(instance._objects, one)
    code, _, err = cli("split", "t", "--dsn", dsn, "--objects", instance._objects.url)
    assert code == 1
    assert "could not split 1 partition; the first: partition root is not divided" in err


def test_a_read_only_instance_reads_last_rounds(instance: Instance, dsn: str) -> None:
    table = broken_table(instance)
    with dm.connect(dsn, instance._objects.url, read_only=True) as reader:
        assert reader.table("t").status().rounds == table.status().rounds
