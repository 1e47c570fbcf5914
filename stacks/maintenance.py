"""Scheduled maintenance. Splits run on Spark if compaction is deployed."""

from __future__ import annotations

from aws_cdk import aws_iam as iam

from dormouse.settings.deployment import MaintenanceSettings, MonitoringSettings
from dormouse.settings.lambdas import MaintenanceEnvironment
from dormouse.settings.resources import RunResources
from stacks.compaction import Compaction
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.monitors import Monitors
from stacks.constructs.schedule import Schedule
from stacks.database import OWNER_ROLE
from stacks.foundation import UpperStack
from stacks.part import Part
from stacks.storage import CHANGE_ACTIONS


class Maintenance(Part):
    """Scheduled maintenance. `runs` is the state machine of its runs on Spark.

    Without compaction, `runs` is None, and the schedule calls the lambda directly.
    """

    def __init__(
        self, stack: UpperStack, maintenance: MaintenanceSettings, compaction: Compaction | None
    ) -> None:
        super().__init__(stack, "maintenance")
        self._every_minutes, storage = maintenance.every_minutes, self.settings.storage
        self._function = DatabaseFunction(
            self,
            "Maintenance",
            handler="lambdas.maintenance.handler",
            description="Rolls the removal log, cools payloads down, finds partitions to split",
            memory_mb=maintenance.memory_mb,
            timeout_seconds=maintenance.timeout_seconds,
            environment=MaintenanceEnvironment,
            database_role=OWNER_ROLE,
            object_actions=CHANGE_ACTIONS,
            payload_retention_days=storage.payload_days,
            payloads_hot_seconds=storage.payloads_hot_seconds,
            jobs_retention_days=storage.jobs_days,
        ).function
        self.runs = compaction.create_runs(self, self._function, "splits") if compaction else None
        self.schedule = Schedule(
            self,
            "Schedule",
            every_minutes=maintenance.every_minutes,
            function=self._function,
            runs=self.runs,
            description="Upkeep",
        )
        if compaction is not None:
            compaction.let_wait(self.schedule)
        self.describe(
            RunResources(
                rules=(self.schedule.rule.rule_name,),
                function=self._function.function_name,
                state_machine=self.runs.state_machine.state_machine_arn if self.runs else None,
            )
        )

    def let_keep(self, keeper: iam.Role) -> None:
        self.schedule.let_keep(keeper)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        self.schedule.let_operate(operator)

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.payloads(limits.payload_backlog_days_max)
        monitors.schedule("Maintenance", self.schedule.rule.rule_name, self._every_minutes)
        if self.runs is None:
            monitors.scheduled("Maintenance", self._function, self._every_minutes)
        else:
            monitors.function("Maintenance", self._function)
            monitors.runs("Split runs", self.runs.state_machine)
