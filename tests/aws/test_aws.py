"""Calls of AWS: the names of the rights that they need, and errors when another server answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import boto3
import pytest

from dormouse.aws.aws import action
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
