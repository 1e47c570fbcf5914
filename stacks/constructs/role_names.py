"""The path and the names of roles, for organizations that prescribe them."""

from __future__ import annotations

import hashlib

import aws_cdk as cdk
import jsii
from aws_cdk import aws_iam as iam
from constructs import IConstruct

from dormouse.settings.deployment import DeploymentSettings

DIGEST_CHARACTERS = 8


@jsii.implements(cdk.IAspect)
class RoleNames:
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
