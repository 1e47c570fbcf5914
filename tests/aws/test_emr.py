"""Runs on EMR Serverless, each submitted once: tested with moto, and each state with botocore's Stubber."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import boto3
import pytest
from botocore.stub import ANY
from emr_runs import ARN, COMMON, LABEL, REGION, ROLE, new_run, set_credentials, settings, stubbed
from moto import mock_aws

from dormouse.aws import emr
from dormouse.aws.emr import Run
from dormouse.errors import InstanceError, InvalidInput
from tests.support.aws import Aws
from tests.support.settings import RunsEnvironment


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)


@pytest.fixture
def aws() -> Iterator[Aws]:
    with mock_aws():
        yield Aws(boto3.session.Session(region_name=REGION))


@pytest.fixture
def serverless(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> RunsEnvironment:
    made = aws.call("emr-serverless", "create_application", name="x", releaseLabel=LABEL, type="SPARK")
    more = {"application_id": made["applicationId"], "execution_role": ROLE, "log_group": "/dormouse/dev"}
    return settings(monkeypatch, "emr-serverless", **more)


def test_a_run_on_emr_serverless(serverless: RunsEnvironment, aws: Aws) -> None:
    run = new_run(jobs=10)
    submitted = emr.submit(serverless, run, aws)
    assert submitted == {
        "engine": "emr-serverless",
        "run_id": run.run_id,
        "application": serverless.application_id,
        "id": submitted["id"],
    }
    found = aws.call(
        "emr-serverless",
        "get_job_run",
        applicationId=serverless.application_id,
        jobRunId=submitted["id"],
    )["jobRun"]
    assert found["name"] == f"dev-compaction-{run.run_id}"
    spark = found["jobDriver"]["sparkSubmit"]
    assert spark["entryPoint"] == "s3://assets/4567.py"
    arguments = [
        "--list",
        run.list,
        "--dsn",
        COMMON["dsn"],
        "--objects",
        "s3://bucket/data",
        "--region",
        REGION,
    ]
    assert spark["entryPointArguments"] == arguments
    parameters = spark["sparkSubmitParameters"]
    for expected in (
        "spark.archives=s3://assets/0123.tar.gz#environment",
        "spark.emr-serverless.driverEnv.PYSPARK_DRIVER_PYTHON=./environment/bin/python",
        "spark.emr-serverless.driverEnv.PYSPARK_PYTHON=./environment/bin/python",
        "spark.executorEnv.PYSPARK_PYTHON=./environment/bin/python",
        "spark.executor.cores=4",
        "spark.executor.memory=4g",
        "spark.executor.memoryOverhead=12g",
        "spark.dynamicAllocation.maxExecutors=3",
        "spark.task.maxFailures=1",
    ):
        assert f"--conf {expected}" in parameters
    logs = found["configurationOverrides"]["monitoringConfiguration"]["cloudWatchLoggingConfiguration"]
    assert (logs["logGroupName"], logs["logStreamNamePrefix"]) == ("/dormouse/dev", run.run_id)
    assert emr.follow(submitted, aws) == emr.Followed("SUCCEEDED")


def test_a_run_is_submitted_with_its_id_as_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """EMR returns the existing run when it gets the same token again."""
    environment = settings(
        monkeypatch, "emr-serverless", application_id="app1", execution_role=ROLE, worker_vcpu=16
    )
    aws, stubber = stubbed("emr-serverless")
    run = new_run(jobs=100_000)
    for _ in range(2):
        stubber.add_response(
            "start_job_run",
            {"applicationId": "app1", "jobRunId": "run1", "arn": ARN},
            {
                "applicationId": "app1",
                "clientToken": run.run_id,
                "executionRoleArn": ROLE,
                "name": ANY,
                "executionTimeoutMinutes": 360,
                "jobDriver": ANY,
            },
        )
    first, again = (emr.submit(environment, run, aws) for _ in range(2))
    assert first == again
    stubber.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("state", "followed"),
    [
        ("SUBMITTED", "RUNNING"),
        ("PENDING", "RUNNING"),
        ("SCHEDULED", "RUNNING"),
        ("QUEUED", "RUNNING"),
        ("RUNNING", "RUNNING"),
        ("CANCELLING", "RUNNING"),
        ("SUCCESS", "SUCCEEDED"),
        ("FAILED", "FAILED"),
        ("CANCELLED", "CANCELLED"),
    ],
)
def test_each_state_of_a_job_run(state: str, followed: str) -> None:
    aws, stubber = stubbed("emr-serverless")
    now = datetime.now(UTC)
    found = {
        "applicationId": "app1", "jobRunId": "run1", "arn": ARN, "createdBy": ROLE, "createdAt": now,
        "updatedAt": now, "executionRole": ROLE, "state": state, "stateDetails": "Worker  ran out\nof memory",
        "releaseLabel": LABEL, "jobDriver": {"sparkSubmit": {"entryPoint": "s3://x"}},
    }  # fmt: skip
    stubber.add_response("get_job_run", {"jobRun": found}, {"applicationId": "app1", "jobRunId": "run1"})
    submitted = {"engine": "emr-serverless", "run_id": "r", "application": "app1", "id": "run1"}
    assert emr.follow(submitted, aws) == emr.Followed(followed, "Worker ran out of memory")


@pytest.mark.slow
def test_a_job_run_is_cancelled_and_cancelling_it_again_is_no_error(
    serverless: RunsEnvironment, aws: Aws
) -> None:
    submitted = emr.submit(serverless, new_run(), aws)
    emr.cancel(submitted, aws)
    assert emr.follow(submitted, aws).state == "CANCELLED"
    stub, stubber = stubbed("emr-serverless")
    stubber.add_client_error("cancel_job_run", "ValidationException", "The job run is in a terminal state")
    emr.cancel(submitted, stub)


def test_a_refusal_of_emr_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = settings(monkeypatch, "emr-serverless", application_id="gone", execution_role=ROLE)
    aws, stubber = stubbed("emr-serverless")
    stubber.add_client_error("start_job_run", "ResourceNotFoundException", "Application gone\ndoes not exist")
    with pytest.raises(InstanceError, match="Application gone does not exist"):
        emr.submit(environment, new_run(), aws)


def test_an_event_that_lacks_a_field_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'list'"):
        Run.of({"run_id": "x", "kind": "split", "jobs": 1})
