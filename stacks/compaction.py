"""Scheduled compaction: a lambda in the VPC creates jobs, and Spark on EMR runs them."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from dormouse.settings.database import CompactionSettings, EmrServerlessCompaction
from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.lambdas import CompactionEnvironment, RunsEnvironment
from dormouse.settings.resources import RunResources
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.emr_ec2 import EmrEc2
from stacks.constructs.emr_serverless import EmrServerless
from stacks.constructs.function import Function
from stacks.constructs.monitors import Monitors
from stacks.constructs.permissions import allow
from stacks.constructs.schedule import Schedule
from stacks.constructs.sleeping import only_while
from stacks.constructs.spark_runs import RunFunctions, SparkRuns
from stacks.database import RUN_ROLE
from stacks.foundation import UpperStack
from stacks.part import Part
from stacks.storage import CHANGE_ACTIONS

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


class Compaction(Part):
    """Scheduled compaction.

    Other parts use its `create_runs`, to run their own lists of work on Spark.
    """

    def __init__(self, stack: UpperStack, compaction: CompactionSettings) -> None:
        super().__init__(stack, "compaction")
        self.compaction = compaction
        self._package = self.foundation.assets.emr_package(self)
        self._entry = self.foundation.assets.emr_entry(self)
        log_uri = self._log_uri()
        self.emr: EmrServerless | EmrEc2 = (
            EmrServerless(self, compaction=compaction, log_uri=log_uri)
            if isinstance(compaction, EmrServerlessCompaction)
            else EmrEc2(self, compaction=compaction, log_uri=log_uri)
        )
        self.endpoint = self._create_endpoint()
        self._let_spark_work()
        self.create = self._database_function("Create", "Makes compaction jobs for a run")
        report = self._database_function("Report", "Releases the jobs that a run did not finish")
        submit = self._call_function("Submit", "Submits a run to EMR")
        follow = self._call_function("Follow", "Asks EMR for the state of a run")
        cancel = self._call_function("Cancel", "Cancels a run that takes too long")
        self.emr.let_run(submit.role, follow.role, cancel.role)
        self._functions = RunFunctions(submit.function, follow.function, cancel.function, report.function)
        self.runs = self.create_runs(self, self.create.function, "compactions")
        self._schedule = Schedule(
            self,
            "Schedule",
            every_minutes=compaction.every_minutes,
            function=self.create.function,
            runs=self.runs,
            description="Compaction",
        )
        self.let_wait(self._schedule)
        self._tell()

    def let_wait(self, schedule: Schedule) -> None:
        """Makes a schedule of runs begin after the endpoint of EMR. A run may start a cluster at once."""
        if self.endpoint is not None:
            schedule.wait_for(self.endpoint, self.stack.is_running)

    def create_runs(self, scope: Construct, create: lambda_.IFunction, what: str) -> SparkRuns:
        """Creates a state machine that runs the work of the lambda `create` on Spark."""
        return SparkRuns(
            scope,
            "Runs",
            create=create,
            functions=self._functions,
            run_minutes_max=self.compaction.run_minutes_max,
            log_days=self.compaction.log_days,
            what=what,
        )

    def let_keep(self, keeper: iam.Role) -> None:
        self._schedule.let_keep(keeper)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        self._schedule.let_operate(operator)
        self.emr.let_operate(operator)

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.function("Compaction", self.create.function)
        monitors.runs("Compaction runs", self.runs.state_machine)
        monitors.schedule("Compaction", self._schedule.rule.rule_name, self.compaction.every_minutes)
        monitors.given_up()

    def _create_endpoint(self) -> str | None:
        """Creates the endpoint of EMR on EC2, which exists while the instance runs, and returns its id.

        EMR would create one itself, but it would outlast a pause.
        """
        compaction = self.compaction
        if isinstance(compaction, EmrServerlessCompaction) or compaction.endpoints == "existing":
            return None
        assert isinstance(self.emr, EmrEc2)  # noqa: S101
        awake = Construct(self, "Awake")
        endpoint = self.emr.create_endpoint(awake)
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
        for group in self.emr.security_groups:
            database.let_in(RUN_ROLE, group, role)
        storage.allow_objects(role, SPARK_OBJECT_ACTIONS)
        storage.allow_below(role, ["s3:PutObject"], LOG_PREFIX)
        assets = (self._package, self._entry)
        allow(role, ["s3:GetObject"], [one.bucket.arn_for_objects(one.s3_object_key) for one in assets])

    def _database_function(self, name: str, description: str) -> DatabaseFunction:
        return DatabaseFunction(
            self,
            name,
            handler=f"lambdas.compaction.{name.lower()}",
            description=description,
            memory_mb=self.compaction.memory_mb,
            timeout_seconds=self.compaction.timeout_seconds,
            environment=CompactionEnvironment,
            database_role=RUN_ROLE,
            object_actions=CHANGE_ACTIONS,
            jobs_max=self.compaction.jobs_max,
            run_minutes_max=self.compaction.run_minutes_max,
        )

    def _call_function(self, name: str, description: str) -> Function:
        return Function(
            self,
            name,
            assets=self.foundation.assets,
            handler=f"lambdas.runs.{name.lower()}",
            description=description,
            timeout_seconds=CALL_SECONDS_MAX,
            environment=RunsEnvironment,
            engine=self.compaction.engine,
            dsn=self.foundation.database.dsn(self.stack, RUN_ROLE),
            objects=self.foundation.storage.objects,
            archive=self._package.s3_object_url,
            entry=self._entry.s3_object_url,
            run_minutes_max=self.compaction.run_minutes_max,
            **self.emr.values,
        )

    def _tell(self) -> None:
        self.describe(
            RunResources(
                rules=(self._schedule.rule.rule_name,),
                function=self.create.function.function_name,
                state_machine=self.runs.state_machine.state_machine_arn,
                engine=self.compaction.engine,
                application=self.emr.values.get("application_id"),
                cluster_name=self.emr.values.get("cluster_name"),
                has_endpoint=self.endpoint is not None,
            )
        )
