"""The resources of CloudTrail and AWS Backup that the emulator lacks, with the checks that AWS makes.

CloudTrail checks that the bucket's policy lets it write. AWS Backup checks that the role trusts it.
"""

from __future__ import annotations

import json
from typing import Any

from ministack.core import iam_evaluator
from ministack.core.iam_evaluator import EvalContext
from ministack.services import backup, cloudtrail, iam, s3
from ministack.services.cloudformation import provisioners
from ministack.services.cloudformation.provisioners import _RESOURCE_HANDLERS as HANDLERS

from tests.deploy_local.emulated_cluster import ACCOUNT, REGION

CLOUDTRAIL, BACKUP = "cloudtrail.amazonaws.com", "backup.amazonaws.com"


def keep_records() -> None:
    HANDLERS["AWS::CloudTrail::Trail"] = {
        "create": _create_trail,
        "update": _update_trail,
        "delete": lambda name, _props: cloudtrail._delete_trail({"Name": name}),
    }
    HANDLERS["AWS::Backup::BackupSelection"] = {"create": _create_selection, "delete": _delete_selection}
    provisioners._STACK_TAG_PROPERTY["AWS::CloudTrail::Trail"] = ("Tags", "list")


def _create_trail(_logical_id: str, props: dict[str, Any], _stack: str) -> tuple[str, dict[str, str]]:
    name, bucket = props["TrailName"], props["S3BucketName"]
    arn = f"arn:aws:cloudtrail:{REGION}:{ACCOUNT}:trail/{name}"
    for action, resource in (
        ("s3:GetBucketAcl", f"arn:aws:s3:::{bucket}"),
        ("s3:PutObject", f"arn:aws:s3:::{bucket}/AWSLogs/{ACCOUNT}/CloudTrail/{REGION}/1.json.gz"),
    ):
        request = EvalContext(
            principal_arn="",
            principal_type="Service",
            principal_account=ACCOUNT,
            action=action,
            resource_arn=resource,
            region=REGION,
            secure_transport=True,
            service_context={
                "aws:sourcearn": arn,
                "aws:sourceaccount": ACCOUNT,
                "s3:x-amz-acl": "bucket-owner-full-control",
                "s3:tlsversion": "1.3",
            },
        )
        policy = s3._bucket_policies.get(bucket)
        policy = policy.decode() if isinstance(policy, bytes) else policy
        if iam_evaluator.evaluate_resource_policy(policy, request, CLOUDTRAIL).decision != "Allow":
            raise ValueError(f"InsufficientS3BucketPolicyException: {bucket} does not let {name} {action}")
    _answer(cloudtrail._create_trail(_body(props)))
    _select(props)
    return name, {"Arn": arn, "SnsTopicArn": ""}


def _update_trail(
    name: str, _old: dict[str, Any], new: dict[str, Any], _stack: str
) -> tuple[str, dict[str, str]]:
    _answer(cloudtrail._update_trail(_body(new)))
    _select(new)
    return name, {"Arn": f"arn:aws:cloudtrail:{REGION}:{ACCOUNT}:trail/{name}", "SnsTopicArn": ""}


def _body(props: dict[str, Any]) -> dict[str, Any]:
    kept = ("S3BucketName", "IncludeGlobalServiceEvents", "IsMultiRegionTrail", "EnableLogFileValidation")
    return {"Name": props["TrailName"], **{name: props[name] for name in kept if name in props}}


def _select(props: dict[str, Any]) -> None:
    """Sets the events that the trail logs from now on, and starts it if `IsLogging` is set."""
    given = {"TrailName": props["TrailName"], "AdvancedEventSelectors": props["AdvancedEventSelectors"]}
    _answer(cloudtrail._put_event_selectors(given))
    if props["IsLogging"]:
        _answer(cloudtrail._start_logging({"Name": props["TrailName"]}))


def _create_selection(_logical_id: str, props: dict[str, Any], _stack: str) -> tuple[str, dict[str, str]]:
    plan, selection = props["BackupPlanId"], props["BackupSelection"]
    role = iam._roles.get(selection["IamRoleArn"].rpartition("/")[2])
    trusted = json.dumps(role["AssumeRolePolicyDocument"]) if role else ""
    if BACKUP not in trusted:
        raise ValueError(f"InvalidParameterValueException: AWS Backup cannot take {selection['IamRoleArn']}")
    made = _answer(backup._create_selection(plan, {"BackupSelection": selection}))
    name = f"{made['SelectionId']}_{plan}"
    return name, {"Id": name, "SelectionId": made["SelectionId"], "BackupPlanId": plan}


def _delete_selection(name: str, _props: dict[str, Any]) -> None:
    selection, _, plan = name.partition("_")
    backup._delete_selection(plan, selection)


def _answer(answer: Any) -> Any:
    """Returns the body of an answer of the emulator; raises ValueError when it is a refusal."""
    status, _, body = answer
    if status >= 400:
        raise ValueError(body.decode() if isinstance(body, bytes) else str(body))
    return json.loads(body or b"{}")
