"""Calls of AWS: the names of the rights that they need, and errors when another server answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from dormouse.aws import aws as aws_module
from dormouse.aws.aws import AwsRefused, action
from dormouse.errors import InstanceError
from tests.support.aws import Aws


@pytest.mark.parametrize(
    ("service", "operation", "named"),
    [
        ("rds", "describe_db_instances", "rds:DescribeDBInstances"),
        ("rds", "describe_orderable_db_instance_options", "rds:DescribeOrderableDBInstanceOptions"),
        ("rds", "stop_db_cluster", "rds:StopDBCluster"),
        ("emr", "list_clusters", "elasticmapreduce:ListClusters"),
        ("stepfunctions", "list_executions", "states:ListExecutions"),
        ("service-quotas", "get_service_quota", "servicequotas:GetServiceQuota"),
        ("s3", "list_object_versions", "s3:ListBucketVersions"),
        ("s3", "delete_objects", "s3:DeleteObjectVersion"),
    ],
)
def test_a_right_has_the_name_that_policies_give_it(service: str, operation: str, named: str) -> None:
    assert action(service, operation) == named


class Portal(BaseHTTPRequestHandler):
    """A captive portal that answers every request with its login page."""

    def do_POST(self) -> None:
        body = b"<!doctype html>\n<p>Log in to the guests' network"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def portal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Portal)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_an_answer_from_another_server_is_one_clear_line(portal: None) -> None:
    session = boto3.session.Session("id", "secret", region_name="eu-west-1")
    with pytest.raises(
        InstanceError, match="the answer for rds did not come from AWS: check the network, its proxy"
    ):
        Aws(session).call("rds", "describe_db_clusters")


class IdleLambda:
    """A lambda that AWS made inactive: the first call starts its recovery, which takes `calls` calls."""

    def __init__(self, calls: int) -> None:
        self.calls, self.refused, self.runs = calls, 0, 0

    def client(self, *_: object, **__: object) -> IdleLambda:
        return self

    def invoke(self, **given: Any) -> dict[str, Any]:
        if self.refused < self.calls:
            self.refused += 1
            code = "ResourceNotReadyException" if self.refused == 1 else "ResourceConflictException"
            error: Any = {"Error": {"Code": code, "Message": "the function is not active"}}
            raise ClientError(error, "Invoke")
        self.runs += 1
        return {"Payload": BytesIO(given["Payload"])}


def test_an_inactive_lambda_is_called_until_it_is_active_and_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aws_module, "ACTIVE_PAUSE_SECONDS", 0.01)
    idle = IdleLambda(4)
    assert Aws(idle).invoke("tables", {"a": 1}, seconds_max=5) == {"a": 1}
    assert (idle.refused, idle.runs) == (4, 1)


def test_a_lambda_that_stays_inactive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws_module, "ACTIVE_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(aws_module, "ACTIVE_SECONDS_MAX", 0.05)
    idle = IdleLambda(1_000)
    with pytest.raises(AwsRefused, match="the function is not active"):
        Aws(idle).invoke("tables", {}, seconds_max=5)
    assert idle.runs == 0
