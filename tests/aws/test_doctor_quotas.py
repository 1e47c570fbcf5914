"""Checks of the doctor of the account's quotas, also in an account that never changed one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dormouse.aws.aws import AwsRefused
from dormouse.aws.check import Check
from dormouse.aws.quotas import Quota, Quotas
from tests.assembly import EXISTING_VPC
from tests.aws.test_doctor import REGION, account, stubbed

LAMBDAS = Quota("lambda", "L-B99A9384", "lambdas at once")
DEFAULTS = "get_aws_default_service_quota"


@pytest.fixture
def session() -> Iterator[Any]:
    with mock_aws():
        yield boto3.session.Session(region_name=REGION)


def allowed(number: float) -> dict[str, Any]:
    return {"Quota": {"Value": number}}


def quotas(subject: Any) -> dict[str, Any]:
    return dict(Quotas(subject.settings, subject.aws).looks())


def test_a_quota_that_was_never_changed_has_the_default_of_aws(session: Any) -> None:
    """GetServiceQuota knows only quotas that were applied to the account."""
    subject = account(session)
    stubber = stubbed(subject, "service-quotas", "get_service_quota", "NoSuchResourceException")
    stubber.add_response(DEFAULTS, allowed(10))
    stubber.add_client_error("get_service_quota", "NoSuchResourceException")
    stubber.add_response(DEFAULTS, allowed(3))
    stubber.add_client_error("get_service_quota", "NoSuchResourceException")
    stubber.add_client_error(DEFAULTS, "NoSuchResourceException")
    looker = Quotas(subject.settings, subject.aws)
    (enough,), (small,), (unknown,) = (looker.check(LAMBDAS, 4) for _ in range(3))
    assert (enough.result, small.result, unknown.result) == ("ok", "wrong", "warning")
    assert small.found == "lambdas at once: 4 needed, 3 allowed by default"
    assert unknown.found == "lambdas at once: not known"


@pytest.mark.parametrize("known", [False, True])
def test_a_missing_right_to_read_quotas_is_one_warning_that_names_both_rights(
    session: Any, known: bool
) -> None:
    subject = account(session, commit={}, compaction={"engine": "emr-serverless"}, query={})
    stubber = stubbed(subject, "service-quotas", "get_service_quota")
    if known:
        stubber.add_client_error("get_service_quota", "NoSuchResourceException")
    stubber.add_client_error(DEFAULTS if known else "get_service_quota", "AccessDeniedException")
    (check,) = [check for look in quotas(subject).values() for check in look()]
    assert (check.name, check.result) == ("quotas", "warning")
    missing = "servicequotas:GetAWSDefaultServiceQuota" if known else "servicequotas:GetServiceQuota"
    assert f"no right to {missing}:" in check.found
    both = "servicequotas:GetServiceQuota and servicequotas:GetAWSDefaultServiceQuota are needed"
    assert check.mend.startswith(both)


def test_other_refusals_of_quotas_leave_the_other_checks(session: Any) -> None:
    subject = account(session)
    stubbed(subject, "service-quotas", "get_service_quota", "ServiceException", allowed(9))
    looker = Quotas(subject.settings, subject.aws)
    with pytest.raises(AwsRefused):
        list(looker.check(LAMBDAS, 4))
    (check,) = looker.check(LAMBDAS, 4)
    assert check.result == "ok"


def instance(kind: str, cores: int, owner: str | None = None, lifecycle: str | None = None) -> dict[str, Any]:
    tags = {"Tags": [{"Key": "dormouse:instance", "Value": owner}]} if owner else {}
    spot = {"InstanceLifecycle": lifecycle} if lifecycle else {}
    return {"InstanceType": kind, "CpuOptions": {"CoreCount": cores, "ThreadsPerCore": 2}, **tags, **spot}


def of_ec2(
    session: Any, offered: dict[str, int], *running: dict[str, Any], limits: tuple[float, ...], **given: Any
) -> list[Check]:
    """Runs the check of EC2's quotas.

    `offered` maps each instance type of the region to its vCPUs. `limits` are the quotas, in the order of the
    questions.
    """
    subject = account(session, **given)
    types = [{"InstanceType": kind, "VCpuInfo": {"DefaultVCpus": n}} for kind, n in offered.items()]
    stubber = stubbed(subject, "ec2", "describe_instance_types", {"InstanceTypes": types})
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": list(running)}]})
    stubbed(subject, "service-quotas", "get_service_quota", *[allowed(one) for one in limits])
    return list(quotas(subject)["quota of EC2"]())


def test_clusters_on_ec2_need_vcpus_of_the_family_of_their_instances(session: Any) -> None:
    """The largest type counts, for the core instances and one primary instance.

    Spot instances have another quota, and a running cluster of this instance is not added to its need.
    """
    compaction = {"engine": "emr-ec2-steps", "instance_types": ["m7g.xlarge", "r7g.2xlarge"]}
    offered = {"m7g.xlarge": 4, "r7g.2xlarge": 8, "t4g.nano": 2}
    running = [
        instance("im4gn.4xlarge", 8),
        instance("m7g.xlarge", 2, owner="dev"),
        instance("m5.xlarge", 2, lifecycle="spot"),
        instance("x8g.xlarge", 2),
    ]
    (check,) = of_ec2(session, offered, *running, limits=(105,), compaction=compaction, access={})
    assert (check.name, check.result) == ("quota", "wrong")
    assert check.found == "vCPUs of standard EC2 instances at once: 90 needed, 16 in use, 105 allowed"
    assert "Service Quotas (ec2, L-1216C47A)" in check.mend
    (check,) = of_ec2(session, offered, *running, limits=(106,), compaction=compaction, access={})
    assert check.result == "ok"


def test_each_family_of_instances_has_its_own_quota(session: Any) -> None:
    given = {"engine": "emr-ec2-transient", "instance_types": ["x8g.xlarge", "m7g.large"], "instances_max": 1}
    offered = {"x8g.xlarge": 4, "m7g.large": 2}
    large, standard = of_ec2(session, offered, limits=(7, 4), compaction=given)
    assert (large.result, large.found) == ("wrong", "vCPUs of X instances at once: 8 needed, 7 allowed")
    assert "(ec2, L-7295265B)" in large.mend
    assert (standard.result, standard.found.split(": ")[1]) == ("ok", "4 needed, 4 allowed")
    given["instance_types"] = ["g5g.xlarge"]
    (check,) = of_ec2(session, {"g5g.xlarge": 4}, limits=(), compaction=given)
    assert (check.result, check.found) == ("warning", "the quota of g5g.xlarge is not known")


def test_an_instance_type_that_the_region_lacks_is_wrong(session: Any) -> None:
    given = {"engine": "emr-ec2-steps", "instance_types": ["m7g.xlarge", "m8g.xlarge"]}
    missing, quota = of_ec2(session, {"m7g.xlarge": 4}, limits=(99,), compaction=given)
    assert (missing.name, missing.result) == ("instance types", "wrong")
    assert missing.found == "m8g.xlarge is not offered in eu-west-1"
    assert missing.mend == "name others in compaction.instance_types"
    assert quota.found.startswith("vCPUs of standard EC2 instances at once: 44 needed")


def test_resources_that_the_instance_has_already_are_not_counted_twice(session: Any) -> None:
    """A second run of the doctor, at the limit of the account, finds nothing wrong."""
    ec2, subject = session.client("ec2"), account(session)
    tags = [{"ResourceType": "vpc", "Tags": [{"Key": "dormouse:instance", "Value": "dev"}]}]
    ec2.create_vpc(CidrBlock="10.40.0.0/16", TagSpecifications=tags)
    stubbed(subject, "service-quotas", "get_service_quota", allowed(2), allowed(1))
    vpcs, gateways = quotas(subject)["quotas of the network"]()
    assert (vpcs.result, vpcs.found) == ("ok", "VPCs: 1 needed, 1 in use, 2 allowed")
    assert (gateways.result, gateways.found) == ("ok", "gateway endpoints: 1 needed, 1 allowed")
    clusters = [{"TagList": [{"Key": "dormouse:instance", "Value": owner}]} for owner in ("dev", "dev", "x")]
    subject = account(session)
    stubbed(subject, "rds", "describe_db_clusters", {"DBClusters": clusters})
    stubbed(subject, "service-quotas", "get_service_quota", allowed(3))
    (check,) = quotas(subject)["quotas of the database"]()
    assert (check.result, check.found) == ("ok", "database clusters: 1 needed, 2 in use, 3 allowed")


@pytest.mark.parametrize(
    ("more", "count"),
    [({}, 4), ({"commit": {"service": True, "endpoints": "create"}, "database": {"kind": "fixed"}}, 5)],
)
def test_new_interface_endpoints_count_in_an_existing_vpc(
    session: Any, more: dict[str, Any], count: int
) -> None:
    """The commit service shares those of the query service, and has one of its own."""
    given = {"query": {"endpoints": "create"}, "access": {"endpoints": "existing"}, **more}
    subject = account(session, network={**EXISTING_VPC, "s3_endpoint": "existing"}, **given)
    kinds = (
        ("Interface", EXISTING_VPC["vpc_id"]),
        ("Gateway", EXISTING_VPC["vpc_id"]),
        ("Interface", "vpc-1"),
    )
    endpoints = [{"VpcEndpointType": kind, "VpcId": vpc} for kind, vpc in kinds]
    stubbed(subject, "ec2", "describe_vpc_endpoints", {"VpcEndpoints": endpoints})
    stubbed(subject, "service-quotas", "get_service_quota", allowed(4))
    (check,) = quotas(subject)["quotas of the network"]()
    assert check.found == f"interface endpoints of a VPC: {count} needed, 1 in use, 4 allowed"
    assert (check.result, "(vpc, L-29B6F2EB)" in check.mend) == ("wrong", True)


@pytest.mark.parametrize(
    ("code", "mend"),
    [
        ("AccessDeniedException", "get that permission, or check by hand"),
        ("ServiceException", "run this command again, or check by hand"),
    ],
)
def test_only_a_missing_right_is_called_a_missing_right(
    session: Any, monkeypatch: pytest.MonkeyPatch, code: str, mend: str
) -> None:
    def refused() -> Iterator[Check]:
        raise AwsRefused(code, "AWS refuses it")

    subject = account(session)
    monkeypatch.setattr(subject, "_looks", lambda: iter([("quotas", refused)]))
    assert list(subject.checks()) == [Check("quotas", "warning", "not checked: AWS refuses it", mend)]
