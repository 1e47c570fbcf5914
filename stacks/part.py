"""The parts of an instance, which are constructs of its stack `application`."""

from __future__ import annotations

import re

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.resources import PREFIX, Described
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

    def fact(self, reader: cdk.Stack, name: str, value: str) -> str:
        """Passes a value of this part to the stack `reader`. Returns the reference to use in `reader`.

        It is an SSM parameter, which each deploy reads again. CloudFormation's exports are no alternative. An
        export cannot change or be removed while another stack uses it, so for example no queue could be
        removed.
        """
        found = self.node.try_find_child("Facts")
        scope = found if isinstance(found, Construct) else Construct(self, "Facts")
        construct_id = re.sub(r"\W", "", name.title())
        parameter_name = f"{PREFIX}/{self.settings.id}/{self.name}/{name}"
        if scope.node.try_find_child(construct_id) is None:
            ssm.StringParameter(scope, construct_id, parameter_name=parameter_name, string_value=value)
        reader.add_stack_dependency(self.stack, "its parameters")
        return ssm.StringParameter.value_for_string_parameter(reader, parameter_name)

    def let_keep(self, keeper: iam.Role) -> None:
        """Allows the lambda of the part `pause` to see the work of this part and to switch it."""

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to pause and resume this part. They may see every part."""

    def let_read(self, reader: iam.ManagedPolicy) -> None:
        """Allows readers of tables what this part offers them."""

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        """Adds the graphs and alarms of this part."""
