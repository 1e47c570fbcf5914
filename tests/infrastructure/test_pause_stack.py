"""Tests of the keeper's stack: events of RDS and an hourly event reach the lambda through a queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from moto.events.models import EventPattern

from dormouse.settings.lambdas import Environment
from dormouse.settings.resources import RUNNING_PARAMETER, PauseResources, Resources, state_parameter
from tests.assembly import CONFIGURATIONS, Assembly, Resource
from tests.support.settings import load_environment
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
    """Returns an event in the form in which RDS sends it."""
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
    """Returns the rule's event pattern, in which the cluster's parameter is replaced by its ARN."""
    rule = only(synthesized("steps"), "AWS::Events::Rule").properties["EventPattern"]
    [arn] = rule["detail"]["SourceArn"]
    assert flat(arn).startswith("arn:aws:rds:eu-central-1:123456789012:cluster:SsmParameter")
    detail = {**rule["detail"], "SourceArn": [CLUSTER]}
    return EventPattern.load(json.dumps({**rule, "detail": detail}))


@pytest.mark.parametrize("event_id", ["RDS-EVENT-0151", "RDS-EVENT-0153"])
def test_a_start_of_the_cluster_matches_the_pattern(event_id: str, pattern: EventPattern) -> None:
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
def test_other_events_do_not_match_the_pattern(other: Any, pattern: EventPattern) -> None:
    assert not pattern.matches_event(other)


@pytest.mark.parametrize("name", ["dev", "prod", "steps", "transient"])
def test_the_rule_is_enabled_whether_the_instance_is_paused_or_not(name: str, synthesized: All) -> None:
    """The keeper has work mainly while the instance is paused."""
    rule = only(synthesized(name), "AWS::Events::Rule").properties
    mapping = only(synthesized(name), "AWS::Lambda::EventSourceMapping").properties
    assert rule["State"] == "ENABLED"
    assert mapping.get("Enabled", True) is True


def test_the_rule_sends_a_message_every_hour_too(synthesized: All) -> None:
    """The hourly event finds lost events of RDS and interrupted commands."""
    assert only(synthesized("dev"), "AWS::Events::Rule").properties["ScheduleExpression"] == "rate(1 hour)"


def test_a_message_is_redelivered_for_a_day_and_then_becomes_a_dead_letter(synthesized: All) -> None:
    queue = only(synthesized("dev"), "AWS::SQS::Queue", "PauseStartsQueue").properties
    function = only(synthesized("dev"), "AWS::Lambda::Function").properties
    assert queue["VisibilityTimeout"] == LOOK_SECONDS
    assert queue["RedrivePolicy"]["maxReceiveCount"] == DAY_SECONDS / LOOK_SECONDS
    assert queue["MessageRetentionPeriod"] == 2 * DAY_SECONDS, "SQS must not delete it before"
    assert 6 * function["Timeout"] <= LOOK_SECONDS
    mapping = only(synthesized("dev"), "AWS::Lambda::EventSourceMapping").properties
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["BatchSize"] == 1


def test_only_the_rule_may_send_to_the_queue(synthesized: All) -> None:
    policy = only(synthesized("dev"), "AWS::SQS::QueuePolicy", "PauseStartsQueue").properties[
        "PolicyDocument"
    ]
    [allow] = [one for one in policy["Statement"] if one["Effect"] == "Allow"]
    assert allow["Principal"] == {"Service": "events.amazonaws.com"}
    assert flat(allow["Condition"]["ArnEquals"]["aws:SourceArn"]).startswith("PauseRule")


def test_the_keeper_may_read_and_switch_only_parts_of_its_instance(synthesized: All) -> None:
    rights: dict[str, set[str]] = {}
    for action, where, _ in allowed(synthesized("prod"), "pause", "PauseRole"):
        rights.setdefault(action, set()).add(where)
    [cluster] = rights["rds:StopDBCluster"]
    assert rights["rds:StartDBCluster"] == {cluster} and "prod" in cluster and "*" not in cluster
    state = f"arn:Partition:ssm:Region:AccountId:parameter{state_parameter('prod')}"
    assert state in rights["ssm:GetParameter"]
    assert len(rights["ssm:GetParameter"]) == len(Resources.model_fields) + 1
    rules, disabled = rights["events:DescribeRule"], rights["events:DisableRule"]
    assert len(disabled) == 3 and disabled < rules and len(rules) == 4, "the lambda only reads its own rule"
    settings = CONFIGURATIONS["prod"]().commit
    assert settings is not None
    assert len(rights["lambda:UpdateEventSourceMapping"]) == settings.queues
    kept = rights["sqs:SendMessage"]
    assert (
        len(kept) == 2 * settings.queues
        and sum("deadletters" in one.lower() for one in kept) == settings.queues
    )
    assert {action for action in rights if any(where.endswith("*") for where in rights[action])} == {
        "cloudformation:DescribeStacks", "cloudwatch:GetMetricData", "rds:DescribeDBInstances",
        "xray:PutTraceSegments", "xray:PutTelemetryRecords",
    }  # fmt: skip
    changing = {
        action for action in rights if not action.partition(":")[2].startswith(("Get", "Describe", "List"))
    }
    assert {one for one in changing if one.partition(":")[0] not in ("logs", "sqs", "xray")} == {
        "events:DisableRule", "events:EnableRule", "lambda:InvokeFunction", "lambda:UpdateEventSourceMapping",
        "rds:StartDBCluster", "rds:StopDBCluster",
    }  # fmt: skip
    [switch] = rights["lambda:InvokeFunction"]
    assert switch.startswith("SwitchFunction"), "only the switch may update that stack"


def test_the_lambda_knows_the_instance(synthesized: All, monkeypatch: pytest.MonkeyPatch) -> None:
    function = only(synthesized("dev"), "AWS::Lambda::Function").properties
    for key, value in function["Environment"]["Variables"].items():
        monkeypatch.setenv(key, flat(value))
    assert load_environment(Environment).instance_id == "dev"
    assert "VpcConfig" not in function


def test_a_parameter_records_the_deployed_resources(synthesized: All) -> None:
    parameter = only(synthesized("dev"), "AWS::SSM::Parameter", "PauseResources")
    recorded = PauseResources.model_validate_json(flat(parameter.properties["Value"]))
    assert recorded.rule.startswith("PauseRule")
    assert recorded.drain_seconds == 900


def test_a_deploy_leaves_a_paused_instance_paused(assembly: Assembly) -> None:
    """Rules and mappings are enabled only if the desired state, an SSM parameter, is running.

    CloudFormation reads it at each deploy. So a change of tags, which rewrites all rules and mappings,
    enables none. The stack `migrate` creates the state first.
    """
    rules = [one for one in assembly.resources("AWS::Events::Rule") if "ScheduleExpression" in one.properties]
    scheduled = [one for one in rules if one.stack != "pause"]
    assert {one.stack for one in scheduled} == {
        "garbage",
        "compaction",
        "maintenance",
    } & assembly.templates.keys()
    for rule in scheduled:
        assert rule.properties["State"] == {"Fn::If": ["IsAwake", "ENABLED", "DISABLED"]}, str(rule)
    template = assembly.stacks["application"]
    [name, wanted] = template["Conditions"]["IsAwake"]["Fn::Equals"]
    parameter = template["Parameters"][name["Ref"]]
    assert (parameter["Type"], wanted) == ("AWS::SSM::Parameter::Value<String>", "running")
    assert parameter["Default"] == state_parameter(assembly.id)
    assert f"dormouse-{assembly.id}-migrate" in assembly.stack("application")["dependencies"]
    parameters = assembly.resources("AWS::SSM::Parameter")
    assert state_parameter(assembly.id) not in {one.properties["Name"] for one in parameters}


def test_a_part_added_to_a_paused_instance_starts_stopped(
    synthesized: Callable[[str], Assembly],
) -> None:
    """The part runs only if the desired state is running. The default of the parameter `Running` is true."""
    template = synthesized("steps").stacks["application"]
    state = template["Conditions"]["IsAwake"]["Fn::Equals"][0]["Ref"]
    assert template["Parameters"][state]["Default"] == state_parameter("steps")
    assert template["Conditions"] == {
        "IsAwake": {"Fn::Equals": [{"Ref": state}, "running"]},
        "IsRunning": {
            "Fn::And": [{"Fn::Equals": [{"Ref": RUNNING_PARAMETER}, "true"]}, {"Condition": "IsAwake"}]
        },
    }
    assert "dormouse-steps-migrate" in synthesized("steps").stack("application")["dependencies"]
