"""Spark on EMR on EC2: all resources that a cluster needs, but not the cluster itself.

The submitting lambda creates clusters. CloudFormation could not create a cluster again after it ended idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_emr as emr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from dormouse.settings.database import EmrStepsCompaction, EmrTransientCompaction
from dormouse.settings.resources import INSTANCE_TAG, cluster_name
from stacks.constructs.emr_service_role import EmrServiceRole
from stacks.constructs.endpoints import Endpoints, emr_services
from stacks.constructs.function import Function, Placement
from stacks.constructs.permissions import acknowledge, allow, arn
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
        self._primary = self._security_group("Primary", placement)
        self._core = self._security_group("Core", placement)
        self._service = self._security_group("ServiceAccess", placement)
        self.security_groups = (self._primary, self._core)
        self._connect()
        self.role = iam.Role(
            self,
            "Role",
            description="Clusters on EC2, and the runs on them",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        self._profile = iam.InstanceProfile(self, "Profile", role=self.role)
        service_role = EmrServiceRole(
            self,
            "Service",
            instance_id=instance_id,
            placement=placement,
            security_groups=(self._primary, self._core, self._service),
            instance_role=self.role,
            key=key,
        )
        self._service_role = service_role.role
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

    def allow_submit(self, function: Function) -> None:
        """Allows a lambda to find and create clusters and steps, and to end duplicates."""
        role = function.role
        ours = {"StringEquals": {f"elasticmapreduce:RequestTag/{INSTANCE_TAG}": self._instance_id}}
        allow(role, ["elasticmapreduce:ListClusters"], ["*"])
        allow(role, ["elasticmapreduce:RunJobFlow"], ["*"], ours)
        allow(role, ["elasticmapreduce:AddTags"], [self._clusters], ours)
        self._allow_clusters(
            role,
            "AddJobFlowSteps",
            "CancelSteps",
            "ListSteps",
            "PutAutoTerminationPolicy",
            "PutManagedScalingPolicy",
            "TerminateJobFlows",
        )
        for passed, service in ((self._service_role, "elasticmapreduce"), (self.role, "ec2")):
            to_service = {"StringEquals": {"iam:PassedToService": f"{service}.amazonaws.com"}}
            allow(role, ["iam:PassRole"], [passed.role_arn], to_service)
        # EMR creates this role of the account with the first cluster, if the caller may create it
        allow(
            role,
            ["iam:CreateServiceLinkedRole"],
            [arn(self, "iam", f"role/{_CLEANUP_ROLE}", region=False)],
            {"StringEquals": {"iam:AWSServiceName": "elasticmapreduce.amazonaws.com"}},
        )
        acknowledge(
            role,
            "AwsSolutions-IAM5[Resource::*]",
            "X-Ray's actions, and those to list and create clusters, support no resource-level permissions",
        )

    def allow_follow(self, function: Function) -> None:
        self._allow_clusters(function.role, "DescribeCluster", "DescribeStep")

    def allow_cancel(self, function: Function) -> None:
        self._allow_clusters(function.role, "CancelSteps", "DescribeStep", "TerminateJobFlows")

    def _allow_clusters(self, grantee: iam.Role | iam.ManagedPolicy, *actions: str) -> None:
        """Allows these actions on the clusters of this instance.

        IAM recognises the clusters by the instance's tag, because their ids are not known before they exist.
        """
        ours = {"StringEquals": {f"elasticmapreduce:ResourceTag/{INSTANCE_TAG}": self._instance_id}}
        because = "the clusters with the tag of this instance"
        every = [f"elasticmapreduce:{action}" for action in actions]
        allow(grantee, every, [self._clusters], ours, because=because)

    def _security_group(self, name: str, placement: Placement) -> ec2.SecurityGroup:
        return closed_group(self, name, placement.vpc, f"{title(self)}: EMR {name}")

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


def _fleets(instance_types: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yields the fleets of a cluster: one primary instance, and core instances that scaling adds.

    All instance types have the same weight.
    """
    kinds = [{"InstanceType": one, "WeightedCapacity": 1} for one in instance_types]
    for kind in ("MASTER", "CORE"):
        yield {"InstanceFleetType": kind, "TargetOnDemandCapacity": 1, "InstanceTypeConfigs": kinds}
