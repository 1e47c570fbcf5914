"""Resources that cost money by the hour. They exist only while the parameter of their stack is true.

A lambda changes the parameter. A new stack of a paused instance sleeps whatever its parameter is, because the
desired state is paused.
"""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.lambdas import SwitchEnvironment
from stacks.assets import Assets
from stacks.constructs.function import Function
from stacks.constructs.permissions import allow, arn
from stacks.instance_stack import InstanceStack

SECONDS_MAX = 60


def only_while(condition: cdk.CfnCondition, scope: Construct) -> None:
    """Makes all resources that are now below the scope exist only while the condition is true."""
    for child in scope.node.find_all():
        if isinstance(child, cdk.CfnResource):
            child.cfn_options.condition = condition


class Switch(Function):
    """The lambda that changes the stack's parameter, for callers that may not update stacks."""

    def __init__(self, stack: InstanceStack, assets: Assets) -> None:
        super().__init__(
            stack,
            "Switch",
            assets=assets,
            name="switch",
            handler="lambdas.pause.switch",
            description="Lets the parts that cost money by the hour run or sleep",
            timeout_seconds=SECONDS_MAX,
            environment=SwitchEnvironment,
            stack=stack.stack_id,
        )
        self._stack = stack
        allow(self.role, ["cloudformation:DescribeStacks", "cloudformation:UpdateStack"], [stack.stack_id])

    def let_read_parameters(self) -> None:
        """Allows reading the SSM parameters to which the template of the stack refers so far.

        CloudFormation reads them with the permissions of the role that updates the stack.
        """
        names = [
            str(one.default)
            for one in self._stack.node.find_all()
            if isinstance(one, cdk.CfnParameter) and one.type.startswith("AWS::SSM::Parameter::Value")
        ]
        # the ARNs of AWS's own parameters contain no account
        arns = [
            arn(self, "ssm", f"parameter{name}", account=not name.startswith("/aws/"))
            for name in [*sorted(names), "/cdk-bootstrap/*"]
        ]
        because = "the version of the CDK's bootstrap"
        allow(self.role, ["ssm:GetParameters"], arns, because=because)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to call the lambda, and to see why an update of the stack failed."""
        allow(operator, ["lambda:InvokeFunction"], [self.function.function_arn])
        stack = arn(self, "cloudformation", f"stack/{self._stack.stack_name}/*")
        because = "requests by name can be allowed only by name; the id differs for each new stack"
        allow(operator, ["cloudformation:DescribeStackEvents"], [stack], because=because)
