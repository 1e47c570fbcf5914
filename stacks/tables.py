"""The lambdas through which the command line works on tables, for users without access to the database."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_

from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.settings.resources import TablesResources
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.monitors import Monitors
from stacks.constructs.permissions import allow
from stacks.database import OWNER_ROLE, READ_ROLE
from stacks.foundation import UpperStack
from stacks.part import Part
from stacks.storage import CHANGE_ACTIONS

MEMORY_MB = 512
TIMEOUT_SECONDS = 900
"""The timeout of the lambdas, which suffices for a drop.

A drop waits up to ten minutes until the table is unused, and then deletes its objects.
"""

CONNECT_SECONDS_MAX = 60
"""The time to wait for the database, which suffices for it to wake while a person waits."""


class Tables(Part):
    """Two lambdas, one for reading and one for changing tables, which IAM can permit separately.

    Only people call the lambdas. A pause leaves them as they are, because they cost nothing when unused.
    """

    def __init__(self, stack: UpperStack) -> None:
        super().__init__(stack, "tables")
        self._show = self._function("Show", "Lists and describes tables", READ_ROLE, ["s3:GetObject"])
        self._change = self._function("Change", "Makes, changes and drops tables", OWNER_ROLE, CHANGE_ACTIONS)
        show, change = self._show.function_name, self._change.function_name
        self.describe(TablesResources(show=show, change=change))

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        both = [self._show.function_arn, self._change.function_arn]
        allow(operator, ["lambda:InvokeFunction"], both)

    def let_read(self, reader: iam.ManagedPolicy) -> None:
        allow(reader, ["lambda:InvokeFunction"], [self._show.function_arn])

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        monitors.function("Show tables", self._show)
        monitors.function("Change tables", self._change)

    def _function(self, name: str, description: str, role: str, actions: Sequence[str]) -> lambda_.Function:
        return DatabaseFunction(
            self,
            name,
            handler=f"lambdas.tables.{name.lower()}",
            description=description,
            memory_mb=MEMORY_MB,
            timeout_seconds=TIMEOUT_SECONDS,
            environment=DatabaseEnvironment,
            database_role=role,
            object_actions=actions,
            connect_seconds_max=CONNECT_SECONDS_MAX,
        ).function
