"""The parts of an instance, which are constructs of its stack `application`."""

from __future__ import annotations

from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.resources import Described
from stacks.constructs.monitors import Monitors
from stacks.foundation import UpperStack
from stacks.instance_stack import describe, title


class Part(Construct):
    """A part of an instance, such as its commit queues, with all its resources.

    A deploy without the part deletes its resources. Each part grants the rights to its own resources, and
    brings its own graphs and alarms.
    """

    def __init__(self, stack: UpperStack, name: str) -> None:
        super().__init__(stack, name.capitalize())
        self.stack, self.name = stack, name
        self.foundation, self.settings = stack.foundation, stack.settings
        self.title = title(self)

    def describe(self, resources: Described) -> None:
        """Writes the SSM parameter from which commands read what this part deployed."""
        describe(self, self.settings.id, self.name, resources)

    def let_keep(self, keeper: iam.Role) -> None:
        """Allows the lambda of the part `pause` to see the work of this part and to switch it."""

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to pause and resume this part. They may see every part."""

    def let_read(self, reader: iam.ManagedPolicy) -> None:
        """Allows readers of tables what this part offers them."""

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        """Adds the graphs and alarms of this part."""
