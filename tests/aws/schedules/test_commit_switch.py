"""Pause, resume, status and cost of an instance whose commits are applied by a service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from moto import mock_aws

from dormouse.aws.keeper import AskSleepers
from dormouse.aws.switches import COMMIT_SERVICE, SwitchMappings, sleepers
from dormouse.settings.resources import (
    CommitResources,
    QueryResources,
    ServiceResources,
    resources_parameter,
)
from tests.deployed import Deployed, FakeClock, deploy, receive_request
from tests.support.aws import pause, resume, status

STACK, QUERY_STACK = "dormouse-dev-commit", "dormouse-dev-query"
PARTS = {"Running": {"Type": "String", "Default": "true"}}
TEMPLATE = {"Parameters": PARTS, "Resources": {"Kept": {"Type": "AWS::SQS::Queue"}}}


@pytest.fixture
def deployed() -> Iterator[Deployed]:
    """Yields an instance with a running commit service, whose mappings are off."""
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        found.client("cloudformation").create_stack(StackName=STACK, TemplateBody=json.dumps(TEMPLATE))
        _cluster(found)
        ssm, name = found.client("ssm"), resources_parameter("dev", "commit")
        commit = CommitResources.model_validate_json(ssm.get_parameter(Name=name)["Parameter"]["Value"])
        service = ServiceResources(
            stack=STACK, cluster="c", service="commit", cpu=1_024, memory_mb=4_096, endpoints=4
        )
        text = commit.model_copy(update={"service": service}).model_dump_json()
        ssm.put_parameter(Name=name, Value=text, Type="String", Overwrite=True)
        _switch_mappings(found, on=False)
        yield found


def _cluster(deployed: Deployed) -> None:
    ecs = deployed.client("ecs")
    ecs.create_cluster(clusterName="c")
    containers = [{"name": "commit", "image": "i", "memory": 64}]
    ecs.register_task_definition(family="f", containerDefinitions=containers)
    ecs.create_service(cluster="c", serviceName="commit", taskDefinition="f", desiredCount=1)


def _switch_mappings(deployed: Deployed, *, on: bool) -> None:
    for uuid in deployed.mappings:
        deployed.client("lambda").update_event_source_mapping(UUID=uuid, Enabled=on)


def running(deployed: Deployed, stack: str = STACK) -> str:
    [found] = deployed.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
    return next(one["ParameterValue"] for one in found["Parameters"] if one["ParameterKey"] == "Running")


def steps(report: Any) -> list[str]:
    return [one.step for one in report.steps]


def test_a_pause_stops_the_service_before_it_waits_for_commits_and_the_database(deployed: Deployed) -> None:
    clock = FakeClock().clock
    found = steps(pause(deployed.find(), clock=clock))
    order = ["stop the commit service", "let running commits end", "stop the database"]
    assert [one for one in found if one in order] == order
    assert running(deployed) == "false"
    found = steps(resume(deployed.find(), clock=clock))
    order = ["start the database", "start the commit service", "verify"]
    assert [one for one in found if one in order] == order
    assert running(deployed) == "true"


def test_a_pause_waits_for_messages_that_a_killed_service_had_received(deployed: Deployed) -> None:
    receive_request(deployed)
    _switch_mappings(deployed, on=False)
    report = pause(deployed.find(), clock=FakeClock().clock)
    [drain] = [one for one in report.steps if one.step == "let running commits end"]
    assert drain.what == ("about 1 commit requests are being applied",)


def test_no_command_enables_the_mappings_beside_a_service(deployed: Deployed) -> None:
    clock = FakeClock().clock
    pause(deployed.find(), clock=clock)
    resume(deployed.find(), clock=clock)
    assert deployed.state()["mappings"] == {"Disabled"}
    assert not list(SwitchMappings(deployed.find(), True).left(0.0))


def test_a_pause_disables_mappings_that_an_operator_enabled(deployed: Deployed) -> None:
    """An operator may let the lambda commit while the service cannot start."""
    _switch_mappings(deployed, on=True)
    pause(deployed.find(), clock=FakeClock().clock)
    assert deployed.state()["mappings"] == {"Disabled"}


def test_the_service_starts_after_the_query_service_whose_endpoints_it_uses(deployed: Deployed) -> None:
    deployed.client("cloudformation").create_stack(StackName=QUERY_STACK, TemplateBody=json.dumps(TEMPLATE))
    query = QueryResources(
        stack=QUERY_STACK, token="arn:secret", cluster="c", service="query",  # noqa: S106
        url="http://query", tasks_min=1, cpu=1_024, memory_mb=4_096, endpoints=4,
    )  # fmt: skip
    deployed.client("ssm").put_parameter(
        Name=resources_parameter("dev", "query"), Value=query.model_dump_json(), Type="String"
    )
    clock = FakeClock().clock
    found = steps(pause(deployed.find(), clock=clock))
    assert found.index("stop the commit service") < found.index("stop the query service")
    found = steps(resume(deployed.find(), clock=clock))
    assert found.index("start the query service") < found.index("start the commit service")


def test_status_reports_the_service_and_its_cost(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1

    def services(aws: Any, service: str, operation: str, **given: Any) -> Any:
        if operation == "describe_services":
            return {"services": [{"status": "ACTIVE", "runningCount": count}]}
        return call(aws, service, operation, **given)

    instance = deployed.find()
    call = type(instance.aws).call
    monkeypatch.setattr(type(instance.aws), "call", services)
    found = status(instance)
    assert (found.commit_service, found.summary) == ("running", "running")
    costs = dict(found.usd_hour)
    assert costs["endpoints of commits"] == pytest.approx(4 * 0.011)
    assert costs["commit task"] is not None and costs["commit task"] > 0.03
    count = 0
    found = status(instance)
    assert found.commit_service == "no task runs"
    assert found.summary == "should be running, but a part of it is not: resume it again"
    pause(instance, wait=True, clock=FakeClock().clock)
    found = status(deployed.find())
    assert (found.commit_service, found.summary) == ("asleep", "paused")
    costs = dict(found.usd_hour)
    assert (costs["commit task"], costs["endpoints of commits"]) == (0.0, 0.0)


def test_status_reports_a_service_that_runs_while_paused(deployed: Deployed) -> None:
    pause(deployed.find(), wait=True, clock=FakeClock().clock)
    again = [{"ParameterKey": "Running", "ParameterValue": "true"}]
    deployed.client("cloudformation").update_stack(
        StackName=STACK, UsePreviousTemplate=True, Parameters=again
    )
    assert status(deployed.find()).summary == "should be paused, but a part of it is not: pause it again"


def test_the_keeper_asks_the_stack_of_the_service(deployed: Deployed) -> None:
    instance = deployed.find()
    assert next(iter(sleepers(instance))) == COMMIT_SERVICE
    [left] = AskSleepers(instance, runs=False).left(0.0)
    assert left.what.startswith("the commit service is running")
