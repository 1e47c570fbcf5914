"""Migrations of the schema and the roles of the database, as a part of the deployment.

The custom resource consists of two lambdas, as CloudFormation resolves no secrets for custom resources:

- The first, outside the VPC, reads the login of the master user and passes it on with the event.
- The second, inside the VPC, migrates and answers to CloudFormation through the S3 endpoint. So the VPC needs
  no way to other AWS services.

The second may also log in as the master user with a token, as RDS may refuse the password when `rds_iam` has
members. It may read and write the instance's objects, as a restored database adopts the object store there.

The first lambda also creates the desired state. As a resource, it would be rewritten by each change of tags.
"""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from dormouse.settings.lambdas import BeginMigrationEnvironment, MigrateEnvironment
from dormouse.settings.resources import state_parameter
from dormouse.settings.section import ACTIVE_SECONDS_MAX
from stacks.constructs.database_function import let_out_to_s3
from stacks.constructs.function import Function
from stacks.database import NAME, PORT, ROWS_NAME
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.storage import DATA_PREFIX

RESOURCE_TYPE = "Custom::DormouseMigration"
MEMORY_MB = 512
TIMEOUT_SECONDS = 900
BEGIN_MEMORY_MB = 256
BEGIN_SECONDS_MAX = 60 + ACTIVE_SECONDS_MAX
"""The first lambda waits until the second is active."""

QUEUED_SECONDS_MAX = ACTIVE_SECONDS_MAX
"""The time after which AWS drops an event. A later call would migrate after CloudFormation had given up."""

ANSWER_SECONDS_MAX = 2 * (BEGIN_SECONDS_MAX + QUEUED_SECONDS_MAX) + TIMEOUT_SECONDS
"""The time after which CloudFormation gives up. No lambda can still be running then."""


class MigrateStack(InstanceStack):
    """A stack that migrates the database.

    Its custom resource has a property that changes with the migrations. So CloudFormation updates the
    resource, and the lambda applies new migrations.
    """

    def __init__(self, scope: Construct, foundation: Foundation) -> None:
        settings, database = foundation.settings, foundation.database
        super().__init__(scope, "migrate", settings, description="migrations of the database")
        self._foundation = foundation
        lambda_ = self._migrating()
        begin = self._beginning(lambda_)
        rows = {"RowDatabases": " ".join(names)} if (names := database.row_databases) else {}
        migration = cdk.CustomResource(
            self,
            "Migration",
            resource_type=RESOURCE_TYPE,
            service_token=begin.function.function_arn,
            service_timeout=cdk.Duration.seconds(ANSWER_SECONDS_MAX),
            properties={
                "Host": database.fact(self, "endpoint"),
                "Port": str(PORT),
                "Database": NAME,
                "Secret": database.fact(self, "secret"),
                "Migrations": foundation.assets.migrations(),
                "DeployPaused": str(settings.deploy_paused).lower(),
                **rows,
            },
        )
        migration.node.add_dependency(lambda_, begin)
        for number, facts in enumerate(database.row_cluster_facts(self), start=1):
            cdk.CustomResource(
                self,
                f"Rows{number}",
                resource_type=RESOURCE_TYPE,
                service_token=begin.function.function_arn,
                service_timeout=cdk.Duration.seconds(ANSWER_SECONDS_MAX),
                properties={
                    "Host": facts["host"],
                    "Port": str(PORT),
                    "Database": ROWS_NAME,
                    "Secret": facts["secret"],
                    "Migrations": foundation.assets.migrations(),  # they have the roles of these migrations
                    "RowsOnly": "true",
                },
            ).node.add_dependency(migration)

    def _migrating(self) -> Function:
        foundation = self._foundation
        lambda_ = Function(
            self,
            "Migrate",
            settings=self.settings,
            name="migrate",
            code=foundation.assets.lambda_code("migrate"),
            handler="lambdas.migrate.handler",
            description="Migrates the database",
            memory_mb=MEMORY_MB,
            timeout_seconds=TIMEOUT_SECONDS,
            environment=MigrateEnvironment.variables(
                instance_id=self.settings.id, objects=foundation.storage.objects
            ),
            placement=foundation.network.placement,
        )
        _once(lambda_)
        assert lambda_.security_group is not None  # noqa: S101
        let_out_to_s3(lambda_.security_group)
        foundation.database.let_in_as_administrator(lambda_.security_group, lambda_.role)
        foundation.storage.allow_objects(lambda_.role, ["s3:GetObject", "s3:PutObject"])
        leftovers = f"{DATA_PREFIX}/owner/now"  # of the previous owner
        foundation.storage.allow_below(lambda_.role, ["s3:DeleteObject"], leftovers)
        return lambda_

    def _beginning(self, migrating: Function) -> Function:
        database = self._foundation.database
        begin = Function(
            self,
            "Begin",
            settings=self.settings,
            name="migrate",
            code=self._foundation.assets.lambda_code("migrate"),
            handler="lambdas.migrate.begin",
            description="Gets the login of the master user for the migrations",
            memory_mb=BEGIN_MEMORY_MB,
            timeout_seconds=BEGIN_SECONDS_MAX,
            environment=BeginMigrationEnvironment.variables(
                instance_id=self.settings.id, migrate_function=migrating.function.function_name
            ),
        )
        secrets = [
            database.fact(self, "secret"),
            *(one["secret"] for one in database.row_cluster_facts(self)),
        ]
        begin.allow(["secretsmanager:GetSecretValue"], secrets)
        begin.allow(
            ["kms:Decrypt"],
            [database.fact(self, "key")],
            {"StringEquals": {"kms:ViaService": f"secretsmanager.{self.region}.{self.url_suffix}"}},
        )
        state = self.format_arn(
            service="ssm",
            resource="parameter",
            resource_name=state_parameter(self.settings.id).removeprefix("/"),
        )
        begin.allow(["ssm:DeleteParameter", "ssm:GetParameter", "ssm:PutParameter"], [state])
        begin.allow(
            ["lambda:GetFunctionConfiguration", "lambda:InvokeFunction"], [migrating.function.function_arn]
        )
        begin.allow(["cloudformation:DescribeStacks"], [self.stack_id])
        _once(begin)
        return begin


def _once(function: Function) -> None:
    """Disables retries of a lambda.

    A retry after a rollback would give the object store to the wrong database.
    """
    function.function.configure_async_invoke(
        retry_attempts=0, max_event_age=cdk.Duration.seconds(QUEUED_SECONDS_MAX)
    )
