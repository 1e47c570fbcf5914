"""Tests of an organization's demands and existing resources: bounded roles, names, keys, topics, channels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings
from tests.assembly import UUID, Assembly, settings, synthesize
from tests.template import flat

ACCOUNT = "arn:aws:iam::123456789012"
BOUNDARY = f"{ACCOUNT}:policy/boundary"
KEYS = [f"arn:aws:kms:eu-central-1:123456789012:key/{UUID[:-1]}{number}" for number in (1, 2)]
TOPICS = [f"arn:aws:sns:eu-central-1:123456789012:{name}" for name in ("urgent", "later")]
SLACK = {"slack_workspace": "T0123ABCD", "slack_channel": "C0123ABCDEF"}
TEAMS = {
    "teams_tenant": UUID,
    "teams_team": f"{UUID[:-1]}9",
    "teams_channel": "19%3ab6ef35dc342d56ba5654e6fc6d25a071%40thread.tacv2",
}
CHANNELS = ("AWS::Chatbot::SlackChannelConfiguration", "AWS::Chatbot::MicrosoftTeamsChannelConfiguration")


def demanding() -> DeploymentSettings:
    iam = {"permissions_boundary": BOUNDARY, "role_path": "/service/dormouse/", "role_prefix": "acme-" * 4}
    return settings(
        "prod",
        id="a" * 20,
        iam=iam,
        compaction={"engine": "emr-ec2-steps"},
        qualifier="acme",
        monitoring=SLACK | TEAMS,
    )


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Returns the assembly of an instance with all demands of an organization.

    It has clusters on EC2, which have the most roles.
    """
    return synthesize(demanding(), tmp_path_factory.mktemp("bound") / "assembly", checked=False)


@pytest.fixture(scope="module")
def existing(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Returns the assembly of an instance that uses existing keys and topics."""
    configuration = settings(
        "prod",
        storage={"key_arn": KEYS[0]},
        database={"kind": "fixed", "key_arn": KEYS[1]},
        monitoring={"topic_arn": TOPICS[0], "warning_topic_arn": TOPICS[1], "budget_usd_month": 1.0, **SLACK},
    )
    return synthesize(configuration, tmp_path_factory.mktemp("existing") / "assembly", checked=False)


@pytest.mark.slow
def test_all_roles_have_the_permissions_boundary(bound: Assembly) -> None:
    roles = list(bound.resources("AWS::IAM::Role"))
    assert roles
    assert {str(one): one.properties.get("PermissionsBoundary") for one in roles} == {
        str(one): BOUNDARY for one in roles
    }


@pytest.mark.slow
def test_all_roles_have_the_path_and_unique_short_names(bound: Assembly) -> None:
    for one in bound.resources("AWS::IAM::Role", "AWS::IAM::InstanceProfile"):
        assert one.properties["Path"] == "/service/dormouse/", str(one)
    names = [flat(one.properties["RoleName"]) for one in bound.resources("AWS::IAM::Role")]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.startswith("acme-" * 4) and name.endswith("-Region")
        assert len(name.replace("Region", "ap-southeast-2")) <= 64


@pytest.mark.slow
def test_a_role_with_another_path_has_another_name(bound: Assembly, tmp_path: Path) -> None:
    """CloudFormation creates the new role while the old one exists, so the two need different names."""
    iam = {"role_path": "/other/", "role_prefix": "acme-" * 4}
    configuration = settings("minimal", id="a" * 20, iam=iam, compaction={"engine": "emr-ec2-steps"})
    other = synthesize(configuration, tmp_path / "assembly", checked=False)
    names, others = (
        {flat(one.properties["RoleName"]) for one in assembly.resources("AWS::IAM::Role")}
        for assembly in (bound, other)
    )
    assert names and not names & others


def test_the_bootstrap_of_the_settings_is_used(bound: Assembly) -> None:
    for stack, template in bound.stacks.items():
        assert template["Parameters"]["BootstrapVersion"]["Default"] == "/cdk-bootstrap/acme/version", stack
    assert "hnb659fds" not in json.dumps(bound.manifest) + json.dumps(bound.templates)


@pytest.mark.slow
def test_cdk_nag_has_no_further_finding(tmp_path: Path) -> None:
    assert synthesize(demanding(), tmp_path / "assembly").findings == []


@pytest.mark.parametrize("kind", CHANNELS)
def test_a_channel_gets_alarms_and_has_no_other_rights(bound: Assembly, kind: str) -> None:
    [channel] = bound.resources(kind)
    [topic] = bound.resources("AWS::SNS::Topic")
    assert channel.properties["SnsTopicArns"] == [{"Ref": topic.name}]
    assert flat(channel.properties["GuardrailPolicies"][0]).endswith(":policy/CloudWatchReadOnlyAccess")
    role = channel.properties["IamRoleArn"]["Fn::GetAtt"][0]
    users = [one for one in bound.resources("AWS::IAM::Policy") if {"Ref": role} in one.properties["Roles"]]
    assert users == []


def test_another_team_gets_a_configuration_with_another_name(bound: Assembly) -> None:
    """CloudFormation creates the new configuration before it deletes the old one, so their names differ."""
    [channel] = bound.resources(CHANNELS[1])
    assert channel.properties["ConfigurationName"] == f"dormouse-{'a' * 20}-{TEAMS['teams_team']}"
    named = [channel.properties[f"Team{key}"] for key in ("sTenantId", "Id", "sChannelId")]
    assert named == list(TEAMS.values())


@pytest.mark.slow
def test_existing_keys_and_topics_are_used_and_none_is_created(existing: Assembly) -> None:
    assert not list(existing.resources("AWS::KMS::Key", "AWS::SNS::Topic", "AWS::SNS::TopicPolicy"))
    [cluster] = existing.resources("AWS::RDS::DBCluster")
    assert cluster.properties["KmsKeyId"] == cluster.properties["MasterUserSecret"]["KmsKeyId"] == KEYS[1]
    encryptions = [one.properties["BucketEncryption"] for one in existing.resources("AWS::S3::Bucket")]
    assert sum(KEYS[0] in json.dumps(one) for one in encryptions) == 2
    [channel] = existing.resources("AWS::Chatbot::SlackChannelConfiguration")
    assert channel.properties["SnsTopicArns"] == TOPICS
    [budget] = existing.resources("AWS::Budgets::Budget")
    assert TOPICS[0] in json.dumps(budget.properties["NotificationsWithSubscribers"])


@pytest.mark.slow
def test_warnings_go_to_the_topic_for_warnings(existing: Assembly) -> None:
    alarms = [one.properties for one in existing.resources("AWS::CloudWatch::Alarm")]
    severities = {"Critical": TOPICS[0], "Warning": TOPICS[1]}
    for alarm in alarms:
        topic = severities[alarm["AlarmDescription"].partition(":")[0]]
        assert alarm["AlarmActions"] == alarm["OKActions"] == [topic], alarm["AlarmName"]
    critical = {one["AlarmName"] for one in alarms if one["AlarmDescription"].startswith("Critical")}
    assert {name.removeprefix("dormouse-prod-").partition("-")[0] for name in critical} == {
        "Commit", "Commits", "Database", "Pause", "Query", "Running", "Starts",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"iam": {"permissions_boundary": "boundary", "role_path": "service", "role_prefix": "a" * 21}},
            ["iam.permissions_boundary = ", "iam.role_path = ", "iam.role_prefix = "],
        ),
        ({"qualifier": "Acme", "storage": {"key_arn": "alias/a"}}, ["qualifier = ", "storage.key_arn = "]),
        (
            {"monitoring": {"topic_arn": TOPICS[0], "email": "a@b.c", "slack_channel": "C0123ABCDEF"}},
            ["monitoring.email = ", "monitoring.slack_channel = "],
        ),
        ({"monitoring": {**TEAMS, "teams_channel": "general"}}, ["monitoring.teams_channel = "]),
        ({"monitoring": {"teams_channel": TEAMS["teams_channel"]}}, ["monitoring.teams_channel = "]),
    ],
)
def test_invalid_settings_are_all_named_at_once(changes: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        settings("minimal", **changes)
    messages = [line.removeprefix("settings: ") for line in str(error.value).splitlines()]
    assert len(messages) == len(lines)
    assert all(line.startswith(start) for line, start in zip(sorted(messages), lines, strict=True))
