"""The base class of all stacks of an instance."""

from __future__ import annotations

from functools import cached_property

import aws_cdk as cdk
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import (
    INSTANCE_TAG,
    Described,
    resources_parameter,
    stack_name,
    state_parameter,
)
from stacks.constructs.role_names import RoleNames

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
            cdk.Aspects.of(self).add(RoleNames(settings))

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
    def removal_policy(self) -> cdk.RemovalPolicy:
        """The removal policy of resources with data: kept if the instance is protected, else deleted."""
        return KEPT if self.settings.protected else cdk.RemovalPolicy.DESTROY

    def describe(self, resources: Described) -> None:
        """Writes the SSM parameter from which commands read what this stack deployed."""
        ssm.StringParameter(
            self,
            "Resources",
            parameter_name=resources_parameter(self.settings.id, self.name),
            string_value=self.to_json_string(resources.model_dump(mode="json")),
            # The standard tier takes at most 4 KB, and many queues need more.
            tier=ssm.ParameterTier.INTELLIGENT_TIERING,
        )
