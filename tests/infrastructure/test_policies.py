"""Tests of the managed policies for people: created on request, with only the rights that commands need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dormouse.settings.deployment import DATABASES_MAX, DeploymentSettings
from tests.assembly import ROOT, Assembly, settings, synthesize
from tests.template import allowed, flat

AWS_CHARACTERS_MAX = 6_144
"""AWS's limit on the length of a managed policy, without spaces."""


def largest() -> DeploymentSettings:
    return settings("prod", iam={"policies": ["operator", "reader"]}, commit={"queues": 16})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Returns the assembly of an instance with the largest allowed number of queues."""
    return synthesize(largest(), tmp_path_factory.mktemp("policies") / "assembly", checked=False)


def rights(assembly: Assembly, name: str) -> dict[str, list[tuple[str, Any]]]:
    """Returns the (resource, condition) pairs of each action that a managed policy allows."""
    managed = assembly.resources("AWS::IAM::ManagedPolicy")
    [policy] = [one for one in managed if one.name.startswith(f"Policies{name}")]
    found: dict[str, list[tuple[str, Any]]] = {}
    for statement in policy.properties["PolicyDocument"]["Statement"]:
        assert statement["Effect"] == "Allow"
        for action in listed(statement["Action"]):
            for where in listed(statement["Resource"]):
                found.setdefault(action, []).append((flat(where), statement.get("Condition")))
    return found


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_there_are_no_policies_by_default(assembly: Assembly) -> None:
    assert "policies" not in assembly.templates
    assert not list(assembly.resources("AWS::IAM::ManagedPolicy"))


@pytest.mark.slow
def test_a_single_policy_may_be_requested(tmp_path: Path) -> None:
    """Covers the smallest instance with the policy for operators alone."""
    found = synthesize(settings("minimal", iam={"policies": ["operator"]}), tmp_path / "a", checked=False)
    assert len(list(found.resources("AWS::IAM::ManagedPolicy"))) == 1
    called = [where for where, _ in rights(found, "Operator")["lambda:InvokeFunction"]]
    allowed = ("GarbageFunction", "TablesChange", "TablesShow")
    assert [[one.startswith(name) for name in allowed].count(True) for one in called] == [1, 1, 1]


@pytest.mark.slow
def test_cdk_nag_finds_nothing(tmp_path: Path) -> None:
    assert synthesize(largest(), tmp_path / "assembly").findings == []


def test_an_operator_may_change_only_the_parts_that_a_pause_changes(made: Assembly) -> None:
    may = rights(made, "Operator")
    changing = {action: places for action, places in may.items() if ("*", None) not in places}
    assert changing.keys() == {
        "cloudformation:DescribeStackEvents",
        "emr-serverless:CancelJobRun", "emr-serverless:StopApplication", "events:DisableRule",
        "events:EnableRule", "lambda:InvokeFunction", "lambda:UpdateEventSourceMapping",
        "rds:StartDBCluster", "rds:StopDBCluster", "sqs:ChangeMessageVisibility", "sqs:DeleteMessage",
        "sqs:ReceiveMessage", "sqs:SendMessage", "ssm:GetParameter", "ssm:GetParametersByPath",
        "ssm:PutParameter", "states:StopExecution",
    }  # fmt: skip
    for action in may.keys() - changing.keys():
        assert action.partition(":")[2].startswith(("Describe", "Get", "List")), action
    assert len(may["events:DisableRule"]) == 4
    assert len(may["lambda:UpdateEventSourceMapping"]) == 16
    [(state, _)] = may["ssm:PutParameter"]
    assert state.endswith(":parameter/dormouse/prod/desired")
    [(runs, _)] = may["emr-serverless:CancelJobRun"]
    assert "CompactionEmrApplication" in runs and runs.endswith("/jobruns/*")
    [(events, _)] = may["cloudformation:DescribeStackEvents"]
    assert events.endswith(":stack/dormouse-prod-application/*"), "the command names the stack, not its ARN"
    [(_, condition)] = may["sqs:DeleteMessage"]
    assert condition == {"StringEquals": {"aws:ResourceTag/dormouse:instance": "prod"}}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["emr-serverless", "emr-ec2-transient"])
def test_every_right_is_documented_for_a_command(engine: str, tmp_path: Path) -> None:
    configuration = settings(
        "prod", iam={"policies": ["operator", "reader"]}, compaction={"engine": engine}, access={}
    )
    found = synthesize(configuration, tmp_path / "a", checked=False)
    documented = documented_rights((ROOT / "docs" / "security.md").read_text("utf-8"))
    for name in ("Operator", "Reader"):
        assert rights(found, name).keys() - documented == set()


def documented_rights(text: str) -> set[str]:
    """Returns the IAM actions in the table "What people need" of a page.

    The service of an action without a prefix is that of the action before it.
    """
    found, service = set(), ""
    table = text.partition("### What people need")[2].partition("`iam.policies =")[0]
    for prefix, name, alone in re.findall(r"`(?:([a-z0-9-]+:)([A-Za-z]+)|([A-Z][A-Za-z]+))`", table):
        service = prefix or service
        found.add(service + (name or alone))
    return found


@pytest.mark.slow
def test_an_operator_may_end_only_clusters_with_the_tag_of_the_instance(tmp_path: Path) -> None:
    configuration = settings(
        "dev", iam={"policies": ["operator"]}, compaction={"engine": "emr-ec2-transient"}
    )
    found = rights(synthesize(configuration, tmp_path / "a", checked=False), "Operator")
    [(_, condition)] = found["elasticmapreduce:TerminateJobFlows"]
    assert condition == {"StringEquals": {"elasticmapreduce:ResourceTag/dormouse:instance": "dev"}}
    assert "emr-serverless:StopApplication" not in found


def test_an_operator_may_not_update_a_stack(made: Assembly) -> None:
    """Only a lambda of the stack `application` may update a stack: that one.

    The right to update a stack includes all rights of CloudFormation.
    """
    assert "cloudformation:UpdateStack" not in rights(made, "Operator")
    updating = [
        (policy.stack, flat(statement["Resource"]))
        for policy in made.resources("AWS::IAM::Policy")
        for statement in policy.properties["PolicyDocument"]["Statement"]
        if "cloudformation:UpdateStack" in listed(statement["Action"])
    ]
    assert updating == [("application", "StackId")]


def test_the_switch_may_read_all_parameters_of_the_template(made: Assembly) -> None:
    """CloudFormation reads parameters with the rights of the caller that updates the stack."""
    parameters = made.stacks["application"]["Parameters"].values()
    read = {one["Default"] for one in parameters if one["Type"].startswith("AWS::SSM::Parameter::Value")}
    assert "/dormouse/prod/database/host" in read
    may = {
        where.rpartition(":parameter")[2]
        for action, where, _ in allowed(made, "application", "SwitchRole")
        if action == "ssm:GetParameters"
    }
    assert {one for one in read if not one.startswith("/cdk-bootstrap/")} | {"/cdk-bootstrap/*"} == may


def test_a_reader_may_only_read(made: Assembly) -> None:
    may = rights(made, "Reader")
    assert may.keys() == {
        "kms:Decrypt", "lambda:InvokeFunction", "rds-db:connect", "s3:GetObject",
        "s3:ListBucket", "secretsmanager:GetSecretValue", "ssm:GetParameter", "ssm:GetParametersByPath",
    }  # fmt: skip
    [(function, _)] = may["lambda:InvokeFunction"]
    assert function.startswith("TablesShow")
    [(user, _)] = may["rds-db:connect"]
    assert user.endswith("/dormouse_read")
    [(objects, _)] = may["s3:GetObject"]
    assert objects.endswith("/data/*")


@pytest.fixture(scope="module")
def with_rows(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Returns the assembly of an instance with a proxy and the largest number of clusters of row tables."""
    configuration = settings(
        "minimal",
        iam={"policies": ["operator", "reader"]},
        database={"kind": "serverless", "min_acu": 1, "proxy": True},
        rows={"databases": DATABASES_MAX, "own_clusters": True},
        query={},
        access={},
    )
    return synthesize(configuration, tmp_path_factory.mktemp("rows") / "assembly")


@pytest.mark.slow
def test_a_reader_may_log_in_to_the_clusters_of_row_tables_too(with_rows: Assembly) -> None:
    defaults = {name: one["Default"] for name, one in with_rows.stacks["application"]["Parameters"].items()}
    users = [where for where, _ in rights(with_rows, "Reader")["rds-db:connect"]]
    assert all(one.endswith("/dormouse_read") for one in users)
    facts = [defaults[one.split(":dbuser:")[1].split("/")[0]] for one in users]
    own = [f"rows/{number}/resource" for number in range(1, DATABASES_MAX + 1)]
    assert sorted(facts) == sorted(f"/dormouse/minimal/database/{one}" for one in ["login", *own])
    assert "rds-db:connect" not in rights(with_rows, "Operator")
    assert with_rows.findings == []


@pytest.mark.few(1)
@pytest.mark.parametrize("instance", ["made", "with_rows"])
def test_policies_are_not_too_long(instance: str, request: pytest.FixtureRequest) -> None:
    """Counts each reference in a policy as the longest ARN that it can stand for."""
    for policy in request.getfixturevalue(instance).resources("AWS::IAM::ManagedPolicy"):
        statements = policy.properties["PolicyDocument"]["Statement"]
        size = sum(
            40
            + sum(len(action) + 3 for action in listed(one["Action"]))
            + sum(3 + length(where) for where in listed(one["Resource"]))
            + len(flat(one.get("Condition", "")))
            for one in statements
        )
        assert size < AWS_CHARACTERS_MAX, policy.name


def length(where: Any) -> int:
    """Returns the greatest length of a resource's ARN: 110 characters if it is read from a parameter."""
    return 110 if isinstance(where, dict) and "Ref" in where else len(flat(where))


def test_the_switch_names_the_stack_by_its_arn(made: Assembly) -> None:
    """The lambda's right names the stack's ARN, so a call with the stack's name might be refused."""
    functions = {one.name[:-8]: one.properties for one in made.resources("AWS::Lambda::Function")}
    variables = functions["SwitchFunction"]["Environment"]["Variables"]
    assert variables["DORMOUSE_STACK"] == {"Ref": "AWS::StackId"}
