"""The stack `application` of an instance in moto: a small stack that sleeps by its parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dormouse.aws.switches import stack, update
from dormouse.settings.resources import ApplicationResources, Described, resources_parameter
from tests.deployed import REGION, Deployed
from tests.support.aws import Aws

STACK = "dormouse-dev-application"
TEMPLATE = {
    "Parameters": {
        "Running": {"Type": "String", "Default": "true"},
        "Other": {"Type": "String", "Default": "kept"},
    },
    "Resources": {"Kept": {"Type": "AWS::SQS::Queue", "Properties": {"QueueName": {"Ref": "Other"}}}},
}
PARTS = ("commit", "garbage", "compaction", "maintenance", "query", "access", "pause", "tables")


def add_application(deployed: Deployed, monkeypatch: pytest.MonkeyPatch, **parts: Described) -> None:
    """Creates the stack, writes its parameter and those of the parts, and answers calls of its lambda."""
    deployed.client("cloudformation").create_stack(
        StackName=STACK,
        TemplateBody=json.dumps(TEMPLATE),
        Parameters=[{"ParameterKey": "Other", "ParameterValue": "kept"}],
        Tags=[{"Key": "dormouse:instance", "Value": "dev"}],
    )
    write_part(deployed, "application", ApplicationResources(stack=STACK, switch="switch", parts=PARTS))
    for name, described in parts.items():
        write_part(deployed, name, described)

    def invoke(aws: Aws, function: str, payload: dict[str, Any], **more: Any) -> dict[str, bool]:
        assert function == "switch"
        described = stack(aws, STACK)
        assert described is not None
        return {"asked": update(aws, STACK, described, runs=payload["running"])}

    monkeypatch.setattr(Aws, "invoke", invoke)


def write_part(deployed: Deployed, name: str, described: Described) -> None:
    """Writes the parameter that describes a part of the instance `dev`."""
    deployed.client("ssm").put_parameter(
        Name=resources_parameter("dev", name),
        Value=described.model_dump_json(),
        Type="String",
        Overwrite=True,
    )


def parameters(deployed: Deployed) -> dict[str, str]:
    """Returns the stack's parameters by name. Moto updates parameters differently from CloudFormation."""
    [found] = deployed.client("cloudformation").describe_stacks(StackName=STACK)["Stacks"]
    return {one["ParameterKey"]: one["ParameterValue"] for one in found["Parameters"]}


def break_application() -> None:
    """Makes the stack one that CloudFormation could not roll back."""
    from moto.cloudformation.models import cloudformation_backends
    from moto.core import DEFAULT_ACCOUNT_ID

    stacks = cloudformation_backends[DEFAULT_ACCOUNT_ID][REGION].stacks.values()
    [broken] = [one for one in stacks if one.name == STACK]
    broken.status = "UPDATE_ROLLBACK_FAILED"


def wake_application(deployed: Deployed) -> None:
    """Starts the sleeping parts, even if the desired state of the instance is paused."""
    deployed.client("cloudformation").update_stack(
        StackName=STACK,
        UsePreviousTemplate=True,
        Parameters=[
            {"ParameterKey": "Running", "ParameterValue": "true"},
            {"ParameterKey": "Other", "UsePreviousValue": True},
        ],
    )
