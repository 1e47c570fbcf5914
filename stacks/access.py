"""The access to the database from outside the VPC: a host for the port forwarding of Session Manager.

The host accepts no connections. Its agent calls Session Manager, through two interface endpoints when the
subnet has no other way out. All of it exists only while the instance runs. Each resume creates a new host
from the newest image.
"""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.deployment import ACCESS_HOST, ACCESS_TAG, DISK_GB, AccessSettings
from dormouse.settings.resources import FORWARDING, AccessResources
from stacks.constructs.endpoints import CHANNELS, SESSION_SERVICES, Endpoints, endpoints_group
from stacks.constructs.permissions import acknowledge, acknowledge_resources, allow, arn
from stacks.constructs.security_group import closed_group
from stacks.constructs.sleeping import only_while
from stacks.foundation import UpperStack
from stacks.instance_stack import resource
from stacks.part import Part

IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-arm64"
"""The image of the host: Amazon Linux 2023 with the agent of Session Manager, which its `minimal` image
lacks."""


class Access(Part):
    def __init__(self, stack: UpperStack, access: AccessSettings) -> None:
        super().__init__(stack, "access")
        self._placement, database = self.foundation.network.placement, self.foundation.database
        group = closed_group(self, "SecurityGroup", self._placement.vpc, f"{self.title}: host")
        group.connections.allow_to(database.security_group, database.client_ports, "the database")
        self.awake = Construct(self, "Awake")
        host = self._host(group)
        self._let_out(host, group, access)
        only_while(stack.is_running, self.awake)
        self.describe(
            AccessResources(
                host=cdk.Token.as_string(
                    cdk.Fn.condition_if(stack.is_running.logical_id, host.instance_id, "")
                ),
                endpoints=0 if access.endpoints == "existing" else len(SESSION_SERVICES),
            )
        )

    def let_read(self, reader: iam.ManagedPolicy) -> None:
        """Allows port forwarding through the host for access. Allows no shell on it, and no other host."""
        hosts = arn(self, "ec2", "instance/*")
        forwarding = arn(self, "ssm", f"document/{FORWARDING}", account=False)
        checked = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
        ours = {"StringEquals": {f"ssm:resourceTag/{ACCESS_TAG}": self.settings.id}}
        because = "the host with the tag of this instance"
        allow(reader, ["ssm:StartSession"], [hosts], {**checked, **ours}, because=because)
        allow(reader, ["ssm:StartSession"], [forwarding], checked)
        own, named = (arn(self, "ssm", f"session/{user}-*") for user in ("${aws:userid}", "<aws:userid>"))
        allow(reader, ["ssm:ResumeSession", "ssm:TerminateSession"], [own])
        acknowledge_resources(reader, [named], "the user's own sessions")

    def _host(self, group: ec2.SecurityGroup) -> ec2.Instance:
        role = iam.Role(
            self, "Role", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"), description="Host for access"
        )
        because = "the channel actions of Session Manager support no resource-level permissions"
        allow(role, ["ssm:UpdateInstanceInformation", *CHANNELS], ["*"], because=because)
        host = ec2.Instance(
            self.awake,
            "Host",
            instance_type=ec2.InstanceType(ACCESS_HOST),
            machine_image=ec2.MachineImage.from_ssm_parameter(IMAGE, os=ec2.OperatingSystemType.LINUX),
            vpc=self._placement.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=[self._placement.subnets[0]]),
            security_group=group,
            role=role,
            associate_public_ip_address=False,
            propagate_tags_to_volume_on_creation=True,
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(
                        DISK_GB, encrypted=True, volume_type=ec2.EbsDeviceVolumeType.GP3
                    ),
                )
            ],
            # Unlimited credits would allow bursts that cost money unnoticed.
            credit_specification=ec2.CpuCredits.STANDARD,
        )
        made = resource(host, ec2.CfnInstance)
        made.add_property_override(
            "MetadataOptions", {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        )
        made.availability_zone = None  # the subnet determines it
        cdk.Tags.of(host).add(ACCESS_TAG, self.settings.id)
        acknowledge(host, "AwsSolutions-EC28", "detailed metrics cost money, and nothing uses them")
        acknowledge(host, "AwsSolutions-EC29", "a pause deletes it, and it stores no data")
        return host

    def _let_out(self, host: ec2.Instance, group: ec2.SecurityGroup, access: AccessSettings) -> None:
        """Allows the host to connect to Session Manager, by default through new interface endpoints."""
        if access.endpoints == "existing":
            group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "Session Manager")
            return
        ways = endpoints_group(self, "interface endpoints", group, "from the host")
        endpoints = Endpoints(self.awake, services=SESSION_SERVICES, security_group=ways)
        host.node.add_dependency(endpoints)  # else the agent would fail first, and wait before its retry
