"""Brings the schema and the roles of the database up to date, as a part of the deployment.

The lambda is itself the custom resource: it answers to CloudFormation through the S3 endpoint, and gets the
password of the master user with its event, so that it needs no way to other AWS services.
"""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from dormouse.settings.lambdas import MigrateEnvironment
from stacks.constructs.database_function import let_out_to_s3
from stacks.constructs.function import Function
from stacks.database import NAME, PORT
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack

RESOURCE_TYPE = "Custom::DormouseMigration"
MEMORY_MB = 512
TIMEOUT_SECONDS = 900


class MigrateStack(InstanceStack):
    """`Migrations` changes with the migrations, and so has them applied."""

    def __init__(self, scope: Construct, foundation: Foundation) -> None:
        settings, database = foundation.settings, foundation.database
        super().__init__(scope, "migrate", settings, description="migrations of the database")
        lambda_ = Function(
            self,
            "Migrate",
            settings=settings,
            name="migrate",
            code=foundation.assets.lambda_code("migrate"),
            handler="lambdas.migrate.handler",
            description="Migrates the database",
            memory_mb=MEMORY_MB,
            timeout_seconds=TIMEOUT_SECONDS,
            environment=MigrateEnvironment.variables(instance_id=settings.id),
            placement=foundation.network.placement,
        )
        assert lambda_.security_group is not None  # noqa: S101
        let_out_to_s3(lambda_.security_group)
        database.let_in_directly(lambda_.security_group)
        secret = database.fact(self, "secret")
        migration = cdk.CustomResource(
            self,
            "Migration",
            resource_type=RESOURCE_TYPE,
            service_token=lambda_.function.function_arn,
            service_timeout=cdk.Duration.seconds(TIMEOUT_SECONDS),
            properties={
                "Host": database.fact(self, "endpoint"),
                "Port": str(PORT),
                "Database": NAME,
                "User": f"{{{{resolve:secretsmanager:{secret}:SecretString:username}}}}",
                "Password": f"{{{{resolve:secretsmanager:{secret}:SecretString:password}}}}",
                "Migrations": foundation.assets.migrations(),
                "DeployPaused": str(settings.deploy_paused).lower(),
            },
        )
        migration.node.add_dependency(lambda_)
