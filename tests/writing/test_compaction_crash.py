"""Compactions in another process that are killed or interrupted: nothing is half done or lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from data_files import SKETCHES, add_file, keys_in, objects_of
from runners import EXPIRE_LEASE, ended, runner, the_dead_are_known, wait_for

from tests.stored import query
from tests.support.state import TableContext
from tests.support.writing import compact

pytestmark = pytest.mark.objects

NewTable = Callable[..., TableContext]
KEYS = range(0, 3000, 3)

# Runs a round up to the moment given as the argument.
RUNNER = """
from dormouse.writing.compaction import compact
from dormouse.writing import compaction_job as task

moment = sys.argv[1]
with address.open() as table:
    if moment == "before the output":
        task.merge_sorted = before(task.merge_sorted)
    elif moment == "before the output is published":
        task.merge_sorted = after(task.merge_sorted)
    elif moment == "before the commit":
        task.run_transaction = before(task.run_transaction)
    elif moment == "within the commit":
        task.WriteAttempts.finish = staticmethod(after(task.WriteAttempts.finish))
    elif moment == "after the commit":
        task.run_transaction = after(task.run_transaction)
    try:
        report = compact(table, create=False)
    except KeyboardInterrupt:
        sys.exit(130)
    print(report.jobs_run, report.superseded, flush=True)
"""
UNWOKEN = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
"""
MOMENTS = [
    "before the output",
    "before the output is published",
    "before the commit",
    "within the commit",
    "after the commit",
]


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    """A table with a job of three files."""
    table = new_table(compaction_strategy="basic", compaction_batch_files=3, attempt_expiry_seconds=0.0)
    for number in range(3):
        add_file(table, f"file-{number}", (key + number for key in KEYS))
    assert table.jobs.create() == 1
    return table


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS[::-1])
def test_a_killed_worker_leaves_nothing_half_done(table: TableContext, moment: str) -> None:
    inputs = {reference.filename for reference in table.store.file_references()}
    with runner(table, RUNNER, moment) as process:
        wait_for(process)
    committed = moment == "after the commit"
    assert ({r.filename for r in table.store.file_references()} != inputs) == committed
    # the next worker finds the job leased, and no other job
    assert compact(table, create=False).jobs_run == 0
    the_dead_are_known(table)
    assert compact(table, create=False).jobs_run == (0 if committed else 1)
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == list(range(3000))
    table.attempts.collect(table.table)
    live = {*inputs, reference.filename}
    assert objects_of(table) == {name + suffix for name in live for suffix in ("", SKETCHES)}
    table.objects.sweep_staging()
    assert len(_files_in(table)) == 2 * len(live)


@pytest.mark.slow
def test_another_worker_runs_the_job_after_its_lease_expires(table: TableContext) -> None:
    with runner(table, RUNNER, "before the commit") as process:
        wait_for(process)
        query(table.supplier, EXPIRE_LEASE, table.table.table_id)
        # the first worker is alive but late; its output has a name of its own, so it does no harm
        assert compact(table, create=False).jobs_run == 1
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == list(range(3000))


@pytest.mark.slow
def test_only_one_of_two_processes_that_run_a_job_commits(table: TableContext) -> None:
    """Both processes have merged before one of them commits. The other process deletes its own output."""
    with runner(table, RUNNER, "before the commit") as first:
        wait_for(first)
        query(table.supplier, EXPIRE_LEASE, table.table.table_id)
        with runner(table, RUNNER, "before the commit") as second:
            wait_for(second)
            first.send_signal(signal.SIGUSR1)
            assert ended(first) == (0, "1 0\n")
            second.send_signal(signal.SIGUSR1)
            assert ended(second) == (0, "0 1\n")
    [reference] = table.store.file_references()
    assert keys_in(table, reference.filename) == list(range(3000))
    assert len(objects_of(table)) == 2 * 4


@pytest.mark.slow
def test_ctrl_c_during_a_merge_ends_at_once_and_releases_the_job(table: TableContext) -> None:
    inputs = objects_of(table)
    with runner(table, RUNNER, "before the output is published") as process:
        wait_for(process)
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130
    assert table.jobs.count() == (1, 0)
    assert query(
        table.supplier, "select count(*) from write_attempt where table_id = %s", table.table.table_id
    ) == [(0,)]
    assert objects_of(table) == inputs
    [job] = table.jobs.take(1, lease_seconds=-1)
    assert job.attempt == 1
    assert compact(table, create=False).jobs_run == 1


@pytest.mark.slow
def test_ctrl_c_that_does_not_wake_the_main_thread_is_handled_soon(table: TableContext) -> None:
    """The signal arrives in another thread, as if it came just before the main thread began to wait."""
    with runner(table, UNWOKEN + RUNNER, "before the output is published") as process:
        wait_for(process)
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130
    assert table.jobs.count() == (1, 0)


def _files_in(table: TableContext) -> list[Path]:
    folder = Path(table.objects.url.removeprefix("file://"))
    return [path for path in folder.rglob("*") if path.is_file()]
