"""Pausing a deployed instance, in moto: the parts that stop, the waits, and the kept messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from moto import mock_aws
from moto.cloudformation.models import cloudformation_backends
from moto.core import DEFAULT_ACCOUNT_ID

from dormouse.aws.keeper import keep
from dormouse.errors import InstanceError
from dormouse.settings import resources
from tests.deployed import (
    PAUSED,
    REGION,
    RUNNING,
    Deployed,
    deploy,
    job_run_state,
    make_function,
    receive_request,
    start_emr_cluster,
    start_job_run,
)
from tests.fake_clock import FakeClock
from tests.support.aws import DeployedInstance, pause, resume


@pytest.fixture
def moto() -> Iterator[None]:
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield


@pytest.fixture
def deployed(moto: None) -> Deployed:
    return deploy()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_all_parts_are_stopped_except_the_rule_of_the_keeper(deployed: Deployed, clock: FakeClock) -> None:
    assert deployed.state() == RUNNING
    report = pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED
    assert (report.database, report.desired) == ("stopped", "paused")
    assert [one.step for one in report.steps if one.outcome == "already"] == [
        "let scheduled lambdas end", "let runs end", "let running commits end",
        "enable the rule that keeps the database asleep",
    ]  # fmt: skip
    assert report.changed


def test_a_paused_instance_may_be_paused_again(deployed: Deployed, clock: FakeClock) -> None:
    pause(deployed.find(), clock=clock.clock)
    report = pause(deployed.find(), wait=True, clock=clock.clock)
    assert [one.step for one in report.steps if one.outcome != "already"] == ["verify"]
    assert not report.changed


def test_a_partly_paused_instance_is_paused_completely(deployed: Deployed, clock: FakeClock) -> None:
    deployed.client("events").disable_rule(Name=deployed.rules[1])
    deployed.client("events").disable_rule(Name=deployed.keeper)
    deployed.client("rds").stop_db_cluster(DBClusterIdentifier=deployed.cluster)
    report = pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED
    done = {one.step: one.what for one in report.steps if one.outcome == "done"}
    assert len(done["disable the schedules"]) == 2
    assert "stop the database" not in done


def test_a_dry_run_changes_nothing(deployed: Deployed, clock: FakeClock) -> None:
    start_job_run(deployed)
    report = pause(deployed.find(), dry_run=True, clock=clock.clock)
    assert deployed.state() == RUNNING
    assert (report.desired, report.database, report.dry_run) == ("running", "available", True)
    assert {one.outcome for one in report.steps} == {"would", "already"}
    assert any("rule" not in what and "job run" in what for one in report.steps for what in one.what)


def test_messages_stay_in_their_queues(deployed: Deployed, clock: FakeClock) -> None:
    sqs = deployed.client("sqs")
    pause(deployed.find(), clock=clock.clock)
    sqs.send_message(QueueUrl=deployed.queues[0], MessageBody="a request")
    pause(deployed.find(), clock=clock.clock)
    assert sqs.receive_message(QueueUrl=deployed.queues[0])["Messages"][0]["Body"] == "a request"


def test_a_pause_waits_for_requests_that_lambdas_hold(deployed: Deployed, clock: FakeClock) -> None:
    receipt, sqs, url = receive_request(deployed), deployed.client("sqs"), deployed.queues[0]
    clock.at.append((20.0, lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle=receipt)))
    report = pause(deployed.find(), clock=clock.clock)
    step = next(one for one in report.steps if one.step == "let running commits end")
    assert step.outcome == "done" and 20 <= step.seconds < 40
    assert deployed.state() == PAUSED


@pytest.mark.slow
def test_a_pause_waits_no_longer_than_the_timeout_of_a_lambda(deployed: Deployed, clock: FakeClock) -> None:
    receive_request(deployed)
    report = pause(deployed.find(), drain_seconds=3_000, clock=clock.clock)
    step = next(one for one in report.steps if one.step == "let running commits end")
    assert 150 <= step.seconds < 170  # its timeout is 120 s
    early = pause(deployed.find(), drain_seconds=0, clock=clock.clock)
    assert all(one.seconds == 0 for one in early.steps)


@pytest.mark.slow
def test_job_runs_are_cancelled_after_the_deadline(deployed: Deployed, clock: FakeClock) -> None:
    run = start_job_run(deployed)
    pause(deployed.find(), drain_seconds=100, clock=clock.clock)
    assert 100 <= clock.seconds < 130
    assert job_run_state(deployed, run) == "CANCELLED"
    assert deployed.state() == PAUSED


@pytest.mark.slow
def test_executions_get_time_to_report_before_they_are_stopped(deployed: Deployed, clock: FakeClock) -> None:
    machines = deployed.client("stepfunctions")
    arn = machines.start_execution(stateMachineArn=deployed.machine)["executionArn"]
    run = start_job_run(deployed)
    pause(deployed.find(), drain_seconds=100, clock=clock.clock)
    assert 400 <= clock.seconds < 430
    assert machines.describe_execution(executionArn=arn)["status"] == "ABORTED"
    assert job_run_state(deployed, run) == "CANCELLED"


def test_runs_that_end_are_not_cancelled(deployed: Deployed, clock: FakeClock) -> None:
    machines = deployed.client("stepfunctions")
    arn = machines.start_execution(stateMachineArn=deployed.machine)["executionArn"]
    clock.at.append((30.0, lambda: machines.stop_execution(executionArn=arn, cause="its own end")))
    pause(deployed.find(), drain_seconds=100, clock=clock.clock)
    assert 30 <= clock.seconds < 60


@pytest.mark.parametrize("engine", ["emr-ec2-steps", "emr-ec2-transient"])
def test_only_emr_clusters_of_the_instance_are_terminated(moto: None, clock: FakeClock, engine: str) -> None:
    deployed, other = deploy(engine=engine), deploy("dev-2", engine=engine)  # type: ignore[arg-type]
    name, run = str(deployed.emr_name), "6f2d3c0e-5a3d-4a58-9d0f-7f2c5f0e3b11"
    ours = [start_emr_cluster(deployed), start_emr_cluster(deployed, f"{name}-{run}")]
    theirs = [start_emr_cluster(other), start_emr_cluster(other, f"{name}-2-compaction")]
    emr = deployed.client("emr")
    step = {"Name": "run", "HadoopJarStep": {"Jar": "command-runner.jar"}}
    emr.add_job_flow_steps(JobFlowId=ours[0], Steps=[step])
    pause(deployed.find(), drain_seconds=0, clock=clock.clock)
    states = [emr.describe_cluster(ClusterId=one)["Cluster"]["Status"]["State"] for one in (*ours, *theirs)]
    assert states == ["TERMINATED", "TERMINATED", "WAITING", "WAITING"]


def test_one_instance_is_paused_and_another_is_not(moto: None, clock: FakeClock) -> None:
    first, second = deploy("one", serverless=False), deploy("one-more")
    pause(first.find(), clock=clock.clock)
    assert (first.state(), second.state()) == (PAUSED, RUNNING)


def test_deleted_parts_count_as_stopped(deployed: Deployed, clock: FakeClock) -> None:
    deployed.client("events").delete_rule(Name=deployed.rules.pop())
    deployed.client("lambda").delete_event_source_mapping(UUID=deployed.mappings.pop())
    deployed.client("sqs").delete_queue(QueueUrl=deployed.queues[0])
    pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED


def test_without_a_database_nothing_is_changed(deployed: Deployed, clock: FakeClock) -> None:
    rds = deployed.client("rds")
    rds.delete_db_instance(DBInstanceIdentifier=f"dormouse-{deployed.id}-writer", SkipFinalSnapshot=True)
    rds.delete_db_cluster(DBClusterIdentifier=deployed.cluster, SkipFinalSnapshot=True)
    with pytest.raises(InstanceError, match="does not exist: restore it"):
        pause(deployed.find(), clock=clock.clock)
    assert deployed.find().desired == "running"


@pytest.mark.parametrize("is_stated", [True, False])
def test_without_the_part_pause_a_pause_warns_how_long_it_lasts(
    deployed: Deployed, clock: FakeClock, is_stated: bool
) -> None:
    ssm, lines = deployed.client("ssm"), []
    ssm.delete_parameter(Name=resources.resources_parameter("dev", "pause"))
    if not is_stated:
        ssm.delete_parameter(Name=resources.state_parameter("dev"))
    pause(deployed.find(), clock=clock.clock, tell=lines.append)
    assert lines[0] == (
        "the settings of dev have no table [pause]: AWS starts its database again after 7 days, and SQS "
        "deletes its messages and dead letters after 14 days at most"
    )
    assert deployed.state() == PAUSED and deployed.find().desired == "paused"
    resume(deployed.find(), clock=clock.clock)
    assert deployed.state() == {**RUNNING, "spark": "STOPPED"}


@pytest.mark.slow
def test_a_pause_waits_for_scheduled_lambdas_unless_their_rules_were_disabled_before(
    deployed: Deployed, clock: FakeClock
) -> None:
    """The pause waits until the longest run of a lambda would have ended: AWS does not report running ones.

    It does not wait for a schedule whose rule was disabled long ago.
    """
    make_function(deployed, "garbage", timeout=200)
    left = pause(deployed.find(), drain_seconds=1_000, dry_run=True, clock=clock.clock).steps
    assert ("garbage may still run, for 350 s at most",) in [one.what for one in left]
    pause(deployed.find(), drain_seconds=1_000, clock=clock.clock)
    assert 350 <= clock.seconds < 370
    resume(deployed.find(), clock=clock.clock)
    began = clock.seconds
    pause(deployed.find(), drain_seconds=20, clock=clock.clock)
    assert 20 <= clock.seconds - began < 40
    resume(deployed.find(), clock=clock.clock)
    for rule in deployed.rules:
        deployed.client("events").disable_rule(Name=rule)
    began = clock.seconds
    found = pause(Quiet.of(deployed.find()), clock=clock.clock)
    assert clock.seconds - began < 20 and found.desired == "paused"


class Quiet(DeployedInstance):
    """A deployed instance whose desired state seems to have been written an hour ago."""

    desired_seconds = 3_600.0  # type: ignore[assignment]

    @classmethod
    def of(cls, instance: DeployedInstance) -> Quiet:
        return cls(
            **{name: getattr(instance, name) for name in ("id", "account", "region", "resources", "aws")}
        )


def test_a_pause_ends_when_another_user_resumes_meanwhile(deployed: Deployed, clock: FakeClock) -> None:
    start_job_run(deployed)
    name, ssm = resources.state_parameter("dev"), deployed.client("ssm")
    clock.at.append((10.0, lambda: ssm.put_parameter(Name=name, Value="running", Overwrite=True)))
    with pytest.raises(InstanceError, match="another user resumed the instance meanwhile"):
        pause(deployed.find(), clock=clock.clock)
    state = deployed.state()
    assert (state["desired"], state["database"], state["spark"]) == ("running", "available", "STARTED")


def test_a_part_that_another_user_starts_during_a_pause_is_named(
    deployed: Deployed, clock: FakeClock
) -> None:
    start_job_run(deployed)
    events = deployed.client("events")
    clock.at.append((10.0, lambda: events.enable_rule(Name=deployed.rules[0])))
    with pytest.raises(InstanceError, match=f"{deployed.rules[0]} is enabled"):
        pause(deployed.find(), clock=clock.clock)
    pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED


@pytest.mark.parametrize("dry_run", [False, True])
def test_nothing_is_paused_while_a_stack_is_deployed(
    deployed: Deployed, clock: FakeClock, *, dry_run: bool
) -> None:
    """The deploy would enable disabled parts again, or fail because the database is stopped."""
    stack = make_stack(deployed, "storage")
    stack.status = "UPDATE_IN_PROGRESS"
    with pytest.raises(InstanceError, match="-storage is in update in progress: pause it when"):
        pause(deployed.find(), dry_run=dry_run, clock=clock.clock)
    assert deployed.state() == RUNNING
    stack.status = "UPDATE_ROLLBACK_COMPLETE"
    pause(deployed.find(), dry_run=dry_run, clock=clock.clock)


def test_a_stack_with_an_unexecuted_change_set_does_not_prevent_a_pause(
    deployed: Deployed, clock: FakeClock
) -> None:
    """A stack whose change set is never executed stays in review without limit."""
    make_stack(deployed, "storage").status = "REVIEW_IN_PROGRESS"
    make_stack(deployed, "migrate").status = "REVIEW_IN_PROGRESS"
    pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED
    assert keep(deployed.find()).ended


def test_a_deploy_to_another_instance_does_not_prevent_a_pause(deployed: Deployed, clock: FakeClock) -> None:
    make_stack(deployed, "storage", of="dev-2").status = "UPDATE_IN_PROGRESS"
    pause(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED


def make_stack(deployed: Deployed, name: str, of: str = "dev") -> Any:
    """Creates a stack of an instance, and returns it as moto stores it."""
    topic = {"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}
    given = {"StackName": f"dormouse-{of}-{name}", "TemplateBody": json.dumps(topic)}
    deployed.client("cloudformation").create_stack(**given, Tags=[{"Key": "dormouse:instance", "Value": of}])
    return next(reversed(cloudformation_backends[DEFAULT_ACCOUNT_ID][REGION].stacks.values()))
