"""A guard that fails a deploy before it begins a change of the database that AWS cannot finish."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import aws_cdk as cdk
import jsii
from aws_cdk import aws_rds as rds
from constructs import Construct

from dormouse.settings.resources import state_parameter
from stacks.assets import Assets
from stacks.constructs.function import Function
from stacks.constructs.permissions import allow, arn
from stacks.instance_stack import InstanceStack

RESOURCE_TYPE = "Custom::DormouseDatabaseGuard"
SECONDS_MAX = 60


def guard(
    stack: InstanceStack, cluster: rds.DatabaseCluster, row_clusters: Sequence[Construct], assets: Assets
) -> None:
    """Adds a custom resource that fails a deploy before it begins a change that AWS cannot finish.

    The resource changes whenever the cluster or its instances change, and is updated before them.
    CloudFormation modifies a cluster for any change, even of a tag. RDS refuses to modify a stopped cluster,
    and refuses the rollback, too. Without the guard, the stack would stay in UPDATE_ROLLBACK_FAILED.

    The guard also compares the engine version with that of each cluster. So `row_clusters` change after it.
    """
    settings = stack.settings
    lambda_ = Function(
        stack,
        "Guard",
        assets=assets,
        name="guard",
        handler="lambdas.pause.guard",
        description="Keeps deploys from a database that is stopped",
        timeout_seconds=SECONDS_MAX,
    )
    role = lambda_.role
    allow(role, ["ssm:GetParameter"], [arn(stack, "ssm", f"parameter{state_parameter(settings.id)}")])
    allow(role, ["cloudformation:DescribeStacks", "cloudformation:ListStackResources"], [stack.stack_id])
    because = "it reads its own clusters, whose names CloudFormation makes after it"
    allow(role, ["rds:DescribeDBClusters"], [arn(stack, "rds", "cluster:*")], because=because)
    resource = cdk.CustomResource(
        stack,
        "Guarded",
        resource_type=RESOURCE_TYPE,
        service_token=lambda_.function.function_arn,
        service_timeout=cdk.Duration.seconds(2 * SECONDS_MAX),
        properties={
            "Changes": cdk.Lazy.uncached_string(_Digest(cluster)),
            "EngineVersion": settings.database.engine_version,
            "Snapshot": settings.database.snapshot or "",
        },
    )
    resource.node.add_dependency(lambda_)
    for child in (*_guarded(cluster), *row_clusters):
        child.node.add_dependency(resource)


def _guarded(
    cluster: rds.DatabaseCluster,
) -> list[rds.CfnDBCluster | rds.CfnDBInstance | rds.CfnDBClusterParameterGroup]:
    """Returns the resources of the cluster that must not change while it is stopped.

    The parameter group is one of them: CloudFormation waits for hours if a stopped cluster's group changes.
    """
    assert cluster.node.scope is not None  # noqa: S101
    parameters = cluster.node.scope.node.find_child("Parameters")
    return [
        child
        for child in [*cluster.node.find_all(), *parameters.node.find_all()]
        if isinstance(child, rds.CfnDBCluster | rds.CfnDBInstance | rds.CfnDBClusterParameterGroup)
    ]


@jsii.implements(cdk.IStringProducer)
class _Digest:
    """A digest of the guarded resources in the template, and of the stack's tags."""

    def __init__(self, cluster: rds.DatabaseCluster) -> None:
        self._cluster = cluster

    def produce(self, context: cdk.IResolveContext) -> str:
        stack = cdk.Stack.of(self._cluster)
        found: list[Any] = [[child.logical_id, child._cfn_properties] for child in _guarded(self._cluster)]
        text = json.dumps([stack.tags.tag_values(), stack.resolve(found)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
