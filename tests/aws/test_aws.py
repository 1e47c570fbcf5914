"""Calls of AWS: the names of the rights that they need, and errors when another server answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import boto3
import pytest

from dormouse.aws.aws import AwsRefused, action
from dormouse.errors import InstanceError
from dormouse.model import loops
from dormouse.settings.section import ACTIVE_SECONDS_MAX
from tests.fake_clock import FakeClock
from tests.lambda_states import StatefulLambda
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


class BrokenLambda(Portal):
    """Lambda's API: the function is active, and each call of it ends with an error of AWS."""

    calls: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(200, {"State": "Active"})

    def do_POST(self) -> None:
        self.calls.append(self.headers["X-Amz-Invocation-Type"])
        self._answer(500, {"Type": "Service", "Message": "an error of AWS"})

    def _answer(self, status: int, body: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("X-Amzn-ErrorType", "ServiceException")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("server", [Portal], indirect=True)
def test_an_answer_from_another_server_is_one_clear_line(server: None) -> None:
    session = boto3.session.Session("id", "secret", region_name="eu-west-1")
    with pytest.raises(
        InstanceError, match="the answer for rds did not come from AWS: check the network, its proxy"
    ):
        Aws(session).call("rds", "describe_db_clusters")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(loops, "time", found)
    return found


def test_an_inactive_lambda_is_called_until_it_is_active_and_runs_once(clock: FakeClock) -> None:
    runs: list[Any] = []
    idle = StatefulLambda(lambda event: runs.append(event) or event, clock, pending_seconds=200)
    assert Aws(idle).invoke("tables", {"a": 1}, seconds_max=5) == {"a": 1}
    assert (runs, idle.calls[0], {*idle.calls[1:-1]}) == ([{"a": 1}], "Inactive", {"Pending"})


@pytest.mark.parametrize("then", ["Inactive", "Failed"])
def test_a_lambda_that_stays_inactive_is_an_error(clock: FakeClock, then: str) -> None:
    idle = StatefulLambda(lambda event: pytest.fail("it runs"), clock, then=then)
    with pytest.raises(AwsRefused, match="The function is"):
        Aws(idle).invoke("tables", {}, seconds_max=5)
    assert clock.seconds == ACTIVE_SECONDS_MAX


@pytest.mark.parametrize("state", ["Active", "Inactive", "Pending"])
def test_an_event_is_queued_once_for_an_active_lambda(clock: FakeClock, state: str) -> None:
    runs: list[Any] = []
    idle = StatefulLambda(runs.append, clock, state=state, pending_seconds=200)
    if state == "Pending":
        clock.at.append((100, idle.become_active))
    Aws(idle).queue("migrate", {"a": 1})
    clock.sleep(1_000)
    assert (runs, idle.dropped) == ([{"a": 1}], 0)


def test_an_event_is_not_queued_for_a_lambda_that_does_not_become_active(clock: FakeClock) -> None:
    stuck = StatefulLambda(lambda event: pytest.fail("it runs"), clock, then="Inactive", pending_seconds=300)
    with pytest.raises(
        InstanceError, match="did not become active within 300 seconds: it is inactive: The fun"
    ):
        Aws(stuck).queue("migrate", {"a": 1})
    failed = StatefulLambda(lambda event: pytest.fail("it runs"), clock, state="Failed")
    began = clock.seconds
    with pytest.raises(InstanceError, match=r"is failed: The subnet does not exist\.; deploy it"):
        Aws(failed).queue("migrate", {"a": 1})
    assert (clock.seconds, failed.calls) == (began, [])


@pytest.mark.slow
@pytest.mark.parametrize("server", [BrokenLambda], indirect=True)
def test_an_event_that_aws_may_have_queued_is_not_sent_again(server: None) -> None:
    session = boto3.session.Session("id", "secret", region_name="eu-west-1")
    with pytest.raises(AwsRefused, match="an error of AWS"):
        Aws(session).queue("migrate", {"a": 1})
    assert BrokenLambda.calls == ["Event"]
