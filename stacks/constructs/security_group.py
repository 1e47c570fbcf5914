"""Security groups that let nothing in or out but what is said."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

NOTHING = {
    "CidrIp": "255.255.255.255/32",
    "Description": "Disallow all traffic",
    "FromPort": 252,
    "IpProtocol": "icmp",
    "ToPort": 86,
}


def closed_group(scope: Construct, construct_id: str, vpc: ec2.IVpc, description: str) -> ec2.SecurityGroup:
    """Its rules to other groups are resources of their own, and a group without a rule within itself would
    keep the one that EC2 gives to all: everything may go out."""
    group = ec2.SecurityGroup(scope, construct_id, vpc=vpc, description=description, allow_all_outbound=False)
    resource = group.node.default_child
    assert isinstance(resource, ec2.CfnSecurityGroup)  # noqa: S101
    resource.add_property_override("SecurityGroupEgress", [NOTHING])
    return group
