"""Interface endpoints, for subnets without another way to AWS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.security_group import closed_group
from stacks.foundation import foundation_of
from stacks.instance_stack import title

PULL_ACTIONS = [
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:GetAuthorizationToken",
    "ecr:GetDownloadUrlForLayer",
]
CHANNELS = [
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
]
"""The IAM actions that the agent of Session Manager needs for its channels."""

RECEIVE_ACTIONS = [
    "sqs:ChangeMessageVisibility",
    "sqs:DeleteMessage",
    "sqs:GetQueueAttributes",
    "sqs:ReceiveMessage",
    "sqs:SendMessage",
]
"""The actions with which a committer uses its queues. It sends a request again that waits for a lock."""

Services = Mapping[str, tuple[ec2.IInterfaceVpcEndpointService, Sequence[str]]]
"""The AWS services and their allowed actions, by purpose; without actions, all are allowed."""

PULL_SERVICES: Services = {
    "Images": (ec2.InterfaceVpcEndpointAwsService.ECR, PULL_ACTIONS),
    "Layers": (ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER, PULL_ACTIONS),
    "Logs": (
        ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
        ["logs:CreateLogStream", "logs:PutLogEvents"],
    ),
}
"""The services that all tasks on Fargate need, for their image and their log."""

TASK_SERVICES: Services = {
    **PULL_SERVICES,
    "Secrets": (
        ec2.InterfaceVpcEndpointAwsService.SECRETS_MANAGER,
        ["secretsmanager:DescribeSecret", "secretsmanager:GetSecretValue"],
    ),
}
"""The services that tasks of the query service need."""

QUEUE_SERVICES: Services = {
    "Queues": (ec2.InterfaceVpcEndpointAwsService.SQS, [*RECEIVE_ACTIONS, "sqs:GetQueueUrl"]),
}
"""The service that the task that commits also needs."""

SESSION_SERVICES: Services = {
    "Manager": (ec2.InterfaceVpcEndpointAwsService.SSM, ["ssm:UpdateInstanceInformation"]),
    "Messages": (ec2.InterfaceVpcEndpointAwsService.SSM_MESSAGES, CHANNELS),
}
"""The services that a host for Session Manager needs. Agents since version 3.3.40 do not need ec2messages."""


def emr_services(region: str) -> Services:
    """Returns the service by which EMR controls clusters in private subnets, since emr-spark-8.0.0.

    AWS documents no actions of it, so the endpoint has AWS's default policy.
    """
    return {"Emr": (ec2.InterfaceVpcEndpointService(f"aws.api.{region}.emr-service-cell01", 443), ())}


def endpoints_group(
    scope: Construct, description: str, clients: ec2.SecurityGroup, rule: str
) -> ec2.SecurityGroup:
    """Creates the security group of interface endpoints, which only their clients reach."""
    vpc = foundation_of(scope).network.placement.vpc
    group = closed_group(scope, "EndpointsGroup", vpc, f"{title(scope)}: {description}")
    group.connections.allow_from(clients, ec2.Port.tcp(443), rule)
    return group


class Endpoints(Construct):
    """Interface endpoints in only one subnet each, because they cost money in each zone.

    Machines in other subnets reach the endpoints by private DNS names.
    """

    def __init__(self, scope: Construct, *, services: Services, security_group: ec2.SecurityGroup) -> None:
        super().__init__(scope, "Endpoints")
        account, placement = cdk.Stack.of(self).account, foundation_of(self).network.placement
        self.ids: list[str] = []
        for name, (service, actions) in services.items():
            endpoint = ec2.InterfaceVpcEndpoint(
                self,
                name,
                vpc=placement.vpc,
                service=service,
                subnets=ec2.SubnetSelection(subnets=[placement.subnets[0]]),
                security_groups=[security_group],
                private_dns_enabled=True,
                open=False,
            )
            if name in PULL_SERVICES:
                # The same id in each part, so that a deploy passes the endpoint on to another part. It could
                # not create another one before it deletes this one, as only one can have the private name.
                made = endpoint.node.default_child
                assert isinstance(made, ec2.CfnVPCEndpoint)  # noqa: S101
                made.override_logical_id(f"Task{name}Endpoint")
            self.ids.append(endpoint.vpc_endpoint_id)
            if actions:
                # Else an intruder could send data out with credentials of another account.
                endpoint.add_to_policy(
                    iam.PolicyStatement(
                        principals=[iam.AnyPrincipal()],
                        actions=list(actions),
                        resources=["*"],
                        conditions={"StringEquals": {"aws:PrincipalAccount": account}},
                    )
                )
