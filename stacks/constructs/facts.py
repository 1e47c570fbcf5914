"""Values that a part passes to another through an SSM parameter, which each deploy reads again.

CloudFormation's exports are no alternative. An export cannot change or be removed while another stack uses
it, so for example no queue could be removed.
"""

from __future__ import annotations

import re
from typing import cast

import aws_cdk as cdk
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from dormouse.settings.resources import PREFIX
from stacks.part import Part

SCOPE = "Facts"


def fact(owner: Part, reader: cdk.Stack, name: str, value: str) -> str:
    """Passes a value of the part `owner` to the stack `reader`. Returns the reference to use in `reader`.

    Raises `ValueError` if another value of `owner` already has this name.
    """
    parameter_name = f"{PREFIX}/{owner.settings.id}/{owner.name}/{name}"
    found = owner.node.try_find_child(SCOPE)
    scope = found if isinstance(found, Construct) else Construct(owner, SCOPE)
    construct_id = re.sub(r"\W", "", name.title())
    stack, made = owner.stack, scope.node.try_find_child(construct_id)
    if made is None:
        ssm.StringParameter(scope, construct_id, parameter_name=parameter_name, string_value=value)
    elif stack.resolve(cast(ssm.CfnParameter, made.node.default_child).value) != stack.resolve(value):
        raise ValueError(f"{parameter_name} is another value of {owner.title} already")
    reader.add_stack_dependency(owner.stack, "its parameters")
    return ssm.StringParameter.value_for_string_parameter(reader, parameter_name)
