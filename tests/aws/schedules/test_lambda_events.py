"""Malformed events: each lambda raises a one-line error that names the fault, and does nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidInput
from dormouse.settings.lambdas import (
    BeginMigrationEnvironment,
    CommitEnvironment,
    CompactionEnvironment,
    Environment,
    MigrateEnvironment,
    SwitchEnvironment,
)
from dormouse.settings.section import WAKE
from lambdas import commit, compaction, garbage, maintenance, migrate, pause, runs
from tests.aws.schedules.test_commit_lambda import record
from tests.aws_lambda import Context
from tests.cloudformation import CloudFormation
from tests.commits import add
from tests.support.settings import RunsEnvironment

RUN = {"run_id": "0c2f1c0e-5a3d-4a58-9d0f-7f2c5f0e3b11", "kind": "compaction", "list": "s3://b/l", "jobs": 1}
STEP = {"engine": "emr-ec2-steps", "cluster": "j-1", "id": "s-1"}
SERVERLESS = {"engine": "emr-serverless", "application": "a", "id": "r"}
ENDED = {"state": "FAILED", "reason": "it was late"}
GOOD = record("1", add("t", "a"))
NO_OBJECTS: list[Any] = [None, [], "", "Records", 5, 1.5, True]


def without(event: dict[str, Any], *path: str) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(event))
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return changed


def of_sqs(*, of_records: bool) -> list[tuple[Any, str]]:
    """Returns events that are not from SQS, each with a part of the expected error."""
    events = [(one, "the event must be an object of JSON") for one in NO_OBJECTS]
    events += [({}, "'Records'"), ({"Records": None}, "'Records'"), ({"Records": []}, "'Records'")]
    events += [({"Records": {"messageId": "1"}}, "'Records' of the event must be a list, not an object")]
    events += [({"Records": [one]}, "a record must be an object of JSON") for one in NO_OBJECTS]
    events += [({"Records": [without(GOOD, "messageId")]}, "'messageId'")]
    if of_records:
        events += [
            ({"Records": [GOOD, without(GOOD, "body")]}, "'body'"),
            ({"Records": [GOOD | {"body": {"a": 1}}]}, "'body' of a record must be text"),
            ({"Records": [GOOD | {"attributes": "none"}]}, "'attributes' of a record must be an object"),
            ({"Records": [without(GOOD, "attributes", "SentTimestamp")]}, "'attributes.SentTimestamp'"),
            (
                {"Records": [without(GOOD, "attributes", "ApproximateReceiveCount")]},
                "'attributes.ApproximateReceiveCount'",
            ),
            ({"Records": [GOOD | {"attributes": GOOD["attributes"] | {"SentTimestamp": "now"}}]}, "now"),
            (
                {"Records": [GOOD | {"attributes": GOOD["attributes"] | {"SentTimestamp": "9" * 30}}]},
                "SentTimestamp",
            ),
        ]
    return events


def no_objects() -> list[tuple[Any, str]]:
    return [(one, "the event must be an object of JSON") for one in NO_OBJECTS]


def of_runs() -> list[tuple[Any, str]]:
    return [
        *no_objects(),
        *((without(RUN, name), repr(name)) for name in RUN),
        (RUN | {"jobs": "many"}, "'jobs' of the event must be a whole number, not text"),
        (RUN | {"jobs": True}, "'jobs' of the event must be a whole number, not true or false"),
        (RUN | {"run_id": 7}, "'run_id' of the event must be text, not a whole number"),
    ]


def of_submitted() -> list[tuple[Any, str]]:
    return [
        *no_objects(),
        *((without(one, name), repr(name)) for one in (STEP, SERVERLESS) for name in one),
        (STEP | {"cluster": ["j-1"]}, "'cluster' of the event must be text, not a list"),
        (STEP | {"engine": "spark"}, "spark"),
    ]


def of_reports() -> list[tuple[Any, str]]:
    whole = {"run": RUN, "status": ENDED}
    return [
        *no_objects(),
        ({}, "'run"),
        ({"run": RUN}, "'status'"),
        ({"run": RUN, "status": "FAILED"}, "'status' of the event must be an object, not text"),
        ({"run": "r", "status": ENDED}, "'run' of the event must be an object of JSON, not text"),
        (without(whole, "run", "run_id"), "'run.run_id'"),
        (without(whole, "run", "kind"), "'run.kind'"),
        (whole | {"run": RUN | {"kind": "merge"}}, "merge"),
        (whole | {"run": RUN | {"run_id": "one"}}, "run id 'one' is not a UUID"),
        (whole | {"run": RUN | {"run_id": "one", "kind": "split"}}, "run id 'one' is not a UUID"),
    ]


def of_executions(*, needed: bool) -> list[tuple[Any, str]]:
    return [
        *no_objects(),
        *([({}, "'execution'"), ({"execution": ""}, "'execution'")] if needed else []),
        ({"execution": 5}, "'execution' of the event must be text, not a whole number"),
        ({"execution": {"name": "x"}}, "'execution' of the event must be text, not an object"),
    ]


def of_cloudformation() -> list[tuple[Any, str]]:
    """Returns events that lack what an answer to CloudFormation needs, each with a part of the error."""
    whole = {
        "RequestType": "Create",
        "ResponseURL": "u",
        "StackId": "s",
        "RequestId": "r",
        "LogicalResourceId": "l",
    }
    answered = ("ResponseURL", "StackId", "RequestId", "LogicalResourceId")
    return [
        *no_objects(),
        *((without(whole, name), repr(name)) for name in answered),
        (whole | {"ResponseURL": 5}, "'ResponseURL' of the event must be text"),
    ]


def of_switches() -> list[tuple[Any, str]]:
    odd = [*NO_OBJECTS, {}, {"running": None}, {"running": "yes"}, {"running": 1}]
    return [(one, "the event must be running: true or false") for one in odd]


ODD = {
    "commit": (commit.handler, of_sqs(of_records=True)),
    "pause": (pause.handler, of_sqs(of_records=False)),
    "pause.switch": (pause.switch, of_switches()),
    "compaction.create": (compaction.create, of_executions(needed=True)),
    "compaction.report": (compaction.report, of_reports()),
    "maintenance": (maintenance.handler, of_executions(needed=False)),
    "runs.submit": (runs.submit, of_runs()),
    "runs.follow": (runs.follow, of_submitted()),
    "runs.cancel": (runs.cancel, of_submitted()),
    "migrate.begin": (migrate.begin, of_cloudformation()),
    "migrate": (migrate.handler, of_cloudformation()),
}


@pytest.fixture(autouse=True)
def environment(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment of all lambdas at once, and refuses every call of AWS."""
    given = {"dsn": dsn, "objects": (tmp_path / "objects").as_uri()}
    engine = {"engine": "emr-serverless", "application_id": "a", "execution_role": "arn"}
    for variables in (
        CommitEnvironment.variables(**given),
        CompactionEnvironment.variables(**given),
        MigrateEnvironment.variables(objects=given["objects"]),
        BeginMigrationEnvironment.variables(migrate_function="migrate"),
        RunsEnvironment.variables(**given, **engine, archive="s3://b/a.tgz", entry="s3://b/run.py"),
        Environment.variables(instance_id="dev"),
        SwitchEnvironment.variables(stack="query"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setattr("dormouse.aws.aws.Aws.call", refused)
    monkeypatch.setattr("dormouse.aws.aws.Aws.ask", refused)
    monkeypatch.setattr("dormouse.aws.aws.Aws.parameter", refused)


def refused(*_given: Any, **_more: Any) -> Any:
    raise AssertionError("AWS was called")


@pytest.mark.parametrize("name", ODD)
def test_a_malformed_event_is_one_line_that_names_the_fault(name: str) -> None:
    handler, events = ODD[name]
    for event, named in events:
        with pytest.raises(dm.DormouseError) as caught:
            handler(event, Context())
        assert named in str(caught.value), event
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "handler",
    [garbage.handler, maintenance.handler, migrate.handler],
    ids=lambda handler: handler.__module__,
)
def test_a_lambda_ignores_a_call_that_makes_it_active(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DORMOUSE_")]:
        monkeypatch.delenv(name)
    assert handler(WAKE, Context()) is None


@pytest.mark.parametrize("event", [{}, *NO_OBJECTS])
def test_the_garbage_lambda_ignores_its_event(event: Any) -> None:
    assert garbage.handler(event, Context())["tables"] == 0


@pytest.mark.parametrize("handler", [migrate.begin, migrate.handler])
@pytest.mark.parametrize(
    "changes, named",
    [
        ({}, "the event has no 'RequestType'"),
        ({"RequestType": ["Create"]}, "'RequestType' of the event must be text, not a list"),
        ({"RequestType": "Create"}, "the event has no 'ResourceProperties'"),
        (
            {"RequestType": "Update", "ResourceProperties": "none"},
            "'ResourceProperties' of the event must be",
        ),
        (
            {"RequestType": "Update", "ResourceProperties": {"Secret": ""}, "OldResourceProperties": "none"},
            {"begin": "no Secret", "handler": "'OldResourceProperties' of the event must be an object"},
        ),
        (
            {"RequestType": "Rename"},
            "'RequestType' of the event must be Create, Update or Delete, not Rename",
        ),
    ],
)
def test_a_malformed_event_that_can_be_answered_fails_the_deployment(
    handler: Any, changes: dict[str, Any], named: str | dict[str, str], cloudformation: CloudFormation
) -> None:
    """CloudFormation would wait for an hour without an answer."""
    whole = {"ResponseURL": cloudformation.url, "StackId": "s", "RequestId": "r", "LogicalResourceId": "l"}
    handler(whole | changes, Context())
    assert cloudformation.answer["Status"] == "FAILED"
    line = named if isinstance(named, str) else named[handler.__name__]
    assert line in cloudformation.answer["Reason"]


def test_a_field_of_another_type_is_an_error_that_names_it() -> None:
    from dormouse.settings.lambdas import field

    assert field({"run": {"jobs": 3}}, "run.jobs", int) == 3
    for event, line in (
        ({"run": {}}, "the event has no 'run.jobs'"),
        ({"run": {"jobs": None}}, "the event has no 'run.jobs'"),
        ({"run": {"jobs": 1.5}}, "'run.jobs' of the event must be a whole number, not a fraction"),
        ({"run": [3]}, "'run' of the event must be an object of JSON, not a list"),
    ):
        with pytest.raises(InvalidInput) as caught:
            field(event, "run.jobs", int)
        assert str(caught.value) == line
