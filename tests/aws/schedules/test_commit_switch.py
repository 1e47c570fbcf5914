"""Pause, resume, status and cost of an instance whose commits are applied by a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from moto import mock_aws

from dormouse.aws.keeper import AskSleepers
from dormouse.aws.switches import SwitchMappings
from dormouse.settings.resources import (
    CommitResources,
    ServiceResources,
    resources_parameter,
)
from tests.application import add_application, parameters, wake_application
from tests.deployed import Deployed, deploy, receive_request
from tests.fake_clock import FakeClock
from tests.support.aws import pause, resume, status


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    """Yields an instance with a running commit service, whose mappings are off."""
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        _cluster(found)
        ssm, name = found.client("ssm"), resources_parameter("dev", "commit")
        commit = CommitResources.model_validate_json(ssm.get_parameter(Name=name)["Parameter"]["Value"])
        service = ServiceResources(cluster="c", service="commit", cpu=1_024, memory_mb=4_096, endpoints=4)
        add_application(found, monkeypatch, commit=commit.model_copy(update={"service": service}))
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


def steps(report: Any) -> list[str]:
    return [one.step for one in report.steps]


def test_a_pause_stops_the_service_then_waits_for_commits_and_stops_the_database(
    deployed: Deployed,
) -> None:
    clock = FakeClock().clock
    found = steps(pause(deployed.find(), clock=clock))
    order = ["stop the commit service", "let running commits end", "stop the database"]
    assert [one for one in found if one in order] == order
    assert parameters(deployed)["Running"] == "false"
    found = steps(resume(deployed.find(), clock=clock))
    order = ["start the database", "start the commit service", "verify"]
    assert [one for one in found if one in order] == order
    assert parameters(deployed)["Running"] == "true"


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
    wake_application(deployed)
    assert status(deployed.find()).summary == "should be paused, but a part of it is not: pause it again"


def test_the_keeper_asks_the_stack_of_the_service(deployed: Deployed) -> None:
    instance = deployed.find()
    [left] = AskSleepers(instance, runs=False).left(0.0)
    assert left.what == "the commit service: running"
