"""A recorded history, and its database restored to each commit, beside a store with all later objects.

Each restored database receives all messages that were ever sent. SQS may deliver pending messages again, and
also messages whose acknowledgement was lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

import dormouse as dm
from dormouse.errors import InstanceIsACopy, InstanceTakenOver
from dormouse.model.file_reference import FileReference, FileWithReferences
from tests.data_files import rows_of, write_object
from tests.databases import name_of
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.commits import AddFiles, encode

SCHEMA = OF_KEYS
PROPERTIES = dm.TableProperties(
    compaction_strategy="basic", compaction_batch_files=2, split_threshold_rows=12, split_min_rows=2
)
"""Properties with the default delay of collection, which is longer than the test.

A file that was collected could not be brought back by restoring the database.
"""

Rows = dict[str, list[int]]
"""A mapping from the name of each table to the keys of its rows, in order."""

ACTS = {"ingest": 6, "send": 5, "drain": 3, "compact": 3, "split": 2, "create": 2, "drop": 1, "rename": 1}


@dataclass(frozen=True)
class Sent:
    """A message, with the table to which it is addressed and the rows that it adds."""

    body: str
    table_uuid: str
    keys: list[int]


@dataclass(frozen=True)
class Moment:
    """A commit of the history: the database, its rows and the UUIDs of its tables at that commit."""

    database: str
    rows: Rows
    uuids: dict[str, str]


@dataclass
class Actor:
    """A random user of an instance, with a record of the rows that should be there."""

    dice: random.Random
    rows: Rows = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    drained: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1_000_000)))

    def act(self, instance: Instance) -> None:
        what = self.dice.choices(list(ACTS), list(ACTS.values()))[0]
        if what == "create" or not self.rows:
            name = self.dice.choice("abc")
            if name not in self.rows:
                instance.create_table(name, SCHEMA, properties=PROPERTIES)
                self.rows[name] = []
            return
        if what == "drain":
            self.drain(instance)
            return
        getattr(self, what)(instance, self.dice.choice(sorted(self.rows)))

    def ingest(self, instance: Instance, name: str) -> None:
        keys = self.keys()
        instance.table(name).ingest(pa.table({"key": keys}))
        self.rows[name] = sorted(self.rows[name] + keys)

    def send(self, instance: Instance, name: str) -> None:
        """Writes a file, and submits a request to add that file."""
        context, keys = instance.table(name).context, self.keys()
        filename = f"mine/{keys[0]}.parquet"
        facts = write_object(context.objects, SCHEMA, filename, rows_of(context, keys))
        root = instance.table(name).partitions.root().partition_id
        reference = FileReference(filename=filename, partition_id=root, row_count=len(keys))
        file = FileWithReferences(filename=filename, references=(reference,), byte_count=facts.byte_count)
        request = AddFiles(commit_id=f"send {keys[0]}", table=name, files=(file,))
        instance.submit([request])
        record = context.table
        body = encode(request, table_id=record.table_id, table_uuid=record.uuid)
        self.sent.append(Sent(body, record.uuid, keys))

    def drain(self, instance: Instance) -> None:
        instance.committer().drain()
        tables = {table.context.table.uuid: table.name for table in instance.tables()}
        for one in self.sent[self.drained :]:
            if (name := tables.get(one.table_uuid)) is not None:
                self.rows[name] = sorted(self.rows[name] + one.keys)
        self.drained = len(self.sent)

    def compact(self, instance: Instance, name: str) -> None:
        assert not instance.table(name).compact().errors

    def split(self, instance: Instance, name: str) -> None:
        assert not instance.table(name).split().errors

    def drop(self, instance: Instance, name: str) -> None:
        instance.drop_table(name)
        del self.rows[name]

    def rename(self, instance: Instance, name: str) -> None:
        other = self.dice.choice("abc")
        if other not in self.rows:
            instance.rename_table(name, other)
            self.rows[other] = self.rows.pop(name)

    def keys(self) -> list[int]:
        first = next(self.numbers)
        return [first, first + 1_000_000, first + 2_000_000]


def rows(instance: Instance) -> Rows:
    found = {table.name: table.query().read_all()["key"].to_pylist() for table in instance.tables()}
    return {name: sorted(keys) for name, keys in found.items()}


@pytest.fixture
def copies(dsn: str) -> Iterator[list[str]]:
    names: list[str] = []
    yield names
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
        for name in names:
            conn.execute(f"drop database if exists {name} with (force)")


def recorded(dsn: str, url: str, copies: list[str], actor: Actor, commits: int) -> list[Moment]:
    """Makes and records a history of changes; copies the database after each commit.

    The objects of dropped tables are held, because a restored database still needs them.
    """
    moments = []
    hold = "insert into hold (holder, since, until) values ('history', clock_timestamp(), 'infinity')"
    for number in range(commits):
        with dm.connect(dsn, url) as instance:
            if number == 0:
                query(instance._supplier, hold)
            actor.act(instance)
            assert rows(instance) == actor.rows
            uuids = {table.name: table.context.table.uuid for table in instance.tables()}
        copies.append(f"{name_of(dsn)}_at_{number}")
        with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
                [name_of(dsn)],
            )
            conn.execute(f"create database {copies[-1]} template {name_of(dsn)}")
        moments.append(Moment(copies[-1], {name: list(keys) for name, keys in actor.rows.items()}, uuids))
    return moments


@pytest.mark.slow
def test_each_commit_of_a_history_can_be_restored(dsn: str, tmp_path: Path, copies: list[str]) -> None:
    url, actor = (tmp_path / "objects").as_uri(), Actor(random.Random(0))
    moments = recorded(dsn, url, copies, actor, commits=25)
    former = dsn
    for moment in actor.dice.sample(moments, len(moments)):
        there = make_conninfo(dsn, dbname=moment.database)
        with dm.connect(there, url) as instance:
            assert isinstance(instance.refusal, InstanceIsACopy)
            assert rows(instance) == moment.rows
            instance.adopt()
        with dm.connect(former, url) as instance:
            assert isinstance(instance.refusal, InstanceTakenOver)
        with dm.connect(there, url) as instance:
            check(instance, moment, actor)
        former = there
    # the newest database is intact: the others deleted none of its objects
    with dm.connect(dsn, url) as instance:
        assert rows(instance) == actor.rows
        instance.adopt()
        actor.drain(instance)
        assert rows(instance) == actor.rows


def check(instance: Instance, moment: Moment, actor: Actor) -> None:
    """Checks that acknowledged changes are there, and that each message of this timeline is applied once."""
    assert rows(instance) == moment.rows
    expected = {
        name: sorted({*moment.rows[name], *(key for one in of(actor, uuid) for key in one.keys)})
        for name, uuid in moment.uuids.items()
    }
    # the table's number belongs to another table in the other timeline
    made = [instance.create_table(f"new{number}", SCHEMA, properties=PROPERTIES) for number in range(3)]
    expected |= {table.name: [] for table in made}
    instance.commits.queues[0].send([one.body for one in actor.sent])
    instance.committer().drain()
    assert rows(instance) == expected
    for table in instance.tables():
        table.ingest(pa.table({"key": [0]}))
        assert not table.compact().errors
        assert not table.collect_garbage().failed
    assert rows(instance) == {name: [0, *keys] for name, keys in expected.items()}
    damage = [one for one in instance.check(deep=True).problems if one.kind != "object_unknown"]
    assert not damage


def of(actor: Actor, uuid: str) -> list[Sent]:
    return [one for one in actor.sent if one.table_uuid == uuid]
