"""Stand-ins for CloudFormation and AWS services, as the lambdas of a custom resource see them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from tests.fake_clock import FakeClock
from tests.lambda_states import StatefulLambda

STACK = "arn:stack"


class CloudFormation:
    """An HTTP server that receives the lambdas' answers at `url`, and refuses the first `refusals` of
    them.
    """

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.refusals = 0
        stack = self

        class Taker(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == ""
                stack.refusals -= 1
                if stack.refusals < 0:
                    stack.answers.append(json.loads(body))
                self.send_response(200 if stack.refusals < 0 else 503)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Discards the line."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/answer?signature=x"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def answer(self) -> dict[str, Any]:
        assert len(self.answers) == 1
        return self.answers[0]


def migration(url: str, **properties: str) -> dict[str, Any]:
    """Returns the event that creates a migration and is answered at `url`."""
    return {
        "RequestType": "Create",
        "ResponseURL": url,
        "StackId": STACK,
        "RequestId": "request",
        "LogicalResourceId": "Migration",
        "ResourceProperties": {
            "ServiceToken": "arn:lambda",
            "Host": "localhost",
            "Database": "dormouse",
            "User": "master",
            "Migrations": "c2",
            "DeployPaused": "false",
            **properties,
        },
    }


class Aws:
    """A substitute for a boto3 session, with the services that `begin` calls.

    It records the events that the lambda of migrations gets in `handed`. It also has the desired state, the
    status of the stack, and the engine version of each cluster in the stack.
    """

    def __init__(self) -> None:
        self.handed: list[dict[str, Any]] = []
        self.clock = FakeClock()
        self.migrating = StatefulLambda(self.handed.append, self.clock, state="Active")
        self.state: str | None = None
        self.stack_status = "UPDATE_IN_PROGRESS"
        secrets = boto3.session.Session("key", "secret", region_name="eu-west-1").client("secretsmanager")
        self._clients = {"secretsmanager": secrets, "lambda": self.migrating}
        self.secrets = Stubber(secrets)
        self.secrets.activate()
        self.versions: dict[str, str] = {}

    def client(self, name: str, **_: Any) -> Any:
        return self._clients.get(name, self)

    def give_login(self, secret: str, password: str) -> None:
        """Gives the next call the login of the master user."""
        login = json.dumps({"username": "master", "password": password})
        self.secrets.add_response("get_secret_value", {"SecretString": login}, {"SecretId": secret})

    def put_parameter(self, **given: Any) -> Any:
        if self.state is not None and not given["Overwrite"]:
            error = {"Error": {"Code": "ParameterAlreadyExists", "Message": "it is there"}}
            raise ClientError(error, "PutParameter")  # type: ignore[arg-type]
        self.state = given["Value"]

    def get_parameter(self, **_: Any) -> Any:
        if self.state is None:
            error = {"Error": {"Code": "ParameterNotFound", "Message": "it is not there"}}
            raise ClientError(error, "GetParameter")  # type: ignore[arg-type]
        return {"Parameter": {"Value": self.state}}

    def delete_parameter(self, **_: Any) -> Any:
        if self.state is None:
            error = {"Error": {"Code": "ParameterNotFound", "Message": "it is not there any longer"}}
            raise ClientError(error, "DeleteParameter")  # type: ignore[arg-type]
        self.state = None

    def describe_stacks(self, **given: Any) -> Any:
        assert given == {"StackName": STACK}
        return {"Stacks": [{"StackStatus": self.stack_status}]}

    def get_paginator(self, operation: str) -> Aws:
        assert operation == "list_stack_resources"
        return self

    def paginate(self, **given: Any) -> Any:
        """Returns the resources of the stack, one of which is not created yet."""
        assert given == {"StackName": STACK}
        kind = {"ResourceType": "AWS::RDS::DBCluster"}
        clusters = [kind | {"PhysicalResourceId": name} for name in self.versions]
        yield {
            "StackResourceSummaries": [{"ResourceType": "AWS::KMS::Key", "PhysicalResourceId": "key"}, kind]
        }
        yield {"StackResourceSummaries": clusters}

    def describe_db_clusters(self, **given: Any) -> Any:
        return {"DBClusters": [{"EngineVersion": self.versions[given["DBClusterIdentifier"]]}]}
