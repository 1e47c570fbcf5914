"""Aurora PostgreSQL, serverless or of fixed size, and an RDS Proxy if the settings have one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_rds as rds
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from dormouse.settings.database import ServerlessDatabase
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import PREFIX, DatabaseResources
from stacks.assets import Assets
from stacks.constructs.database_guard import guard
from stacks.constructs.permissions import acknowledge, allow, arn
from stacks.constructs.retained import key_of, log_group
from stacks.constructs.security_group import closed_group, let_clients_in
from stacks.instance_stack import KEPT, InstanceStack, resource
from stacks.network import NetworkStack

PORT = 5433
"""The port of the clusters. It is not PostgreSQL's default, which scanners try first."""

PROXY_PORT = 5432
"""The port of every RDS Proxy."""

NAME = "dormouse"
ROWS_NAME = "dormouse_rows"
"""The name of the database for indexes of row tables, in clusters that contain only such indexes.

In the instance's cluster, an underscore and a number are appended.
"""

ADMINISTRATOR = "dormouse_admin"
"""The master user, whose password RDS keeps and rotates; only the migrations use it."""

RUN_ROLE = "dormouse_run"
OWNER_ROLE = "dormouse_owner"
READ_ROLE = "dormouse_read"
ROLES = (RUN_ROLE, OWNER_ROLE, READ_ROLE)

STORAGE_TYPES = {
    # Standard is given, too: CloudFormation changes nothing when the property is removed.
    "standard": rds.DBClusterStorageType.AURORA,
    "io-optimized": rds.DBClusterStorageType.AURORA_IOPT1,
}

Fact = Literal["cluster", "resource", "endpoint", "host", "login", "secret", "key"]
"""The names of the facts about the database that other stacks can read.

- `cluster`, `resource`: the identifiers of the cluster in RDS and in IAM
- `endpoint`: the endpoint of the cluster
- `host`, `login`: the host that clients connect to, and the resource that IAM lets them log in to
- `secret`, `key`: the ARNs of the master user's secret and of its encryption key
"""


def user_arn(scope: Construct, resource_id: str, user: str) -> str:
    """Returns the ARN of a database user for the IAM action `rds-db:connect`.

    `resource_id` is the resource id of the cluster or of the proxy to which the user connects.
    """
    return arn(scope, "rds-db", f"dbuser:{resource_id}/{user}")


class DatabaseStack(InstanceStack):
    """The stack of the database. Database roles log in with IAM tokens over TLS.

    Its security group is closed, except to the clients in the settings and to groups that other stacks let
    in.
    """

    def __init__(
        self, scope: Construct, settings: DeploymentSettings, network: NetworkStack, assets: Assets
    ) -> None:
        super().__init__(scope, "database", settings, description="database", stateful=True)
        self.placement = network.placement
        self._facts = f"{PREFIX}/{settings.id}/database"
        self._engine = rds.DatabaseClusterEngine.aurora_postgres(
            version=rds.AuroraPostgresEngineVersion.of(settings.database.engine_version, "17")
        )
        self.key = key_of(self, "database", settings.database.key_arn)
        self.security_group = closed_group(
            self, "SecurityGroup", self.placement.vpc, f"{self.stack_name}: cluster and proxy"
        )
        let_clients_in(self.security_group, self.client_ports, settings.database)
        self.cluster = self._cluster()
        self._keep_logs()
        self.row_clusters = self._row_clusters()
        guard(self, self.cluster, self.row_clusters, assets)
        self.proxy = self._create_proxy() if settings.database.proxy else None
        self._tell()

    @property
    def port(self) -> int:
        """The port for clients: that of the proxy, or of the cluster when there is none."""
        return PORT if self.proxy is None else PROXY_PORT

    def fact(self, stack: cdk.Stack, name: Fact) -> str:
        """Returns a fact about this database for use in another stack.

        The fact is passed in an SSM parameter, which each deploy reads again. An export could not change
        while another stack uses it. Then the cluster could not be replaced, for example by one from a
        snapshot.
        """
        return self._read_fact(stack, name)

    def arn(self, stack: cdk.Stack) -> str:
        """Returns the ARN of the cluster, for use in another stack."""
        return arn(stack, "rds", f"cluster:{self.fact(stack, 'cluster')}")

    def dsn(self, stack: cdk.Stack, role: str) -> str:
        """Returns the connection string for clients of another stack."""
        proxy = "" if self.proxy is None else "&proxy=true"
        return f"rds-iam://{role}@{self.fact(stack, 'host')}:{self.port}/{NAME}?region={stack.region}{proxy}"

    def row_indexes(self, stack: cdk.Stack) -> list[str]:
        """Returns the databases in which row tables are indexed, as `host:port/database`."""
        own = [f"{host}:{PORT}/{ROWS_NAME}" for host in self._row_facts(stack, "host")]
        return own or [f"{self.fact(stack, 'host')}:{self.port}/{name}" for name in self.row_databases]

    def _own_row_indexes(self) -> list[str]:
        """Returns the databases in which row tables are indexed, as `host:port/database`.

        The host names are references that only this stack can use.
        """
        host = self.cluster.cluster_endpoint.hostname if self.proxy is None else self.proxy.endpoint
        return [
            *(f"{host}:{self.port}/{name}" for name in self.row_databases),
            *(f"{each.cluster_endpoint.hostname}:{PORT}/{ROWS_NAME}" for each in self.row_clusters),
        ]

    @property
    def row_databases(self) -> list[str]:
        """The databases of the instance's cluster in which row tables are indexed."""
        rows = self.settings.rows
        count = 0 if rows is None or rows.own_clusters else rows.databases
        return [f"{ROWS_NAME}_{number}" for number in range(1, count + 1)]

    def row_index_dsns(self, stack: cdk.Stack, role: str) -> str:
        """Returns the value of `DORMOUSE_ROW_INDEXES` for clients of another stack."""
        proxied = self.proxy is not None and bool(self.row_databases)
        more = f"?region={stack.region}{'&proxy=true' if proxied else ''}"
        return " ".join(f"rds-iam://{role}@{where}{more}" for where in self.row_indexes(stack))

    def row_cluster_facts(self, stack: cdk.Stack) -> list[dict[str, str]]:
        """Returns the `host` and the master user's `secret` of each cluster that only indexes row tables."""
        names = ("host", "secret")
        return [{name: self._read_fact(stack, f"{row}/{name}") for name in names} for row in self._rows]

    def logins(self, stack: cdk.Stack, role: str, *, to_rows: bool) -> list[str]:
        """Returns the ARNs on which a role in IAM needs `rds-db:connect` to log in as a database role.

        With `to_rows`, they include the clusters that only index row tables.
        """
        resources = [self.fact(stack, "login")]
        if to_rows:
            resources += self._row_facts(stack, "resource")
        return [user_arn(stack, one, role) for one in resources]

    def let_in(
        self, role: str, security_group: ec2.SecurityGroup, grantee: iam.Role, *, to_rows: bool = False
    ) -> None:
        """Allows a security group and an IAM role of another stack to connect as the database role `role`.

        With `to_rows`, this includes the clusters that only index row tables.
        """
        ports = self.client_ports if to_rows else ec2.Port.tcp(self.port)
        security_group.connections.allow_to(self.security_group, ports, "the database")
        allow(grantee, ["rds-db:connect"], self.logins(cdk.Stack.of(grantee), role, to_rows=to_rows))

    def let_in_as_administrator(self, security_group: ec2.SecurityGroup, grantee: iam.Role) -> None:
        """Allows a security group and an IAM role to connect to the clusters as the master user.

        They connect directly, not through an RDS Proxy. The IAM role may also log in with a token instead of
        the password.
        """
        stack = cdk.Stack.of(grantee)
        resources = [self.fact(stack, "resource"), *self._row_facts(stack, "resource")]
        security_group.connections.allow_to(self.security_group, ec2.Port.tcp(PORT), "the database")
        users = [user_arn(stack, one, ADMINISTRATOR) for one in resources]
        allow(grantee, ["rds-db:connect"], users)

    @property
    def client_ports(self) -> ec2.Port:
        """The ports of the cluster or its RDS Proxy, and of the clusters that only index row tables.

        They form one range, because a security group has at most 60 rules.
        """
        rows, has_proxy = self.settings.rows, self.settings.database.proxy
        if has_proxy and rows is not None and rows.own_clusters:
            return ec2.Port.tcp_range(PROXY_PORT, PORT)
        return ec2.Port.tcp(PROXY_PORT if has_proxy else PORT)

    def _row_facts(self, stack: cdk.Stack, name: str) -> list[str]:
        """Returns a fact about each cluster that only indexes row tables."""
        return [self._read_fact(stack, f"{row}/{name}") for row in self._rows]

    @property
    def _rows(self) -> list[str]:
        """The names of the clusters that only index row tables, before the names of their facts."""
        return [f"rows/{number}" for number in range(1, len(self.row_clusters) + 1)]

    def _read_fact(self, stack: cdk.Stack, name: str) -> str:
        stack.add_stack_dependency(self, "parameters of the database")
        return ssm.StringParameter.value_for_string_parameter(stack, f"{self._facts}/{name}")

    def _write_facts(self, construct_id: str, below: str, facts: Mapping[Any, str]) -> None:
        scope = Construct(self, construct_id)
        for name, value in facts.items():
            path = f"{self._facts}/{below}{name}"
            ssm.StringParameter(scope, name.capitalize(), parameter_name=path, string_value=value)

    def _cluster(self) -> rds.DatabaseCluster:
        settings = self.settings.database
        names = ["Writer", *(f"Reader{number}" for number in range(1, settings.readers + 1))]
        serverless = settings if isinstance(settings, ServerlessDatabase) else None
        instance_class = None if isinstance(settings, ServerlessDatabase) else settings.instance_class
        writer, *readers = [self._instance(name, instance_class) for name in names]
        pause_seconds = settings.pause_after_seconds
        cluster = self._create_cluster(
            self,
            "Cluster",
            writer=writer,
            readers=readers,
            serverless_v2_min_capacity=serverless.min_acu if serverless else None,
            serverless_v2_max_capacity=serverless.max_acu if serverless else None,
            serverless_v2_auto_pause_duration=cdk.Duration.seconds(pause_seconds) if pause_seconds else None,
            default_database_name=NAME,
            parameter_group=self._parameters(self, f"Dormouse {self.settings.id}"),
            storage_type=STORAGE_TYPES[settings.storage],
            enable_performance_insights=settings.insights,
            performance_insight_encryption_key=self.key if settings.insights else None,
            backup_days=settings.backup_days,
            deletion_protection=self.settings.protected,
            removal_policy=self.removal_policy,
            cloudwatch_logs_exports=["postgresql"],
        )
        if settings.snapshot is not None:
            self._restore(cluster, settings.snapshot)
        if self.settings.protected:
            self._keep_with(cluster)
        else:
            acknowledge(cluster, "AwsSolutions-RDS10", "the settings say that it may be destroyed")
        return cluster

    def _row_clusters(self) -> list[rds.DatabaseCluster]:
        """Creates the serverless clusters that only index row tables. They are deleted with the stack."""
        rows = self.settings.rows
        if rows is None or not rows.own_clusters:
            return []
        scope = Construct(self, "Rows")
        group = self._parameters(scope, f"Dormouse {self.settings.id}, rows")
        clusters = []
        for number in range(1, rows.databases + 1):
            cluster = self._create_cluster(
                scope,
                f"Cluster{number}",
                writer=self._instance("Writer"),
                serverless_v2_min_capacity=0,
                serverless_v2_max_capacity=rows.max_acu,
                serverless_v2_auto_pause_duration=cdk.Duration.seconds(300),
                default_database_name=ROWS_NAME,
                parameter_group=group,
                backup_days=1,
                removal_policy=cdk.RemovalPolicy.DESTROY,
            )
            acknowledge(cluster, "AwsSolutions-RDS10", "its contents can be rebuilt from the objects")
            facts = {
                "host": cluster.cluster_endpoint.hostname,
                "resource": cluster.cluster_resource_identifier,
                "secret": _secret_arn(cluster),
            }
            self._write_facts(f"FactsRows{number}", f"rows/{number}/", facts)
            clusters.append(cluster)
        return clusters

    def _create_cluster(
        self, scope: Construct, construct_id: str, *, backup_days: int, **more: Any
    ) -> rds.DatabaseCluster:
        """Creates a cluster with the properties that all clusters have, and `more`."""
        settings = self.settings.database
        return rds.DatabaseCluster(
            scope,
            construct_id,
            engine=self._engine,
            port=PORT,
            credentials=rds.Credentials.from_username(ADMINISTRATOR, encryption_key=self.key),
            manage_master_user_password=True,
            iam_authentication=True,
            storage_encryption_key=self.key,
            preferred_maintenance_window=settings.maintenance_window,
            backup=rds.BackupProps(
                retention=cdk.Duration.days(backup_days), preferred_window=settings.backup_window
            ),
            vpc=self.placement.vpc,
            vpc_subnets=self.placement.selection,
            security_groups=[self.security_group],
            **more,
        )

    def _parameters(self, scope: Construct, description: str) -> rds.ParameterGroup:
        """Creates the parameter group of clusters, with values in PostgreSQL's units."""
        return rds.ParameterGroup(
            scope,
            "Parameters",
            engine=self._engine,
            description=description,
            parameters={
                "rds.force_ssl": "1",
                "track_commit_timestamp": "1",
                "idle_session_timeout": str(self.settings.database.idle_session_seconds * 1_000),
                # The file tables change constantly: small and frequent rounds prevent bloat.
                "autovacuum_naptime": "15",
                "autovacuum_max_workers": "6",
                "autovacuum_vacuum_scale_factor": "0.05",
                "autovacuum_analyze_scale_factor": "0.02",
                "autovacuum_vacuum_insert_scale_factor": "0.1",
                "autovacuum_vacuum_cost_limit": "2000",
                "log_lock_waits": "1",
            },
        )

    def _create_proxy(self) -> rds.DatabaseProxy:
        """Creates an RDS Proxy, which uses IAM tokens and stores no passwords.

        It has the security group of the cluster, so that clients need no change when it comes or goes. Its
        name differs for other subnets: with these, the proxy is replaced.
        """
        scope = Construct(self, "Proxy")
        role = iam.Role(scope, "Role", assumed_by=iam.ServicePrincipal("rds.amazonaws.com"))
        cluster_id = self.cluster.cluster_resource_identifier
        allow(role, ["rds-db:connect"], [user_arn(self, cluster_id, user) for user in ROLES])
        subnets = json.dumps(self.resolve([subnet.subnet_id for subnet in self.placement.subnets]))
        return rds.DatabaseProxy(
            scope,
            "Proxy",
            db_proxy_name=f"{self.stack_name}-{hashlib.sha256(subnets.encode()).hexdigest()[:6]}",
            proxy_target=rds.ProxyTarget.from_cluster(self.cluster),
            default_auth_scheme=rds.DefaultAuthScheme.IAM_AUTH,
            iam_auth=True,
            require_tls=True,
            role=role,
            vpc=self.placement.vpc,
            vpc_subnets=self.placement.selection,
            security_groups=[self.security_group],
        )

    @staticmethod
    def _keep_with(cluster: rds.DatabaseCluster) -> None:
        """Keeps the writer and the subnet group of a kept cluster when they are removed from the stack.

        A kept cluster needs both. Readers are deleted: they hold no data, and would still cost money after
        the settings dropped them.
        """
        for child in cluster.node.find_all():
            is_writer = isinstance(child, rds.CfnDBInstance) and "/Writer/" in child.node.path
            if is_writer or isinstance(child, rds.CfnDBSubnetGroup):
                assert isinstance(child, cdk.CfnResource)  # noqa: S101
                child.apply_removal_policy(KEPT)

    @staticmethod
    def _restore(cluster: rds.DatabaseCluster, snapshot: str) -> None:
        """Makes CloudFormation create the cluster from a snapshot, which contains its database and its user.

        RDS still manages the password.
        """
        created = resource(cluster, rds.CfnDBCluster)
        created.snapshot_identifier = snapshot
        for name in ("DatabaseName", "MasterUsername", "StorageEncrypted"):
            created.add_property_deletion_override(name)

    def _instance(self, name: str, instance_class: str | None = None) -> rds.IClusterInstance:
        """Returns a writer or a reader: serverless, unless it has a class."""
        # CloudFormation sends a version only when the settings change it, so that upgrades by AWS stay.
        common: dict[str, Any] = {
            "auto_minor_version_upgrade": self.settings.database.minor_upgrades,
            "preferred_maintenance_window": self.settings.database.maintenance_window,
            "publicly_accessible": False,
        }
        if instance_class is None:
            # a reader that takes over must have the size of the writer
            return rds.ClusterInstance.serverless_v2(name, scale_with_writer=True, **common)
        return rds.ClusterInstance.provisioned(name, instance_type=ec2.InstanceType(instance_class), **common)

    def _keep_logs(self) -> None:
        """Creates the log group of the cluster. Otherwise RDS would create one whose entries never expire."""
        name = f"/aws/rds/cluster/{self.cluster.cluster_identifier}/postgresql"
        logs = log_group(self, "Logs", days=self.settings.database.log_days, name=name)
        for child in self.cluster.node.find_all():
            if isinstance(child, rds.CfnDBInstance):
                child.node.add_dependency(logs)

    def _tell(self) -> None:
        cluster, proxy = self.cluster, self.proxy
        facts: dict[Fact, str] = {
            "cluster": cluster.cluster_identifier,
            "resource": cluster.cluster_resource_identifier,
            "endpoint": cluster.cluster_endpoint.hostname,
            "host": cluster.cluster_endpoint.hostname if proxy is None else proxy.endpoint,
            "login": cluster.cluster_resource_identifier if proxy is None else _proxy_id(proxy),
            "secret": _secret_arn(cluster),
            "key": self.key.key_arn,
        }
        self._write_facts("Facts", "", facts)
        self.export_value(self.security_group.security_group_id)
        self.describe(
            DatabaseResources(
                cluster=cluster.cluster_identifier,
                kind=self.settings.database.kind,
                endpoint=cluster.cluster_endpoint.hostname,
                port=self.port,
                name=NAME,
                proxy=proxy.endpoint if proxy is not None else None,
                row_indexes=tuple(self._own_row_indexes()) or None,
                row_clusters=tuple(one.cluster_identifier for one in self.row_clusters) or None,
                storage=self.settings.database.storage,
            )
        )


def _secret_arn(cluster: rds.DatabaseCluster) -> str:
    """Returns the ARN of the secret with the password of the master user."""
    assert cluster.secret is not None  # noqa: S101
    return cluster.secret.secret_arn


def _proxy_id(proxy: rds.DatabaseProxy) -> str:
    """Returns the resource id of an RDS Proxy."""
    return cdk.Fn.select(6, cdk.Fn.split(":", proxy.db_proxy_arn))
