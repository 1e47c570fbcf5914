"""Ten thousand pending deletions of single keys. A file or a job must read only those that concern it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dormouse.reading.table_view import key_bounds
from dormouse.reading.where import condition_of
from dormouse.writing.compaction_job import JobDeletions
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance, Table
from tests.support.reading import question
from tests.work_of import measured

SCHEMA = OF_K_AND_NUMBERS
LEAVES, KEYS_A_LEAF = 100, 100
RECORD = """
insert into deletion
    (table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, epoch)
select %s, n, condition, array[bound], array[bound], bound, bound, false, 1
from unnest(%s::text[], %s::bytea[]) with ordinality as t (condition, bound, n)
"""


@pytest.fixture
def table(instance: Instance) -> Table:
    """A table with one file in each leaf and one pending deletion for each key."""
    splits = list(range(KEYS_A_LEAF, LEAVES * KEYS_A_LEAF, KEYS_A_LEAF))
    table = instance.create_table("t", SCHEMA, split_points=splits)
    keys = range(LEAVES * KEYS_A_LEAF)
    table.ingest(pa.table({"k": keys, "v": keys}))
    questions = [question(SCHEMA, {"k": key}, None, None) for key in keys]
    conditions = [condition_of(SCHEMA, one) for one in questions]
    bounds = [key_bounds(SCHEMA, one.ranges).min_keys[0] for one in questions]
    with table.context.supplier.connection() as conn:
        conn.execute(RECORD, [table.context.table.table_id, conditions, bounds])
    return table


@pytest.mark.slow
def test_finding_files_with_many_deletions_is_little_work(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    with measured(monkeypatch) as work:
        assert table.context.jobs.create_of_deleted() == 0, "no leaf has more than deletions_max"
    assert work.total() < 100_000, (
        "about ten for each deletion; comparing each deletion with each file would be a million"
    )
    table.set_properties(deletions_max=KEYS_A_LEAF - 1)
    assert table.context.followed().jobs.create_of_deleted() == LEAVES


@pytest.mark.slow
def test_a_job_reads_only_the_deletions_of_its_leaf(table: Table) -> None:
    table.set_properties(deletions_max=KEYS_A_LEAF - 1)
    context = table.context.followed()
    context.jobs.create_of_deleted()
    [job] = context.jobs.take(1)
    names = [one.filename for one in job.inputs]
    found = context.store.deletions_of(names)
    assert (len(found.deletions), found.till) == (KEYS_A_LEAF, LEAVES * KEYS_A_LEAF)
    assert len(context.store.deletions_of(names, retired_too=True).deletions) == KEYS_A_LEAF
    [applied] = JobDeletions.of(context, job).of_inputs
    numbers = [one.deletion_id for one in applied]
    assert len(numbers) == KEYS_A_LEAF
    assert numbers == list(range(numbers[0], numbers[0] + KEYS_A_LEAF)), "the deletions are those of one leaf"
