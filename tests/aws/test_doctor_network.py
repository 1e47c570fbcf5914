"""Checks of the doctor on an existing VPC: its subnets, route tables and endpoint for S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dormouse.aws.vpc import Network
from tests.assembly import EXISTING_VPC
from tests.aws.test_doctor import REGION, account, results


@pytest.fixture
def session() -> Iterator[Any]:
    with mock_aws():
        yield boto3.session.Session(region_name=REGION)


def existing(session: Any, *, endpoint: bool, owner: str | None = None) -> dict[str, Any]:
    """Creates a VPC with two subnets, and returns its settings.

    `owner` is the id of the instance that created the endpoint.
    """
    ec2 = session.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    zones = [f"{REGION}a", f"{REGION}b"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.1.{n}.0/24", AvailabilityZone=zone)["Subnet"]["SubnetId"]
        for n, zone in enumerate(zones)
    ]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    for subnet in subnets:
        ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    if endpoint:
        tags = [{"Key": "dormouse:instance", "Value": owner}] if owner else []
        ec2.create_vpc_endpoint(
            VpcId=vpc,
            ServiceName=f"com.amazonaws.{REGION}.s3",
            VpcEndpointType="Gateway",
            RouteTableIds=[table],
            TagSpecifications=[{"ResourceType": "vpc-endpoint", "Tags": tags}],
        )
    return {
        "vpc_id": vpc, "subnet_ids": subnets, "availability_zones": zones, "route_table_ids": [table, table],
        "s3_endpoint": "create",
    }  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("s3_endpoint", ["create", "existing"])
def test_an_existing_vpc_has_an_endpoint_or_the_deploy_creates_one(
    session: Any, has: bool, s3_endpoint: str
) -> None:
    network = {**existing(session, endpoint=has), "s3_endpoint": s3_endpoint}
    found = list(dict(account(session, network=network)._looks())["vpc"]())
    fine = has == (s3_endpoint == "existing")
    assert [check.result for check in found if check.name != "s3 endpoint"] == ["ok"] * 4
    assert (found[-1].name, found[-1].result) == ("s3 endpoint", "ok" if fine else "wrong")
    assert bool(found[-1].mend) != fine


def test_subnets_and_route_tables_must_agree_with_the_settings(session: Any) -> None:
    network = existing(session, endpoint=False)
    network["availability_zones"].reverse()
    network["route_table_ids"][0] = "rtb-0a1b2c3d"
    found = results(dict(account(session, network=network)._looks())["vpc"]())
    assert found[:4] == [
        ("subnet", "wrong"),
        ("subnet", "wrong"),
        ("route table", "wrong"),
        ("route table", "ok"),
    ]
    network |= {"vpc_id": "vpc-0a1b2c3d"}
    (check,) = dict(account(session, network=network)._looks())["vpc"]()
    assert check.mend == "correct network.vpc_id"


@pytest.mark.slow
@pytest.mark.parametrize("s3_endpoint", ["create", "existing"])
def test_an_endpoint_in_other_route_tables_does_not_count(session: Any, s3_endpoint: str) -> None:
    """Lambdas could not reach S3 there. A second endpoint can be created, however."""
    network, ec2 = {**existing(session, endpoint=True), "s3_endpoint": s3_endpoint}, session.client("ec2")
    other = ec2.create_route_table(VpcId=network["vpc_id"])["RouteTable"]["RouteTableId"]
    [ours] = ec2.describe_route_tables(RouteTableIds=network["route_table_ids"][:1])["RouteTables"]
    for one in ours["Associations"]:
        association = one["RouteTableAssociationId"]
        ec2.replace_route_table_association(AssociationId=association, RouteTableId=other)
    network["route_table_ids"] = [other, other]
    check = list(dict(account(session, network=network)._looks())["vpc"]())[-1]
    assert (check.name, check.result) == ("s3 endpoint", "ok" if s3_endpoint == "create" else "wrong")
    assert (other in check.found) == (s3_endpoint == "existing")


@pytest.mark.parametrize(
    ("owner", "s3_endpoint", "result", "text"),
    [
        ("dev", "create", "ok", "is the instance's own"),
        ("prod", "create", "wrong", "has an S3 gateway endpoint already"),
        ("prod", "existing", "ok", "vpce-"),
        ("dev", "existing", "wrong", "has no S3 gateway endpoint but the instance's own"),
    ],
)
def test_an_endpoint_that_the_instance_created_is_not_a_foreign_one(
    session: Any, owner: str, s3_endpoint: str, result: str, text: str
) -> None:
    """A deploy keeps its own endpoint with `create`, and deletes it with `existing`."""
    network = {**existing(session, endpoint=True, owner=owner), "s3_endpoint": s3_endpoint}
    check = list(dict(account(session, network=network)._looks())["vpc"]())[-1]
    assert (check.name, check.result) == ("s3 endpoint", result)
    assert text in check.found


@pytest.mark.parametrize(
    ("free", "vcpu_max", "result", "text"),
    [
        (251, 1_880, "ok", "502 addresses needed, 502 free"),
        (251, 1_884, "wrong", "503 addresses needed, 502 in the subnets"),
        (250, 1_880, "warning", "502 addresses needed, 500 free"),
    ],
)
def test_the_subnets_have_an_address_for_each_worker_of_emr_serverless(
    session: Any, free: int, vcpu_max: int, result: str, text: str
) -> None:
    """Some addresses are left for lambdas and others, as in the instance's own VPC."""
    subject = account(
        session, network=EXISTING_VPC, compaction={"engine": "emr-serverless", "vcpu_max": vcpu_max}
    )
    subnets = [{"CidrBlock": f"10.1.{n}.0/24", "AvailableIpAddressCount": free} for n in range(2)]
    (check,) = Network(subject.settings, subject.aws)._addresses(subnets)
    assert (check.name, check.result, check.found) == ("addresses", result, text)
    assert ("compaction.vcpu_max" in check.mend) == (result != "ok")
    assert list(Network(account(session, network=EXISTING_VPC).settings, subject.aws)._addresses([])) == []


@pytest.mark.parametrize(
    ("free", "instances_max", "result", "text"),
    [
        (251, 250, "ok", "251 addresses needed, 251 free"),
        (251, 251, "wrong", "252 addresses needed, 251 in the largest subnet"),
        (240, 250, "warning", "251 addresses needed, 240 free"),
    ],
)
def test_one_subnet_has_an_address_for_each_instance_of_a_cluster(
    session: Any, free: int, instances_max: int, result: str, text: str
) -> None:
    """EMR creates all instances of a cluster in one of the subnets."""
    given = {"engine": "emr-ec2-steps", "endpoints": "existing", "instances_max": instances_max}
    subject = account(session, network=EXISTING_VPC, compaction=given)
    subnets = [{"CidrBlock": f"10.1.{n}.0/24", "AvailableIpAddressCount": free - n} for n in range(2)]
    (check,) = Network(subject.settings, subject.aws)._addresses(subnets)
    assert (check.name, check.result, check.found) == ("addresses", result, text)
    assert ("compaction.instances_max" in check.mend) == (result != "ok")


def test_free_addresses_are_those_of_the_subnets_in_the_settings(session: Any) -> None:
    network = existing(session, endpoint=False)
    extra = session.client("ec2").create_subnet(VpcId=network["vpc_id"], CidrBlock="10.1.8.0/21")
    assert extra["Subnet"]["AvailableIpAddressCount"] > 2_000
    subject = account(session, network=network, compaction={"engine": "emr-serverless", "vcpu_max": 3_200})
    (check,) = [one for one in dict(subject._looks())["vpc"]() if one.name == "addresses"]
    assert (check.result, check.found) == ("wrong", "832 addresses needed, 502 in the subnets")
