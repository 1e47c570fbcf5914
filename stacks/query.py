"""The query service: `dormouse serve` on Fargate, behind an internal load balancer.

Resources that cost money even without queries are below `awake`, and exist while the parameter `Running` is
true. `dormouse pause` and `resume` update only this parameter of the stack. Free resources stay, and with
them the name, the token and the security groups that clients use.
"""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elbv2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_route53 as route53
from aws_cdk import aws_route53_targets as targets
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from dormouse.settings.database import QuerySettings
from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.resources import QueryResources
from dormouse.settings.service import SERVICE_PREFIX
from stacks.constructs.endpoints import TASK_SERVICES, Endpoints, endpoints_group
from stacks.constructs.fargate import STOP_SECONDS, fargate_cluster, fargate_service, fargate_task
from stacks.constructs.function import Placement
from stacks.constructs.monitors import Awake, Monitors
from stacks.constructs.permissions import acknowledge, allow
from stacks.constructs.security_group import closed_group, group_with_s3, let_clients_in
from stacks.constructs.sleeping import only_while
from stacks.database import READ_ROLE, RUN_ROLE
from stacks.foundation import UpperStack, foundation_of
from stacks.instance_stack import title
from stacks.part import Part
from stacks.storage import BALANCER_LOGS, CHANGE_ACTIONS

SERVICE = "query"
"""The name of the service in its cluster. It is constant because metrics and commands use it."""

HEALTH_PATH = "/health"
"""The path of health checks. It does not query the database, and so does not keep the database awake."""

STARTS_SECONDS_MAX = 120
PORT = 8088
STOP_SPARE_SECONDS = 10

TOKEN_CHARACTERS = 43
"""The length of a token: 43 of 62 characters make 256 bits."""


class Query(Part):
    """The query service.

    Its cluster and its target group exist even while the service sleeps.
    """

    def __init__(self, stack: UpperStack, query: QuerySettings) -> None:
        super().__init__(stack, "query")
        self._query = query
        self._placement = self.foundation.network.placement
        self.task = _Task(self, "Task", query=query)
        self.cluster = fargate_cluster(
            self, "AWS/ECS and AWS/ApplicationELB have CPU, memory and requests for free"
        )
        self.target_group = self._target_group()
        clients = self._clients()
        zone = route53.PrivateHostedZone(
            self, "Zone", vpc=self._placement.vpc, zone_name=query.host_of(self.settings.id)
        )
        self.endpoints_group = endpoints = (
            endpoints_group(self, "interface endpoints", self.task.security_group, "from the tasks")
            if query.endpoints != "existing"
            else None
        )
        self.awake = Construct(self, "Awake")
        self._service = self._wake(clients, zone, endpoints)
        only_while(stack.is_running, self.awake)
        self._tell(endpoints is not None)

    def let_read(self, reader: iam.ManagedPolicy) -> None:
        allow(reader, ["secretsmanager:GetSecretValue"], [self.task.token.secret_arn])

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        awake = Awake(self.stack.is_running, self._service)
        targets = self.target_group.target_group_full_name
        monitors.query(self.cluster.cluster_name, SERVICE, targets, awake)

    def _target_group(self) -> elbv2.ApplicationTargetGroup:
        return elbv2.ApplicationTargetGroup(
            self,
            "Targets",
            vpc=self._placement.vpc,
            port=PORT,
            protocol=elbv2.ApplicationProtocol.HTTP,
            target_type=elbv2.TargetType.IP,
            # Queries take milliseconds to minutes: round robin would pile them up on one task.
            load_balancing_algorithm_type=elbv2.TargetGroupLoadBalancingAlgorithmType.LEAST_OUTSTANDING_REQUESTS,
            # A stopping task gets no more requests, and finishes its answers first.
            deregistration_delay=cdk.Duration.seconds(self._query.seconds_max),
            health_check=elbv2.HealthCheck(
                path=HEALTH_PATH,
                interval=cdk.Duration.seconds(15),
                timeout=cdk.Duration.seconds(5),
                healthy_threshold_count=2,
                unhealthy_threshold_count=3,
            ),
        )

    def _clients(self) -> ec2.SecurityGroup:
        """Creates the security group of the load balancer, which is open to the clients in the settings."""
        group = closed_group(self, "BalancerGroup", self._placement.vpc, f"{self.title}: load balancer")
        let_clients_in(group, ec2.Port.tcp(self._query.port), self._query)
        group.connections.allow_to(self.task.security_group, ec2.Port.tcp(PORT), "to the tasks")
        return group

    def _wake(
        self, clients: ec2.SecurityGroup, zone: route53.PrivateHostedZone, endpoints: ec2.SecurityGroup | None
    ) -> ecs.FargateService:
        """Creates the service, and the resources that exist only while it runs."""
        target = targets.LoadBalancerTarget(self._balancer(clients))
        route53.ARecord(self.awake, "Record", zone=zone, target=route53.RecordTarget.from_alias(target))
        service = self._create_service()
        if endpoints is not None:
            service.node.add_dependency(
                Endpoints(self.awake, services=TASK_SERVICES, security_group=endpoints)
            )
        return service

    def _balancer(self, clients: ec2.SecurityGroup) -> elbv2.ApplicationLoadBalancer:
        """Creates the load balancer. It serves HTTPS with a certificate, else HTTP within the VPC."""
        certificate = self._query.certificate_arn
        balancer = elbv2.ApplicationLoadBalancer(
            Construct(self.awake, "Balancer"),
            "LoadBalancer",
            vpc=self._placement.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=one_in_each_zone(self._placement)),
            internet_facing=False,
            security_group=clients,
            idle_timeout=cdk.Duration.seconds(self._query.idle_seconds),
            drop_invalid_header_fields=True,
            deletion_protection=False,  # it has no data, and a pause deletes it, also of a protected instance
        )
        # Set directly, as the method for it needs to know the region.
        logs = {"enabled": "true", "bucket": self.foundation.storage.access_logs.bucket_name}
        for name, value in {**logs, "prefix": BALANCER_LOGS}.items():
            balancer.set_attribute(f"access_logs.s3.{name}", value)
        balancer.add_listener(
            "Listener",
            port=self._query.port,
            protocol=elbv2.ApplicationProtocol.HTTPS if certificate else elbv2.ApplicationProtocol.HTTP,
            certificates=[elbv2.ListenerCertificate.from_arn(certificate)] if certificate else None,
            ssl_policy=elbv2.SslPolicy.TLS13_RES if certificate else None,
            default_target_groups=[self.target_group],
            open=False,
        )
        return balancer

    def _create_service(self) -> ecs.FargateService:
        query = self._query
        service = fargate_service(
            self.awake,
            SERVICE,
            self.cluster,
            self.task.definition,
            self.task.security_group,
            min_healthy_percent=100,
            max_healthy_percent=200,
            health_check_grace_period=cdk.Duration.seconds(STARTS_SECONDS_MAX),
        )
        service.attach_to_application_target_group(self.target_group)
        service.node.add_dependency(self.task)  # includes the permissions of its roles, and its network rules
        scaling = service.auto_scale_task_count(min_capacity=query.tasks_min, max_capacity=query.tasks_max)
        scaling.scale_on_cpu_utilization("Cpu", target_utilization_percent=query.cpu_percent)
        scaling.scale_on_request_count(
            "Requests", requests_per_target=query.requests_minute, target_group=self.target_group
        )
        return service

    def _tell(self, has_endpoints: bool) -> None:
        query = self._query
        self.describe(
            QueryResources(
                url=query.url(self.settings.id),
                token=self.task.token.secret_arn,
                cluster=self.cluster.cluster_name,
                service=SERVICE,
                tasks_min=query.tasks_min,
                cpu=query.cpu,
                memory_mb=query.memory_mb,
                endpoints=len(TASK_SERVICES) if has_endpoints else 0,
            )
        )


def one_in_each_zone(placement: Placement) -> list[ec2.ISubnet]:
    """Returns one subnet for each zone, since a load balancer accepts no more."""
    return list({subnet.availability_zone: subnet for subnet in reversed(placement.subnets)}.values())[::-1]


class _Task(Construct):
    """A task definition with its roles. `token` is the secret with the token that clients also need."""

    def __init__(self, scope: Construct, construct_id: str, *, query: QuerySettings) -> None:
        super().__init__(scope, construct_id)
        foundation = foundation_of(self)
        self.security_group = group_with_s3(self, foundation.network.placement.vpc, f"{title(self)}: tasks")
        self.token = secretsmanager.Secret(
            self,
            "Token",
            description=f"Dormouse {foundation.settings.id}: the token of the query service",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                password_length=TOKEN_CHARACTERS, exclude_punctuation=True
            ),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        acknowledge(
            self.token,
            "AwsSolutions-SMG4",
            "clients have it too, so a rotation must also update them and restart the tasks",
        )
        rows = foundation.settings.rows
        job_threads = rows.job_threads if rows else 0
        task = fargate_task(
            self,
            "query",
            cpu=query.cpu,
            memory_mb=query.memory_mb,
            disk_gb=query.disk_gb,
            roles=("Starts the tasks of the query service", "The query service"),
            database_role=RUN_ROLE if job_threads else READ_ROLE,
            object_actions=CHANGE_ACTIONS if job_threads else ["s3:GetObject"],
            security_group=self.security_group,
            environment=_environment(query, job_threads),
            image=query.image,
            log_days=query.log_days,
            secrets={f"{SERVICE_PREFIX}TOKEN": ecs.Secret.from_secrets_manager(self.token)},
            port_mappings=[ecs.PortMapping(container_port=PORT)],
        )
        self.definition = task.definition


def _environment(query: QuerySettings, job_threads: int) -> Mapping[str, str]:
    """Returns the environment variables of `dormouse serve`, without the token."""
    limits = {
        "QUERIES_MAX": query.queries_max,
        "ROWS_MAX": query.rows_max,
        "BYTES_MAX": query.bytes_max,
        "SECONDS_MAX": query.seconds_max,
        "SHUTDOWN_SECONDS_MAX": STOP_SECONDS - STOP_SPARE_SECONDS,
        "JOB_THREADS": job_threads or None,
    }
    return {
        f"{SERVICE_PREFIX}HOST": "0.0.0.0",  # noqa: S104
        f"{SERVICE_PREFIX}PORT": str(PORT),
        **{f"{SERVICE_PREFIX}{name}": str(most) for name, most in limits.items() if most is not None},
    }
