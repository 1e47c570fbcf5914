"""The base class of all stacks of an instance."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TypeVar

import aws_cdk as cdk
import jsii
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct, IConstruct

from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import (
    INSTANCE_TAG,
    RUNNING_PARAMETER,
    Described,
    resources_parameter,
    stack_name,
    state_parameter,
)

Resource = TypeVar("Resource", bound=cdk.CfnResource)

APPLICATION = "application"
"""The short name of the stack with the parts that can be added and removed."""

DIGEST_CHARACTERS = 8
KEPT = cdk.RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE
"""The removal policy of resources that are kept, except when the deploy that creates them fails.

After such a failure, kept resources would cost money outside any stack, and the next deploy could not use
their names.
"""


class InstanceStack(cdk.Stack):
    """The base class of the stacks `dormouse-<id>-<name>`.

    CloudFormation refuses to delete stateful stacks of a protected instance.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        settings: DeploymentSettings,
        *,
        description: str,
        stateful: bool = False,
        region: str | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        full_name = stack_name(settings.id, name)
        boundary, qualifier = settings.iam.permissions_boundary, settings.qualifier
        super().__init__(
            scope,
            full_name,
            stack_name=full_name,
            description=f"Dormouse {settings.id}: {description}",
            env=cdk.Environment(account=settings.account, region=region or settings.region),
            tags={INSTANCE_TAG: settings.id, **settings.tags},
            termination_protection=stateful and settings.protected,
            permissions_boundary=cdk.PermissionsBoundary.from_arn(boundary) if boundary else None,
            synthesizer=cdk.DefaultStackSynthesizer(qualifier=qualifier) if qualifier else None,
        )
        if settings.iam.role_path != "/" or settings.iam.role_prefix:
            cdk.Aspects.of(self).add(_RoleNames(settings))

    @cached_property
    def is_awake(self) -> cdk.CfnCondition:
        """The condition that the desired state is to run, which CloudFormation reads at each deploy.

        A deploy may rewrite schedules and mappings, for example when tags change. With this condition, they
        stay as the last pause or resume set them. The stack `migrate` creates the desired state, so it must
        be deployed before.
        """
        state = ssm.StringParameter.value_for_string_parameter(self, state_parameter(self.settings.id))
        return cdk.CfnCondition(self, "IsAwake", expression=cdk.Fn.condition_equals(state, "running"))

    @property
    def sleeps(self) -> bool:
        """True if any resource exists only while the instance runs."""
        return "is_running" in vars(self)

    @property
    def removal_policy(self) -> cdk.RemovalPolicy:
        """The removal policy of resources with data: kept if the instance is protected, else deleted."""
        return KEPT if self.settings.protected else cdk.RemovalPolicy.DESTROY

    @cached_property
    def is_running(self) -> cdk.CfnCondition:
        """The condition that the stack's parameter is true and that the desired state is to run.

        Resources that cost money by the hour exist while it is met. The lambda `Switch` changes the
        parameter.
        """
        parameter = cdk.CfnParameter(
            self,
            RUNNING_PARAMETER,
            allowed_values=["true", "false"],
            default="true",
            description="Whether it runs. Use dormouse pause and resume; a deploy leaves it as it is",
        )
        is_true = cdk.Fn.condition_equals(parameter.value_as_string, "true")
        both = cdk.Fn.condition_and(is_true, self.is_awake)  # type: ignore[arg-type]  # the CDK's stubs are wrong
        return cdk.CfnCondition(self, "IsRunning", expression=both)

    def describe(self, resources: Described) -> None:
        """Writes the SSM parameter from which commands read what this stack deployed."""
        describe(self, self.settings.id, self.name, resources)


@jsii.implements(cdk.IAspect)
class _RoleNames:
    """An aspect of the CDK that gives roles the path and the prefix in the settings.

    A name has at most 64 characters: the prefix (20), the instance's id (20), a digest of the role's purpose,
    and the region (14). The region is needed because all regions of an account share its roles.
    """

    def __init__(self, settings: DeploymentSettings) -> None:
        self._settings = settings

    def visit(self, node: IConstruct) -> None:
        path, prefix = self._settings.iam.role_path, self._settings.iam.role_prefix
        if isinstance(node, iam.CfnRole | iam.CfnInstanceProfile | iam.CfnManagedPolicy) and path != "/":
            node.add_property_override("Path", path)
        if isinstance(node, iam.CfnRole) and prefix:
            # with the path, as a role of another path is another role, made while the old one has its name
            stack = cdk.Stack.of(node)
            # from its stack on, so that it stays the same when the instance moves into another app
            below = node.node.path[node.node.path.index(stack.node.id) :]
            what = hashlib.sha256(f"{path} {below}".encode()).hexdigest()[:DIGEST_CHARACTERS]
            name = f"{prefix}{self._settings.id}-{what}-{stack.region}"
            node.add_property_override("RoleName", name)


def stack_of(scope: Construct) -> InstanceStack:
    """Returns the stack of a construct."""
    stack = cdk.Stack.of(scope)
    assert isinstance(stack, InstanceStack)  # noqa: S101
    return stack


def resource(construct: IConstruct, kind: type[Resource]) -> Resource:
    """Returns the resource of a construct in the template, to set what the construct has no argument for."""
    found = construct.node.default_child
    assert isinstance(found, kind)  # noqa: S101
    return found


def title(scope: Construct) -> str:
    """Returns a name such as `dormouse-dev-commit`: that of the construct's part, else of its stack."""
    stack = stack_of(scope)
    part = scope.node.path.removeprefix(f"{stack.node.path}/").partition("/")[0]
    return stack_name(stack.settings.id, part.lower()) if stack.name == APPLICATION else stack.stack_name


def describe(scope: Construct, instance_id: str, name: str, resources: Described) -> None:
    """Writes the SSM parameter from which commands read what a stack or a part of a stack deployed."""
    ssm.StringParameter(
        scope,
        "Resources",
        parameter_name=resources_parameter(instance_id, name),
        string_value=cdk.Stack.of(scope).to_json_string(resources.model_dump(mode="json")),
        # The standard tier takes at most 4 KB, and many queues need more.
        tier=ssm.ParameterTier.INTELLIGENT_TIERING,
    )
