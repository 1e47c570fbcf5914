"""Effects of a jump of the database's clock, and their correction.

The clock was five days ahead for a while and is right again, so leases and times written meanwhile lie five
days ahead. The tests write such times; in `tests/state/history/test_clock_storm.py` the clock really jumps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability.maintaining import InstanceRounds
from dormouse.errors import PayloadDayBusy, RowLockHeld
from dormouse.jobs import worker
from dormouse.payloads import days
from dormouse.postgres.lease import clock_jumps, restart_leases
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance, Table
from tests.support.state import record_cut
from tests.working import Working, until

DAYS = 5
AHEAD = f"clock_timestamp() + interval '{DAYS} days'"
YESTERDAY = (datetime.now(UTC) - timedelta(days=1)).date()

HEALED = {
    "clock_jump.found_at", "compaction_job.leased_until", "compaction_job.run_until", "deletion.read_at",
    "hold.since", "hold.until", "instance.removals_since", "job_worker.asleep_since",
    "job_worker.lease_until", "job_worker.since", "job_worker.suspected_at", "job_worker.waits_until",
    "last_round.began_at", "last_round.ended_at", "payload_day.leased_until", "payload_day.rehydrated_at",
    "row_index.used_at", "row_lock.leased_until", "tables.history_since", "tables.log_since",
    "truncation.recorded_at", "watermark.looked_at", "watermark.whole_at", "write_attempt.abandoned_at",
    "write_attempt.finished_at", "write_attempt.started_at",
}  # fmt: skip
"""Columns that `restart_leases` corrects."""

ELSEWHERE = {
    "commit_message.visible_at": "committers show messages that are hidden for longer than any is",
    "commit_waiter.waits_until": "the next committer that sleeps forgets waiters of the future",
    "cut.recorded_at": "cuts stay in their order; the next one is due, and holds files by the clock of now",
    "cut.clock_at": "cuts stay in their order, and note when the clock was set back",
    "epoch.clock_at": "epochs stay in their order, and note when the clock was set back",
    "epoch.created_at": "epochs stay in their order, and note when the clock was set back",
    "incarnation.passed_at": "a milestone of the future is as old as one of the past",
    "instance_round.ended_at": "a round that ended in the future is due",
    "removal.removed_at": "dated back where no day was made for it",
}
"""Columns that need no correction by `restart_leases`, with the way in which their readers handle a jump."""

KEPT_LONGER = {
    "applied_commit.applied_at", "applied_commit.expires_at", "backup_taken.taken_at",
    "consumer.acknowledged_at", "consumer.position_at", "deletion.deleted_at", "deletion.retired_at",
    "ended_job.ended_at", "erased_file.freed_at", "file.unreferenced_at", "file_content.added_at",
    "payload.inserted_at", "payload_object.changed_at", "rejected_commit.rejected_at", "removal.removed_at",
}  # fmt: skip
"""Columns that determine how long something is kept. A clock that was ahead only prolongs that."""

FOR_PEOPLE = {
    "commit_message.sent_at", "compaction_job.created_at", "consumer.created_at",
    "dead_commit_message.buried_at", "dead_commit_message.sent_at", "difference.accepted_at",
    "difference.found_at", "ended_job.claimed_at", "ended_job.started_at", "erasure.began_at",
    "erasure.finished_at", "file.added_at", "file_count.changed_at", "file_reference.file_added_at",
    "file_reference.last_updated", "incarnation.made_at", "instance.created_at", "instance_round.began_at",
    "instance_round.well_at", "job.claimed_at", "job.started_at", "job.told_at", "last_round.failing_since",
    "last_round.given_up_at", "migration.applied_at", "payload_day.after_at", "payload_day.changed_at",
    "payload_day.failed_at", "payload_object.first_at", "payload_object.last_at", "restored.moment",
    "restored.restored_at", "row_change.changed_at", "row_index.failed_at", "row_snapshot.taken_at",
    "row_table.changed_at", "schema_change.changed_at", "tables.created_at", "truncation.truncated_at",
    "write_stream.committed_at",
}  # fmt: skip
"""Columns that are only shown to people, or are part of a key."""


def test_each_stored_time_is_listed_with_the_effect_of_a_clock_jump(instance: Instance) -> None:
    """Each new column with a time must be added to one of the four lists above.

    To choose the list, consider the effect of a time that lies five days ahead.
    """
    found = query(
        instance._supplier,
        """
        select c.relname || '.' || a.attname
        from pg_class c
        join pg_attribute a on a.attrelid = c.oid
        where c.relnamespace = 'dormouse'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
            and a.atttypid = 'timestamptz'::regtype and a.attnum > 0 and not a.attisdropped
        """,
    )
    known = HEALED | ELSEWHERE.keys() | KEPT_LONGER | FOR_PEOPLE
    assert {name for (name,) in found} ^ known == set()


def test_leases_of_normal_length_are_not_restarted(instance: Instance, table_t: Table) -> None:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    release = threading.Event()
    job = instance.jobs.start("work", {})
    with (
        rows.locks.write(),
        days.leased(instance._supplier, YESTERDAY, "offload", ["open"]),
        Working(instance.jobs.worker({"work": lambda request, progress: release.wait(600)})),
    ):
        until(lambda: not instance.jobs.status(job).is_waiting)
        table_t.consumer("etl")
        record_cut(table_t.context, "named")
        table_t.collect_garbage()
        assert restart_leases(instance._supplier) is None
        release.set()
    assert clock_jumps(instance._supplier) == []


def test_a_row_lock_ends_soon_after_a_clock_jump(instance: Instance) -> None:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    query(
        instance._supplier,
        f"insert into row_lock select table_id, gen_random_uuid(), 'write', 'dead:1', {AHEAD} from row_table",
    )
    with pytest.raises(RowLockHeld, match="dead:1"):
        rows.change([dm.Insert([{"n": 1}])], wait_seconds=0)
    assert seconds_left(instance, "row_lock", "leased_until") <= 30
    [jump] = clock_jumps(instance._supplier)
    assert (jump.leases, jump.times) == (1, 0)
    assert jump.seconds == pytest.approx(DAYS * 86_400, abs=600)
    query(instance._supplier, "update row_lock set leased_until = clock_timestamp()")
    assert rows.change([dm.Insert([{"n": 1}])], wait_seconds=0).versions


def test_the_lease_of_a_payload_day_ends_soon_after_a_clock_jump(instance: Instance) -> None:
    with days.leased(instance._supplier, YESTERDAY, "offload", ["open"]):
        query(instance._supplier, f"update payload_day set leased_until = {AHEAD}")
        with (
            pytest.raises(PayloadDayBusy),
            days.leased(instance._supplier, YESTERDAY, "offload", ["open"]),
        ):
            pass
        assert seconds_left(instance, "payload_day", "leased_until") <= 60


@pytest.mark.slow
def test_a_job_of_a_dead_worker_runs_soon_after_a_clock_jump(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOOK_SECONDS_MAX", 0.1)
    job = instance.jobs.start("work", {})
    kind_id = instance.jobs._kind_id("work")
    claims = instance.jobs.worker({"work": print})._claims
    dead = uuid4()
    claims.register(dead, [kind_id], "dead", 3.0)
    assert len(claims.claim(dead, {kind_id: 1}, {})) == 1
    query(instance._supplier, f"update job_worker set lease_until = {AHEAD}, waits_until = {AHEAD}")
    with Working(instance.jobs.worker({"work": lambda request, progress: "done"})):
        until(lambda: clock_jumps(instance._supplier))
        left = query(
            instance._supplier,
            "select extract(epoch from lease_until - clock_timestamp())::float8, "
            f"waits_until <= clock_timestamp() from job_worker where worker_id = '{dead}'",
        )
        assert left[0][0] <= 63 and left[0][1]
        query(
            instance._supplier,
            f"update job_worker set lease_until = clock_timestamp() where worker_id = '{dead}'",
        )
        until(lambda: instance.jobs.status(job).has_ended)
    assert instance.jobs.result(job) == "done"


@pytest.mark.slow
def test_a_compaction_job_is_taken_when_its_restarted_lease_ends(instance: Instance) -> None:
    table = filled(instance)
    assert table.context.jobs.create(10) == 1
    assert len(table.context.jobs.take(1)) == 1
    query(instance._supplier, f"update compaction_job set leased_until = {AHEAD}")
    table.compact()
    assert seconds_left(instance, "compaction_job", "leased_until") <= 6 * 3_600
    query(
        instance._supplier,
        f"update compaction_job set run_id = gen_random_uuid(), run_until = {AHEAD}, "
        "leased_until = '-infinity'",
    )
    table.compact()
    assert seconds_left(instance, "compaction_job", "run_until") <= 2 * 86_400
    query(instance._supplier, "update compaction_job set run_until = clock_timestamp()")
    assert table.compact().jobs_run == 1


@pytest.mark.slow
def test_history_can_be_read_from_the_correction_on(instance: Instance, table_t: Table) -> None:
    """Covers reads at a time, by a new consumer and at a cut.

    Before, a collection ran with the wrong clock and made all earlier moments unreadable.
    """
    add(table_t, 1)
    let_go(instance)
    assert table_t.query(as_of=datetime.now(UTC) + timedelta(seconds=1)).read_all().num_rows == 1
    let_go(instance)
    consumer = table_t.consumer("etl")
    add(table_t, 2)
    assert consumer.read().read_all()["key"].to_pylist() == [2]
    let_go(instance)
    table_t.collect_garbage()
    add(table_t, 3)
    cut = record_cut(table_t.context, "now")
    add(table_t, 4)
    assert table_t.query(as_of=cut).read_all().num_rows == 3
    assert len(clock_jumps(instance._supplier)) == 3


@pytest.mark.slow
def test_a_truncation_dated_by_the_wrong_clock_does_not_hide_the_present(
    instance: Instance, table_t: Table
) -> None:
    add(table_t, 1)
    table_t.history.truncate(record_cut(table_t.context, "old"))
    query(instance._supplier, f"update truncation set recorded_at = {AHEAD}")
    assert table_t.query(as_of=datetime.now(UTC) + timedelta(seconds=1)).read_all().num_rows == 1


def test_a_cut_holds_its_files_also_after_cuts_of_the_wrong_clock(instance: Instance, table_t: Table) -> None:
    add(table_t, 1)
    record_cut(table_t.context, "ahead")
    query(instance._supplier, f"update cut set recorded_at = {AHEAD}")
    query(instance._supplier, f"update hold set since = {AHEAD}")
    add(table_t, 2)
    cut = record_cut(table_t.context, "later")
    assert cut.recorded_at > datetime.now(UTC) + timedelta(days=DAYS - 1)  # cuts are ordered by time
    table_t.collect_garbage()
    late = "select count(*) from hold where since > clock_timestamp()"
    assert query(instance._supplier, late) == [(0,)]
    add(table_t, 3)
    assert table_t.history.record_if_due() is not None


def test_holds_of_backups_end_soon_and_holds_of_cuts_stay(instance: Instance, table_t: Table) -> None:
    record_cut(table_t.context, "named")
    table_t.consumer("etl")
    query(
        instance._supplier,
        f"""
        insert into hold (holder, since, until) values
            ('backup 1', clock_timestamp(), {AHEAD}), ('metadata backup 1', clock_timestamp(), {AHEAD}),
            ('adoption 1', 'epoch', {AHEAD})
        """,
    )
    assert restart_leases(instance._supplier) is not None
    left = dict(
        query(
            instance._supplier,
            "select holder, extract(epoch from until - clock_timestamp())::float8 from hold",
        )
    )
    assert left.pop("backup 1") <= 900
    assert left.pop("metadata backup 1") <= 2 * 86_400
    assert all(seconds > 4 * 86_400 for seconds in left.values())
    assert len(left) == 3


def test_a_hold_that_began_in_the_future_is_moved_back(instance: Instance, table_t: Table) -> None:
    table_t.consumer("etl")
    [(before,)] = query(instance._supplier, "select until from hold")
    query(
        instance._supplier,
        f"update hold set since = since + interval '{DAYS} d', until = until + interval '{DAYS} d'",
    )
    restart_leases(instance._supplier)
    [(since, until_)] = query(instance._supplier, "select since <= clock_timestamp(), until from hold")
    assert since
    assert abs(until_ - before) < timedelta(minutes=15)


TIMES = [
    ("write_attempt", "started_at"), ("write_attempt", "abandoned_at"), ("write_attempt", "finished_at"),
    ("watermark", "whole_at"), ("watermark", "looked_at"), ("last_round", "ended_at"),
    ("deletion", "read_at"),
    ("payload_day", "rehydrated_at"), ("row_index", "used_at"),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "column"), TIMES, ids=[".".join(one) for one in TIMES])
def test_a_time_of_the_wrong_clock_is_corrected(instance: Instance, name: str, column: str) -> None:
    table = filled(instance)
    table.delete({"key": 1})
    table.collect_garbage()
    with table.context.writing():
        instance.create_row_table("r", [dm.Column("n", "INTEGER")])
        query(instance._supplier, f"insert into payload_day (day) values ('{YESTERDAY}')")
        query(
            instance._supplier,
            "insert into row_index (table_id) select table_id from row_table on conflict do nothing",
        )
        query(instance._supplier, f"update {name} set {column} = {AHEAD}")
        assert query(instance._supplier, f"select count(*) > 0 from {name}") == [(True,)]
        assert restart_leases(instance._supplier) is not None
    found = query(instance._supplier, f"select count(*) from {name} where {column} > clock_timestamp()")
    assert found == [(0,)]
    assert restart_leases(instance._supplier) is None


def test_a_daily_round_that_ended_in_the_future_is_due(instance: Instance) -> None:
    rounds = InstanceRounds(instance._supplier)
    rounds.run("daily", lambda: None)
    assert not rounds.is_due("daily", 86_400)
    query(instance._supplier, f"update instance_round set ended_at = {AHEAD}")
    assert rounds.is_due("daily", 86_400)
    rounds.run("daily", lambda: None)
    assert not rounds.is_due("daily", 86_400)


def test_a_table_that_was_counted_in_the_future_is_counted_again(instance: Instance, table_t: Table) -> None:
    add(table_t, 1)
    table_t.collect_garbage()
    query(instance._supplier, f"update watermark set whole_at = {AHEAD}")
    restart_leases(instance._supplier)
    fresh = "select count(*) from watermark where whole_at > clock_timestamp() - interval '1 day'"
    assert query(instance._supplier, fresh) == [(0,)]


def test_the_time_until_which_removals_may_be_missing_ends_soon(instance: Instance) -> None:
    query(instance._supplier, f"update instance set removals_since = {AHEAD}")
    restart_leases(instance._supplier)
    soon = "select removals_since <= clock_timestamp() + interval '1 day' from instance"
    assert query(instance._supplier, soon) == [(True,)]


def test_status_and_check_report_a_clock_jump(
    instance: Instance, table_t: Table, dsn: str, capsys: pytest.CaptureFixture[str], cli: Callable[..., Any]
) -> None:
    let_go(instance)
    table_t.collect_garbage()
    for command in ("status", "check"):
        code, out, err = cli(command, "--dsn", dsn, "--objects", instance.objects.url)
        assert code == 0, err
        assert "the database's clock went back by about 5 d 0 h, found at " in " ".join(out.split())
    [jump] = instance.check().clock_jumps
    assert "0 leases were restarted, and 1 other times corrected" in str(jump)


def test_maintenance_does_not_hold_a_snapshot(instance: Instance) -> None:
    """A long transaction must not keep a snapshot, which would stop VACUUM.

    A prepared statement could keep one, and psycopg prepares a statement that runs several times.
    """
    rounds = InstanceRounds(instance._supplier)
    held = (
        "select count(*) from pg_stat_activity "
        "where state = 'idle in transaction' and backend_xmin is not null"
    )
    for _ in range(10):
        with rounds.alone():
            assert query(instance._supplier, f"{held} and datname = current_database()") == [(0,)]


def filled(instance: Instance) -> Table:
    properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
    table = instance.create_table("f", OF_KEYS, properties=properties)
    for key in (1, 2):
        add(table, key)
    return table


def add(table: Table, *keys: int) -> None:
    table.ingest(pa.table({"key": list(keys)}), engine="local")


def let_go(instance: Instance) -> None:
    """Moves the beginning of the table's history into the future, as a collection with a wrong clock does."""
    query(instance._supplier, f"update tables set history_since = {AHEAD}, log_since = {AHEAD}")


def seconds_left(instance: Instance, table: str, column: str) -> float:
    [(seconds,)] = query(
        instance._supplier,
        f"select extract(epoch from max({column}) - clock_timestamp())::float8 from {table}",
    )
    return float(seconds)
