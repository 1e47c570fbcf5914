"""Checks of the doctor of service-linked roles, which a new account lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.iam import aws_managed_policies

from dormouse.aws.check import Check
from tests.aws.test_doctor import REGION, account

EXECUTOR = f"cdk-hnb659fds-cfn-exec-role-123456789012-{REGION}"
TRUST = '{"Version": "2012-10-17", "Statement": []}'


@pytest.fixture(scope="module")
def policies() -> str:
    """Returns two of the thousand policies of AWS: each test would read them all."""
    known = json.loads(aws_managed_policies.aws_managed_policies_data)
    return json.dumps({name: known[name] for name in ("ReadOnlyAccess", "AdministratorAccess")})


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, policies: str) -> Iterator[Any]:
    monkeypatch.setattr("moto.iam.models.aws_managed_policies_data", policies)
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        yield boto3.session.Session(region_name=REGION)


def create_roles(session: Any, *names: str) -> None:
    for name in names:
        session.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=TRUST)


def bootstrap(session: Any, policy: str) -> None:
    """Creates the role by which CloudFormation deploys, with a policy of AWS."""
    create_roles(session, EXECUTOR)
    arn = f"arn:aws:iam::aws:policy/{policy}"
    session.client("iam").attach_role_policy(RoleName=EXECUTOR, PolicyArn=arn)


def looked(session: Any, **settings: Any) -> list[Check]:
    return list(dict(account(session, **settings)._looks())["service-linked roles"]())


def command(service: str) -> str:
    return f"aws iam create-service-linked-role --aws-service-name {service}.amazonaws.com"


SERVERLESS = {"compaction": {"engine": "emr-serverless"}}
CLUSTERS = {"compaction": {"engine": "emr-ec2-steps"}}


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({}, {"AWSServiceRoleForRDS": "rds"}),
        (SERVERLESS, {"AWSServiceRoleForAmazonEMRServerless": "ops.emr-serverless"}),
        (
            {"commit": {"service": True}, "database": {"kind": "fixed"}},
            {"AWSServiceRoleForECS": "ecs"},
        ),
        (
            {"query": {}},
            {
                "AWSServiceRoleForECS": "ecs",
                "AWSServiceRoleForElasticLoadBalancing": "elasticloadbalancing",
                "AWSServiceRoleForApplicationAutoScaling_ECSService": "ecs.application-autoscaling",
            },
        ),
    ],
)
def test_a_role_that_cloudformation_may_not_create_is_a_warning_with_the_command(
    session: Any, settings: dict[str, Any], lacking: dict[str, str]
) -> None:
    bootstrap(session, "ReadOnlyAccess")
    if settings:
        create_roles(session, "AWSServiceRoleForRDS")
    checks = looked(session, **settings)
    assert [(check.found.split(" ")[0], check.result) for check in checks] == [
        (name, "warning") for name in lacking
    ]
    assert all(
        command(service) in check.mend for check, service in zip(checks, lacking.values(), strict=True)
    )
    create_roles(session, *lacking)
    (check,) = looked(session, **settings)
    assert (check.name, check.result) == ("service-linked roles", "ok")


@pytest.mark.parametrize("is_bootstrapped", [False, True])
def test_aws_creates_roles_with_the_rights_that_the_bootstrap_gives_by_default(
    session: Any, is_bootstrapped: bool
) -> None:
    """ECS is the exception: its first cluster can fail before AWS has created the role."""
    if is_bootstrapped:
        bootstrap(session, "AdministratorAccess")
    (check,) = looked(session, **SERVERLESS)
    assert (check.result, check.found) == (
        "ok", "AWS creates AWSServiceRoleForRDS, AWSServiceRoleForAmazonEMRServerless at the first use"
    )  # fmt: skip
    ecs, others = looked(session, query={})
    assert (ecs.result, others.result) == ("warning", "ok")
    assert ecs.found.startswith("AWSServiceRoleForECS does not exist: the first deploy can fail")
    assert ecs.mend == f"run {command('ecs')}"


def test_the_lambda_that_creates_clusters_may_create_their_role_unless_a_boundary_forbids_it(
    session: Any,
) -> None:
    bootstrap(session, "ReadOnlyAccess")
    create_roles(session, "AWSServiceRoleForRDS")
    (check,) = looked(session, **CLUSTERS)
    assert (check.result, check.found) == ("ok", "AWS creates AWSServiceRoleForEMRCleanup at the first use")
    boundary = {"permissions_boundary": "arn:aws:iam::123456789012:policy/bound"}
    (check,) = looked(session, **CLUSTERS, iam=boundary)
    assert (check.result, command("elasticmapreduce") in check.mend) == ("warning", True)
