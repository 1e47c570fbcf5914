"""IAM users for the run. Each has one of the instance's managed policies and no other right."""

from __future__ import annotations

from dormouse.settings.resources import stack_name
from tests.deploy_local.account import Account

NAMES = ("operator", "reader")


def arrive(account: Account, name: str) -> dict[str, str]:
    """Creates the user; returns the environment variables with which it runs commands."""
    iam, policies = account.client("iam"), stack_name("local", "application")
    (stack,) = account.client("cloudformation").describe_stacks(StackName=policies)["Stacks"]
    outputs = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
    iam.create_user(UserName=name)
    iam.attach_user_policy(UserName=name, PolicyArn=outputs[f"{name.capitalize()}Arn"])
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


def leave(account: Account) -> None:
    """Detaches the policies from the users, because IAM does not delete an attached policy."""
    iam = account.client("iam")
    for name in NAMES:
        for policy in iam.list_attached_user_policies(UserName=name)["AttachedPolicies"]:
            iam.detach_user_policy(UserName=name, PolicyArn=policy["PolicyArn"])
