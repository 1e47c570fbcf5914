"""Security groups that allow only the traffic in their rules."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from dormouse.settings.database import DatabaseSettings, QuerySettings


def closed_group(scope: Construct, construct_id: str, vpc: ec2.IVpc, description: str) -> ec2.SecurityGroup:
    """Creates a security group that allows no traffic.

    It has one outgoing rule that leads nowhere. Without a rule of its own, the group would keep EC2's default
    rule, which allows all outgoing traffic.
    """
    group = ec2.SecurityGroup(scope, construct_id, vpc=vpc, description=description, allow_all_outbound=False)
    group.add_egress_rule(ec2.Peer.ipv4("127.0.0.1/32"), ec2.Port.all_traffic(), "nowhere")
    return group


def group_with_s3(scope: Construct, vpc: ec2.IVpc, description: str) -> ec2.SecurityGroup:
    """Creates a security group that allows only connections to S3."""
    group = ec2.SecurityGroup(
        scope, "SecurityGroup", vpc=vpc, description=description, allow_all_outbound=False
    )
    let_out_to_s3(group)
    return group


def let_out_to_s3(security_group: ec2.SecurityGroup) -> None:
    """Allows HTTPS connections to any address, because the addresses of S3 depend on the region.

    The instance's own VPC has a route only to S3.
    """
    security_group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "S3, by the gateway endpoint")


def let_clients_in(group: ec2.SecurityGroup, port: ec2.Port, to: DatabaseSettings | QuerySettings) -> None:
    """Opens a security group to the clients in the settings."""
    for cidr in to.client_cidrs:
        group.add_ingress_rule(ec2.Peer.ipv4(cidr), port, "clients")
    for client in to.client_security_groups:
        group.add_ingress_rule(ec2.Peer.security_group_id(client), port, "clients")
