"""The stack of scheduled garbage collection."""

from __future__ import annotations

from constructs import Construct

from dormouse.settings.deployment import GarbageSettings
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.settings.resources import ScheduledResources
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.schedule import Schedule
from stacks.database import RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack


class GarbageStack(InstanceStack):
    def __init__(self, scope: Construct, foundation: Foundation, garbage: GarbageSettings) -> None:
        super().__init__(scope, "garbage", foundation.settings, description="garbage collection")
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
        schedule = Schedule(
            self,
            "Schedule",
            every_minutes=garbage.every_minutes,
            is_awake=self.is_awake,
            target=lambda_.function,
            description="Garbage collection",
        )
        self.every_minutes = garbage.every_minutes
        self.function, self.rule = lambda_.function, schedule.rule
        self.describe(
            ScheduledResources(rules=(self.rule.rule_name,), function=lambda_.function.function_name)
        )
