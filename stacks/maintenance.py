"""The stack of scheduled maintenance. Splits run on Spark if compaction is deployed."""

from __future__ import annotations

from constructs import Construct

from dormouse.settings.deployment import MaintenanceSettings
from dormouse.settings.lambdas import MaintenanceEnvironment
from dormouse.settings.resources import RunResources
from stacks.compaction import CompactionStack
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.schedule import Schedule
from stacks.constructs.spark_runs import SparkRuns
from stacks.database import OWNER_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack


class MaintenanceStack(InstanceStack):
    """A stack with scheduled maintenance. `runs` is the state machine of its runs on Spark.

    Without compaction, `runs` is None, and the schedule calls the lambda directly.
    """

    def __init__(
        self,
        scope: Construct,
        foundation: Foundation,
        maintenance: MaintenanceSettings,
        compaction: CompactionStack | None,
    ) -> None:
        super().__init__(scope, "maintenance", foundation.settings, description="upkeep")
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
        self.function, self.every_minutes = lambda_.function, maintenance.every_minutes
        self.runs = self._runs(compaction) if compaction is not None else None
        machine = self.runs.state_machine if self.runs is not None else None
        schedule = Schedule(
            self,
            "Schedule",
            every_minutes=maintenance.every_minutes,
            is_awake=self.is_awake,
            target=machine or self.function,
            description="Upkeep",
        )
        self.rule = schedule.rule
        self.describe(
            RunResources(
                rules=(self.rule.rule_name,),
                function=self.function.function_name,
                state_machine=machine.state_machine_arn if machine is not None else None,
            )
        )

    def _runs(self, compaction: CompactionStack) -> SparkRuns:
        return SparkRuns(
            self,
            "Runs",
            create=self.function,
            functions=compaction.functions,
            run_minutes_max=compaction.compaction.run_minutes_max,
            log_days=compaction.compaction.log_days,
            what="splits",
        )
