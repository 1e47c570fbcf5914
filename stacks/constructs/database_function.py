"""A lambda in the VPC that works on the database and the objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aws_cdk as cdk
from constructs import Construct

from dormouse.settings.lambdas import DatabaseEnvironment
from stacks.constructs.function import Function
from stacks.foundation import foundation_of


class DatabaseFunction(Function):
    """A lambda in the VPC that uses the database and the objects.

    It logs in as `database_role`, and may do `object_actions` on the instance's objects.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        handler: str,
        description: str,
        memory_mb: int,
        timeout_seconds: int,
        environment: type[DatabaseEnvironment],
        database_role: str,
        object_actions: Sequence[str],
        **values: Any,
    ) -> None:
        foundation = foundation_of(scope)
        storage, database = foundation.storage, foundation.database
        super().__init__(
            scope,
            construct_id,
            assets=foundation.assets,
            handler=handler,
            description=description,
            memory_mb=memory_mb,
            timeout_seconds=timeout_seconds,
            environment=environment,
            placement=foundation.network.placement,
            dsn=database.dsn(cdk.Stack.of(scope), database_role),
            objects=storage.objects,
            **values,
        )
        database.let_in(database_role, self.security_group, self.role)
        storage.allow_objects(self.role, object_actions)
