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
"""The policy of resources that are kept, except when the deploy that creates them fails.

Else they would cost money outside any stack, and their names would be taken at the next deploy.
"""


class InstanceStack(cdk.Stack):
    """The stack `dormouse-<id>-<name>`. A protected instance's stateful stacks refuse to be deleted."""

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

        A deploy may rewrite schedules and mappings, for example when tags change. The condition leaves them
        as the last pause or resume set them. The state exists after `migrate` is deployed.
        """
        state = ssm.StringParameter.value_for_string_parameter(self, state_parameter(self.settings.id))
        return cdk.CfnCondition(self, "IsAwake", expression=cdk.Fn.condition_equals(state, "running"))

    @property
    def removal_policy(self) -> cdk.RemovalPolicy:
        """The removal policy of stateful resources; see KEPT."""
        return KEPT if self.settings.protected else cdk.RemovalPolicy.DESTROY

    def describe(self, resources: Described) -> None:
        """Writes the SSM parameter that tells commands what this stack deployed."""
        ssm.StringParameter(
            self,
            "Resources",
            parameter_name=resources_parameter(self.settings.id, self.name),
            string_value=self.to_json_string(resources.model_dump(mode="json")),
            # The standard tier takes at most 4 KB, and many queues need more.
            tier=ssm.ParameterTier.INTELLIGENT_TIERING,
        )
