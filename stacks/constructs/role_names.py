"""The path and the names of roles, where an organization demands them."""

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
    """Names have 64 characters at most: the prefix (20), the instance's id (20), a digest of what the role is
    for, and the region (14), as an account has its roles in common to all regions."""

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
