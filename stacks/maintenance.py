"""Scheduled maintenance. Splits run on Spark if compaction is deployed."""

from __future__ import annotations

from aws_cdk import aws_iam as iam

from dormouse.settings.deployment import MaintenanceSettings, MonitoringSettings
from dormouse.settings.lambdas import MaintenanceEnvironment
from dormouse.settings.resources import RunResources
from stacks.compaction import Compaction
from stacks.constructs.allow import allow
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.monitors import Monitors
from stacks.constructs.schedule import Schedule
from stacks.constructs.spark_runs import SparkRuns
from stacks.database import OWNER_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.part import Part


class Maintenance(Part):
    """Scheduled maintenance. `runs` is the state machine of its runs on Spark.

    Without compaction, `runs` is None, and the schedule calls the lambda directly.
    """

    def __init__(
        self,
        stack: InstanceStack,
        foundation: Foundation,
        maintenance: MaintenanceSettings,
        compaction: Compaction | None,
    ) -> None:
        super().__init__(stack, "maintenance", foundation)
        lambda_ = DatabaseFunction(
            self,
            "Maintenance",
            foundation=foundation,
            name="maintenance",
            handler="lambdas.maintenance.handler",
            description="Rolls the removal log, cools payloads down, finds partitions to split",
            memory_mb=maintenance.memory_mb,
            timeout_seconds=maintenance.timeout_seconds,
            environment=MaintenanceEnvironment,
            values={
                "payload_retention_days": foundation.settings.storage.payload_days,
                "payloads_hot_seconds": foundation.settings.storage.payloads_hot_seconds,
                "jobs_retention_days": foundation.settings.storage.jobs_days,
            },
            database_role=OWNER_ROLE,
            object_actions=["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
        )
        self._function, self._every_minutes = lambda_.function, maintenance.every_minutes
        self.runs = self._runs(compaction) if compaction is not None else None
        machine = self.runs.state_machine if self.runs is not None else None
        self.schedule = Schedule(
            self,
            "Schedule",
            every_minutes=maintenance.every_minutes,
            is_awake=stack.is_awake,
            target=machine or self._function,
            description="Upkeep",
        )
        if compaction is not None:
            compaction.let_wait(self.schedule)
        self.describe(
            RunResources(
                rules=(self.schedule.rule.rule_name,),
                function=self._function.function_name,
                state_machine=machine.state_machine_arn if machine is not None else None,
            )
        )

    def let_keep(self, keeper: iam.Role) -> None:
        self.schedule.let_keep(keeper)
        allow(keeper, ["lambda:GetFunctionConfiguration"], [self._function.function_arn])
        if self.runs is not None:
            self.runs.let_keep(keeper)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        self.schedule.let_operate(operator)
        if self.runs is not None:
            self.runs.let_operate(operator)
        else:  # as for garbage collection, to make it active
            allow(operator, ["lambda:InvokeFunction"], [self._function.function_arn])

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.payloads(limits.payload_backlog_days_max)
        monitors.schedule("Maintenance", self.schedule.rule.rule_name, self._every_minutes)
        if self.runs is None:
            monitors.scheduled("Maintenance", self._function, self._every_minutes)
        else:
            monitors.function("Maintenance", self._function)
            monitors.runs("Split runs", self.runs.state_machine)

    def _runs(self, compaction: Compaction) -> SparkRuns:
        return SparkRuns(
            self,
            "Runs",
            create=self._function,
            functions=compaction.functions,
            run_minutes_max=compaction.compaction.run_minutes_max,
            log_days=compaction.compaction.log_days,
            what="splits",
        )
