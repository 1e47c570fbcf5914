"""A user's own CDK app: an instance of Dormouse, and beside it a lambda that reads its tables."""

import os

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct
from dormouse_cdk import Dormouse

SETTINGS = {
    "id": "sales",
    "database": {"kind": "serverless", "min_acu": 0, "max_acu": 4},
    "commit": {},
    "garbage": {},
}
"""The settings, as in a file of config/ (docs/reference/deployment-settings.md)."""


CODE = """
def handler(event, context):
    return "here your package says dormouse.connect(…).table(…).query(…)"
"""


class Report(cdk.Stack):
    def __init__(self, scope: Construct, construct_id: str, *, lake: Dormouse) -> None:
        super().__init__(scope, construct_id)
        group = ec2.SecurityGroup(self, "Group", vpc=lake.vpc, allow_all_outbound=False)
        role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AWSLambdaVPCAccessExecutionRole")
            ],
        )
        lambda_.Function(
            self,
            "Report",
            code=lambda_.Code.from_inline(CODE),
            handler="index.handler",
            runtime=lambda_.Runtime.PYTHON_3_13,
            timeout=cdk.Duration.minutes(2),  # a database that sleeps wakes within 40 seconds
            vpc=lake.vpc,
            vpc_subnets=lake.subnets,
            security_groups=[group],
            role=role,
            environment=lake.let_in(role, group),  # what dormouse.connect() needs to know
        )
        cdk.CfnOutput(self, "Data", value=lake.data_bucket.bucket_name)
        cdk.CfnOutput(self, "Database", value=lake.database_security_group.security_group_id)
        for number, (queue, dead) in enumerate(zip(lake.queues, lake.dead_letters, strict=True), 1):
            cdk.CfnOutput(self, f"Queue{number}", value=queue.queue_url)
            cdk.CfnOutput(self, f"DeadLetters{number}", value=dead.queue_url)


app = cdk.App()
account, region = os.environ.get("CDK_DEFAULT_ACCOUNT"), os.environ.get("CDK_DEFAULT_REGION")
test = cdk.Stage(app, "test", env=cdk.Environment(account=account, region=region))
Report(test, "report", lake=Dormouse(test, "lake", SETTINGS))
app.synth()
