"""The program that starts the AWS emulator and adds what it lacks. It runs in the emulator's environment.

Resource types whose behaviour the run does not test get handlers that do nothing. The database cluster leads
to the run's PostgreSQL. Everything else is the emulator's own.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from ministack import app
from ministack.core import iam_actions, lambda_runtime
from ministack.core.concurrency import esm_wake
from ministack.core.responses import new_uuid, request_scope
from ministack.services import eventbridge, lambda_svc, sqs, ssm, sts
from ministack.services.cloudformation.provisioners import _RESOURCE_HANDLERS as HANDLERS

from tests.deploy_local import emulated_cluster, emulated_network, emulated_records
from tests.deploy_local.emulated_cluster import ACCOUNT, REGION

LAMBDA_PYTHON, LAMBDA_RUNTIME = os.environ["LAMBDA_PYTHON"], os.environ["LAMBDA_RUNTIME"]
RUN = Path(os.environ["TMPDIR"])
NEWEST_LABEL = "emr-7.13.0"
"""The newest release that moto's EMR Serverless knows."""

SESSION_SECONDS = 3600.0
RUNTIME_LIBRARIES = ("boto3", "botocore", "dateutil", "jmespath", "s3transfer", "six.py", "urllib3")
"""The packages that Lambda's Python runtime has in addition to the standard library."""

NOTHING_TO_PROVE = {
    "AWS::ApplicationAutoScaling::ScalableTarget": {},
    "AWS::ApplicationAutoScaling::ScalingPolicy": {},
    "AWS::Budgets::Budget": {},
    "AWS::EC2::FlowLog": {"Id": "fl-{id}"},
}
"""Resource types that the emulator lacks and the run does not test, each with its attributes."""


def main() -> None:
    for name, attributes in NOTHING_TO_PROVE.items():
        HANDLERS.setdefault(name, _nothing(attributes))
    HANDLERS["AWS::EMRServerless::Application"] = {
        "create": _create_application,
        "delete": _delete_application,
    }
    _accept_alarms_on_metric_math()
    emulated_cluster.lead_to_the_database()
    emulated_cluster.take_time_to_stop_and_start()
    emulated_network.make_strict()
    emulated_records.keep_records()
    _give_sessions_an_end()
    _name_resources_as_iam_does()
    _name_actions_on_mappings()
    _receive_whole_batches()
    _run_lambdas_with_their_own_libraries()
    _count_as_tls()
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["CONTROL_PORT"])), _Control)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.argv = ["ministack"]
    app.main()


def _nothing(attributes: dict[str, str]) -> dict[str, Any]:
    def create(_logical_id: str, _props: dict[str, Any], _stack: str) -> tuple[str, dict[str, str]]:
        physical_id = new_uuid().replace("-", "")[:17]
        return physical_id, {name: text.format(id=physical_id) for name, text in attributes.items()}

    def update(physical_id: str, _old: Any, _new: Any, *_: Any, **__: Any) -> tuple[str, dict[str, str]]:
        return physical_id, {name: text.format(id=physical_id) for name, text in attributes.items()}

    return {"create": create, "update": update, "delete": lambda _id, _props: None}


def _accept_alarms_on_metric_math() -> None:
    """Makes the emulator accept alarms on metric math, which it refuses otherwise. No alarm is raised in a
    run.
    """
    known, nothing = HANDLERS["AWS::CloudWatch::Alarm"], _nothing({"Arn": "arn:aws:cloudwatch:::alarm:{id}"})

    def create(logical_id: str, props: dict[str, Any], stack: str) -> Any:
        return (nothing if "Metrics" in props else known)["create"](logical_id, props, stack)

    def update(physical_id: str, old: Any, new: dict[str, Any], *rest: Any, **more: Any) -> Any:
        return (nothing if "Metrics" in new else known)["update"](physical_id, old, new, *rest, **more)

    def delete(physical_id: str, props: dict[str, Any]) -> Any:
        return (nothing if "Metrics" in props else known)["delete"](physical_id, props)

    HANDLERS["AWS::CloudWatch::Alarm"] = known | {"create": create, "update": update, "delete": delete}


# ------------------------------------------------------------------ EMR Serverless: moto's server


def _emr() -> Any:
    return boto3.client(
        "emr-serverless",
        endpoint_url=os.environ["AWS_ENDPOINT_URL_EMR_SERVERLESS"],
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
    )


def _create_application(logical_id: str, props: dict[str, Any], stack: str) -> tuple[str, dict[str, str]]:
    made = _emr().create_application(
        name=props.get("Name", f"{stack}-{logical_id}")[:64], releaseLabel=NEWEST_LABEL, type=props["Type"]
    )
    _emr().stop_application(applicationId=made["applicationId"])
    return made["applicationId"], {"ApplicationId": made["applicationId"], "Arn": made["arn"]}


def _delete_application(physical_id: str, _props: dict[str, Any]) -> None:
    _emr().stop_application(applicationId=physical_id)
    _emr().delete_application(applicationId=physical_id)


# ------------------------------------------------------------------ lambdas and their queues


def _give_sessions_an_end() -> None:
    """Gives each lambda's session an expiry time. Without one, the database would refuse its tokens."""
    make = lambda_runtime.execution_credentials

    def made(config: dict[str, Any]) -> dict[str, str]:
        credentials = make(config)
        session = sts._sessions.get(credentials["AWS_ACCESS_KEY_ID"])
        if session is not None:
            session["Expiration"] = time.time() + SESSION_SECONDS
        return credentials

    lambda_runtime.execution_credentials = made


def _name_resources_as_iam_does() -> None:
    """Names resources in ARNs like IAM.

    Rules of the default event bus are named without the bus, and parameters by their path.
    """
    extract = iam_actions.extract_resource_arn

    def extracted(service: str, method: str, path: str, headers: Any, body: bytes, *given: Any) -> str:
        arn = str(extract(service, method, path, headers, body, *given))
        if service == "ssm" and arn == "*" and (below := json.loads(body or b"{}").get("Path")):
            return f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter{below}"
        return arn.replace(":rule/default/", ":rule/") if service == "events" else arn

    iam_actions.extract_resource_arn = extracted


def _name_actions_on_mappings() -> None:
    """Gives requests on one event source mapping the same IAM actions as in AWS.

    The emulator has actions only for requests on the list of mappings.
    """
    known = iam_actions._lambda_action
    verbs = {"GET": "Get", "PUT": "Update", "DELETE": "Delete"}

    def action(method: str, path: str) -> str | None:
        before, _, uuid = path.rstrip("/").partition("/event-source-mappings/")
        is_one = uuid and "/functions" not in before
        return f"{verbs[method]}EventSourceMapping" if is_one else known(method, path)

    iam_actions._lambda_action = action


def _receive_whole_batches() -> None:
    """Makes the emulator receive up to the mapping's batch size of messages at once, instead of ten."""

    def receive(queue_url: str, number: int) -> list[dict[str, Any]]:
        with sqs._queues_lock:
            queue = sqs._get_q(queue_url)
            visibility = int(queue["attributes"].get("VisibilityTimeout", "30"))
            sqs._expire_retained(queue)
            sqs._dlq_sweep(queue)
            return list(sqs._collect_msgs(queue, number, visibility))

    sqs._receive_messages_for_esm = receive


def _let_visibility_timeouts_pass() -> int:
    """Makes hidden messages visible now; returns their number.

    The messages, and the parameters in SSM, become older by the time that was skipped. The pause lambda
    measures by the age of the desired state for how long nothing was scheduled. While a lambda works, nothing
    happens and 0 is returned, because the messages that it has must stay hidden.
    """
    count, longest, now = 0, 0.0, time.time()
    if lambda_svc._esm_inflight:
        return 0
    with request_scope(ACCOUNT, REGION), sqs._queues_lock:
        for queue in sqs._queues.values():
            for message in queue["messages"]:
                if (hidden := message.get("visible_at", 0) - now) > 0:
                    message["visible_at"] = now
                    message["sent_at"] -= hidden
                    count, longest = count + 1, max(longest, hidden)
        for parameter in ssm._parameters.values():
            parameter["LastModifiedDate"] -= longest
    esm_wake.set()
    return count


def _fire_rule(rule: str) -> None:
    """Calls the targets of a rule now, if the rule is enabled."""
    for key, known in list(eventbridge._rules._data.items()):
        if known["Name"] == rule:
            eventbridge._rule_last_fired[key] = 0.0
    eventbridge._tick_scheduled_rules()


def _run_lambdas_with_their_own_libraries() -> None:
    """Runs lambdas with only the libraries of Lambda's runtime, so that a package must contain all others."""
    libraries = RUN / "lambda-runtime"
    libraries.mkdir()
    installed = Path(boto3.__file__).parents[1]
    for name in RUNTIME_LIBRARIES:
        (libraries / name).symlink_to(installed / name)
    python = RUN / "lambda-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={libraries} exec {LAMBDA_PYTHON} -S -s "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    detect = lambda_runtime._detect_runtime_binary

    def detected(runtime: str) -> tuple[str, str]:
        if runtime != LAMBDA_RUNTIME:
            raise RuntimeError(f"the lambdas of Dormouse run on {LAMBDA_RUNTIME}, not {runtime}")
        return str(python), detect(runtime)[1]

    lambda_runtime._detect_runtime_binary = detected


def _count_as_tls() -> None:
    """Treats requests over loopback as TLS, which the policies of the buckets demand."""
    pin = app.pin_request_origin
    app.pin_request_origin = lambda address, _secure: pin(address, True)


def _end_with_the_run() -> None:
    """Kills this process group when the parent process ends, even if the parent was killed."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _put_event_of_aws(event: dict[str, Any]) -> int:
    """Puts an event of AWS itself on the bus, which callers of the emulator may not do.

    Returns the number of refused events.
    """
    with request_scope(ACCOUNT, REGION):
        _, _, body = eventbridge._put_events({"Entries": [event]}, allow_aws_source=True)
    return int(json.loads(body)["FailedEntryCount"])


# ------------------------------------------------------------------ the control port for the run


class _Control(BaseHTTPRequestHandler):
    """The control port, in addition to the emulator's own port. Through it, the run checks logins and moves
    time.
    """

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/login":
            self._answer({"refusal": emulated_cluster.refusal(request["user"], request["token"])})
        elif self.path == "/time":
            self._answer({"messages": _let_visibility_timeouts_pass()})
        elif self.path == "/schedule":
            self._answer({"called": _fire_rule(request["rule"])})
        elif self.path == "/event":
            self._answer({"refused": _put_event_of_aws(request)})
        elif self.path == "/cluster":
            self._answer(emulated_cluster.described())
        elif self.path == "/images":
            self._answer(emulated_network.publish_images())
        elif self.path == "/session":
            self._answer({"refusal": emulated_network.session_refusal(**request)})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    main()
