"""Compactions of deletion marks, and loads beside them, that are killed: nothing is lost or half done."""

from __future__ import annotations

from typing import Any

import pytest
from keyed_tables import begun, delete_keys, keyed, seen, upsert
from runners import runner, the_dead_are_known, wait_for

from tests.support.api import Instance, Table

# Runs the action given as the first argument, up to the moment given as the second.
RUNNER = """
from dormouse.writing import parquet_file
from dormouse.state.files.attempts import WriteAttempts
from dormouse.writing import compaction, compaction_job, ingest

what, moment = sys.argv[1:]
is_compaction = what == "compact"
if moment == "once it is announced":
    WriteAttempts.begin = after(WriteAttempts.begin)
elif moment == "before the output":
    if is_compaction:
        compaction_job.merge_newest = before(compaction_job.merge_newest)
    else:
        parquet_file.write_groups = before(parquet_file.write_groups)
elif moment == "once it is written":
    compaction_job.merge_newest = after(compaction_job.merge_newest)
elif moment == "before the commit":
    compaction_job.run_transaction = before(compaction_job.run_transaction)
elif moment == "within the commit":
    compaction_job.WriteAttempts.finish = staticmethod(after(compaction_job.WriteAttempts.finish))
elif moment == "after the commit":
    compaction_job.run_transaction = after(compaction_job.run_transaction)
with address.open() as table:
    if is_compaction:
        compaction.compact(table, create=False)
    else:
        ingest.ingest_in_process(table, {"k": [5], "v": [5], "s": ["killed"]})
"""
MOMENTS = [
    "once it is announced",
    "before the output",
    "once it is written",
    "before the commit",
    "within the commit",
    "after the commit",
]


def quick(moments: list[str]) -> list[Any]:
    """Returns all moments as test parameters; those outside of `moments` are marked slow."""
    return [pytest.param(one, marks=[] if one in moments else pytest.mark.slow) for one in MOMENTS]


def killed(table: Table, what: str, moment: str) -> None:
    """Runs an action in another process, which is killed at a moment."""
    with runner(table.context, RUNNER, what, moment) as process:
        wait_for(process)


@pytest.mark.slow
@pytest.mark.parametrize("moment", quick(MOMENTS[::2]))
def test_a_killed_compaction_with_marks_changes_no_row(instance: Instance, moment: str) -> None:
    table = keyed(instance, compaction_batch_files=3, gc_delay_seconds=0, attempt_expiry_seconds=0.0)
    upsert(table, *((key, 0) for key in range(20)))
    upsert(table, (3, 1), (30, 1))
    delete_keys(table, 4, 5)
    expected = seen(table, instance)
    assert table.context.jobs.create() == 1
    killed(table, "compact", moment)
    assert seen(table, instance) == expected
    the_dead_are_known(table.context)
    table.compact()
    table.collect_garbage()
    assert seen(table, instance) == expected
    status = table.status()
    assert (status.files, status.row_count, status.rows_exact) == (1, len(expected), True)
    upsert(table, (4, 9))
    assert seen(table, instance) == {**expected, 4: 9}


@pytest.mark.slow
def test_marks_are_kept_until_the_attempt_of_a_killed_load_expires(instance: Instance) -> None:
    table = keyed(instance, gc_delay_seconds=0, inline_bytes_max=0)
    upsert(table, (1, 1), (2, 7))
    late = begun(table, (1, 5))
    killed(table, "load", "before the output")
    delete_keys(table, 1)
    table.compact()
    assert (table.status().row_count, table.status().rows_exact) == (2, False)
    late()
    the_dead_are_known(table.context)
    table.compact()
    assert (table.status().row_count, table.status().rows_exact, seen(table, instance)) == (1, True, {2: 7})
