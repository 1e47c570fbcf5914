"""Hostile messages in the queue are refused, postponed or applied, and never affect another table."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse import errors
from dormouse.state.commits.outcomes import CommitOutcome
from tests.commits import add, send_raw
from tests.hostile_messages import Forger
from tests.standard import OF_KEYS
from tests.stored import live, query
from tests.support.api import Instance
from tests.support.commits import encode
from tests.support.state import LAYOUTS

OWN_ID = 57
"""The id of the messages' table. It differs from the other table's id in more than one digit."""
MESSAGES, BATCH = 240, 40
SECONDS_MAX = 180.0
"""The patience with a drain. The queue hides a message for a minute if a younger session deletes it."""
ANSWERS = {"applied", "applied_before", "rejected", "try_later"}


@contextmanager
def two_tables(dsn: str, folder: Path, seed: int) -> Iterator[Instance]:
    """Yields an instance with one table that the messages name, and another that they must not affect.

    Both have rows, compaction jobs, a writer that has not finished, and unreferenced files.
    """
    layouts = list(LAYOUTS)
    with dm.connect(dsn, (folder / "objects").as_uri()) as instance:
        for number, name in enumerate(("other", "t")):
            properties = dm.TableProperties(
                gc_delay_seconds=0,
                compaction_strategy="basic",
                compaction_batch_files=2,
                isolation=("read committed", "serializable")[seed % 2],
            )
            layout = layouts[(seed + number) % len(layouts)]
            table = instance.create_table(name, OF_KEYS, layout=layout, properties=properties)
            query(instance._supplier, f"alter table tables alter table_id restart with {OWN_ID}")
            for keys in ([1, 2], [3], [4, 5, 6]):
                table.ingest(pa.table({"key": keys}))
            table.compact()
            context = table.context
            attempt = context.attempts.begin(context.table)
            instance._objects.put(attempt.object_name("root"), b"half written")
        yield instance


def rows_of(instance: Instance, table_id: int) -> dict[str, list[str]]:
    """Returns all rows about a table in the database, as text."""
    columns = """select table_name, bool_or(column_name = 'table_id') from information_schema.columns
                 where table_schema = 'dormouse' group by 1 order by 1"""
    found = {}
    for name, shared in query(instance._supplier, columns):
        if shared or name.endswith(f"_{table_id}"):
            where = f"where table_id = {table_id}" if shared else ""
            text = f"select x::text from (select * from {name} {where}) x order by 1"
            found[name] = [line for (line,) in query(instance._supplier, text)]
    return found


def objects_of(instance: Instance, own: str) -> dict[str, str]:
    """Returns the digest of each object, by name.

    Omits the objects whose names begin with `own`, bodies of requests, and milestones.
    """
    passing = (own, "commits/", "owner/now/")
    names = [name for name, _ in instance._objects.list() if not name.startswith(passing)]
    return {name: hashlib.sha256(instance._objects.get(name)).hexdigest() for name in names}


def answered(instance: Instance, bodies: list[str]) -> list[CommitOutcome]:
    """Sends the messages that the queue accepts, drains it, and returns the outcomes."""
    taken = []
    for body in bodies:
        try:
            send_raw(instance, body)
        except errors.InvalidCommitRequest:
            continue
        taken.append(body)
    outcomes: list[CommitOutcome] = []
    committer = instance.committer(receives_max=2)
    thread = threading.Thread(target=lambda: outcomes.extend(committer.drain()), daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive(), "the committer hangs"
    # requests for a newer committer, and requests whose inputs it may add
    put_off = query(instance._supplier, "delete from commit_message returning 1")
    answers = [outcome for outcome in outcomes if outcome.state != "try_later"]
    assert len(answers) + len(put_off) == len(taken), "a message has no answer, or the committer died"
    return outcomes


def check_answer(outcome: CommitOutcome) -> None:
    """Checks that an error is one of Dormouse's own, and not one of the database or of faulty code."""
    assert outcome.state in ANSWERS, outcome
    if outcome.error_class is not None:
        assert issubclass(getattr(errors, outcome.error_class, Exception), errors.DormouseError) or (
            outcome.error_class in ("PartlyApplied", "SchemaMoved")
        ), outcome


def read(instance: Instance) -> list[int]:
    """Returns the rows of the other table; a query and SQL must agree."""
    found = instance.table("other").query().read_all()["key"].to_pylist()
    assert instance.sql("select key from other order by key").read_all()["key"].to_pylist() == found
    return list(found)


def check_usable(instance: Instance) -> None:
    """Checks that the table can be read, maintained, counted and emptied, whatever files it was given."""
    table = instance.table("t")
    before = live(table.files)
    assert len(before) == table.status().references
    table.files.all_files(10)
    list(table.partitions.leaves())
    table.explain()
    table.context.jobs.create()
    with suppress(errors.DormouseError):  # some of its files do not exist
        table.split()
    table.convert_layout("file_table")
    table.files.clear()
    assert table.ingest(pa.table({"key": [8, 9]})).applied
    assert table.query().read_all()["key"].to_pylist() == [8, 9]


def bombard(dsn: str, folder: Path, seed: int, messages: int) -> Counter[str]:
    with two_tables(dsn, folder, seed) as instance:
        other, own = (instance.table(name).context for name in ("other", "t"))
        for table in instance.tables():
            table.collect_garbage()
            table.collect_garbage()
        names = [
            name for context in (own, other) for name, _ in context.objects.list(context.table.object_prefix)
        ]
        attempts = [
            str(i)
            for (i,) in query(own.supplier, "select replace(attempt_id::text, '-', '') from write_attempt")
        ]
        forger = Forger(seed, own.table, names, attempts, instance._objects)
        rows, objects = rows_of(instance, other.table.table_id), objects_of(instance, own.table.object_prefix)
        answers = Counter[str]()
        for number in range(0, messages, BATCH):
            control = f"control {number}"
            bodies = [forger.body() for _ in range(BATCH)]
            outcomes = answered(instance, [*bodies, encode(add("t", control, rows=1))])
            for outcome in outcomes:
                check_answer(outcome)
            answers.update(outcome.state for outcome in outcomes)
            assert instance.commit_status(f"add {control}").state == "applied"
        with suppress(errors.CheckFailed):  # raised for references whose file has no row
            own.garbage.collect()
        own.store.differences.accept()
        for _ in range(2):
            own.garbage.collect()
        assert rows_of(instance, other.table.table_id) == rows
        assert objects_of(instance, own.table.object_prefix) == objects
        assert read(instance) == [1, 2, 3, 4, 5, 6]
        check_usable(instance)
        print(f"seed {seed}: {dict(answers)}")
        return answers


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_message_touches_another_table(dsn: str, tmp_path: Path, seed: int) -> None:
    assert set(bombard(dsn, tmp_path, seed, MESSAGES)) >= {"applied", "rejected", "try_later"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 9))
def test_no_message_touches_another_table_among_very_many(dsn: str, tmp_path: Path, seed: int) -> None:
    bombard(dsn, tmp_path, seed, 1_000)
