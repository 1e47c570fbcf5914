"""Spark on EMR Serverless: an application that starts with a run, and stops when it is idle."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_emrserverless as emrserverless
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.database import EmrServerlessCompaction
from stacks.assets import Architecture
from stacks.constructs.allow import allow
from stacks.constructs.database_function import let_out_to_s3
from stacks.constructs.function import Function, Placement
from stacks.constructs.service_role import service_role
from stacks.instance_stack import title

MEMORY_GB_PER_VCPU = 4
DISK_GB_PER_VCPU = 20
EMR_NAMES = "the runs of this application, which EMR names"


class EmrServerless(Construct):
    """An application of EMR Serverless.

    Its runs have the permissions of `role` and connect from `security_group`.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        compaction: EmrServerlessCompaction,
        architecture: Architecture,
        placement: Placement,
        log_uri: str,
    ) -> None:
        super().__init__(scope, construct_id)
        self._stack = cdk.Stack.of(self)
        self.security_group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=placement.vpc,
            description=f"{title(self)}: Spark",
            allow_all_outbound=False,
        )
        let_out_to_s3(self.security_group)
        self._application = self._made(compaction, architecture, placement, log_uri)
        self.application_id = self._application.ref
        partition, region, account = self._stack.partition, self._stack.region, self._stack.account
        self.application_arn = (
            f"arn:{partition}:emr-serverless:{region}:{account}:/applications/{self.application_id}"
        )
        self.role = service_role(
            self, "Role", "emr-serverless", sources=self.application_arn, description="Runs on EMR Serverless"
        )

    def allow_submit(self, function: Function) -> None:
        """Allows a lambda to start runs that have this construct's role."""
        function.allow(["emr-serverless:StartJobRun"], [self.application_arn])
        function.allow(
            ["iam:PassRole"],
            [self.role.role_arn],
            {"StringEquals": {"iam:PassedToService": "emr-serverless.amazonaws.com"}},
        )

    def allow_follow(self, function: Function) -> None:
        self._allow_runs(function, "emr-serverless:GetJobRun")

    def allow_cancel(self, function: Function) -> None:
        self._allow_runs(function, "emr-serverless:CancelJobRun")

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to stop runs for which a pause does not wait, and the application."""
        allow(operator, ["emr-serverless:StopApplication"], [self.application_arn])
        allow(operator, ["emr-serverless:CancelJobRun"], [self._runs], because=EMR_NAMES)

    @property
    def _runs(self) -> str:
        return f"{self.application_arn}/jobruns/*"

    def _allow_runs(self, function: Function, action: str) -> None:
        function.allow([action], [self._runs], because=EMR_NAMES)

    def _made(
        self,
        compaction: EmrServerlessCompaction,
        architecture: Architecture,
        placement: Placement,
        log_uri: str,
    ) -> emrserverless.CfnApplication:
        made = emrserverless.CfnApplication
        vcpu_max = compaction.vcpu_max
        return made(
            self,
            "Application",
            release_label=compaction.release,
            type="SPARK",
            architecture=architecture.upper(),
            auto_start_configuration=made.AutoStartConfigurationProperty(enabled=True),
            auto_stop_configuration=made.AutoStopConfigurationProperty(
                enabled=True, idle_timeout_minutes=compaction.idle_minutes
            ),
            maximum_capacity=made.MaximumAllowedResourcesProperty(
                cpu=f"{vcpu_max} vCPU",
                memory=f"{vcpu_max * MEMORY_GB_PER_VCPU} GB",
                disk=f"{vcpu_max * DISK_GB_PER_VCPU} GB",
            ),
            network_configuration=made.NetworkConfigurationProperty(
                security_group_ids=[self.security_group.security_group_id],
                subnet_ids=[subnet.subnet_id for subnet in placement.subnets],
            ),
            monitoring_configuration=made.MonitoringConfigurationProperty(
                # The VPC has a way to S3, and none to CloudWatch or the storage of EMR.
                s3_monitoring_configuration=made.S3MonitoringConfigurationProperty(log_uri=log_uri),
                managed_persistence_monitoring_configuration=(
                    made.ManagedPersistenceMonitoringConfigurationProperty(enabled=False)
                ),
            ),
        )
