"""Spark on EMR Serverless: an application that starts with a run, and stops when it is idle."""

from __future__ import annotations

from typing import Any

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_emrserverless as emrserverless
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.database import EmrServerlessCompaction
from stacks.constructs.function import Placement
from stacks.constructs.permissions import allow, arn, service_role
from stacks.constructs.security_group import group_with_s3
from stacks.foundation import foundation_of
from stacks.instance_stack import stack_of, title

MEMORY_GB_PER_VCPU = 4
DISK_GB_PER_VCPU = 20
EMR_NAMES = "the runs of this application, which EMR names"


class EmrServerless(Construct):
    """An application of EMR Serverless.

    Its runs have the permissions of `role` and connect from `security_groups`. `values` are the environment
    variables of the lambdas that control runs.
    """

    def __init__(self, scope: Construct, *, compaction: EmrServerlessCompaction, log_uri: str) -> None:
        super().__init__(scope, "Emr")
        placement = foundation_of(self).network.placement
        group = group_with_s3(self, placement.vpc, f"{title(self)}: Spark")
        self.security_groups = (group,)
        application = self._made(compaction, placement, group, log_uri)
        self.application_arn = arn(self, "emr-serverless", f"/applications/{application.ref}")
        self.role = service_role(
            self, "Role", "emr-serverless", sources=self.application_arn, description="Runs on EMR Serverless"
        )
        self.values: dict[str, Any] = {
            "application_id": application.ref,
            "execution_role": self.role.role_arn,
            "worker_vcpu": compaction.worker_vcpu,
        }

    def let_run(self, submit: iam.Role, follow: iam.Role, cancel: iam.Role) -> None:
        """Allows the roles of lambdas to start runs with the role of runs, and to see or cancel them."""
        allow(submit, ["emr-serverless:StartJobRun"], [self.application_arn])
        to_emr = {"StringEquals": {"iam:PassedToService": "emr-serverless.amazonaws.com"}}
        allow(submit, ["iam:PassRole"], [self.role.role_arn], to_emr)
        allow(follow, ["emr-serverless:GetJobRun"], [self._runs], because=EMR_NAMES)
        allow(cancel, ["emr-serverless:CancelJobRun"], [self._runs], because=EMR_NAMES)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to stop runs for which a pause does not wait, and the application."""
        allow(operator, ["emr-serverless:StopApplication"], [self.application_arn])
        allow(operator, ["emr-serverless:CancelJobRun"], [self._runs], because=EMR_NAMES)

    @property
    def _runs(self) -> str:
        return f"{self.application_arn}/jobruns/*"

    def _made(
        self,
        compaction: EmrServerlessCompaction,
        placement: Placement,
        group: ec2.SecurityGroup,
        log_uri: str,
    ) -> emrserverless.CfnApplication:
        made = emrserverless.CfnApplication
        vcpu_max = compaction.vcpu_max
        return made(
            self,
            "Application",
            release_label=compaction.release,
            type="SPARK",
            architecture=stack_of(self).settings.architecture.upper(),
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
                security_group_ids=[group.security_group_id],
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
