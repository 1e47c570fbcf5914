"""Checks of the doctor on an existing VPC: its subnets, route tables and endpoint for S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from tests.aws.test_doctor import REGION, account, results


@pytest.fixture
def session() -> Iterator[Any]:
    with mock_aws():
        yield boto3.session.Session(region_name=REGION)


def existing(session: Any, *, endpoint: bool) -> dict[str, Any]:
    """Creates a VPC with two subnets, and returns its settings."""
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
        ec2.create_vpc_endpoint(
            VpcId=vpc,
            ServiceName=f"com.amazonaws.{REGION}.s3",
            VpcEndpointType="Gateway",
            RouteTableIds=[table],
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
