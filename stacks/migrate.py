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
from stacks.constructs.function import Function
from stacks.constructs.permissions import allow, arn
from stacks.database import NAME, PORT, ROWS_NAME
from stacks.foundation import Foundation, UpperStack
from stacks.storage import DATA_PREFIX

RESOURCE_TYPE = "Custom::DormouseMigration"
MEMORY_MB = 512
TIMEOUT_SECONDS = 900
BEGIN_SECONDS_MAX = 60 + ACTIVE_SECONDS_MAX
"""The first lambda waits until the second is active."""

QUEUED_SECONDS_MAX = ACTIVE_SECONDS_MAX
"""The time after which AWS drops an event. A later call would migrate after CloudFormation had given up."""

ANSWER_SECONDS_MAX = 2 * (BEGIN_SECONDS_MAX + QUEUED_SECONDS_MAX) + TIMEOUT_SECONDS
"""The time after which CloudFormation gives up. No lambda can still be running then."""


class MigrateStack(UpperStack):
    """A stack that migrates the database.

    Its custom resource has a property that changes with the migrations. So CloudFormation updates the
    resource, and the lambda applies new migrations.
    """

    def __init__(self, scope: Construct, foundation: Foundation) -> None:
        settings, database = foundation.settings, foundation.database
        super().__init__(scope, "migrate", foundation, description="migrations of the database")
        lambda_ = self._migrating()
        begin = self._beginning(lambda_)
        rows = {"RowDatabases": " ".join(names)} if (names := database.row_databases) else {}
        migration = self._migration(
            begin,
            "Migration",
            NAME,
            host=database.fact(self, "endpoint"),
            secret=database.fact(self, "secret"),
            DeployPaused=str(settings.deploy_paused).lower(),
            **rows,
        )
        migration.node.add_dependency(lambda_, begin)
        for number, facts in enumerate(database.row_cluster_facts(self), start=1):
            only_rows = self._migration(begin, f"Rows{number}", ROWS_NAME, **facts, RowsOnly="true")
            only_rows.node.add_dependency(migration)

    def _migration(
        self, begin: Function, name: str, database: str, *, host: str, secret: str, **properties: str
    ) -> cdk.CustomResource:
        """Creates the custom resource of a database, which changes with the migrations and their roles."""
        return cdk.CustomResource(
            self,
            name,
            resource_type=RESOURCE_TYPE,
            service_token=begin.function.function_arn,
            service_timeout=cdk.Duration.seconds(ANSWER_SECONDS_MAX),
            properties={
                "Host": host,
                "Port": str(PORT),
                "Database": database,
                "Secret": secret,
                "Migrations": self.foundation.assets.migrations(),
                **properties,
            },
        )

    def _migrating(self) -> Function:
        foundation = self.foundation
        lambda_ = Function(
            self,
            "Migrate",
            assets=foundation.assets,
            handler="lambdas.migrate.handler",
            description="Migrates the database",
            memory_mb=MEMORY_MB,
            timeout_seconds=TIMEOUT_SECONDS,
            environment=MigrateEnvironment,
            placement=foundation.network.placement,
            objects=foundation.storage.objects,
        )
        _once(lambda_)
        foundation.database.let_in_as_administrator(lambda_.security_group, lambda_.role)
        foundation.storage.allow_objects(lambda_.role, ["s3:GetObject", "s3:PutObject"])
        leftovers = f"{DATA_PREFIX}/owner/now"  # of the previous owner
        foundation.storage.allow_below(lambda_.role, ["s3:DeleteObject"], leftovers)
        return lambda_

    def _beginning(self, migrating: Function) -> Function:
        database = self.foundation.database
        begin = Function(
            self,
            "Begin",
            assets=self.foundation.assets,
            handler="lambdas.migrate.begin",
            description="Gets the login of the master user for the migrations",
            timeout_seconds=BEGIN_SECONDS_MAX,
            environment=BeginMigrationEnvironment,
            migrate_function=migrating.function.function_name,
        )
        role, fact = begin.role, database.fact
        secrets = [fact(self, "secret"), *(one["secret"] for one in database.row_cluster_facts(self))]
        allow(role, ["secretsmanager:GetSecretValue"], secrets)
        by_secrets = {"kms:ViaService": f"secretsmanager.{self.region}.{self.url_suffix}"}
        allow(role, ["kms:Decrypt"], [fact(self, "key")], {"StringEquals": by_secrets})
        state = arn(self, "ssm", f"parameter{state_parameter(self.settings.id)}")
        allow(role, ["ssm:DeleteParameter", "ssm:GetParameter", "ssm:PutParameter"], [state])
        calls = ["lambda:GetFunctionConfiguration", "lambda:InvokeFunction"]
        allow(role, calls, [migrating.function.function_arn])
        allow(role, ["cloudformation:DescribeStacks"], [self.stack_id])
        _once(begin)
        return begin


def _once(function: Function) -> None:
    """Disables retries of a lambda.

    A retry after a rollback would give the object store to the wrong database.
    """
    function.function.configure_async_invoke(
        retry_attempts=0, max_event_age=cdk.Duration.seconds(QUEUED_SECONDS_MAX)
    )
