"""The lambdas of runs: jobs are made once per execution, submitted once, and released if the run fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

import dormouse as dm
from dormouse.aws.schedules import runs as system_runs
from dormouse.aws.schedules.runs import RunList, RunTable
from dormouse.errors import InstanceError, InvalidInput
from dormouse.objects import store as store_module
from dormouse.settings.lambdas import CompactionEnvironment
from dormouse.state.files.compaction_jobs import CompactionJobs
from lambdas import compaction, runs
from tests.aws_lambda import Context, lambda_service, metrics_in
from tests.standard import OF_KEYS
from tests.stored import jobs_of, ref
from tests.support.api import Instance
from tests.support.objects import open_store
from tests.support.settings import RunsEnvironment

EXECUTION = {"execution": "arn:aws:states:eu-west-1:123456789012:execution:compaction:one"}
OTHER = {"execution": "arn:aws:states:eu-west-1:123456789012:execution:compaction:two"}
SUCCEEDED = {"state": "SUCCEEDED", "reason": None}
FAILED = {"state": "FAILED", "reason": "exit code 1"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def instance(dsn: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """Yields the instance that the lambda's environment names, with a table of two jobs."""
    given = {"instance_id": "dev", "dsn": dsn, "objects": url, "jobs_max": 3}
    for name, value in CompactionEnvironment.variables(**given).items():
        monkeypatch.setenv(name, value)
    with dm.connect(dsn, url) as instance:
        properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
        table = instance.create_table("t", OF_KEYS, properties=properties)
        table.files.add_files(ref(f"{n}", rows=10) for n in range(4))
        yield instance


def test_jobs_are_made_once_for_an_execution(instance: Instance, url: str) -> None:
    created = compaction.create(EXECUTION, Context())
    assert created == {
        "run_id": created["run_id"],
        "kind": "compaction",
        "list": f"{url.removeprefix('file://')}/runs/{created['run_id']}.json",
        "jobs": 2,
        "tables": 1,
    }
    assert compaction.create(EXECUTION, Context()) == created


def test_without_work_the_database_is_not_queried(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = compaction.create(EXECUTION, Context())
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.1")
    assert compaction.create(OTHER, Context()) == {"jobs": 0}
    # the list of the existing run is read from the store, without the database
    assert compaction.create(EXECUTION, Context()) == created


def test_jobs_beyond_the_limit_of_a_run_wait_for_the_next_schedule(instance: Instance, url: str) -> None:
    instance.table("t").files.add_files(ref(f"more {n}", rows=10) for n in range(6))
    created = compaction.create(EXECUTION, Context())
    assert created["jobs"] == 3
    system_runs.note_begun(open_store(url), created["run_id"])
    assert compaction.create(OTHER, Context())["jobs"] == 2


def test_while_a_run_waits_to_begin_no_other_is_made(
    instance: Instance, url: str, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    """At a quota, or behind others on a cluster, a run can wait for hours. The database stays asleep."""
    instance.table("t").files.add_files(ref(f"more {n}", rows=10) for n in range(6))
    created = compaction.create(EXECUTION, Context())
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    assert compaction.create(OTHER, Context()) == {"jobs": 0}
    assert compaction.create(EXECUTION, Context()) == created
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    system_runs.note_begun(open_store(url), created["run_id"])
    assert compaction.create(OTHER, Context())["jobs"] == 2


def test_of_runs_made_at_the_same_time_one_releases_its_jobs(
    instance: Instance, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both executions found no waiting run, and one has written its list before the other."""
    objects, create = open_store(url), system_runs.create
    first = RunList(system_runs.run_id_for("first"), "compaction", (RunTable("t", 1, ("a",)),))

    def late(*given: Any, **more: Any) -> RunList:
        made = create(*given, **more)
        system_runs.write_list(objects, first)
        return made

    with monkeypatch.context() as racing:
        racing.setattr(system_runs, "create", late)
        assert compaction.create(EXECUTION, Context()) == {"jobs": 0}
    assert set(jobs_of(instance.table("t").files).values()) == {None}
    assert [name for name, _ in objects.list("runs")] == [f"runs/{first.run_id}.json"]
    system_runs.note_begun(objects, first.run_id)
    assert compaction.create(EXECUTION, Context())["jobs"] == 2


def test_a_run_that_ended_without_a_report_is_not_waited_for(
    instance: Instance, url: str, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    """The report notes the end before it needs the database."""
    instance.table("t").files.add_files(ref(f"more {n}", rows=10) for n in range(6))
    created = compaction.create(EXECUTION, Context())
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.1")
    with pytest.raises(InstanceError):
        compaction.report({"run": created, "status": FAILED}, Context())
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    assert compaction.create(OTHER, Context())["jobs"] == 2


def test_without_files_to_compact_there_is_no_run(instance: Instance) -> None:
    instance.drop_table("t")
    assert compaction.create(EXECUTION, Context()) == {"jobs": 0}


def test_a_failed_run_releases_its_jobs_and_reports_it(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    created = compaction.create(EXECUTION, Context())
    before = open_store(url)
    cause = json.dumps({"errorMessage": "Application gone", "errorType": "AwsRefused"})
    with lambda_service(monkeypatch):
        reported = compaction.report(
            {"run": created, "status": {"Error": "AwsRefused", "Cause": cause}}, Context()
        )
    assert reported == {
        "run_id": created["run_id"],
        "state": "FAILED",
        "reason": "AwsRefused: Application gone",
        "jobs": 2,
        "finished": 0,
        "released": 2,
        "files_released": 4,
        "given_up": 0,
    }
    assert metrics_in(capsys.readouterr().out) == {
        "RunsFailed": 1,
        "RunJobsFinished": 0,
        "RunJobsReleased": 2,
        "RunJobsGivenUp": 0,
        "RoundsFailing": 1,
    }
    # the run died before it could record its failure
    [last] = instance.table("t").status().rounds
    assert (last.kind, last.failures) == ("compaction", 1)
    assert last.error == f"the run {created['run_id']} failed: AwsRefused: Application gone"
    assert set(jobs_of(instance.table("t").files).values()) == {None}
    assert list(before.list("runs")) == []
    assert [name for name, _ in before.list("activity")]
    # the next execution gets the released files
    assert compaction.create(OTHER, Context())["jobs"] == 2


def test_a_run_that_succeeded_releases_nothing(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created = compaction.create(EXECUTION, Context())
    for job in instance.table("t").context.jobs.take(10, run_id=created["run_id"]):
        instance.table("t").files.unassign_job(job.job_id)
    with lambda_service(monkeypatch):
        reported = compaction.report({"run": created, "status": SUCCEEDED}, Context())
    assert (reported["finished"], reported["released"]) == (2, 0)
    assert metrics_in(capsys.readouterr().out) == {
        "RunJobsFinished": 2, "RunJobsReleased": 0, "RunJobsGivenUp": 0, "RoundsFailing": 0,
    }  # fmt: skip


def test_a_failed_run_that_recorded_its_round_and_a_cancelled_run_record_no_failure_again(
    instance: Instance,
) -> None:
    table = instance.table("t")
    for event, status in ((EXECUTION, {"state": "CANCELLED", "reason": "paused"}), (OTHER, FAILED)):
        created = compaction.create(event, Context())
        if status == FAILED:
            with pytest.raises(dm.DormouseError), table.context.last_rounds.round("compaction"):
                raise dm.DormouseError("no executors")
        assert compaction.report({"run": created, "status": status}, Context())["released"] == 2
        rounds = [(last.error, last.failures) for last in table.status().rounds]
        assert rounds == ([("no executors", 1)] if status == FAILED else [])


def test_jobs_that_a_run_gives_up_are_counted_once(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = instance.table("t")
    table.set_properties(compaction_attempts_max=1)
    for event, jobs in ((EXECUTION, 1), (OTHER, 2)):
        created = compaction.create(event, Context())
        for job in table.context.jobs.take(jobs, run_id=created["run_id"]):
            assert table.context.jobs.fail(job, "bad") == "given_up"
        capsys.readouterr()
        with lambda_service(monkeypatch):
            reported = compaction.report({"run": created, "status": FAILED}, Context())
        assert (reported["given_up"], reported["released"]) == (jobs, 2 - jobs)
        metrics = metrics_in(capsys.readouterr().out)
        assert (metrics["RunJobsGivenUp"], metrics["RoundsFailing"]) == (jobs, 1)
        monkeypatch.setattr(store_module, "_noted", {})
        store_module.note_activity(instance._objects)
    assert compaction.report({"run": created, "status": FAILED}, Context())["given_up"] == 0


def test_a_table_whose_jobs_cannot_be_made_has_a_failed_round(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    table = instance.table("t")
    with monkeypatch.context() as broken:
        broken.setattr(CompactionJobs, "create", lambda *_: 1 / 0)
        assert compaction.create(EXECUTION, Context()) == {"jobs": 0}
    [failed] = table.status().rounds
    assert (failed.kind, failed.error, failed.failures) == ("compaction", "division by zero", 1)
    monkeypatch.setattr(store_module, "_noted", {})
    store_module.note_activity(open_store(url))
    # jobs were made: the run that has them records how the round ends
    assert compaction.create(OTHER, Context())["jobs"] == 2
    assert table.status().rounds == (failed,)


def test_the_report_of_a_run_of_splits_needs_no_database(
    instance: Instance, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_store(url)
    run = RunList(system_runs.run_id_for("x"), "split", (RunTable("t", 1),))
    system_runs.write_list(objects, run)
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    for _ in range(2):
        reported = compaction.report({"run": run.summary(objects), "status": SUCCEEDED}, Context())
        assert reported["state"] == "SUCCEEDED"
    assert list(objects.list("runs")) == []


@pytest.mark.parametrize("event", [{}, {"execution": ""}])
def test_an_event_without_an_execution_is_refused(instance: Instance, event: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="'execution'"):
        compaction.create(event, Context())


def test_an_unreachable_database_leaves_the_work_for_the_next_execution(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.1")
    with pytest.raises(InstanceError):
        compaction.create(EXECUTION, Context())
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    assert compaction.create(OTHER, Context())["jobs"] == 2


def test_a_run_is_submitted_followed_and_cancelled(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    created = compaction.create(EXECUTION, Context())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        client = boto3.client("emr-serverless", region_name="eu-west-1")
        made = client.create_application(name="x", releaseLabel="emr-7.13.0", type="SPARK")
        given = {
            "instance_id": "dev",
            "engine": "emr-serverless",
            "dsn": "rds-iam://dormouse_run@db/dormouse?region=eu-west-1",
            "objects": url,
            "archive": "s3://assets/a.tar.gz",
            "entry": "s3://assets/compact.py",
            "application_id": made["applicationId"],
            "execution_role": "arn:aws:iam::123456789012:role/run",
        }
        for name, value in RunsEnvironment.variables(**given).items():
            monkeypatch.setenv(name, value)
        submitted = json.loads(json.dumps(runs.submit(created, Context())))
        assert submitted["run_id"] == created["run_id"]
        assert runs.follow(submitted, Context()) == {"state": "SUCCEEDED", "reason": None}
        assert runs.cancel(submitted, Context()) == {}
        assert runs.follow(submitted, Context())["state"] == "CANCELLED"


def test_activity_is_not_noted_when_nothing_was_released(
    instance: Instance, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_noted", {})
    objects = open_store(url)
    run = RunList(system_runs.run_id_for("x"), "compaction").summary(objects)
    compaction.report({"run": run, "status": {"state": "CANCELLED", "reason": "paused"}}, Context())
    assert list(objects.list("activity")) == []
