"""Scheduled compaction: a lambda in the VPC creates jobs, and Spark on EMR runs them."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.database import CompactionSettings, EmrServerlessCompaction
from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.lambdas import CompactionEnvironment, RunsEnvironment
from dormouse.settings.resources import RunResources
from stacks.constructs.allow import allow
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.emr_ec2 import EmrEc2
from stacks.constructs.emr_serverless import EmrServerless
from stacks.constructs.function import Function
from stacks.constructs.monitors import Monitors
from stacks.constructs.schedule import Schedule
from stacks.constructs.sleeping import only_while
from stacks.constructs.spark_runs import RunFunctions, SparkRuns
from stacks.database import RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.part import Part

LOG_PREFIX = "logs/emr"
"""The prefix of EMR's logs in the data bucket, outside the prefix of the object store."""

SPARK_OBJECT_ACTIONS = [
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:ListMultipartUploadParts",
    "s3:PutObject",
]
CALL_SECONDS_MAX = 60
CALL_MEMORY_MB = 256


class Compaction(Part):
    """Scheduled compaction.

    Other parts use its `functions`, to run their own lists of work on Spark.
    """

    def __init__(self, stack: InstanceStack, foundation: Foundation, compaction: CompactionSettings) -> None:
        super().__init__(stack, "compaction", foundation)
        self.compaction = compaction
        self._package = foundation.assets.emr_package(self)
        self._entry = foundation.assets.emr_entry(self)
        self.emr = self._made()
        self.endpoint = self._create_endpoint()
        self._let_spark_work()
        self.create = self._database_function("Create", "create", "Makes compaction jobs for a run")
        report = self._database_function("Report", "report", "Releases the jobs that a run did not finish")
        submit = self._call_function("Submit", "submit", "Submits a run to EMR")
        follow = self._call_function("Follow", "follow", "Asks EMR for the state of a run")
        cancel = self._call_function("Cancel", "cancel", "Cancels a run that takes too long")
        self.emr.allow_submit(submit)
        self.emr.allow_follow(follow)
        self.emr.allow_cancel(cancel)
        self.functions = RunFunctions(submit.function, follow.function, cancel.function, report.function)
        self.runs = SparkRuns(
            self,
            "Runs",
            create=self.create.function,
            functions=self.functions,
            run_minutes_max=compaction.run_minutes_max,
            log_days=compaction.log_days,
            what="compactions",
        )
        self._schedule = Schedule(
            self,
            "Schedule",
            every_minutes=compaction.every_minutes,
            is_awake=stack.is_awake,
            target=self.runs.state_machine,
            description="Compaction",
        )
        self.let_wait(self._schedule)
        self._tell()

    def let_wait(self, schedule: Schedule) -> None:
        """Makes a schedule of runs begin after the endpoint of EMR. A run may start a cluster at once."""
        if self.endpoint is not None:
            schedule.wait_for(self.endpoint, self.stack.is_running)

    def let_keep(self, keeper: iam.Role) -> None:
        self._schedule.let_keep(keeper)
        self.runs.let_keep(keeper)
        allow(keeper, ["lambda:GetFunctionConfiguration"], [self.create.function.function_arn])

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        self._schedule.let_operate(operator)
        self.runs.let_operate(operator)
        self.emr.let_operate(operator)

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.function("Compaction", self.create.function)
        monitors.runs("Compaction runs", self.runs.state_machine)
        monitors.schedule("Compaction", self._schedule.rule.rule_name, self.compaction.every_minutes)
        monitors.given_up()

    def _made(self) -> EmrServerless | EmrEc2:
        compaction, foundation = self.compaction, self.foundation
        placement, log_uri = foundation.network.placement, self._log_uri()
        if isinstance(compaction, EmrServerlessCompaction):
            return EmrServerless(
                self,
                "Emr",
                compaction=compaction,
                architecture=self.settings.architecture,
                placement=placement,
                log_uri=log_uri,
            )
        return EmrEc2(
            self,
            "Emr",
            instance_id=self.settings.id,
            compaction=compaction,
            placement=placement,
            key=foundation.storage.key,
            log_uri=log_uri,
        )

    def _create_endpoint(self) -> str | None:
        """Creates the endpoint of EMR on EC2, which exists while the instance runs, and returns its id.

        EMR would create one itself, but it would outlast a pause.
        """
        compaction = self.compaction
        if isinstance(compaction, EmrServerlessCompaction) or compaction.endpoints == "existing":
            return None
        assert isinstance(self.emr, EmrEc2)  # noqa: S101
        awake = Construct(self, "Awake")
        endpoint = self.emr.create_endpoint(awake, self.foundation.network.placement)
        only_while(self.stack.is_running, awake)
        return endpoint

    def _log_uri(self) -> str:
        bucket = self.foundation.storage.data_bucket
        bucket.add_lifecycle_rule(
            id="LogsOfRuns",
            prefix=f"{LOG_PREFIX}/",
            expiration=cdk.Duration.days(self.compaction.log_days),
        )
        return f"s3://{bucket.bucket_name}/{LOG_PREFIX}/"

    def _let_spark_work(self) -> None:
        storage, database, role = self.foundation.storage, self.foundation.database, self.emr.role
        for group in self._security_groups():
            database.let_in(RUN_ROLE, group, role)
        storage.allow_objects(role, SPARK_OBJECT_ACTIONS)
        storage.allow_below(role, ["s3:PutObject"], LOG_PREFIX)
        assets = (self._package, self._entry)
        allow(role, ["s3:GetObject"], [one.bucket.arn_for_objects(one.s3_object_key) for one in assets])

    def _security_groups(self) -> tuple[ec2.SecurityGroup, ...]:
        emr = self.emr
        return (emr.security_group,) if isinstance(emr, EmrServerless) else emr.security_groups

    def _database_function(self, name: str, function: str, description: str) -> DatabaseFunction:
        return DatabaseFunction(
            self,
            name,
            foundation=self.foundation,
            name="compaction",
            handler=f"lambdas.compaction.{function}",
            description=description,
            memory_mb=self.compaction.memory_mb,
            timeout_seconds=self.compaction.timeout_seconds,
            environment=CompactionEnvironment,
            values={
                "jobs_max": self.compaction.jobs_max,
                "run_minutes_max": self.compaction.run_minutes_max,
            },
            database_role=RUN_ROLE,
            object_actions=["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
        )

    def _call_function(self, name: str, function: str, description: str) -> Function:
        return Function(
            self,
            name,
            settings=self.settings,
            name="runs",
            code=self.foundation.assets.lambda_code("runs"),
            handler=f"lambdas.runs.{function}",
            description=description,
            memory_mb=CALL_MEMORY_MB,
            timeout_seconds=CALL_SECONDS_MAX,
            environment=RunsEnvironment.variables(
                instance_id=self.settings.id,
                engine=self.compaction.engine,
                dsn=self.foundation.database.dsn(self.stack, RUN_ROLE),
                objects=self.foundation.storage.objects,
                archive=self._package.s3_object_url,
                entry=self._entry.s3_object_url,
                run_minutes_max=self.compaction.run_minutes_max,
                **self._engine_values(),
            ),
        )

    def _engine_values(self) -> dict[str, Any]:
        emr, compaction = self.emr, self.compaction
        if isinstance(emr, EmrServerless) and isinstance(compaction, EmrServerlessCompaction):
            return {
                "application_id": emr.application_id,
                "execution_role": emr.role.role_arn,
                "worker_vcpu": compaction.worker_vcpu,
            }
        assert isinstance(emr, EmrEc2)  # noqa: S101
        return {"cluster_name": emr.cluster_name, "cluster_template": emr.template}

    def _tell(self) -> None:
        emr = self.emr
        self.describe(
            RunResources(
                rules=(self._schedule.rule.rule_name,),
                function=self.create.function.function_name,
                state_machine=self.runs.state_machine.state_machine_arn,
                engine=self.compaction.engine,
                application=emr.application_id if isinstance(emr, EmrServerless) else None,
                cluster_name=emr.cluster_name if isinstance(emr, EmrEc2) else None,
                has_endpoint=self.endpoint is not None,
            )
        )
