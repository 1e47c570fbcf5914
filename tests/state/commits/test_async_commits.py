"""Jobs that commit through the queue: their rows are visible when they return, and refused jobs leave
nothing.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import AttemptAbandoned, CommitFailed, CommitIdReused, CommitRejected
from dormouse.model.file_reference import FileWithReferences
from dormouse.settings import Settings
from dormouse.state.commits import job_commits
from dormouse.state.commits.apply import _TableBatch
from dormouse.state.commits.job_commits import QueuedJobCommits
from dormouse.state.commits.requests import decode
from tests.commits import add
from tests.ingested import attempts
from tests.standard import OF_KEYS
from tests.stored import assign, file, live, query, ref, replace, wait_until
from tests.support.api import Instance
from tests.support.commits import ReplaceFileReferences, encode
from tests.support.objects import open_store
from tests.support.settings import load_settings
from tests.support.state import TableContext, WriteAttempt
from tests.support.writing import commit_files, run_compaction

pytestmark = pytest.mark.objects

SCHEMA = OF_KEYS
MERGE_PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}
JOBS = 40
DIES = """
import os, signal, sys
import pyarrow as pa
import dormouse as dm
from dormouse.state.commits.commit_queues import CommitQueues

send = CommitQueues.send

def die(*given):
    send(*given)
    os.kill(os.getpid(), signal.SIGKILL)

CommitQueues._start_own = lambda service: None
CommitQueues.send = die
instance = dm.local(sys.argv[1], committer=True)
instance.table("t").ingest(pa.table({"key": [1, 2]}), ingest_id="july")
"""


def opened(dsn: str, folder: Path, settings: Settings | None = None, *, committer: bool) -> Instance:
    objects = open_store(folder / "objects")
    return Instance(dsn, objects, settings or load_settings(), committer=committer).open()


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an instance whose own committer starts with the first job."""
    with opened(dsn, tmp_path, committer=True) as instance:
        instance.create_table("t", SCHEMA, properties=dm.TableProperties(**MERGE_PAIRS))
        yield instance


@pytest.fixture
def unserved(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """Yields an instance without a committer. Its settings say that committers run elsewhere."""
    with opened(dsn, tmp_path, load_settings(commit_queue="postgres"), committer=False) as instance:
        instance.create_table("t", SCHEMA)
        yield instance


@pytest.fixture
def sent(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the commit id of each request that a job sends."""
    found: list[str] = []
    job_commits = instance._tables.job_commits
    assert isinstance(job_commits, QueuedJobCommits)
    real = job_commits._send

    def send(request: Any, *table: Any) -> None:
        found.append(request.commit_id)
        real(request, *table)

    monkeypatch.setattr(job_commits, "_send", send)
    return found


def keys(*values: int) -> pa.Table:
    return pa.table({"key": values})


def context_of(instance: Instance) -> TableContext:
    return instance.table("t").context


def written(context: TableContext) -> tuple[WriteAttempt, list[FileWithReferences]]:
    """Returns a write attempt and its file, which is stored as an object."""
    attempt = context.attempts.begin(context.table)
    name = attempt.object_name("root")
    context.objects.put(name, b"rows")
    return attempt, [file(name, ref(name))]


def pending(instance: Instance) -> int:
    return int(query(instance._supplier, "select count(*) from commit_message")[0][0])


@pytest.mark.slow
def test_rows_are_visible_when_an_ingest_returns(instance: Instance, sent: list[str]) -> None:
    table = instance.table("t")
    report = table.ingest(keys(3, 1, 2), ingest_id="july")
    assert (report.applied, report.rows, report.files) == (True, 3, 1)
    assert sorted(table.query().read_all()["key"].to_pylist()) == [1, 2, 3]
    assert sent == ["ingest:july"]
    assert attempts(context_of(instance)) == 0
    assert not table.ingest(keys(3, 1, 2), ingest_id="july").applied
    with pytest.raises(CommitIdReused, match="ingest id 'july' was used before, for other data"):
        table.ingest(keys(4), ingest_id="july")


def test_a_compaction_commits_through_the_queue(instance: Instance, sent: list[str]) -> None:
    table = instance.table("t")
    for key in (1, 2):
        table.ingest(keys(key))
    report = table.compact()
    assert (report.jobs_run, report.jobs_failed, report.files_out) == (1, 0, 1)
    assert len(live(table.files)) == 1 and table.query().read_all().num_rows == 2
    assert len(sent) == 3 and sent[-1].startswith("compaction-")
    context = context_of(instance)
    assert (attempts(context), context.jobs.count()) == (0, (0, 0))


@pytest.mark.slow
def test_without_a_committer_or_with_sync_nothing_is_sent(
    dsn: str, tmp_path: Path, instance: Instance, sent: list[str]
) -> None:
    table = instance.table("t")
    table.set_properties(commit="sync")
    instance.table("t").ingest(keys(1))
    instance.table("t").ingest(keys(2))
    assert instance.table("t").compact().jobs_run == 1
    assert sent == []
    table.set_properties(commit="async")
    with opened(dsn, tmp_path, committer=False) as other:
        other.table("t").ingest(keys(3))
        assert context_of(other).commits is None
    with context_of(instance).address.open() as of_a_task:
        assert of_a_task.commits is None


def test_an_ingest_without_rows_needs_no_queue(instance: Instance, sent: list[str]) -> None:
    assert instance.table("t").ingest(keys(), ingest_id="empty").applied
    assert sent == []


@pytest.mark.slow
def test_a_table_that_was_renamed_is_found_by_its_id(instance: Instance, sent: list[str]) -> None:
    old = instance.table("t")
    instance.rename_table("t", "renamed")
    instance.create_table("t", SCHEMA)
    assert old.ingest(keys(1)).applied and len(sent) == 1
    assert len(live(instance.table("renamed").files)) == 1 and live(instance.table("t").files) == []


@pytest.mark.slow
def test_jobs_that_finish_at_once_are_committed_together(
    unserved: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, sizes = context_of(unserved), list[int]()
    real = _TableBatch._in_one_transaction

    def counted(self: Any, requests: Any) -> Any:
        sizes.append(len(requests))
        return real(self, requests)

    monkeypatch.setattr(_TableBatch, "_in_one_transaction", counted)
    jobs = [written(context) for _ in range(JOBS)]
    with ThreadPoolExecutor(JOBS) as pool:
        answers = [
            pool.submit(commit_files, context, attempt, files, f"id {number}")
            for number, (attempt, files) in enumerate(jobs)
        ]
        wait_until(lambda: pending(unserved) == JOBS, 60)
        unserved.committer(concurrency=1).drain()
        assert all(answer.result(60) for answer in answers)
    assert sizes == [JOBS]
    assert len(live(context.store)) == JOBS
    assert attempts(context) == 0


@pytest.mark.slow
def test_an_abandoned_job_harms_no_other_in_its_batch(unserved: Instance) -> None:
    context = context_of(unserved)
    jobs = [written(context) for _ in range(5)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [
            pool.submit(commit_files, context, attempt, files, f"id {number}")
            for number, (attempt, files) in enumerate(jobs)
        ]
        wait_until(lambda: pending(unserved) == len(jobs), 60)
        context.attempts.abandon(jobs[2][0])
        with pytest.raises(AttemptAbandoned):
            answers[2].result(60)
        unserved.committer(concurrency=1).drain()
        assert [a.result(60) for n, a in enumerate(answers) if n != 2] == [True] * 4
    assert unserved.commit_status("ingest:id 2").state == "rejected"
    assert len(live(context.store)) == 4


def test_of_two_jobs_with_one_id_the_second_adds_nothing_and_leaves_no_objects(unserved: Instance) -> None:
    context = context_of(unserved)
    jobs = [written(context) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(commit_files, context, *job, "july") for job in jobs]
        wait_until(lambda: pending(unserved) == 2, 60)
        unserved.committer(concurrency=1).drain()
        assert sorted(answer.result(60) for answer in answers) == [False, True]
    assert [name for name, _ in context.objects.list(context.table.object_prefix)] == [
        live(context.store)[0][1]
    ]
    assert attempts(context) == 0


def test_a_job_does_not_wait_for_another_table_s_message_with_its_id(
    unserved: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_commits, "DURABLE_SECONDS", 20.0)
    unserved.create_table("u", SCHEMA)
    unserved.submit([add("u", "a", "ingest:july")])
    assert len(unserved.commits.queues[0].receive(1)) == 1, "another committer works on it"
    committer = unserved.committer()
    with ThreadPoolExecutor(1) as pool:
        running, begun = pool.submit(committer.run), time.monotonic()
        try:
            assert unserved.table("t").ingest(keys(1), ingest_id="july").applied
            assert time.monotonic() - begun < 19
        finally:
            committer.close()
            running.result(60)
    assert pending(unserved) == 1


@pytest.mark.slow
def test_a_refusal_is_an_error_and_the_next_run_with_the_id_is_applied(instance: Instance) -> None:
    table, context = instance.table("t"), context_of(instance)
    table.ingest(keys(1))
    [(_, taken, _, _)] = live(context.store)
    with (
        pytest.raises(CommitRejected, match="already"),
        context.attempts.attempt(context.table) as attempt,
    ):
        commit_files(context, attempt, [file(taken, ref(taken))], "july")
    assert attempts(context) == 0
    assert table.ingest(keys(2), ingest_id="july").applied
    assert table.query().read_all().num_rows == 2


def test_a_compaction_whose_inputs_were_replaced_is_superseded_at_once(instance: Instance) -> None:
    table, context = instance.table("t"), context_of(instance)
    for key in (1, 2):
        table.ingest(keys(key))
    context.jobs.create()
    [job] = context.jobs.take(1)
    assert run_compaction(context, job, 0).outcome == "committed"
    assert run_compaction(context, job, 0).outcome == "superseded"
    assert attempts(context) == 0 and len(live(context.store)) == 1


def test_a_request_that_no_committer_answers_is_abandoned(
    unserved: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_commits, "ANSWER_SECONDS_MAX", 0.0)
    with pytest.raises(CommitFailed, match="no committer answered"):
        unserved.table("t").ingest(keys(1), ingest_id="july")
    assert [o.error_class for o in unserved.committer().drain()] == ["AttemptAbandoned"]
    check_holds_no_objects(context_of(unserved))


def test_a_job_retries_while_the_database_does_not_answer(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([OSError("gone"), OSError("gone")])
    real = job_commits.QueuedJobCommits._ask

    def answer(self: Any, *arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return real(self, *arguments)

    monkeypatch.setattr(job_commits.QueuedJobCommits, "_ask", answer)
    assert instance.table("t").ingest(keys(1)).applied


def test_a_job_looks_up_a_commit_whose_answer_is_lost(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database applies the commit, and answers the job's question about the outcome with an error."""
    monkeypatch.setattr(job_commits, "SILENCE_SECONDS_MAX", 0.0)

    def silent(self: Any, questions: Any) -> Any:
        ((_, commit_id),) = questions
        wait_until(lambda: instance.commit_status(commit_id).state == "applied", 60)
        raise OSError("gone")

    monkeypatch.setattr(job_commits.QueuedJobCommits, "_ask", silent)
    assert instance.table("t").ingest(keys(1), ingest_id="july").applied
    assert len(live(instance.table("t").files)) == 1


@pytest.mark.slow
def test_a_job_killed_before_its_commit_adds_nothing_and_runs_again(tmp_path: Path) -> None:
    """The killed job's request is in the queue when the instance is opened again, and is then refused."""
    folder = tmp_path / "instance"
    with dm.local(folder) as instance:
        instance.create_table("t", SCHEMA)
    child = subprocess.run([sys.executable, "-c", DIES, str(folder)], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    with dm.local(folder, committer=True) as instance:
        table, context = instance.table("t"), context_of(instance)
        assert pending(instance) == 1
        assert [o.error_class for o in instance.committer().drain()] == ["AttemptAbandoned"]
        table.collect_garbage()
        check_holds_no_objects(context)
        assert table.ingest(keys(1, 2), ingest_id="july").applied
        assert table.query().read_all().num_rows == 2


def test_a_replacement_keeps_its_attempt_when_encoded() -> None:
    request = ReplaceFileReferences(
        commit_id="c", table="t", requests=(replace("j", ["a"], "b"),), attempt_id="0a" * 16
    )
    assert decode(encode(request)).request == request


def test_a_replacement_refused_in_part_leaves_its_attempt_to_collection(unserved: Instance) -> None:
    context = context_of(unserved)
    attempt = context.attempts.begin(context.table)
    context.store.add_files([ref("a")])
    context.store.assign_job_ids([assign("j", "root", "a")])
    requests = (replace("j", ["a"], f"{attempt.object_prefix}x"), replace("k", ["none"], "y"))
    unserved.submit(
        [ReplaceFileReferences(commit_id="c", table="t", requests=requests, attempt_id=attempt.attempt_id)]
    )
    [outcome] = unserved.committer().drain()
    assert outcome.state == "applied" and "1 of 2" in str(outcome.error)
    finished = "select finished_at is not null from write_attempt where table_id = %s"
    assert query(context.supplier, finished, context.table.table_id) == [(True,)]


def check_holds_no_objects(context: TableContext) -> None:
    assert context.store.has_no_files() and attempts(context) == 0
    assert list(context.objects.list(context.table.object_prefix)) == []
