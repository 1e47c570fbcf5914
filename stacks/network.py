"""The network of the database and its lambdas, whose only way out leads to S3."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.deployment import ZONES_MAX, DeploymentSettings, NetworkSettings
from stacks.constructs.function import Placement
from stacks.constructs.permissions import acknowledge, service_role
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
        flows = self.format_arn(service="ec2", resource="vpc-flow-log", resource_name="*")
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
            subnets=[ec2.SubnetSelection(subnets=self.placement.subnets)],
        )
        anyone = [iam.AnyPrincipal()]
        endpoint.add_to_policy(
            iam.PolicyStatement(
                sid="BucketsOfThisAccount",
                principals=anyone,
                actions=OBJECT_ACTIONS,
                resources=["*"],
                conditions={"StringEquals": {"aws:ResourceAccount": self.account}},
            )
        )
        region = cdk.Fn.join("", cdk.Fn.split("-", self.region))
        endpoint.add_to_policy(
            iam.PolicyStatement(
                sid="AnswersToCloudFormation",
                principals=anyone,
                actions=["s3:PutObject"],
                resources=[
                    f"arn:{self.partition}:s3:::cloudformation-custom-resource-response-{region}/*",
                    f"arn:{self.partition}:s3:::cloudformation-waitcondition-{self.region}/*",
                ],
            )
        )
        if self.settings.compaction is not None and self.settings.compaction.engine != "emr-serverless":
            self._let_out_to_emr(endpoint)
        if self.settings.has_tasks:
            endpoint.add_to_policy(
                iam.PolicyStatement(
                    sid="LayersOfImages",
                    principals=anyone,
                    actions=["s3:GetObject"],
                    resources=[f"arn:{self.partition}:s3:::prod-{self.region}-starport-layer-bucket/*"],
                )
            )

    def _let_out_to_emr(self, endpoint: ec2.GatewayVpcEndpoint) -> None:
        """Allows access through the S3 endpoint to the buckets that EMR clusters on EC2 read when they start.

        EMR's documentation lists these buckets for private subnets.
        """
        data = [f"aws157-instance-data-{number}-prod-{self.region}" for number in (0, 1)]
        # One region has other names, and the region may be known only at deployment.
        data += [f"aws157-instance-data-bucket-{number}-prod-ap-southeast-2" for number in (0, 1)]
        packages = [
            f"prod.{self.region}.appinfo.src",
            f"repo.{self.region}.emr.amazonaws.com",
            f"al2023-repos-{self.region}-de612dc2",
        ]
        for sid, actions, buckets in (
            ("PackagesOfEmr", ["s3:GetObject"], packages),
            ("DataOfEmr", ["s3:GetObject", "s3:PutObject"], data),
        ):
            endpoint.add_to_policy(
                iam.PolicyStatement(
                    sid=sid,
                    principals=[iam.AnyPrincipal()],
                    actions=actions,
                    resources=[f"arn:{self.partition}:s3:::{bucket}/*" for bucket in buckets],
                )
            )
