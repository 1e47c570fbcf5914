"""Helpers for tests of runs on EMR: environments as stacks write them, runs, and stubbed clients."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.stub import Stubber

from dormouse.aws.aws import Aws
from dormouse.aws.emr import Run
from dormouse.settings.lambdas import RunsEnvironment, load_environment

REGION = "eu-west-1"
ROLE = "arn:aws:iam::123456789012:role/run"
LABEL = "emr-7.13.0"  # the newest release that moto knows
ARN = f"arn:aws:emr-serverless:{REGION}:123456789012:/applications/app1/jobruns/run1"
TEMPLATE = {
    "ReleaseLabel": LABEL,
    "LogUri": "s3://logs/",
    "Instances": {"MasterInstanceType": "m7g.xlarge", "SlaveInstanceType": "m7g.xlarge", "InstanceCount": 2},
    "JobFlowRole": "EMR_EC2_DefaultRole",
    "ServiceRole": "EMR_DefaultRole",
    "VisibleToAllUsers": True,
}
COMMON = {
    "instance_id": "dev",
    "dsn": "rds-iam://dormouse_run@db:5432/dormouse?region=eu-west-1",
    "objects": "s3://bucket/data",
    "archive": "s3://assets/0123.tar.gz",
    "entry": "s3://assets/4567.py",
}


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)


def settings(monkeypatch: pytest.MonkeyPatch, engine: str, **more: Any) -> RunsEnvironment:
    """Sets the environment that a stack gives to the lambda; returns the settings that the lambda reads."""
    given = {**COMMON, "engine": engine, **more}
    if engine != "emr-serverless":
        given |= {"cluster_name": "dormouse-dev", "cluster_template": json.dumps(TEMPLATE)}
    for name, value in RunsEnvironment.variables(**given).items():
        monkeypatch.setenv(name, value)
    return load_environment(RunsEnvironment)


def new_run(jobs: int = 10) -> Run:
    run_id = str(uuid4())
    return Run(run_id, "compaction", f"s3://bucket/data/runs/{run_id}.json", jobs)


def stubbed(service: str) -> tuple[Aws, Stubber]:
    aws = Aws(boto3.session.Session(region_name=REGION))
    client = boto3.client(service, region_name=REGION)
    aws._clients[service] = client
    stubber = Stubber(client)
    stubber.activate()
    return aws, stubber
