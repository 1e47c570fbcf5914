"""Scheduled garbage collection."""

from __future__ import annotations

from aws_cdk import aws_iam as iam

from dormouse.settings.deployment import GarbageSettings, MonitoringSettings
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.settings.resources import ScheduledResources
from stacks.constructs.allow import allow
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.monitors import Monitors
from stacks.constructs.schedule import Schedule
from stacks.database import RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.part import Part


class Garbage(Part):
    def __init__(self, stack: InstanceStack, foundation: Foundation, garbage: GarbageSettings) -> None:
        super().__init__(stack, "garbage", foundation)
        lambda_ = DatabaseFunction(
            self,
            "Garbage",
            foundation=foundation,
            name="garbage",
            handler="lambdas.garbage.handler",
            description="Deletes files that no partition refers to",
            memory_mb=garbage.memory_mb,
            timeout_seconds=garbage.timeout_seconds,
            environment=DatabaseEnvironment,
            database_role=RUN_ROLE,
            object_actions=["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
        )
        self.schedule = Schedule(
            self,
            "Schedule",
            every_minutes=garbage.every_minutes,
            is_awake=stack.is_awake,
            target=lambda_.function,
            description="Garbage collection",
        )
        self._every_minutes, self._function = garbage.every_minutes, lambda_.function
        rules = (self.schedule.rule.rule_name,)
        self.describe(ScheduledResources(rules=rules, function=self._function.function_name))

    def let_keep(self, keeper: iam.Role) -> None:
        self.schedule.let_keep(keeper)
        allow(keeper, ["lambda:GetFunctionConfiguration"], [self._function.function_arn])

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        self.schedule.let_operate(operator)
        # a resume makes an inactive lambda active by a call that the lambda ignores
        allow(operator, ["lambda:InvokeFunction"], [self._function.function_arn])

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.scheduled("Garbage", self._function, self._every_minutes)
        monitors.schedule("Garbage", self.schedule.rule.rule_name, self._every_minutes)
        monitors.garbage(limits.orphaned_gb_max)
