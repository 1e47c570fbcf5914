"""The internal load balancer of the query service."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_elasticloadbalancingv2 as elbv2
from constructs import Construct

from dormouse.settings.database import QuerySettings
from stacks.constructs.function import Placement


class Balancer(Construct):
    """A load balancer of the query service. It serves HTTPS with a certificate, else HTTP within the VPC.

    `logs` is the bucket and prefix of its request logs.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        placement: Placement,
        query: QuerySettings,
        security_group: ec2.SecurityGroup,
        target_group: elbv2.ApplicationTargetGroup,
        logs: tuple[str, str],
    ) -> None:
        super().__init__(scope, construct_id)
        self.load_balancer = elbv2.ApplicationLoadBalancer(
            self,
            "LoadBalancer",
            vpc=placement.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=one_in_each_zone(placement)),
            internet_facing=False,
            security_group=security_group,
            idle_timeout=cdk.Duration.seconds(query.idle_seconds),
            drop_invalid_header_fields=True,
            deletion_protection=False,  # it has no data, and a pause deletes it, also of a protected instance
        )
        # Set directly, as the method for it needs to know the region.
        for name, value in (("enabled", "true"), ("bucket", logs[0]), ("prefix", logs[1])):
            self.load_balancer.set_attribute(f"access_logs.s3.{name}", value)
        certificate = query.certificate_arn
        self.load_balancer.add_listener(
            "Listener",
            port=query.port,
            protocol=elbv2.ApplicationProtocol.HTTPS if certificate else elbv2.ApplicationProtocol.HTTP,
            certificates=[elbv2.ListenerCertificate.from_arn(certificate)] if certificate else None,
            ssl_policy=elbv2.SslPolicy.TLS13_RES if certificate else None,
            default_target_groups=[target_group],
            open=False,
        )


def one_in_each_zone(placement: Placement) -> list[ec2.ISubnet]:
    """Returns one subnet for each zone, since a load balancer accepts no more."""
    return list({subnet.availability_zone: subnet for subnet in reversed(placement.subnets)}.values())[::-1]
