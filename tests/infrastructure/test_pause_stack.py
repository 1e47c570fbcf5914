"""The desired state, and the way of an event of RDS to the lambda that stops the database again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from moto.events.models import EventPattern

from dormouse.settings.lambdas import PauseEnvironment, load_environment
from dormouse.settings.resources import PauseResources, state_parameter
from tests.assembly import CONFIGURATIONS, Assembly, Resource
from tests.template import allowed, flat

DAY_SECONDS = 86_400
LOOK_SECONDS = 540
CLUSTER = "arn:aws:rds:eu-central-1:123456789012:cluster:dormouse-steps"
All = Callable[[str], Assembly]


def only(assembly: Assembly, kind: str, begins: str = "") -> Resource:
    [found] = [
        one for one in assembly.resources(kind) if one.stack == "pause" and one.name.startswith(begins)
    ]
    return found


def event(
    event_id: str, cluster: str = CLUSTER, kind: str = "RDS DB Cluster Event", source: str = "aws.rds"
) -> Any:
    """As RDS sends it."""
    return {
        "version": "0",
        "detail-type": kind,
        "source": source,
        "account": "123456789012",
        "region": "eu-central-1",
        "resources": [cluster],
        "detail": {
            "EventCategories": ["notification"],
            "SourceType": "CLUSTER",
            "SourceArn": cluster,
            "SourceIdentifier": cluster.rpartition(":")[2],
            "EventID": event_id,
            "Message": "DB cluster is being started: it was stopped for too long.",
        },
    }


@pytest.fixture
def pattern(synthesized: All) -> EventPattern:
    """Of the rule, with the cluster in place of its parameter."""
    rule = only(synthesized("steps"), "AWS::Events::Rule").properties["EventPattern"]
    [arn] = rule["detail"]["SourceArn"]
    assert flat(arn).startswith("arn:aws:rds:eu-central-1:123456789012:cluster:SsmParameter")
    detail = {**rule["detail"], "SourceArn": [CLUSTER]}
    return EventPattern.load(json.dumps({**rule, "detail": detail}))


@pytest.mark.parametrize("event_id", ["RDS-EVENT-0151", "RDS-EVENT-0153"])
def test_a_start_of_the_cluster_is_an_event(event_id: str, pattern: EventPattern) -> None:
    assert pattern.matches_event(event(event_id))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(event("RDS-EVENT-0150"), id="stopped"),
        pytest.param(event("RDS-EVENT-0153", cluster=f"{CLUSTER}-2"), id="other cluster"),
        pytest.param(event("RDS-EVENT-0153", kind="RDS DB Instance Event"), id="instance"),
        pytest.param(event("RDS-EVENT-0153", source="our.own"), id="other source"),
    ],
)
def test_no_other_event_is_for_us(other: Any, pattern: EventPattern) -> None:
    assert not pattern.matches_event(other)


@pytest.mark.parametrize("name", ["dev", "prod", "steps", "transient"])
def test_the_rule_is_on_whether_the_instance_is_paused_or_not(name: str, synthesized: All) -> None:
    """It is while the instance is paused that it has to do something."""
    rule = only(synthesized(name), "AWS::Events::Rule").properties
    mapping = only(synthesized(name), "AWS::Lambda::EventSourceMapping").properties
    assert rule["State"] == "ENABLED"
    assert mapping.get("Enabled", True) is True


@pytest.mark.parametrize("name", ["dev", "transient"])
def test_the_desired_state_is_as_the_settings_say(name: str, synthesized: All) -> None:
    state = only(synthesized(name), "AWS::SSM::Parameter", "State").properties
    assert state["Name"] == state_parameter(name)
    assert state["Value"] == ("paused" if CONFIGURATIONS[name]().deploy_paused else "running")


def test_a_message_comes_back_every_nine_minutes_for_a_day(synthesized: All) -> None:
    queue = only(synthesized("dev"), "AWS::SQS::Queue", "StartsQueue").properties
    function = only(synthesized("dev"), "AWS::Lambda::Function").properties
    assert queue["VisibilityTimeout"] == LOOK_SECONDS
    assert queue["MessageRetentionPeriod"] == DAY_SECONDS
    assert queue["RedrivePolicy"]["maxReceiveCount"] > DAY_SECONDS / LOOK_SECONDS
    assert 6 * function["Timeout"] <= LOOK_SECONDS
    mapping = only(synthesized("dev"), "AWS::Lambda::EventSourceMapping").properties
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["BatchSize"] == 1


def test_only_our_rule_may_send(synthesized: All) -> None:
    policy = only(synthesized("dev"), "AWS::SQS::QueuePolicy", "StartsQueue").properties["PolicyDocument"]
    [allow] = [one for one in policy["Statement"] if one["Effect"] == "Allow"]
    assert allow["Principal"] == {"Service": "events.amazonaws.com"}
    assert flat(allow["Condition"]["ArnEquals"]["aws:SourceArn"]).startswith("Rule")


def test_it_may_stop_and_start_this_cluster_and_read_this_state(synthesized: All) -> None:
    rights = {action: where for action, where, _ in allowed(synthesized("dev"), "pause", "PauseRole")}
    actions = {"rds:DescribeDBClusters", "rds:StartDBCluster", "rds:StopDBCluster"}
    assert actions == {action for action in rights if action.startswith("rds")}
    [cluster] = {rights[action] for action in actions}
    assert ":cluster:SsmParameterValuedormousedevdatabasecluster" in cluster and "*" not in cluster
    assert rights["ssm:GetParameter"].startswith("arn:Partition:ssm:Region:AccountId:parameterState")
    assert {action.partition(":")[0] for action in rights} == {"logs", "rds", "sqs", "ssm", "xray"}


def test_the_lambda_knows_cluster_and_state(synthesized: All, monkeypatch: pytest.MonkeyPatch) -> None:
    function = only(synthesized("dev"), "AWS::Lambda::Function").properties
    for key, value in function["Environment"]["Variables"].items():
        monkeypatch.setenv(key, flat(value))
    environment = load_environment(PauseEnvironment)
    assert environment.instance_id == "dev"
    assert environment.cluster.startswith("SsmParameterValuedormousedevdatabasecluster")
    assert environment.state_parameter.startswith("State")
    assert "VpcConfig" not in function


def test_commands_learn_what_is_deployed(synthesized: All) -> None:
    parameter = only(synthesized("dev"), "AWS::SSM::Parameter", "Resources")
    told = PauseResources.model_validate_json(flat(parameter.properties["Value"]))
    assert told.rule.startswith("Rule")
    assert told.drain_seconds == 900
