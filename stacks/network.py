"""The network of the database and its lambdas, whose only way out leads to S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.deployment import ZONES_MAX, DeploymentSettings, NetworkSettings
from stacks.constructs.function import Placement
from stacks.constructs.permissions import acknowledge, arn, service_role
from stacks.constructs.retained import log_group
from stacks.instance_stack import InstanceStack

OBJECT_ACTIONS = [
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:DeleteObjectVersion",
    "s3:GetBucketLocation",
    "s3:GetObject",
    "s3:GetObjectVersion",
    "s3:GetReplicationConfiguration",
    "s3:ListBucket",
    "s3:ListBucketMultipartUploads",
    "s3:ListBucketVersions",
    "s3:ListMultipartUploadParts",
    "s3:PutObject",
]
"""The actions that the S3 endpoint allows. Some are for earlier versions of objects.

`dormouse restore-objects` and `erase` need those when they run in the VPC.
"""


class NetworkStack(InstanceStack):
    """A stack with a new or an existing VPC; `placement` has the VPC and subnets.

    It has neither NAT nor interface endpoints, which cost money even while everything sleeps. Lambdas that
    call other AWS services run outside the VPC.
    """

    def __init__(self, scope: Construct, settings: DeploymentSettings) -> None:
        super().__init__(scope, "network", settings, description="network", stateful=True)
        network = settings.network
        if network.vpc_id is None:
            self.placement = self._own(network)
        else:
            self.placement = self._existing(network, network.vpc_id)
        if network.s3_endpoint == "create":
            self._let_out_to_s3()
        elif network.vpc_id is not None:
            # CloudFormation requires a resource in each stack; this one does nothing and costs nothing.
            cdk.CfnWaitConditionHandle(self, "Nothing")

    @property
    def availability_zones(self) -> list[str]:
        """The region's first availability zones, as references that CloudFormation resolves.

        Names of zones differ between accounts, and otherwise the CDK would ask AWS for them.
        """
        return [cdk.Fn.select(zone, cdk.Fn.get_azs()) for zone in range(ZONES_MAX)]

    def _own(self, network: NetworkSettings) -> Placement:
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(network.cidr),
            availability_zones=list(network.availability_zones) or self.availability_zones[: network.zones],
            nat_gateways=0,
            create_internet_gateway=False,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="Isolated",
                    subnet_type=ec2.SubnetType.PRIVATE_ISOLATED,
                    # A quarter each, so that adding a zone leaves the other subnets unchanged.
                    cidr_mask=int(network.cidr.rpartition("/")[2]) + 2,
                )
            ],
            restrict_default_security_group=False,  # The group is unused, and restricting it needs a lambda.
        )
        if network.availability_zones:
            acknowledge(vpc, "CloudFormation-Validate::W3010", "these zones are those of the settings")
        flow_log = log_group(self, "FlowLogs", days=network.flow_log_days)
        flows = arn(self, "ec2", "vpc-flow-log/*")
        writer = service_role(self, "FlowLogRole", "vpc-flow-logs", sources=flows)
        vpc.add_flow_log("FlowLog", destination=ec2.FlowLogDestination.to_cloud_watch_logs(flow_log, writer))
        for value in (vpc.vpc_id, *(subnet.subnet_id for subnet in vpc.isolated_subnets)):
            self.export_value(value)
        return Placement(vpc, vpc.isolated_subnets)

    def _existing(self, network: NetworkSettings, vpc_id: str) -> Placement:
        vpc = ec2.Vpc.from_vpc_attributes(
            self, "Vpc", vpc_id=vpc_id, availability_zones=sorted(set(network.availability_zones))
        )
        tables = network.route_table_ids or (None,) * len(network.subnet_ids)
        subnets = [
            ec2.Subnet.from_subnet_attributes(
                self, f"Subnet{number}", subnet_id=subnet_id, availability_zone=zone, route_table_id=table
            )
            for number, (subnet_id, zone, table) in enumerate(
                zip(network.subnet_ids, network.availability_zones, tables, strict=True), 1
            )
        ]
        for subnet in subnets:
            # Only the creation of an endpoint needs its route table.
            cdk.Annotations.of(subnet).acknowledge_warning("@aws-cdk/aws-ec2:noSubnetRouteTableId")
        return Placement(vpc, subnets)

    def _let_out_to_s3(self) -> None:
        endpoint = ec2.GatewayVpcEndpoint(
            self,
            "S3Endpoint",
            vpc=self.placement.vpc,
            service=ec2.GatewayVpcEndpointAwsService.S3,
            subnets=[self.placement.selection],
        )
        for sid, actions, resources, conditions in self._ways_out():
            endpoint.add_to_policy(
                iam.PolicyStatement(
                    sid=sid,
                    principals=[iam.AnyPrincipal()],
                    actions=actions,
                    resources=resources,
                    conditions=conditions,
                )
            )

    def _ways_out(self) -> Iterator[tuple[str, list[str], list[str], dict[str, Any] | None]]:
        """Yields id, actions, resources and conditions of each statement in the policy of the endpoint."""
        ours = {"StringEquals": {"aws:ResourceAccount": self.account}}
        yield "BucketsOfThisAccount", OBJECT_ACTIONS, ["*"], ours
        region = cdk.Fn.join("", cdk.Fn.split("-", self.region))
        responses = f"cloudformation-custom-resource-response-{region}"
        answers = self._objects(responses, f"cloudformation-waitcondition-{self.region}")
        yield "AnswersToCloudFormation", ["s3:PutObject"], answers, None
        if self.settings.compaction is not None and self.settings.compaction.engine != "emr-serverless":
            # EMR's documentation lists the buckets that clusters in private subnets read when they start.
            packages = self._objects(
                f"prod.{self.region}.appinfo.src",
                f"repo.{self.region}.emr.amazonaws.com",
                f"al2023-repos-{self.region}-de612dc2",
            )
            yield "PackagesOfEmr", ["s3:GetObject"], packages, None
            data = [f"aws157-instance-data-{number}-prod-{self.region}" for number in (0, 1)]
            # One region has other names, and the region may be known only at deployment.
            data += [f"aws157-instance-data-bucket-{number}-prod-ap-southeast-2" for number in (0, 1)]
            yield "DataOfEmr", ["s3:GetObject", "s3:PutObject"], self._objects(*data), None
        if self.settings.has_tasks:
            layers = self._objects(f"prod-{self.region}-starport-layer-bucket")
            yield "LayersOfImages", ["s3:GetObject"], layers, None

    def _objects(self, *buckets: str) -> list[str]:
        return [f"arn:{self.partition}:s3:::{bucket}/*" for bucket in buckets]
