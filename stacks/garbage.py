"""Scheduled garbage collection."""

from __future__ import annotations

from aws_cdk import aws_iam as iam

from dormouse.settings.deployment import GarbageSettings, MonitoringSettings
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.settings.resources import ScheduledResources
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.monitors import Monitors
from stacks.constructs.schedule import Schedule
from stacks.database import RUN_ROLE
from stacks.foundation import UpperStack
from stacks.part import Part
from stacks.storage import CHANGE_ACTIONS


class Garbage(Part):
    def __init__(self, stack: UpperStack, garbage: GarbageSettings) -> None:
        super().__init__(stack, "garbage")
        self._every_minutes = garbage.every_minutes
        self._function = DatabaseFunction(
            self,
            "Garbage",
            handler="lambdas.garbage.handler",
            description="Deletes files that no partition refers to",
            memory_mb=garbage.memory_mb,
            timeout_seconds=garbage.timeout_seconds,
            environment=DatabaseEnvironment,
            database_role=RUN_ROLE,
            object_actions=CHANGE_ACTIONS,
        ).function
        self.schedule = Schedule(
            self,
            "Schedule",
            every_minutes=garbage.every_minutes,
            function=self._function,
            description="Garbage collection",
        )
        rules = (self.schedule.rule.rule_name,)
        self.describe(ScheduledResources(rules=rules, function=self._function.function_name))

    def let_keep(self, keeper: iam.Role) -> None:
        self.schedule.let_keep(keeper)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        self.schedule.let_operate(operator)

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.scheduled("Garbage", self._function, self._every_minutes)
        monitors.schedule("Garbage", self.schedule.rule.rule_name, self._every_minutes)
        monitors.garbage(limits.orphaned_gb_max)
