"""Tables that have work for maintenance: tables that are left out have none, whatever happened to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest

import dormouse as dm
from dormouse.errors import DormouseError
from dormouse.state.files import removal_log
from tests.standard import OF_K_AND_NUMBERS
from tests.stored import query
from tests.support.api import Instance, Table
from tests.support.state import KINDS, LAYOUTS, Kind, due_kinds
from tests.tiers import by_tier

HOUR = 3_600.0
DAY = 24 * HOUR
FREE = {
    "watermark": ["till", "looked_at", "version"],
    "tables": ["collected_till"],
    "incarnation": ["milestone", "milestone_id", "passed_at", "passed_in"],
}
"""The columns that a round without work may change."""


def kinds_due(table: Table) -> frozenset[Kind]:
    [kinds] = due_kinds(table.context.supplier, [table.context.table])
    return kinds


def id_of(table: Table) -> int:
    return table.context.table.table_id


def work_of(table: Table) -> dict[Kind, Callable[[], object]]:
    """Returns the work of a round of maintenance by its kind."""

    def merge() -> None:
        if table.properties.merge_threshold_rows is not None:
            table.merge()

    def collect() -> None:
        if "cut" not in kinds_due(table):  # else it first records a cut
            table.history.apply_retention()
        table.collect_garbage()

    return {
        "cut": table.history.record_if_due,
        "split": table.split,
        "merge": merge,
        "compaction": table.compact,
        "collection": collect,
    }


def everything(instance: Instance) -> dict[str, set[Any]]:
    """Returns all rows of the instance's PostgreSQL tables, without the free columns, and its objects."""
    names = query(
        instance._supplier,
        "select relname from pg_class c join pg_namespace n on n.oid = relnamespace "
        "where nspname = 'dormouse' and relkind in ('r', 'p') and not relispartition",
    )
    found = {"objects": set(instance._objects.list("data/"))} | {name: set() for (name,) in names}
    found.pop("ended_job")  # a thread lists ingests there later
    parts = []
    for name in found.keys() - {"objects"}:
        free = ",".join(FREE.get(name, []))
        # a round that did nothing is recorded, too
        some = "where error is not null or given_up > 0" if name == "last_round" else ""
        parts.append(
            f"select '{name}', (to_jsonb(t) - '{{{free}}}'::text[])::text from dormouse.{name} t {some}"
        )
    for name, row in query(instance._supplier, " union all ".join(parts)):
        found[name].add(row)
    return found


def let_pass(instance: Instance, seconds: float) -> None:
    """Makes all stored times older, as if `seconds` had passed."""
    columns = query(
        instance._supplier,
        "select c.oid::regclass::text, array_agg(attname) from pg_class c "
        "join pg_attribute a on attrelid = c.oid where relnamespace = 'dormouse'::regnamespace "
        "and relkind in ('r', 'p') and not relispartition and atttypid = 'timestamptz'::regtype "
        "and not attisdropped and attgenerated = '' group by 1",
    )
    parts = []
    for number, (table, names) in enumerate(columns):
        older = ", ".join(f"{name} = {name} - make_interval(secs => {seconds})" for name in names)
        parts.append(f"of_{number} as (update {table} set {older})")
    query(instance._supplier, f"with {', '.join(parts)} select 1")


def check(instance: Instance, table: Table) -> frozenset[Kind]:
    """Asserts that the kinds of work that are not due do nothing; returns those that are due."""
    due = kinds_due(table)
    if "collection" in due:
        table.context.store.totals.bring_forward()  # as compaction does, whatever its work
    removal_log.roll(instance._supplier)  # work of the instance
    before = everything(instance)
    kinds = {kind: work for kind, work in work_of(table).items() if kind not in due}
    for work in kinds.values():
        work()
    after = everything(instance)
    changed = {name: after[name] ^ before[name] for name in after if after[name] != before[name]}
    assert not changed, f"one of {[*kinds]} is not due, but has work"
    return due


class Life:
    """A random life of a table, with all that can give maintenance work."""

    def __init__(self, instance: Instance, seed: int) -> None:
        self.instance = instance
        self.chance = random.Random(seed)
        self.table = instance.create_table(
            "t",
            OF_K_AND_NUMBERS,
            layout=self.chance.choice(LAYOUTS),
            properties=dm.TableProperties(
                compaction_batch_files=3,
                split_threshold_rows=30,
                split_min_rows=2,
                merge_threshold_rows=self.chance.choice([None, 15]),
                inline_bytes_max=self.chance.choice([0, 65_536]),
                keep=self.chance.choice(["every_row", "newest_row"]),
            ),
        )
        self.cuts = 0

    def step(self) -> str:
        """Does something; what fails, such as a restore to a lost moment, has done its part."""
        steps = [
            *[self.ingest] * 6, *[self.passes] * 4, *[self.maintain] * 4, *[self.part] * 3, self.delete,
            self.properties, self.cut, self.drop_cut, self.consumer, self.restore, self.attempt, self.lease,
            self.hold, self.truncate, self.convert, self.fail, self.erase, self.reshape,
        ]  # fmt: skip
        step = self.chance.choice(steps)
        with suppress(DormouseError):
            step()
        return step.__name__

    def ingest(self) -> None:
        rows = self.chance.randint(1, 12)
        keys = [self.chance.randint(0, 100) for _ in range(rows)]
        once = f"i{self.chance.random()}" if self.chance.random() < 0.3 else None
        self.table.ingest({"k": keys, "v": [self.chance.randint(0, 9) for _ in keys]}, ingest_id=once)

    def passes(self) -> None:
        let_pass(self.instance, self.chance.choice([60.0, 0.6 * HOUR, 2 * HOUR, 25 * HOUR, 8 * DAY]))

    def maintain(self) -> None:
        self.instance.maintain(once=True)

    def part(self) -> None:
        self.chance.choice(list(work_of(self.table).values()))()

    def delete(self) -> None:
        lowest = self.chance.randint(0, 100)
        self.table.delete(self.chance.choice([{"k": (lowest, lowest + 5)}, {"v": lowest % 10}, dm.ALL]))

    def properties(self) -> None:
        choices: dict[str, list[Any]] = {
            "gc_delay_seconds": [0.0, 60.0],
            "history_retention_seconds": [60.0, HOUR, DAY],
            "attempt_expiry_seconds": [60.0, DAY],
            "compaction_strategy": ["basic", "size_ratio"],
            "compaction_batch_files": [2, 5],
            "split_threshold_rows": [10, 100],
            "merge_threshold_rows": [None, 40],
            "inline_bytes_max": [0, 65_536],
            "inline_seconds_max": [1.0, HOUR],
            "inline_total_bytes_max": [1, 65_536],
            "deletions_max": [1, 100],
        }
        name = self.chance.choice(sorted(choices))
        self.table.set_properties(**{name: self.chance.choice(choices[name])})

    def cut(self) -> None:
        self.cuts += 1
        self.table.history.record_cut(self.chance.choice([None, f"c{self.cuts}"]))

    def any_cut(self) -> dm.Cut | str:
        known: list[dm.Cut | str] = [*self.table.history.cuts(), "none"]
        return self.chance.choice(known)

    def drop_cut(self) -> None:
        self.table.history.drop_cut(self.any_cut())

    def consumer(self) -> None:
        if self.chance.random() < 0.5:
            self.table.consumer("reader")
        else:
            self.table.drop_consumer("reader")

    def restore(self) -> None:
        self.table.restore(self.any_cut())

    def attempt(self) -> None:
        """Leaves a write attempt of a dead writer, with an object."""
        context = self.table.context
        attempt = context.attempts.begin(context.table, loads=True)
        self.instance._objects.put(attempt.object_name("root"), b"of a dead writer")

    def lease(self) -> None:
        """Leaves the jobs of a dead process."""
        self.table.context.jobs.create()
        self.table.context.jobs.take(2)

    def hold(self) -> None:
        query(
            self.instance._supplier,
            "insert into hold (holder, since, until) values (%s, clock_timestamp(), "
            "clock_timestamp() + interval '15 minutes') returning 1",
            f"backup {self.chance.random()}",
        )

    def truncate(self) -> None:
        self.table.history.truncate(self.any_cut())

    def convert(self) -> None:
        self.table.convert_layout(self.chance.choice(LAYOUTS))

    def fail(self) -> None:
        query(
            self.instance._supplier,
            "update last_round set error = 'failed', failures = 1, failing_since = clock_timestamp() "
            "where kind = %s returning 1",
            self.chance.choice(["compaction", "split", "merge", "collection"]),
        )

    def erase(self) -> None:
        self.table.erase({"k": self.chance.randint(0, 100)}, wait_seconds=0)

    def reshape(self) -> None:
        name = f"c{self.chance.randint(0, 999)}"
        self.table.add_column(dm.Field(name, dm.LONG, nullable=True))


SEEDS = [pytest.param(seed, marks=[] if seed < 1 else pytest.mark.slow) for seed in range(16)]


@pytest.mark.parametrize("seed", SEEDS)
def test_work_that_is_not_due_does_nothing_in_any_life_of_a_table(instance: Instance, seed: int) -> None:
    life, steps = Life(instance, seed), list[str]()
    for _ in range(by_tier(16, 40)):
        steps.append(life.step())
        try:
            check(instance, life.table)
        except AssertionError:
            print(life.table.layout, life.table.properties, steps)
            raise
    for _ in range(4):
        let_pass(instance, 8 * DAY)
        instance.maintain(once=True)
        instance.maintain(once=True)
    # a deletion stays pending while a file may have its rows
    assert kinds_due(life.table) <= {"collection"}, "work remains without end"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_at_rest_is_due_only_once_a_day(instance: Instance, layout: str) -> None:
    table = instance.create_table("t", OF_K_AND_NUMBERS, layout=layout)
    for number in range(4):
        table.ingest({"k": [number], "v": [0]})
    assert kinds_due(table) == {"cut", "split", "compaction", "collection"}
    assert instance.maintain(once=True).tables_idle == 0
    assert kinds_due(table) == {"split", "compaction"}  # because of the compaction
    instance.maintain(once=True)
    assert kinds_due(table) == set()
    let_pass(instance, HOUR)
    assert kinds_due(table) == {"cut"}
    instance.maintain(once=True)
    for _ in range(2):
        assert kinds_due(table) == set()
        assert instance.maintain(once=True).tables_idle == 1
        let_pass(instance, 0.9 * DAY)
        assert kinds_due(table) == set()
        let_pass(instance, 0.2 * DAY)
        assert kinds_due(table) >= {"split", "compaction", "collection"}
        instance.maintain(once=True)
        instance.maintain(once=True)


def at_rest(instance: Instance, name: str, **properties: Any) -> Table:
    """Returns a table with rows and without work."""
    given = {"inline_bytes_max": 0} | properties  # inlined files become due with time
    table = instance.create_table(name, OF_K_AND_NUMBERS, properties=dm.TableProperties(**given))
    table.ingest({"k": list(range(100)), "v": [0] * 100})
    for _ in range(2):
        instance.maintain(once=True)
    assert not kinds_due(table)
    return table


def test_new_criteria_make_a_table_due(instance: Instance) -> None:
    table = at_rest(instance, "t")
    for changes, kind in (
        ({"compaction_batch_files": 5}, "compaction"),
        ({"split_threshold_rows": 5_000}, "split"),
        ({"merge_threshold_rows": 1_000}, "merge"),
    ):
        table.set_properties(**changes)
        assert kinds_due(instance.table("t")) == {kind}
        instance.maintain(once=True)
        assert not kinds_due(instance.table("t"))


def test_inlined_files_are_due_when_they_are_old_many_or_large(instance: Instance) -> None:
    table = at_rest(instance, "t", inline_bytes_max=65_536, compaction_batch_files=3)
    assert query(instance._supplier, f"select count(*) from dormouse.file_content_{id_of(table)}") == [(1,)]
    let_pass(instance, HOUR + 1)
    assert "compaction" in kinds_due(table)
    instance.maintain(once=True)
    instance.maintain(once=True)
    table.ingest({"k": [1], "v": [0]})
    instance.maintain(once=True)
    assert "compaction" not in kinds_due(table)
    table.set_properties(inline_total_bytes_max=2)
    assert "compaction" in kinds_due(instance.table("t"))


def test_a_transaction_that_commits_after_a_look_makes_its_table_due(instance: Instance, dsn: str) -> None:
    table, other = at_rest(instance, "t"), at_rest(instance, "other")
    with psycopg.connect(dsn) as conn:
        own = f"dormouse.file_reference_{id_of(table)}"
        conn.execute(
            f"insert into {own} (table_id, partition_id, file_id, filename, row_count, count_approximate, "
            "only_contains_data_for_this_partition) "
            f"select table_id, partition_id, gen_random_uuid(), 'late', 1, false, true from {own}"
        )
        for each in (table, other):
            for work in work_of(each).values():
                work()
        assert not kinds_due(table)
        assert not kinds_due(other)
        conn.commit()
    let_pass(instance, HOUR)
    assert kinds_due(table) == {"cut", "split", "compaction", "collection"}
    assert not kinds_due(other)


def test_tables_beside_a_dropped_or_converted_one_count_as_due(instance: Instance) -> None:
    tables = [at_rest(instance, name) for name in "abc"]
    records = [table.context.table for table in tables]
    instance.rename_table("a", "d")
    assert [*due_kinds(instance._supplier, records)] == [set()] * 3
    tables[1].convert_layout("salted_counts")
    assert [*due_kinds(instance._supplier, records)] == [KINDS] * 3
    instance.maintain(once=True)
    records = [table.context.table for table in instance.tables()]
    assert [*due_kinds(instance._supplier, records)] == [set()] * 3
    instance.drop_table("c")
    assert [*due_kinds(instance._supplier, records)] == [KINDS] * 3


LONG_AGO = "clock_timestamp() - interval '60 days'"
WAITING = {
    "split": [
        ("insert into dirty_partition (table_id, purpose, partition_id) values (1, 'splits', 'root')", True),
        ("insert into dirty_partition (table_id, purpose, partition_id) values (1, 'pushes', 'root')", True),
        ("update last_round set error = 'failed', failing_since = now() where kind = 'split'", True),
        (f"update watermark set whole_at = {LONG_AGO} where purpose = 'splits'", True),
    ],
    "compaction": [
        ("insert into dirty_partition (table_id, purpose, partition_id) values (1, 'jobs', 'root')", True),
        ("insert into compaction_job (table_id, job_id, partition_id) values (1, 'j', 'root')", True),
        (
            "insert into compaction_job (table_id, job_id, partition_id, leased_until) "
            "values (1, 'j', 'root', clock_timestamp() + interval '1 hour')",
            False,
        ),
    ],
    "collection": [
        (
            "insert into write_attempt (table_id, attempt_id, object_prefix, abandoned_at) "
            "values (1, gen_random_uuid(), 'p', clock_timestamp())",
            True,
        ),
        (
            "insert into write_attempt (table_id, attempt_id, object_prefix, started_at) "
            f"values (1, gen_random_uuid(), 'p', {LONG_AGO})",
            True,
        ),
        (
            "insert into write_attempt (table_id, attempt_id, object_prefix, finished_at) "
            f"values (1, gen_random_uuid(), 'p', {LONG_AGO})",
            True,
        ),
        (
            "insert into write_attempt (table_id, attempt_id, object_prefix) "
            "values (1, gen_random_uuid(), 'p')",
            False,
        ),
        (
            "insert into applied_commit (table_id, commit_key, commit_id, expires_at) "
            f"values (1, gen_random_uuid(), 'c', {LONG_AGO})",
            True,
        ),
        (
            "insert into applied_commit (table_id, commit_key, commit_id, expires_at) "
            "values (1, gen_random_uuid(), 'c', clock_timestamp() + interval '1 hour')",
            False,
        ),
        (f"update file_1 set unreferenced_at = {LONG_AGO}", False),  # it has a reference
        (
            "insert into file_1 (table_id, file_id, filename, unreferenced_at) "
            f"values (1, gen_random_uuid(), 'f', {LONG_AGO})",
            True,
        ),
        (
            "insert into file_1 (table_id, file_id, filename, unreferenced_at) "
            "values (1, gen_random_uuid(), 'f', clock_timestamp())",
            False,
        ),
        (f"update cut set recorded_at = {LONG_AGO}", True),
        ("insert into difference (table_id, partition_id, filename, detail) values (1, '', '', 'd')", True),
        (
            "insert into truncation (table_id, cut_id, epoch, snapshot, recorded_at) "
            f"values (1, 1, 7, pg_current_snapshot(), {LONG_AGO})",
            True,
        ),
        ("update last_round set error = 'failed', failing_since = now() where kind = 'collection'", True),
    ],
}  # fmt: skip
"""Changes of the state of the first table, and whether each gives it work of a kind."""


@pytest.mark.parametrize("kind", WAITING)
def test_each_state_that_waits_for_maintenance_makes_a_table_due(
    instance: Instance, dsn: str, kind: Kind
) -> None:
    table = at_rest(instance, "t")
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=dormouse,pg_temp") as conn:
        for change, is_due in WAITING[kind]:
            name = change.removeprefix("insert into ").removeprefix("update ").split()[0]
            conn.execute(f"create temp table kept as table {name}")
            conn.execute(change)
            assert (kind in kinds_due(table)) is is_due, change
            conn.execute(f"delete from {name}")
            conn.execute(f"insert into {name} overriding system value table kept")
            conn.execute("drop table kept")
            assert not kinds_due(table)


WORK: dict[str, tuple[str, Kind]] = {
    "a round that failed": (
        "insert into last_round as r (table_id, kind, error, failures, failing_since) "
        "values (%s, 'split', 'failed', 1, clock_timestamp()) on conflict (table_id, kind) do update "
        "set error = excluded.error, failures = 1, failing_since = excluded.failing_since returning 1",
        "split",
    ),
    "a difference": (
        "insert into difference (table_id, partition_id, filename, detail) "
        "values (%s, '', 'f', 'd') returning 1",
        "collection",
    ),
    "an abandoned attempt": (
        "insert into write_attempt (table_id, attempt_id, object_prefix, abandoned_at) "
        "values (%s, gen_random_uuid(), 'data/x', clock_timestamp()) returning 1",
        "collection",
    ),
    "an expired attempt": (
        "insert into write_attempt (table_id, attempt_id, object_prefix, started_at) "
        "values (%s, gen_random_uuid(), 'data/x', '-infinity') returning 1",
        "collection",
    ),
    "an expired commit": (
        "insert into applied_commit (table_id, commit_key, commit_id, expires_at) "
        "values (%s, gen_random_uuid(), 'c', '-infinity') returning 1",
        "collection",
    ),
    "a job whose lease ended": (
        "insert into compaction_job (table_id, job_id, partition_id) values (%s, gen_random_uuid(), 'root') "
        "returning 1",
        "compaction",
    ),
}


@pytest.mark.parametrize("state", WORK)
def test_work_that_waits_is_due(instance: Instance, state: str) -> None:
    table = instance.create_table("t", OF_K_AND_NUMBERS)
    instance.maintain(once=True)
    text, kind = WORK[state]
    assert kind not in kinds_due(table)
    query(instance._supplier, text, id_of(table))
    assert kinds_due(table) == {kind}
