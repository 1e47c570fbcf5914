"""Stacks that can sleep. Their resources that cost money exist only while the stack's parameter is true.

A lambda changes the parameter. A new stack of a paused instance sleeps whatever its parameter is, because the
desired state is paused.
"""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from dormouse.settings.lambdas import SwitchEnvironment
from dormouse.settings.resources import RUNNING_PARAMETER
from stacks.assets import Assets
from stacks.constructs.function import Function
from stacks.constructs.wildcards import acknowledge_resources
from stacks.instance_stack import InstanceStack

SECONDS_MAX = 60
MEMORY_MB = 256


def running(stack: InstanceStack) -> cdk.CfnCondition:
    """Adds the parameter.

    Returns the condition that the parameter is true and the desired state is to run.
    """
    parameter = cdk.CfnParameter(
        stack,
        RUNNING_PARAMETER,
        allowed_values=["true", "false"],
        default="true",
        description="Whether it runs. Use dormouse pause and resume; a deploy leaves it as it is",
    )
    is_true = cdk.Fn.condition_equals(parameter.value_as_string, "true")
    both = cdk.Fn.condition_and(is_true, stack.is_awake)  # type: ignore[arg-type]  # the CDK's stubs are wrong
    return cdk.CfnCondition(stack, "IsRunning", expression=both)


def only_while(condition: cdk.CfnCondition, scope: Construct) -> None:
    """Makes all resources that are now below the scope exist only while the condition is true."""
    for child in scope.node.find_all():
        if isinstance(child, cdk.CfnResource):
            child.cfn_options.condition = condition


def switch(stack: InstanceStack, assets: Assets, description: str) -> Function:
    """Creates the lambda that changes the stack's parameter, for callers that may not update stacks.

    The lambda may read the SSM parameters to which the template refers so far.
    """
    made = Function(
        stack,
        "Switch",
        settings=stack.settings,
        name="switch",
        code=assets.lambda_code("pause"),
        handler="lambdas.pause.switch",
        description=description,
        memory_mb=MEMORY_MB,
        timeout_seconds=SECONDS_MAX,
        environment=SwitchEnvironment.variables(instance_id=stack.settings.id, stack=stack.stack_id),
    )
    made.allow(["cloudformation:DescribeStacks", "cloudformation:UpdateStack"], [stack.stack_id])
    # CloudFormation reads the parameters of the template with the permissions of the updating role.
    names = [
        str(one.default)
        for one in stack.node.find_all()
        if isinstance(one, cdk.CfnParameter) and one.type.startswith("AWS::SSM::Parameter::Value")
    ]
    bootstrap = _parameter(stack, "/cdk-bootstrap/*")
    made.allow(["ssm:GetParameters"], [*(_parameter(stack, name) for name in sorted(names)), bootstrap])
    acknowledge_resources(made.role, [bootstrap], "the version of the CDK's bootstrap")
    return made


def _parameter(stack: cdk.Stack, name: str) -> str:
    """Returns the ARN of an SSM parameter. The ARNs of AWS's own parameters contain no account."""
    account = "" if name.startswith("/aws/") else None
    return stack.format_arn(
        service="ssm", resource="parameter", resource_name=name.removeprefix("/"), account=account
    )
