"""Spark on EMR on EC2: all resources that a cluster needs, but not the cluster itself.

The submitting lambda creates clusters. CloudFormation could not create a cluster again after it ended idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_emr as emr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from dormouse.settings.database import EmrStepsCompaction, EmrTransientCompaction
from dormouse.settings.resources import INSTANCE_TAG, cluster_name
from stacks.constructs.endpoints import Endpoints, emr_services
from stacks.constructs.function import Placement
from stacks.constructs.permissions import acknowledge, acknowledge_resources, allow, arn, service_role
from stacks.constructs.security_group import closed_group, let_out_to_s3
from stacks.foundation import foundation_of
from stacks.instance_stack import title

SERVICE_PORT = 443
"""The port of the endpoint by which clusters call EMR, since emr-spark-8.0.0."""

ROOT_GB = 30
_CLEANUP_ROLE = "aws-service-role/elasticmapreduce.amazonaws.com/AWSServiceRoleForEMRCleanup"
SPARK_PROPERTIES = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
    # the shuffle service of YARN's nodes has no secrets by default, and would refuse to register executors
    "spark.shuffle.service.enabled": "false",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
}
"""Properties that encrypt the data that executors exchange and spill. YARN makes the secrets for each run."""
DESCRIBE_ACTIONS = [
    "ec2:DescribeAccountAttributes",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstances",
    "ec2:DescribeLaunchTemplates",
    "ec2:DescribeNetworkAcls",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumeStatus",
    "ec2:DescribeVolumes",
    "ec2:DescribeVpcAttribute",
    "ec2:DescribeVpcEndpoints",
    "ec2:DescribeVpcs",
]
LAUNCH_ACTIONS = [
    "ec2:CreateFleet",
    "ec2:CreateLaunchTemplate",
    "ec2:CreateLaunchTemplateVersion",
    "ec2:RunInstances",
]
RULE_ACTIONS = [
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:RevokeSecurityGroupEgress",
    "ec2:RevokeSecurityGroupIngress",
]
KEY_ACTIONS = [
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:Encrypt",
    "kms:GenerateDataKey",
    "kms:GenerateDataKeyWithoutPlaintext",
    "kms:ReEncryptFrom",
    "kms:ReEncryptTo",
]
MADE = ("instance", "launch-template", "network-interface", "volume")


class EmrEc2(Construct):
    """The resources of EMR clusters on EC2.

    Runs have the permissions of `role`, and connect from `security_groups`. `values` are the environment
    variables of the lambdas that control runs.
    """

    def __init__(
        self,
        scope: Construct,
        *,
        compaction: EmrStepsCompaction | EmrTransientCompaction,
        log_uri: str,
    ) -> None:
        super().__init__(scope, "Emr")
        self._stack, foundation = cdk.Stack.of(self), foundation_of(self)
        self._instance_id = instance_id = foundation.settings.id
        self._clusters = arn(self, "elasticmapreduce", "cluster/*")
        placement, key = foundation.network.placement, foundation.storage.key
        groups = [
            closed_group(self, name, placement.vpc, f"{title(self)}: EMR {name}")
            for name in ("Primary", "Core", "ServiceAccess")
        ]
        self._primary, self._core, self._service = groups
        self.security_groups = (self._primary, self._core)
        self._connect()
        self.role = iam.Role(
            self,
            "Role",
            description="Clusters on EC2, and the runs on them",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        self._profile = iam.InstanceProfile(self, "Profile", role=self.role)
        self._service_role = _ServiceRole(Construct(self, "Service"), groups, self.role).role
        self._security = self._security_configuration(key)
        template = self._stack.to_json_string(self._request(compaction, placement, log_uri))
        self.values = {"cluster_name": cluster_name(instance_id), "cluster_template": template}

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to terminate clusters, whose runs a pause does not wait for."""
        self._allow_clusters(operator, "TerminateJobFlows")

    def create_endpoint(self, scope: Construct) -> str:
        """Creates the endpoint by which EMR controls clusters, and returns its id.

        It has the security group for EMR's access.
        """
        services = emr_services(self._stack.region)
        return Endpoints(scope, services=services, security_group=self._service).ids[0]

    def let_run(self, submit: iam.Role, follow: iam.Role, cancel: iam.Role) -> None:
        """Allows the roles of lambdas to submit runs, and to see or cancel them.

        To submit means to find and create clusters and steps, and to end duplicates.
        """
        self._allow_clusters(follow, "DescribeCluster", "DescribeStep")
        self._allow_clusters(cancel, "CancelSteps", "DescribeStep", "TerminateJobFlows")
        ours = {"StringEquals": {f"elasticmapreduce:RequestTag/{INSTANCE_TAG}": self._instance_id}}
        allow(submit, ["elasticmapreduce:ListClusters"], ["*"])
        allow(submit, ["elasticmapreduce:RunJobFlow"], ["*"], ours)
        allow(submit, ["elasticmapreduce:AddTags"], [self._clusters], ours)
        self._allow_clusters(
            submit,
            "AddJobFlowSteps",
            "CancelSteps",
            "ListSteps",
            "PutAutoTerminationPolicy",
            "PutManagedScalingPolicy",
            "TerminateJobFlows",
        )
        for passed, service in ((self._service_role, "elasticmapreduce"), (self.role, "ec2")):
            to_service = {"StringEquals": {"iam:PassedToService": f"{service}.amazonaws.com"}}
            allow(submit, ["iam:PassRole"], [passed.role_arn], to_service)
        # EMR creates this role of the account with the first cluster, if the caller may create it
        allow(
            submit,
            ["iam:CreateServiceLinkedRole"],
            [arn(self, "iam", f"role/{_CLEANUP_ROLE}", region=False)],
            {"StringEquals": {"iam:AWSServiceName": "elasticmapreduce.amazonaws.com"}},
        )
        acknowledge(
            submit,
            "AwsSolutions-IAM5[Resource::*]",
            "X-Ray's actions, and those to list and create clusters, support no resource-level permissions",
        )

    def _allow_clusters(self, grantee: iam.Role | iam.ManagedPolicy, *actions: str) -> None:
        """Allows these actions on the clusters of this instance.

        IAM recognises the clusters by the instance's tag, because their ids are not known before they exist.
        """
        ours = {"StringEquals": {f"elasticmapreduce:ResourceTag/{INSTANCE_TAG}": self._instance_id}}
        because = "the clusters with the tag of this instance"
        every = [f"elasticmapreduce:{action}" for action in actions]
        allow(grantee, every, [self._clusters], ours, because=because)

    def _connect(self) -> None:
        """Adds the rules of the security groups that EMR would otherwise add itself, and the rule for S3."""
        for one in self.security_groups:
            let_out_to_s3(one)
            for other in self.security_groups:
                for port in (ec2.Port.all_tcp(), ec2.Port.all_udp(), ec2.Port.all_icmp()):
                    one.connections.allow_to(other, port, "within the cluster")
            one.connections.allow_to(self._service, ec2.Port.tcp(SERVICE_PORT), "the cluster calls EMR")

    def _security_configuration(self, key: kms.IKey) -> emr.CfnSecurityConfiguration:
        return emr.CfnSecurityConfiguration(
            self,
            "SecurityConfiguration",
            security_configuration={
                "EncryptionConfiguration": {
                    "EnableInTransitEncryption": False,  # Spark encrypts by itself: SPARK_PROPERTIES.
                    "EnableAtRestEncryption": True,
                    "AtRestEncryptionConfiguration": {
                        "S3EncryptionConfiguration": {"EncryptionMode": "SSE-KMS", "AwsKmsKey": key.key_arn},
                        "LocalDiskEncryptionConfiguration": {
                            "EncryptionKeyProviderType": "AwsKms",
                            "AwsKmsKey": key.key_arn,
                            "EnableEbsEncryption": True,
                        },
                    },
                },
                "InstanceMetadataServiceConfiguration": {
                    "MinimumInstanceMetadataServiceVersion": 2,
                    "HttpPutResponseHopLimit": 1,
                },
            },
        )

    def _request(
        self, compaction: EmrStepsCompaction | EmrTransientCompaction, placement: Placement, log_uri: str
    ) -> dict[str, Any]:
        """Returns the request RunJobFlow for a cluster, without its fields Name and Steps."""
        steps = isinstance(compaction, EmrStepsCompaction)
        tags = {INSTANCE_TAG: self._instance_id, **self._stack.tags.tag_values()}
        request: dict[str, Any] = {
            "ReleaseLabel": compaction.release,
            "Applications": [{"Name": "Spark"}],
            "LogUri": log_uri,
            "ServiceRole": self._service_role.role_arn,
            "JobFlowRole": self._profile.instance_profile_name,
            "SecurityConfiguration": self._security.ref,
            "ScaleDownBehavior": "TERMINATE_AT_TASK_COMPLETION",
            "VisibleToAllUsers": True,
            "EbsRootVolumeSize": ROOT_GB,
            "Instances": {
                "InstanceFleets": list(_fleets(compaction.instance_types)),
                "Ec2SubnetIds": [subnet.subnet_id for subnet in placement.subnets],
                "EmrManagedMasterSecurityGroup": self._primary.security_group_id,
                "EmrManagedSlaveSecurityGroup": self._core.security_group_id,
                "ServiceAccessSecurityGroup": self._service.security_group_id,
                "KeepJobFlowAliveWhenNoSteps": steps,
                "TerminationProtected": False,
            },
            "ManagedScalingPolicy": {
                "ComputeLimits": {
                    "UnitType": "InstanceFleetUnits",
                    "MinimumCapacityUnits": 1,
                    "MaximumCapacityUnits": compaction.instances_max,
                    "MaximumCoreCapacityUnits": compaction.instances_max,
                    "MaximumOnDemandCapacityUnits": compaction.instances_max,
                }
            },
            "Configurations": [{"Classification": "spark-defaults", "Properties": SPARK_PROPERTIES}],
            "Tags": [{"Key": key, "Value": value} for key, value in sorted(tags.items())],
        }
        if isinstance(compaction, EmrStepsCompaction):
            request["AutoTerminationPolicy"] = {"IdleTimeout": compaction.idle_minutes * 60}
        return request


class _ServiceRole:
    """The service role of EMR, with which it creates and ends machines, but only for this instance.

    It has the managed policy AmazonEMRServicePolicy_v2 without the unused parts. The managed policy restricts
    resources by a tag of its own. This role restricts them by exact ARN if they have one, else by the
    instance's tag. Clusters have that tag, and EMR puts it on everything that it creates.
    """

    def __init__(self, scope: Construct, groups: Sequence[ec2.SecurityGroup], runs: iam.Role) -> None:
        self._scope, foundation = scope, foundation_of(scope)
        storage, placement = foundation.storage, foundation.network.placement
        self._requested = {"StringEquals": {f"aws:RequestTag/{INSTANCE_TAG}": foundation.settings.id}}
        self._tagged = {"StringEquals": {f"aws:ResourceTag/{INSTANCE_TAG}": foundation.settings.id}}
        self.role = service_role(
            scope,
            "Role",
            "elasticmapreduce",
            sources=arn(scope, "elasticmapreduce", "*"),
            description="EMR, for clusters on EC2",
        )
        allowed = [self._arn("security-group", one.security_group_id) for one in groups]
        subnets = [self._arn("subnet", subnet.subnet_id) for subnet in placement.subnets]
        allow(self.role, [*LAUNCH_ACTIONS, "ec2:CreateNetworkInterface"], [*subnets, *allowed])
        self._allow_machines()
        self._allow_tags()
        allow(self.role, RULE_ACTIONS, allowed)
        to_ec2 = {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
        allow(self.role, ["iam:PassRole"], [runs.role_arn], to_ec2)
        keys = [storage.key.key_arn]
        allow(self.role, KEY_ACTIONS, keys)
        allow(self.role, ["kms:CreateGrant"], keys, {"Bool": {"kms:GrantIsForAWSResource": "true"}})
        allow(self.role, DESCRIBE_ACTIONS, ["*"])
        self._acknowledge()

    def _allow_machines(self) -> None:
        templates, instances = self._arn("launch-template", "*"), self._arn("instance", "*")
        volumes, interfaces = self._arn("volume", "*"), self._arn("network-interface", "*")
        allow(
            self.role,
            ["ec2:CreateFleet", "ec2:CreateLaunchTemplateVersion", "ec2:RunInstances"],
            [templates],
            self._tagged,
        )
        allow(self.role, ["ec2:CreateLaunchTemplate"], [templates], self._requested)
        allow(self.role, ["ec2:CreateFleet", "ec2:RunInstances"], [instances, volumes], self._requested)
        allow(self.role, LAUNCH_ACTIONS, [interfaces, self._images, self._arn("fleet", "*")])
        allow(self.role, ["ec2:CreateNetworkInterface"], [interfaces], self._requested)
        allow(
            self.role,
            ["ec2:DeleteLaunchTemplate", "ec2:DeleteNetworkInterface", "ec2:ModifyInstanceAttribute",
             "ec2:TerminateInstances"],
            [templates, interfaces, instances],
            self._tagged,
        )  # fmt: skip

    def _allow_tags(self) -> None:
        made = [self._arn(kind, "*") for kind in MADE]
        allow(self.role, ["ec2:CreateTags", "ec2:DeleteTags"], made, self._tagged)
        creating = ["CreateFleet", "CreateLaunchTemplate", "CreateNetworkInterface", "RunInstances"]
        allow(self.role, ["ec2:CreateTags"], made, {"StringEquals": {"ec2:CreateAction": creating}})

    @property
    def _images(self) -> str:
        return arn(self._scope, "ec2", "image/ami-*", account=False)

    def _arn(self, kind: str, name: str) -> str:
        return arn(self._scope, "ec2", f"{kind}/{name}")

    def _acknowledge(self) -> None:
        made = [self._arn(kind, "*") for kind in (*MADE, "fleet")]
        reason = "EMR chooses the names; only resources with the instance's tag or in its subnets are allowed"
        acknowledge_resources(self.role, made, reason)
        acknowledge_resources(self.role, [self._images], "EMR chooses its image")
        acknowledge_resources(
            self.role, ["*"], "the actions that describe EC2 support no resource-level permissions"
        )


def _fleets(instance_types: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yields the fleets of a cluster: one primary instance, and core instances that scaling adds.

    All instance types have the same weight.
    """
    kinds = [{"InstanceType": one, "WeightedCapacity": 1} for one in instance_types]
    for kind in ("MASTER", "CORE"):
        yield {"InstanceFleetType": kind, "TargetOnDemandCapacity": 1, "InstanceTypeConfigs": kinds}
