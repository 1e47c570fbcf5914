"""Pause and resume of the query service of a deployed instance, in every state of its stack."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.response import StreamingBody
from botocore.stub import ANY
from moto import mock_aws

from dormouse.aws.steps import Run, StepReport
from dormouse.aws.switches import SwitchStack, sleeper_state, switch_sleepers
from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings.resources import ApplicationResources, QueryResources, Resources, state_parameter
from lambdas import pause as pause_lambda
from tests.application import STACK, add_application, break_application, parameters, wake_application
from tests.deployed import PAUSED, REGION, Deployed, StubSession, deploy
from tests.fake_clock import FakeClock
from tests.support.aws import Aws, DeployedInstance, pause, resume, status

QUERY = QueryResources(
    token="arn:secret", cluster="c", service="query",  # noqa: S106
    url="http://query.dev.dormouse.internal",
    tasks_min=1, cpu=1_024, memory_mb=4_096, endpoints=4,
)  # fmt: skip
APPLICATION = ApplicationResources(stack=STACK, switch="switch", parts=("query",))
BEGAN = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)


# --- with a CloudFormation that works


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    """Yields an instance with a query service."""
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        add_application(found, monkeypatch, query=QUERY)
        yield found


def test_the_service_stops_after_the_runs_and_starts_before_the_schedules(deployed: Deployed) -> None:
    """A failed update of the stack switches schedules and mappings back, so they are switched after it."""
    clock = FakeClock().clock
    report = pause(deployed.find(), clock=clock)
    assert [one.step for one in report.steps] == [
        "write the desired state: paused", "disable the schedules", "disable the mappings of the queues",
        "let scheduled lambdas end", "let runs end", "stop EMR",
        "stop the query service", "disable the schedules", "disable the mappings of the queues",
        "let running commits end", "stop the database", "enable the rule that keeps the database asleep",
        "verify",
    ]  # fmt: skip
    assert parameters(deployed) == {"Running": "false", "Other": "kept"}
    report = resume(deployed.find(), clock=clock)
    assert [one.step for one in report.steps] == [
        "write the desired state: running", "start the database", "wake the scheduled lambdas",
        "start the query service", "enable the mappings of the queues", "enable the schedules",
        "verify",
    ]  # fmt: skip
    assert parameters(deployed) == {"Running": "true", "Other": "kept"}


@pytest.mark.parametrize("wait", [False, True])
def test_a_broken_stack_does_not_keep_other_parts_running(deployed: Deployed, *, wait: bool) -> None:
    break_application()
    lines: list[str] = []
    with pytest.raises(InstanceError, match=r"could not stop the query service: .*update rollback failed"):
        pause(deployed.find(), wait=wait, tell=lines.append, clock=FakeClock().clock)
    assert deployed.state() == PAUSED
    assert [line for line in lines if line.endswith("then pause it again; the other steps continue")]


def test_a_resume_during_a_pause_wins_although_a_stack_is_broken(deployed: Deployed) -> None:
    break_application()

    def resumed(line: str) -> None:
        if "could not stop" in line:
            given: Any = {"Name": state_parameter("dev"), "Value": "running", "Overwrite": True}
            deployed.client("ssm").put_parameter(**given)

    with pytest.raises(InstanceError, match="another user resumed the instance meanwhile"):
        pause(deployed.find(), tell=resumed, clock=FakeClock().clock)
    assert deployed.state()["database"] == "available"


def test_a_stopped_service_is_left_alone(deployed: Deployed) -> None:
    clock = FakeClock().clock
    pause(deployed.find(), clock=clock)
    report = pause(deployed.find(), wait=True, clock=clock)
    assert not report.changed
    assert {one.step: one.outcome for one in report.steps}["stop the query service"] == "already"


def test_a_dry_run_reports_the_steps_without_doing_them(deployed: Deployed) -> None:
    report = pause(deployed.find(), dry_run=True, clock=FakeClock().clock)
    [step] = [one for one in report.steps if one.step == "stop the query service"]
    assert (step.outcome, step.what) == ("would", ("running",))
    assert parameters(deployed)["Running"] == "true"


@pytest.mark.slow
def test_status_reports_whether_the_service_runs_its_address_and_cost(deployed: Deployed) -> None:
    found = status(deployed.find())
    assert (found.query, found.query_url, found.summary) == ("running", QUERY.url, "running")
    assert dict(found.usd_hour)["load balancer and endpoints"] == pytest.approx(0.0252 + 4 * 0.011)
    pause(deployed.find(), wait=True, clock=FakeClock().clock)
    found = status(deployed.find())
    assert (found.query, found.summary) == ("asleep", "paused")
    costs = dict(found.usd_hour)
    assert (costs["query tasks"], costs["load balancer and endpoints"]) == (0.0, 0.0)


def test_status_reports_a_service_that_runs_while_paused(deployed: Deployed) -> None:
    pause(deployed.find(), wait=True, clock=FakeClock().clock)
    wake_application(deployed)
    assert status(deployed.find()).summary == "should be paused, but a part of it is not: pause it again"


def test_a_pause_without_a_query_service_has_no_step_for_it() -> None:
    with mock_aws(config={"lambda": {"use_docker": False}}):
        report = pause(deploy().find(), clock=FakeClock().clock)
        assert not [one.step for one in report.steps if "query" in one.step]


# --- with every state in between


@pytest.fixture
def stubs() -> Iterator[StubSession]:
    session = StubSession()
    yield session
    session.assert_all_stubs_were_used()


def described(stubs: StubSession, *states: tuple[str, str, int], desired: str = "running") -> None:
    """Stubs one answer about the stack for each of `states`.

    A state is (status, parameter `Running`, number of the last update). `desired` is the desired state that
    the last update read.
    """
    for state, running, update in states:
        stack = {
            "StackName": STACK,
            "CreationTime": BEGAN,
            "LastUpdatedTime": BEGAN + timedelta(hours=update),
            "StackStatus": state,
            "Parameters": [
                {"ParameterKey": "Running", "ParameterValue": running},
                {"ParameterKey": "State", "ParameterValue": state_parameter("dev"), "ResolvedValue": desired},
            ],
        }
        stubs.stub("cloudformation").add_response(
            "describe_stacks", {"Stacks": [stack]}, {"StackName": STACK}
        )


def expect_update(stubs: StubSession, running: str) -> None:
    """Stubs one update of the stack, which sets the parameter `Running` and changes no other."""
    stubs.stub("cloudformation").add_response(
        "update_stack",
        {"StackId": "id"},
        {
            "StackName": STACK,
            "UsePreviousTemplate": True,
            "Parameters": [
                {"ParameterKey": "State", "UsePreviousValue": True},
                {"ParameterKey": "Running", "ParameterValue": running},
            ],
            "Capabilities": ANY,
        },
    )


def expect_switch(stubs: StubSession, running: str, answer: str = '{"asked": true}', **more: str) -> None:
    """Stubs one call of the lambda that updates the stack, and its answer."""
    payload = io.BytesIO(answer.encode())
    stubs.stub("lambda").add_response(
        "invoke",
        {"StatusCode": 200, "Payload": StreamingBody(payload, len(answer)), **more},
        {"FunctionName": "switch", "Payload": f'{{"running": {running}}}'.encode()},
    )


def test_the_switch_lambda_updates_the_stack_so_that_users_need_no_right_to(
    stubs: StubSession,
) -> None:
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    expect_switch(stubs, "false", '{"asked": false}')  # another caller updated it first
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    expect_switch(stubs, "false")
    described(stubs, ("UPDATE_IN_PROGRESS", "false", 2), ("UPDATE_COMPLETE", "false", 2))
    expect_events(stubs, (STACK, "UPDATE_IN_PROGRESS", "User Initiated"))
    assert ran(step(stubs, runs=False)).outcome == "done"


def test_an_error_of_the_switch_lambda_is_reported(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    expect_switch(stubs, "false", '{"errorMessage": "no right"}', FunctionError="Unhandled")
    with pytest.raises(InstanceError, match="the lambda switch failed: no right"):
        ran(step(stubs, runs=False))


@pytest.fixture
def lambda_of_the_stack(stubs: StubSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_STACK", STACK)
    monkeypatch.setattr(pause_lambda, "open_session", lambda region: stubs)


@pytest.mark.usefixtures("lambda_of_the_stack")
def test_the_lambda_changes_the_parameter_and_nothing_else(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    expect_update(stubs, "false")
    assert pause_lambda.switch({"running": False}, None) == {"asked": True}


@pytest.mark.usefixtures("lambda_of_the_stack")
@pytest.mark.parametrize("event", [{}, {"running": "false"}, {"running": None, "TemplateBody": "{}"}])
def test_the_lambda_refuses_other_events(stubs: StubSession, event: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="the event must be running: true or false"):
        pause_lambda.switch(event, None)


def expect_events(stubs: StubSession, *events: tuple[str, str, str]) -> None:
    """Stubs the events of the stack, newest first, as CloudFormation lists them."""
    listed = [
        {
            "StackId": "id", "EventId": str(number), "StackName": STACK, "Timestamp": BEGAN,
            "LogicalResourceId": name, "ResourceStatus": state, "ResourceStatusReason": why,
        }
        for number, (name, state, why) in enumerate(events)
    ]  # fmt: skip
    stubs.stub("cloudformation").add_response(
        "describe_stack_events", {"StackEvents": listed}, {"StackName": STACK}
    )


def step(stubs: StubSession, *, runs: bool) -> SwitchStack:
    described = Resources(application=APPLICATION, query=QUERY)
    [made] = switch_sleepers(
        DeployedInstance("dev", "123456789012", REGION, described, Aws(stubs)), runs=runs
    )
    return made


def ran(switch: SwitchStack) -> StepReport:
    wanted: Any = "running" if switch.runs else "paused"
    return Run(wanted, lambda: wanted, clock=FakeClock().clock).step(switch)


def test_the_switch_waits_for_an_update_and_its_cleanup(stubs: StubSession) -> None:
    """Parts that cost money are deleted only during the cleanup."""
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    expect_switch(stubs, "false")
    described(
        stubs,
        ("UPDATE_COMPLETE", "true", 1),  # CloudFormation may report the update late
    )
    expect_switch(stubs, "false")
    described(
        stubs,
        ("UPDATE_IN_PROGRESS", "false", 2),
        ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "false", 2),
        ("UPDATE_COMPLETE", "false", 2),
    )
    expect_events(
        stubs,
        ("AwakeRecord", "DELETE_COMPLETE", ""),
        ("AwakeRecord", "DELETE_FAILED", "it is tried again"),
        (STACK, "UPDATE_IN_PROGRESS", "User Initiated"),
        ("AwakeService", "DELETE_FAILED", "of an update before"),
    )
    assert ran(step(stubs, runs=False)).outcome == "done"


def test_a_resource_that_could_not_be_deleted_is_reported_once(stubs: StubSession) -> None:
    """CloudFormation reports a complete update, and forgets the resource that it could not delete."""
    described(stubs, ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "false", 2), ("UPDATE_COMPLETE", "false", 2))
    expect_events(stubs, ("AwakeEndpointsLogs", "DELETE_FAILED", "in use"), (STACK, "UPDATE_IN_PROGRESS", ""))
    with pytest.raises(
        InstanceError, match=r"could not delete its AwakeEndpointsLogs, .*: in use; delete it"
    ):
        ran(step(stubs, runs=False))
    described(stubs, ("UPDATE_COMPLETE", "false", 2))
    assert ran(step(stubs, runs=False)).outcome == "already"


def test_the_switch_waits_for_an_update_that_an_interrupted_run_began(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_IN_PROGRESS", "true", 2), ("UPDATE_COMPLETE", "true", 2))
    assert ran(step(stubs, runs=True)).what == ("its stack is in update in progress",)


def test_an_update_in_the_other_direction_is_awaited_and_reversed(stubs: StubSession) -> None:
    """An interrupted pause is still updating the stack when a resume begins."""
    described(stubs, ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "false", 2), ("UPDATE_COMPLETE", "false", 2))
    expect_switch(stubs, "true")
    described(stubs, ("UPDATE_IN_PROGRESS", "true", 3), ("UPDATE_COMPLETE", "true", 3))
    assert ran(step(stubs, runs=True)).outcome == "done"


def test_a_failed_update_is_reported_with_its_reason(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_COMPLETE", "false", 1))
    expect_switch(stubs, "true")
    described(
        stubs,
        ("UPDATE_IN_PROGRESS", "true", 2),
        ("UPDATE_ROLLBACK_IN_PROGRESS", "true", 2),
        ("UPDATE_ROLLBACK_COMPLETE", "false", 2),
    )
    expect_events(
        stubs,
        (STACK, "UPDATE_ROLLBACK_IN_PROGRESS", "The following resource(s) failed"),
        ("AwakeRecord", "CREATE_FAILED", "Resource creation cancelled"),
        ("AwakeService", "CREATE_FAILED", "ECS Deployment Circuit Breaker\n was triggered"),
        (STACK, "UPDATE_IN_PROGRESS", "User Initiated"),
        ("AwakeEndpointsLogs", "CREATE_FAILED", "of an update before"),
    )
    with pytest.raises(InstanceError) as caught:
        ran(step(stubs, runs=True))
    assert str(caught.value) == (
        "could not start the query service: its stack dormouse-dev-application is update rollback complete: "
        "AwakeService: ECS Deployment Circuit Breaker was triggered; fix that, then resume it again"
    )


def test_after_a_failure_the_next_run_tries_again(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_ROLLBACK_COMPLETE", "false", 2))
    expect_switch(stubs, "true")
    described(stubs, ("UPDATE_IN_PROGRESS", "true", 3), ("UPDATE_COMPLETE", "true", 3))
    assert ran(step(stubs, runs=True)).outcome == "done"


def test_a_broken_stack_is_not_updated(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_ROLLBACK_FAILED", "true", 2))
    expect_events(
        stubs, ("AwakeService", "UPDATE_FAILED", "no"), (STACK, "UPDATE_IN_PROGRESS", "User Initiated")
    )
    with pytest.raises(
        InstanceError, match="is update rollback failed: AwakeService: no; fix that, then pause"
    ):
        ran(step(stubs, runs=False))


def test_the_switch_waits_for_a_concurrent_deploy(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    expect_switch(stubs, "false", '{"asked": false}')
    described(stubs, ("UPDATE_IN_PROGRESS", "true", 2), ("UPDATE_COMPLETE", "false", 2))
    assert ran(step(stubs, runs=False)).outcome == "done"  # another user's update has the same effect


@pytest.mark.usefixtures("lambda_of_the_stack")
def test_the_lambda_reports_that_a_deploy_is_under_way(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    stubs.stub("cloudformation").add_client_error(
        "update_stack",
        "ValidationError",
        f"Stack:arn:{STACK} is in UPDATE_IN_PROGRESS state and can not be updated.",
    )
    assert pause_lambda.switch({"running": False}, None) == {"asked": False}


@pytest.mark.parametrize("runs", [True, False])
def test_a_missing_stack_counts_as_stopped_and_cannot_start(runs: bool, stubs: StubSession) -> None:
    stubs.stub("cloudformation").add_client_error(
        "describe_stacks", "ValidationError", f"Stack with id {STACK} does not exist"
    )
    if runs:
        with pytest.raises(InstanceError, match=f"the stack {STACK} is missing: deploy dev again"):
            ran(step(stubs, runs=True))
    else:
        assert ran(step(stubs, runs=False)).outcome == "already"


@pytest.mark.usefixtures("lambda_of_the_stack")
def test_a_missing_right_to_update_is_named(stubs: StubSession) -> None:
    described(stubs, ("UPDATE_COMPLETE", "true", 1))
    stubs.stub("cloudformation").add_client_error("update_stack", "AccessDenied", "no")
    with pytest.raises(InstanceError, match="no right to cloudformation:UpdateStack: ask for it"):
        pause_lambda.switch({"running": False}, None)


@pytest.mark.parametrize(
    ("state", "running", "words"),
    [
        ("UPDATE_COMPLETE", "true", "running"),
        ("UPDATE_ROLLBACK_COMPLETE", "false", "asleep"),
        ("UPDATE_IN_PROGRESS", "true", "update in progress"),
        ("UPDATE_ROLLBACK_FAILED", "true", "update rollback failed"),
    ],
)
def test_the_state_of_the_service_is_shown_in_words(
    state: str, running: str, words: str, stubs: StubSession
) -> None:
    described(stubs, (state, running, 1))
    assert sleeper_state(step(stubs, runs=True).instance) == words
