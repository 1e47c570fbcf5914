"""Pause and resume in every intermediate state of AWS, with botocore's Stubber; and refusals of AWS."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from botocore.stub import ANY
from moto import mock_aws

from dormouse.aws import aws as aws_module
from dormouse.aws.aws import AwsRefused, action, open_session
from dormouse.aws.database import ASLEEP, HOPELESS, SERVES, StartDatabase, StopDatabase
from dormouse.aws.drain import DrainRuns, StopSpark
from dormouse.aws.instance import find
from dormouse.aws.steps import Run, Step, StepReport
from dormouse.aws.switches import SwitchMappings
from dormouse.errors import InstanceError, InvalidInput, NotAnInstance
from dormouse.settings.resources import (
    CommitResources,
    DatabaseResources,
    PauseResources,
    Resources,
    RunResources,
    state_parameter,
)
from tests.deployed import REGION, StubSession, deploy
from tests.fake_clock import FakeClock
from tests.support.aws import Aws, DeployedInstance, resume

UUID = "6f2d3c0e-5a3d-4a58-9d0f-7f2c5f0e3b11"
ARN = "arn:aws:emr-serverless:eu-west-1:123456789012:/applications/of/some/length"
RESOURCES = Resources(
    database=DatabaseResources(cluster="db", kind="serverless", endpoint="e", port=5432, name="dormouse"),
    commit=CommitResources(queues=(), dead_letters=(), mappings=(UUID,), function="commit"),
    compaction=RunResources(rules=(), function="c", engine="emr-serverless", application="a"),
    pause=PauseResources(rule="keeper", queue="q", function="p", drain_seconds=60),
)
IN_BETWEEN = [
    "backing-up", "cloning", "configuring-iam-database-auth", "creating", "failing-over", "maintenance",
    "migrating", "modifying", "preparing-data-migration", "promoting", "rebooting", "renaming",
    "resetting-master-credentials", "starting", "storage-full", "storage-optimization", "update-iam-db-auth",
    "upgrading", "a state of next year",
]  # fmt: skip


@pytest.fixture
def stubs() -> Iterator[StubSession]:
    session = StubSession()
    yield session
    session.assert_all_stubs_were_used()


@pytest.fixture
def instance(stubs: StubSession) -> DeployedInstance:
    return DeployedInstance("dev", "123456789012", REGION, RESOURCES, Aws(stubs))


def ran(step: Step, clock: FakeClock | None = None) -> StepReport:
    return Run("paused", lambda: "paused", clock=(clock or FakeClock()).clock).step(step)


def described(stubs: StubSession, *states: str, writer: bool = False) -> None:
    for state in states:
        members = [{"DBInstanceIdentifier": "w", "IsClusterWriter": True}] if writer else []
        answer = {"DBClusters": [{"DBClusterIdentifier": "db", "Status": state, "DBClusterMembers": members}]}
        stubs.stub("rds").add_response("describe_db_clusters", answer, {"DBClusterIdentifier": "db"})


def expect_call(stubs: StubSession, operation: str, refusal: str | None = None) -> None:
    if refusal is None:
        stubs.stub("rds").add_response(operation, {}, {"DBClusterIdentifier": "db"})
    else:
        stubs.stub("rds").add_client_error(operation, refusal, "not now")


@pytest.mark.parametrize("state", IN_BETWEEN)
def test_a_busy_database_is_stopped_when_its_work_has_ended(
    stubs: StubSession, instance: DeployedInstance, state: str
) -> None:
    for _ in range(3):
        described(stubs, state)
        expect_call(stubs, "stop_db_cluster", "InvalidDBClusterStateFault")
    described(stubs, "available")
    expect_call(stubs, "stop_db_cluster", "InvalidDBInstanceState")  # one of its instances is still busy
    described(stubs, "available")
    expect_call(stubs, "stop_db_cluster")
    described(stubs, "stopping")
    assert ran(StopDatabase(instance)).what == (f"cluster db is {state}",)


@pytest.mark.parametrize("state", sorted({"stopping"} | ASLEEP))
def test_a_stopping_or_stopped_database_is_left_alone(
    stubs: StubSession, instance: DeployedInstance, state: str
) -> None:
    described(stubs, state)
    assert ran(StopDatabase(instance)).outcome == "already"


def test_a_pause_may_wait_until_the_database_has_stopped(
    stubs: StubSession, instance: DeployedInstance
) -> None:
    described(stubs, "stopping", "stopping", "stopping", "stopped")
    assert ran(StopDatabase(instance, to_the_end=True)).outcome == "done"


@pytest.mark.parametrize("state", sorted(HOPELESS))
@pytest.mark.parametrize("step", [StopDatabase, StartDatabase])
def test_a_cluster_state_that_only_an_operator_can_fix_is_an_error(
    stubs: StubSession, instance: DeployedInstance, step: Any, state: str
) -> None:
    described(stubs, state)
    with pytest.raises(InstanceError, match=f"cluster db is {state}: "):
        ran(step(instance))


def test_a_state_that_does_not_end_is_named_after_the_timeout(
    stubs: StubSession, instance: DeployedInstance
) -> None:
    clock = FakeClock()
    for _ in range(4):
        described(stubs, "upgrading")
        expect_call(stubs, "stop_db_cluster", "InvalidDBClusterStateFault")
    described(stubs, "upgrading")
    clock.at.append((2.0, lambda: setattr(clock, "seconds", 4_000.0)))
    with pytest.raises(InstanceError, match="stop the database within 60 minutes: cluster db is upgrading"):
        ran(StopDatabase(instance), clock)


@pytest.mark.parametrize("state", sorted(set(IN_BETWEEN) - SERVES))
def test_a_database_in_an_intermediate_state_is_awaited_and_not_started(
    stubs: StubSession, instance: DeployedInstance, state: str
) -> None:
    described(stubs, state, state, "available")
    assert ran(StartDatabase(instance)).what == (f"cluster db is {state}",)


@pytest.mark.parametrize("asleep", sorted(ASLEEP))
def test_a_resume_starts_the_database_and_waits_for_its_writer(
    stubs: StubSession, instance: DeployedInstance, asleep: str
) -> None:
    described(stubs, "stopping", "stopping", asleep)
    expect_call(stubs, "start_db_cluster", "InvalidDBClusterStateFault")
    described(stubs, asleep)
    expect_call(stubs, "start_db_cluster")
    described(stubs, "starting")
    for state in ("starting", "configuring-enhanced-monitoring"):
        described(stubs, "available", writer=True)
        answer = {"DBInstances": [{"DBInstanceStatus": state}]}
        stubs.stub("rds").add_response("describe_db_instances", answer, {"DBInstanceIdentifier": "w"})
    assert ran(StartDatabase(instance)).outcome == "done"


def test_a_database_that_another_user_stops_is_started_again(
    stubs: StubSession, instance: DeployedInstance
) -> None:
    described(stubs, "stopped")
    expect_call(stubs, "start_db_cluster")
    described(stubs, "starting", "available", writer=True)
    stubs.stub("rds").add_response(
        "describe_db_instances", {"DBInstances": [{"DBInstanceStatus": "stopping"}]}
    )
    described(stubs, "stopping", "stopped")
    expect_call(stubs, "start_db_cluster")
    described(stubs, "starting", "available")
    assert ran(StartDatabase(instance)).outcome == "done"


def test_a_resume_while_the_database_stops_is_refused_in_one_line(
    stubs: StubSession, instance: DeployedInstance
) -> None:
    described(stubs, "stopping")
    with pytest.raises(InstanceError, match=r"AWS is still stopping the database cluster db.*--wait"):
        resume(instance, clock=FakeClock().clock)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_mapping_is_changed_after_its_previous_change_has_ended(
    stubs: StubSession, instance: DeployedInstance, enabled: bool
) -> None:
    goal, other, to_goal = (
        ("Enabled", "Disabled", "Enabling") if enabled else ("Disabled", "Enabled", "Disabling")
    )
    stub = stubs.stub("lambda")

    def seen(*states: str) -> None:
        for state in states:
            stub.add_response("get_event_source_mapping", {"UUID": UUID, "State": state}, {"UUID": UUID})

    seen("Creating", "Updating", other)
    stub.add_client_error("update_event_source_mapping", "ResourceInUseException")
    seen("Enabling", "Disabling", other)
    stub.add_response("update_event_source_mapping", {}, {"UUID": UUID, "Enabled": enabled})
    seen(to_goal, to_goal, goal)
    report = ran(SwitchMappings(instance, enabled))
    assert (report.outcome, report.what) == ("done", (f"mapping {UUID} is creating",))


def test_an_application_is_stopped_when_it_has_started(
    stubs: StubSession, instance: DeployedInstance
) -> None:
    stub = stubs.stub("emr-serverless")

    def seen(*states: str) -> None:
        for state in states:
            times = {"createdAt": datetime.now(UTC), "updatedAt": datetime.now(UTC)}
            about = {"applicationId": "a", "arn": ARN, "releaseLabel": "emr", "type": "Spark", **times}
            stub.add_response("get_application", {"application": {**about, "state": state}})

    seen("CREATING", "STARTING", "STARTED")
    stub.add_client_error("stop_application", "ValidationException", "job runs are still cancelling")
    seen("STARTED")
    stub.add_response("stop_application", {}, {"applicationId": "a"})
    seen("STOPPING", "STOPPED")
    assert ran(StopSpark(instance)).outcome == "done"
    seen("CREATED", "TERMINATED")
    assert [ran(StopSpark(instance)).outcome for _ in range(2)] == ["already"] * 2


def test_a_job_run_is_cancelled_once_and_awaited(stubs: StubSession, instance: DeployedInstance) -> None:
    stub, clock = stubs.stub("emr-serverless"), FakeClock()

    def seen(*states: str) -> None:
        times = {"createdAt": datetime.now(UTC), "updatedAt": datetime.now(UTC)}
        about = {"applicationId": "a", "arn": ARN, "createdBy": ARN, "executionRole": ARN, **times}
        runs = [
            {**about, "id": f"r{n}", "releaseLabel": "emr", "state": state, "stateDetails": "-"}
            for n, state in enumerate(states)
        ]
        expected = {"applicationId": "a", "states": ANY}
        stub.add_response("list_job_runs", {"jobRuns": runs}, expected)

    seen("QUEUED", "RUNNING")
    stub.add_client_error("cancel_job_run", "ValidationException", "it has ended")
    stub.add_response(
        "cancel_job_run", {"applicationId": "a", "jobRunId": "r1"}, {"applicationId": "a", "jobRunId": "r1"}
    )
    seen("CANCELLING")
    seen("CANCELLING")
    seen()
    assert ran(DrainRuns(instance, 0), clock).outcome == "done"


def test_actions_have_the_names_used_in_policies() -> None:
    assert action("rds", "stop_db_cluster") == "rds:StopDBCluster"
    assert action("emr", "terminate_job_flows") == "elasticmapreduce:TerminateJobFlows"
    assert action("stepfunctions", "list_executions") == "states:ListExecutions"
    assert action("ssm", "get_parameters_by_path") == "ssm:GetParametersByPath"


@pytest.mark.parametrize(
    ("code", "message", "line"),
    [
        ("ExpiredTokenException", "The security token is expired", "credentials have expired: log in again"),
        (
            "UnrecognizedClientException",
            "The security token is invalid",
            "AWS does not know these credentials",
        ),
        (
            "AccessDeniedException",
            "User: arn:u is not authorized to perform: ssm:GetParametersByPath on resource: arn:x",
            "no right to ssm:GetParametersByPath on arn:x: ask for it",
        ),
        ("AccessDenied", "", "no right to ssm:GetParametersByPath: ask for it"),
        ("InternalServerError", "sorry", "AWS refuses ssm:GetParametersByPath: sorry"),
    ],
)
def test_a_refusal_of_aws_is_one_clear_line(stubs: StubSession, code: str, message: str, line: str) -> None:
    stubs.stub("ssm").add_client_error("get_parameters_by_path", code, message, http_status_code=400)
    with pytest.raises(InstanceError) as error:
        find("dev", stubs)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_throttled_calls_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Botocore retries up to the limit that it is given; then the error is one line."""
    slept: list[float] = []
    calls: list[str] = []
    ours, sleep = threading.current_thread(), time.sleep
    # other threads sleep as usual
    monkeypatch.setattr(
        "time.sleep", lambda s: slept.append(s) if threading.current_thread() is ours else sleep(s)
    )

    def answer(request: Any, **more: Any) -> Any:
        from botocore.awsrequest import AWSResponse

        class Raw:
            def stream(self, **more: Any) -> Iterator[bytes]:
                yield b'{"__type": "ThrottlingException", "message": "Rate exceeded"}'

        calls.append(request.url)
        return AWSResponse(request.url, 400, {}, Raw())

    session = boto3.session.Session("key", "secret", region_name=REGION)
    session.events.register("before-send.ssm", answer)
    with pytest.raises(AwsRefused, match=r"limits the rate of ssm:GetParameter: try again"):
        Aws(session).call("ssm", "get_parameter", Name="x")
    assert len(calls) == aws_module.ATTEMPTS_MAX == len(slept) + 1


def test_a_missing_region_profile_or_login_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InvalidInput, match="no AWS region is given: use --region"):
        find("dev", open_session())
    with pytest.raises(InstanceError, match="no AWS credentials: log in"):
        find("dev", open_session(REGION))
    with pytest.raises(InvalidInput, match=r"profile \(missing\) could not be found"):
        open_session(REGION, "missing")
    with pytest.raises(InvalidInput, match="is not the id of an instance"):
        find("./dev", open_session(REGION))
    assert issubclass(NoCredentialsError, Exception)


def test_an_unknown_instance_is_named_with_the_known_ones() -> None:
    with mock_aws(config={"lambda": {"use_docker": False}}):
        session = boto3.session.Session(region_name=REGION)
        with pytest.raises(NotAnInstance, match=f"no instance 'dev' in account 123456789012, {REGION}, nor"):
            find("dev", session)
        deploy("one")
        deploy("two")
        with pytest.raises(NotAnInstance, match=r"there are one, two$"):
            find("dev", session)
        session.client("ssm").put_parameter(Name=state_parameter("one"), Value="asleep", Overwrite=True)
        with pytest.raises(InstanceError, match="must be running or paused, not 'asleep'"):
            _ = find("one", session).desired
        for text in ("{}", "{"):
            where = "/dormouse/two/resources/pause"
            session.client("ssm").put_parameter(Name=where, Value=text, Overwrite=True)
            with pytest.raises(InstanceError, match=f"{where} cannot be read: deploy two"):
                find("two", session)
