"""Tests of the stack of migrations: the rights to log in as the master user, and retries of events."""

from __future__ import annotations

import json

from dormouse.settings.resources import state_parameter
from dormouse.settings.section import ACTIVE_SECONDS_MAX
from tests.assembly import Assembly
from tests.template import allowed


def test_custom_resources_have_no_secrets(assembly: Assembly) -> None:
    """CloudFormation does not resolve references to secrets in custom resources."""
    customs = [one for one in assembly.resources() if one.type.startswith("Custom::")]
    assert customs
    for one in customs:
        assert "{{resolve:" not in json.dumps(one.properties), str(one)


def test_the_lambda_that_reads_the_master_login_may_otherwise_only_write_the_state(
    assembly: Assembly,
) -> None:
    rights = {action: where for action, where, _ in allowed(assembly, "migrate", "BeginRole")}
    assert rights.keys() == {
        "cloudformation:DescribeStacks", "kms:Decrypt", "lambda:GetFunctionConfiguration",
        "lambda:InvokeFunction", "logs:CreateLogStream", "logs:PutLogEvents",
        "secretsmanager:GetSecretValue", "ssm:DeleteParameter", "ssm:GetParameter", "ssm:PutParameter",
        "xray:PutTelemetryRecords", "xray:PutTraceSegments",
    }  # fmt: skip
    assert rights["cloudformation:DescribeStacks"] == "StackId"
    assert rights["lambda:InvokeFunction"].startswith("MigrateFunction")
    assert rights["lambda:GetFunctionConfiguration"] == rights["lambda:InvokeFunction"]
    assert rights["ssm:PutParameter"].endswith(f":parameter{state_parameter(assembly.id)}")
    assert "databasesecret" in rights["secretsmanager:GetSecretValue"]
    begin = allowed(assembly, "migrate", "BeginRole")
    decrypting = [condition for action, _, condition in begin if action == "kms:Decrypt"]
    assert ["kms:ViaService" in json.dumps(one) for one in decrypting] == [True]


def test_a_failed_migration_is_not_retried_without_cloudformation(assembly: Assembly) -> None:
    """Neither of the two lambdas is retried by AWS: each ends before CloudFormation gives up waiting."""
    configs = [one for one in assembly.resources("AWS::Lambda::EventInvokeConfig") if one.stack == "migrate"]
    [queued] = {one.properties["MaximumEventAgeInSeconds"] for one in configs}
    functions = [one for one in assembly.resources("AWS::Lambda::Function") if one.stack == "migrate"]
    timeouts = [one.properties["Timeout"] for one in functions]
    waits = [
        int(one.properties["ServiceTimeout"])
        for one in assembly.resources("Custom::DormouseMigration")
        if one.stack == "migrate"
    ]
    assert waits and len(timeouts) == 2 and sum(timeouts) + 2 * queued < min(waits) <= 3_600
    assert [one.properties["MaximumRetryAttempts"] for one in configs] == [0, 0]
    assert min(timeouts) > ACTIVE_SECONDS_MAX <= queued, "the lambda in the VPC may be inactive"


def test_migrations_may_log_in_as_the_master_user_with_a_token(assembly: Assembly) -> None:
    """RDS may refuse the master user's password once the role rds_iam has members.

    See `test_migrate_login.py`.
    """
    users = [
        where
        for action, where, _ in allowed(assembly, "migrate", "MigrateRole")
        if action == "rds-db:connect"
    ]
    assert users
    assert all(one.endswith("/dormouse_admin") for one in users)
