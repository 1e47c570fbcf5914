"""The command `dormouse doctor`: each check returns ok, warning or wrong, and a remedy.

A check that lacks a right is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from moto import mock_aws

from dormouse.aws.check import Check
from dormouse.aws.doctor import BOOTSTRAP, _Account, examine, machine
from dormouse.aws.quotas import Quota, Quotas
from dormouse.aws.vpc import Network
from dormouse.settings.resources import INSTANCE_TAG, state_parameter
from tests.assembly import EXISTING_VPC
from tests.support.aws import Aws
from tests.support.settings import parse

REGION = "eu-west-1"


@pytest.fixture
def session() -> Iterator[Any]:
    with mock_aws():
        yield boto3.session.Session(region_name=REGION)


def account(session: Any, **settings: Any) -> _Account:
    return _Account(parse({"id": "dev", **settings}), Aws(session))


def stubbed(subject: _Account, service: str, operation: str, *answers: Any) -> Stubber:
    """Stubs the answers to one operation of an AWS service: documents, or codes of errors."""
    stubber = Stubber(subject.aws._client(service))
    for answer in answers:
        if isinstance(answer, str):
            stubber.add_client_error(operation, answer, "AWS refused")
        else:
            stubber.add_response(operation, answer)
    stubber.activate()
    return stubber


def results(checks: Any) -> list[tuple[str, str]]:
    return [(check.name, check.result) for check in checks]


@pytest.mark.parametrize("qualifier", [None, "acme"])
@pytest.mark.parametrize(("version", "result"), [(None, "wrong"), ("5", "wrong"), ("28", "ok")])
def test_the_account_is_bootstrapped(
    session: Any, version: str | None, result: str, qualifier: str | None
) -> None:
    if version:
        name = BOOTSTRAP.format(qualifier=qualifier or "hnb659fds")
        session.client("ssm").put_parameter(Name=name, Value=version, Type="String")
    subject = account(session, **({"qualifier": qualifier} if qualifier else {}))
    (check,) = subject._bootstrap(subject.aws)
    assert check.result == result
    option = f" --qualifier {qualifier}" if qualifier else ""
    assert (check.mend == f"run npx cdk bootstrap aws://123456789012/eu-west-1{option}") == (
        result == "wrong"
    )


def test_the_region_of_the_copy_is_bootstrapped_too(session: Any) -> None:
    """The copy has a stack in its own region."""
    there = boto3.session.Session(region_name="eu-central-1").client("ssm")
    given = {"account": "123456789012", "region": REGION, "backup": {"copy_region": "eu-central-1"}}
    name = BOOTSTRAP.format(qualifier="hnb659fds")
    session.client("ssm").put_parameter(Name=name, Value="28", Type="String")

    def looked() -> list[Check]:
        checks = account(session, **given)._looks()
        return [check for name, look in checks if name == "bootstrap" for check in look()]

    assert [check.result for check in looked()] == ["ok", "wrong"]
    assert looked()[1].found == "the CDK is not bootstrapped in eu-central-1"
    assert looked()[1].mend == "run npx cdk bootstrap aws://123456789012/eu-central-1"
    there.put_parameter(Name=name, Value="28", Type="String")
    assert [check.result for check in looked()] == ["ok", "ok"]


def test_a_permissions_boundary_must_exist(session: Any) -> None:
    bound = account(session, iam={"permissions_boundary": "arn:aws:iam::123456789012:policy/bound"})
    name = "arn:aws:iam::123456789012:policy/bound"
    (check,) = dict(bound._looks())["permissions boundary"]()
    assert (check.result, check.found) == ("wrong", f"there is no policy {name}")
    statement = '{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}'
    document = f'{{"Version": "2012-10-17", "Statement": [{statement}]}}'
    session.client("iam").create_policy(PolicyName="bound", PolicyDocument=document)
    (check,) = bound._boundary(name)
    assert check.result == "ok"


def test_an_engine_version_or_class_that_the_region_lacks_is_wrong(session: Any) -> None:
    subject = account(session, database={"kind": "fixed", "instance_class": "r8g.large"})
    with stubbed(subject, "rds", "describe_db_engine_versions", {"DBEngineVersions": []}):
        assert results(subject._engine()) == [("engine version", "wrong")]
    subject = account(session, database={"kind": "fixed", "instance_class": "r8g.large"})
    stubber = stubbed(subject, "rds", "describe_db_engine_versions", {"DBEngineVersions": [{"Engine": "a"}]})
    given = {"Engine": ANY, "EngineVersion": "17.7", "DBInstanceClass": "db.r8g.large", "MaxRecords": 20}
    stubber.add_response("describe_orderable_db_instance_options", {"OrderableDBInstanceOptions": []}, given)
    assert results(subject._engine()) == [("engine version", "ok"), ("instance class", "wrong")]


def test_a_quota_that_is_too_small_is_wrong(session: Any) -> None:
    subject = account(session)
    stubbed(subject, "service-quotas", "get_service_quota", *[{"Quota": {"Value": 10.0}}] * 2)
    quota, quotas = Quota("lambda", "L-B99A9384", "lambdas at once"), Quotas(subject.settings, subject.aws)
    (enough,), (small,) = (quotas.check(quota, needed, 4) for needed in (6, 7))
    assert (enough.result, small.result) == ("ok", "wrong")
    assert small.found == "lambdas at once: 7 needed, 4 in use, 10 allowed"
    assert "Service Quotas (lambda, L-B99A9384)" in small.mend
    subject = account(session, rows={"databases": 4, "own_clusters": True})
    stubbed(subject, "rds", "describe_db_clusters", {"DBClusters": []})
    stubbed(subject, "service-quotas", "get_service_quota", {"Quota": {"Value": 4.0}})
    (clusters,) = dict(subject._looks())["quotas of the database"]()
    assert clusters.found == "database clusters: 5 needed, 4 allowed"


def zones(
    region: str, *subnets: str, deployed: tuple[str, ...] = (), **network: Any
) -> list[tuple[str, str]]:
    """Runs the check of zones for a new VPC; returns (first word of the finding, result) for each zone.

    The region has three zones, `a` to `c`. The account has default subnets in the zones `subnets`. An
    instance is deployed in the zones `deployed`.
    """
    session = boto3.session.Session(region_name=region)
    subject = account(session, network=network)
    poor = [
        {"ZoneName": f"{region}{zone}", "ZoneId": f"use1-az{n}"} for zone, n in zip("abc", "136", strict=True)
    ]
    stubber = stubbed(subject, "ec2", "describe_availability_zones", {"AvailabilityZones": poor})
    if not network.get("availability_zones"):
        defaults = [{"AvailabilityZone": one} for one in subnets]
        stubber.add_response("describe_subnets", {"Subnets": defaults})
    ours = [
        {"AvailabilityZone": zone, "Tags": [{"Key": "Name", "Value": f"Vpc/IsolatedSubnet{number}"}]}
        for number, zone in enumerate(deployed, 1)
    ]
    mine = [{"Name": "tag:dormouse:instance", "Values": ["dev"]}]
    stubber.add_response("describe_subnets", {"Subnets": ours[::-1]}, {"Filters": mine})
    return [
        (check.found.split(" ")[0].rstrip(","), check.result) for check in dict(subject._looks())["zones"]()
    ]


def test_a_zone_that_lacks_services_is_a_warning_and_other_zones_may_be_named(session: Any) -> None:
    assert zones("us-east-1") == [("us-east-1a", "ok"), ("us-east-1b", "warning")]
    assert zones("us-east-1", zones=3)[2] == ("us-east-1c", "ok")
    named = ["us-east-1c", "us-east-1a"]
    assert zones("us-east-1", availability_zones=named) == [(name, "ok") for name in named]
    named = ["us-east-1b", "us-east-1z"]
    found = zones("us-east-1", availability_zones=named)
    assert found == [("us-east-1b", "warning"), ("us-east-1z", "wrong")]


def test_an_account_with_default_subnets_gets_their_zones(session: Any) -> None:
    """CloudFormation chooses the zones of the default subnets."""
    assert zones("us-east-1", "us-east-1c", "us-east-1a") == [("us-east-1a", "ok"), ("us-east-1c", "ok")]


def test_a_deploy_that_would_move_subnets_to_other_zones_is_wrong(session: Any) -> None:
    """CloudFormation chooses other zones when an account loses its default subnets, or a region gets a zone.

    The deploy then fails: a new subnet would have the address range of an existing one.
    """
    there = ("us-east-1a", "us-east-1c")
    assert ("dev", "wrong") not in zones("us-east-1", *there, deployed=there)
    assert zones("us-east-1", deployed=there)[0] == ("dev", "wrong")
    assert ("dev", "wrong") not in zones("us-east-1", deployed=there, availability_zones=list(there))
    more = [*there, "us-east-1b"]
    assert ("dev", "wrong") not in zones("us-east-1", deployed=there, availability_zones=more)
    assert zones("us-east-1", deployed=there, availability_zones=more[::-1])[0] == ("dev", "wrong")


def test_a_region_with_too_few_zones_is_wrong(session: Any) -> None:
    """CloudFormation would fail to choose the third zone."""
    subject = account(session, network={"zones": 3})
    zones = [{"ZoneName": f"{REGION}{letter}", "ZoneId": f"euw1-az{letter}"} for letter in "ab"]
    stubber = stubbed(subject, "ec2", "describe_availability_zones", {"AvailabilityZones": zones})
    for _ in range(2):
        stubber.add_response("describe_subnets", {"Subnets": []})
    few, *others = dict(subject._looks())["zones"]()
    assert (few.result, few.found) == ("wrong", f"network.zones = 3, but this account has only 2 in {REGION}")
    assert results(others) == [("zone", "ok")] * 2


@pytest.mark.parametrize(
    ("backup", "let", "lacking"),
    [
        ({}, {"Aurora": True, "S3": True}, None),
        ({}, {"Aurora": False, "S3": True}, "Aurora=true"),
        ({}, {}, "Aurora=true,S3=true"),
        ({"objects": False, "retention_days": 3}, {"Aurora": True, "S3": False}, None),
    ],
)
def test_aws_backup_must_be_enabled_for_each_service(
    session: Any, backup: dict[str, Any], let: dict[str, bool], lacking: str | None
) -> None:
    """AWS Backup leaves out other services without a message."""
    subject = account(session, backup=backup)
    stubbed(subject, "backup", "describe_region_settings", {"ResourceTypeOptInPreference": let})
    (check,) = dict(subject._looks())["backups"]()
    assert check.result == ("wrong" if lacking else "ok")
    command = f"run aws backup update-region-settings --resource-type-opt-in-preference {lacking}"
    assert check.mend == (command if lacking else "")


@pytest.mark.parametrize(("state", "result"), [("paused", "warning"), ("running", "ok"), (None, None)])
def test_a_paused_instance_is_a_warning(session: Any, state: str | None, result: str | None) -> None:
    if state:
        session.client("ssm").put_parameter(Name=state_parameter("dev"), Value=state, Type="String")
    found = list(account(session)._state())
    assert [check.result for check in found] == ([result] if result else [])
    assert ["resume it" in check.mend for check in found] == [result == "warning"] * len(found)


@pytest.mark.parametrize(
    ("default", "result"),
    [
        ({"SSEAlgorithm": "AES256"}, "ok"),
        ({"SSEAlgorithm": "aws:kms"}, "ok"),
        ({"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": f"arn:aws:kms:{REGION}:1:alias/aws/s3"}, "ok"),
        ({"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": f"arn:aws:kms:{REGION}:1:key/1-2"}, "warning"),
        (None, None),
    ],
)
def test_a_bootstrap_bucket_with_a_key_of_a_customer_is_a_warning(
    session: Any, default: dict[str, str] | None, result: str | None
) -> None:
    if default:
        s3, name = session.client("s3"), f"cdk-hnb659fds-assets-123456789012-{REGION}"
        s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        rules = [{"ApplyServerSideEncryptionByDefault": default}]
        s3.put_bucket_encryption(Bucket=name, ServerSideEncryptionConfiguration={"Rules": rules})
    found = list(account(session)._bucket())
    assert [check.result for check in found] == ([result] if result else [])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("service", "operation", "code", "name", "right"),
    [
        (
            "ec2",
            "describe_availability_zones",
            "UnauthorizedOperation",
            "zones",
            "ec2:DescribeAvailabilityZones",
        ),
        ("s3", "get_bucket_encryption", "AccessDenied", "bootstrap bucket", "s3:GetEncryptionConfiguration"),
        ("iam", "get_role", "AccessDenied", "service-linked roles", "iam:GetRole"),
        (
            "emr",
            "list_release_labels",
            "AccessDeniedException",
            "EMR release",
            "elasticmapreduce:ListReleaseLabels",
        ),
    ],
)
def test_a_check_without_its_right_is_a_warning_that_names_the_right(
    session: Any, service: str, operation: str, code: str, name: str, right: str
) -> None:
    subject = account(session, compaction={"engine": "emr-serverless"})
    stubber = stubbed(subject, service, operation)
    if service == "ec2":
        stubber.add_response("describe_vpcs", {"Vpcs": []})
    stubber.add_client_error(operation, code, "AWS refused")
    stubbed(subject, "service-quotas", "get_service_quota", *["ServiceException"] * 9)
    stubbed(subject, "rds", "describe_db_engine_versions", "AccessDenied")
    (check,) = [one for one in subject.checks() if one.name == name]
    assert (check.result, right in check.found) == ("warning", True)


@pytest.mark.parametrize("engine", ["emr-serverless", "emr-ec2-steps"])
@pytest.mark.parametrize(("labels", "result"), [(["emr-spark-8.0.0"], "ok"), (["emr-7.13.0"], "warning")])
def test_a_region_that_does_not_list_the_release_of_emr_is_a_warning(
    session: Any, labels: list[str], result: str, engine: str
) -> None:
    """EMR Serverless has no list of its own, so EMR's list counts for it, too."""
    subject = account(session, compaction={"engine": engine})
    stubber = stubbed(subject, "emr", "list_release_labels")
    wanted = {"Filters": {"Prefix": "emr-spark-8.0.0"}}
    stubber.add_response("list_release_labels", {"ReleaseLabels": labels}, wanted)
    (check,) = dict(subject._looks())["EMR release"]()
    assert (check.name, check.result) == ("EMR release", result)
    assert ("EMR does not list emr-spark-8.0.0 in eu-west-1" in check.found) == (result == "warning")
    assert "EMR release" not in dict(account(session)._looks())


def test_the_first_checks_name_a_missing_right_too(session: Any) -> None:
    subject = account(session)
    stubbed(subject, "ssm", "get_parameter", *["AccessDeniedException"] * 2)
    checks = subject.checks()
    for check, name in ((next(checks), "bootstrap"), (next(checks), "state")):
        assert (check.name, check.result) == (name, "warning")
        assert "ssm:GetParameter" in check.found


def test_another_account_than_that_of_the_settings_is_wrong(session: Any, tmp_path: Path) -> None:
    settings = parse({"id": "dev", "account": "999999999999", "region": "us-east-1"})
    last = examine(settings, root=tmp_path, session=session)[-1]
    assert (last.name, last.result) == ("account", "wrong")


def test_a_region_without_certificates_is_wrong(tmp_path: Path) -> None:
    """The check uses the session's region, because the settings name none."""
    with mock_aws():
        found = examine(
            parse({"id": "dev"}), root=tmp_path, session=boto3.Session(region_name="il-central-1")
        )
    [check] = [one for one in found if one.name == "certificates"]
    assert check.result == "wrong"
    assert "the certificates of Amazon RDS in il-central-1 are not in" in check.found


def test_alarms_without_a_receiver_are_a_warning(session: Any) -> None:
    for monitoring, wanted in (({"budget_usd_month": 9.0}, ["warning"]), ({"email": "a@example.com"}, [])):
        found = dict(account(session, monitoring=monitoring)._looks())["alarms"]()
        assert [check.result for check in found] == wanted


def test_a_missing_region_is_not_reported_as_a_missing_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with mock_aws():
        last = examine(parse({"id": "dev"}), root=tmp_path)[-1]
    assert (last.result, last.found.split(":")[0]) == ("wrong", "no AWS region is given")
    assert "log in" not in last.mend


@pytest.mark.slow
def test_every_check_runs_and_none_raises(session: Any, tmp_path: Path) -> None:
    subject = account(session, commit={}, compaction={"engine": "emr-serverless"})
    stubbed(subject, "rds", "describe_db_engine_versions", "AccessDenied")
    stubbed(subject, "service-quotas", "get_service_quota", *["TooManyRequestsException"] * 30)
    found = [*machine(tmp_path), *subject.checks()]
    assert all(isinstance(check, Check) and bool(check.mend) == (check.result != "ok") for check in found)
    assert {"node", "cdk", "bootstrap", "engine version", "quota of lambdas"} <= {c.name for c in found}


@pytest.mark.parametrize(
    ("part", "wanted", "has", "result"),
    [
        ("query", "create", (), "ok"),
        ("query", "create", ("logs",), "wrong"),
        ("query", "existing", ("ecr.api", "ecr.dkr", "logs", "secretsmanager"), "ok"),
        ("query", "existing", ("logs",), "warning"),
        ("access", "create", ("logs",), "ok"),
        ("access", "create", ("ssm",), "wrong"),
        ("access", "existing", ("ssm", "ssmmessages"), "ok"),
        ("access", "existing", ("ssm",), "warning"),
    ],
)
def test_parts_that_call_aws_need_endpoints_in_an_existing_vpc(
    part: str, wanted: str, has: tuple[str, ...], result: str, session: Any
) -> None:
    subject = account(session, network=EXISTING_VPC, **{part: {"endpoints": wanted}})
    endpoints = [
        {"ServiceName": f"com.amazonaws.{REGION}.{name}", "PrivateDnsEnabled": True, "Tags": []}
        for name in has
    ]
    ours = {
        "ServiceName": f"com.amazonaws.{REGION}.ecr.api", "PrivateDnsEnabled": True,
        "Tags": [{"Key": "dormouse:instance", "Value": "dev"}],
    }  # fmt: skip
    check = Network(subject.settings, subject.aws)._ways(part, wanted == "create", [*endpoints, ours])
    assert (check.name, check.result) == (f"{part} endpoints", result)


def test_a_query_service_without_clients_is_a_warning(session: Any) -> None:
    assert results(account(session, query={})._clients()) == [("clients", "warning")]
    assert results(account(session, query={"client_cidrs": ["10.0.0.0/16"]})._clients()) == []


def test_a_stack_that_no_deploy_has_is_named_with_the_command_that_deletes_it(session: Any) -> None:
    cloudformation = session.client("cloudformation")
    for part, owner in (("query", "dev"), ("application", "dev"), ("query-x", "dev-query")):
        tags = [{"Key": INSTANCE_TAG, "Value": owner}]
        name = f"dormouse-dev-{part}"
        cloudformation.create_stack(StackName=name, TemplateBody='{"Resources": {}}', Tags=tags)
    [check] = account(session)._other_stacks()
    assert (check.name, check.result) == ("other stacks", "warning")
    assert check.found.startswith("dormouse-dev-query is no stack of a deploy")
    assert "aws cloudformation delete-stack --stack-name dormouse-dev-query --region eu-west-1" in check.mend
    cloudformation.delete_stack(StackName="dormouse-dev-query")
    [check] = account(session)._other_stacks()
    assert check.result == "ok"
