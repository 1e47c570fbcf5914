"""Runs on EMR on EC2, each submitted once: tested with moto, and each state with botocore's Stubber."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from emr_runs import REGION, TEMPLATE, new_run, set_credentials, settings, stubbed
from moto import mock_aws

from dormouse.aws import emr
from tests.stored import at_once
from tests.support.aws import Aws
from tests.support.settings import RunsEnvironment


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)


@pytest.fixture
def aws() -> Iterator[Aws]:
    with mock_aws():
        yield Aws(boto3.session.Session(region_name=REGION))


@pytest.fixture
def steps(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> RunsEnvironment:
    return settings(monkeypatch, "emr-ec2-steps")


@pytest.fixture
def transient(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> RunsEnvironment:
    return settings(monkeypatch, "emr-ec2-transient")


def live(aws: Aws) -> list[Any]:
    states = ["STARTING", "BOOTSTRAPPING", "RUNNING", "WAITING"]
    return list(aws.all("emr", "list_clusters", "Clusters", ClusterStates=states))


def steps_of(aws: Aws, cluster: str) -> list[Any]:
    return list(aws.all("emr", "list_steps", "Steps", ClusterId=cluster))


def test_runs_are_steps_of_one_cluster(steps: RunsEnvironment, aws: Aws) -> None:
    one, other = new_run(), new_run()
    first, second = emr.submit(steps, one, aws), emr.submit(steps, other, aws)
    [cluster] = live(aws)
    assert cluster["Name"] == "dormouse-dev"
    assert first["cluster"] == second["cluster"] == cluster["Id"]
    found = {step["Id"]: step for step in steps_of(aws, cluster["Id"])}
    assert found.keys() == {first["id"], second["id"]}
    step = found[first["id"]]
    assert (step["Name"], step["ActionOnFailure"]) == (f"dev-compaction-{one.run_id}", "CONTINUE")
    arguments = step["Config"]["Args"]
    assert arguments[:5] == [
        "spark-submit", "--deploy-mode", "cluster", "--archives", "s3://assets/0123.tar.gz#environment",
    ]  # fmt: skip
    assert "spark.yarn.appMasterEnv.PYSPARK_PYTHON=./environment/bin/python" in arguments
    assert arguments[arguments.index("s3://assets/4567.py") + 1 :][:2] == ["--list", one.list]


def test_a_run_submitted_again_is_the_same_step(steps: RunsEnvironment, aws: Aws) -> None:
    """The step stays the same even after its cluster has ended."""
    run = new_run()
    first = emr.submit(steps, run, aws)
    assert emr.submit(steps, run, aws) == first
    aws.call("emr", "terminate_job_flows", JobFlowIds=[first["cluster"]])
    assert emr.submit(steps, run, aws) == first
    assert live(aws) == []


def test_a_cluster_that_ended_when_idle_is_replaced(steps: RunsEnvironment, aws: Aws) -> None:
    first = emr.submit(steps, new_run(), aws)
    aws.call("emr", "terminate_job_flows", JobFlowIds=[first["cluster"]])
    second = emr.submit(steps, new_run(), aws)
    assert [one["Id"] for one in live(aws)] == [second["cluster"]] != [first["cluster"]]


def test_clusters_of_other_instances_are_left_alone(steps: RunsEnvironment, aws: Aws) -> None:
    other = aws.call("emr", "run_job_flow", **{**TEMPLATE, "Name": "dormouse-development"})["JobFlowId"]
    assert emr.submit(steps, new_run(), aws)["cluster"] != other
    assert steps_of(aws, other) == []


def test_each_run_has_a_cluster_of_its_own(transient: RunsEnvironment, aws: Aws) -> None:
    run = new_run()
    first, second = emr.submit(transient, run, aws), emr.submit(transient, new_run(), aws)
    assert first["cluster"] != second["cluster"]
    names = {one["Id"]: one["Name"] for one in live(aws)}
    assert names[first["cluster"]] == f"dormouse-dev-{run.run_id}"
    [step] = steps_of(aws, first["cluster"])
    assert (step["Id"], step["ActionOnFailure"]) == (first["id"], "TERMINATE_CLUSTER")
    found = aws.call("emr", "describe_cluster", ClusterId=first["cluster"])["Cluster"]
    assert found["AutoTerminate"] is True
    assert emr.submit(transient, run, aws) == first
    aws.call("emr", "terminate_job_flows", JobFlowIds=[first["cluster"]])
    assert emr.submit(transient, run, aws) == first


class Meeting(Aws):
    """A client that waits before its first call of one operation until a second client waits there, too.

    So each of them has looked for an existing cluster or step, and found none.
    """

    _one_call = threading.Lock()
    """A lock for each call, because moto lists clusters that another thread has not made completely."""

    def __init__(self, session: Any, operation: str, barrier: threading.Barrier) -> None:
        super().__init__(session)
        self._operation, self._barrier, self._met = operation, barrier, False

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        if operation == self._operation and not self._met:
            self._met = True
            self._barrier.wait(60)
        with self._one_call:
            return super().call(service, operation, **parameters)

    def pages(self, service: str, operation: str, **parameters: Any) -> Iterator[Any]:
        with self._one_call:
            pages = list(super().pages(service, operation, **parameters))
        yield from pages


@pytest.mark.parametrize("engine", ["emr-ec2-steps", "emr-ec2-transient"])
def test_a_run_submitted_twice_at_once_keeps_one_cluster_and_step(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Both callers create a cluster. Then one of them ends its own, which was created later."""
    environment, run, barrier = settings(monkeypatch, engine), new_run(), threading.Barrier(2)
    cancelled: list[str] = []
    monkeypatch.setattr("dormouse.aws.emr._cancel_step", lambda cluster, step, aws: cancelled.append(step))

    def submit() -> Any:
        return emr.submit(
            environment, run, Meeting(boto3.session.Session(region_name=REGION), "run_job_flow", barrier)
        )

    answers = at_once(submit, submit)
    assert answers[0] == answers[1]
    [cluster] = live(aws)
    assert cluster["Id"] == answers[0]["cluster"]
    kept = [one["Id"] for one in steps_of(aws, cluster["Id"]) if one["Id"] not in cancelled]
    assert kept == [answers[0]["id"]]


def test_a_step_added_twice_at_once_is_kept_once(
    steps: RunsEnvironment, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    emr.submit(steps, new_run(), aws)
    run, barrier = new_run(), threading.Barrier(2)
    cancelled: list[str] = []
    monkeypatch.setattr("dormouse.aws.emr._cancel_step", lambda cluster, step, aws: cancelled.append(step))

    def submit() -> Any:
        meeting = Meeting(boto3.session.Session(region_name=REGION), "add_job_flow_steps", barrier)
        return emr.submit(steps, run, meeting)

    answers = at_once(submit, submit)
    assert answers[0] == answers[1]
    [cluster] = live(aws)
    added = [one["Id"] for one in steps_of(aws, cluster["Id"]) if run.run_id in one["Name"]]
    assert sorted([answers[0]["id"], *cancelled]) == sorted(added)


def test_a_cluster_that_ends_during_a_submission_is_replaced(
    steps: RunsEnvironment, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = emr.submit(steps, new_run(), aws)["cluster"]
    call = Aws.call

    def refusing(self: Aws, service: str, operation: str, **parameters: Any) -> Any:
        if operation == "add_job_flow_steps" and parameters["JobFlowId"] == ending:
            call(self, "emr", "terminate_job_flows", JobFlowIds=[ending])
            stub, stubber = stubbed("emr")
            stubber.add_client_error(operation, "InvalidRequestException", "A job flow that is shutting down")
            return call(stub, service, operation, **parameters)
        return call(self, service, operation, **parameters)

    monkeypatch.setattr(Aws, "call", refusing)
    assert emr.submit(steps, new_run(), aws)["cluster"] != ending


def step_response(state: str, **status: Any) -> dict[str, Any]:
    return {"Step": {"Id": "s-1", "Name": "x", "Status": {"State": state, **status}}}


def cluster_response(state: str, **reason: str) -> dict[str, Any]:
    return {"Cluster": {"Id": "j-1", "Status": {"State": state, "StateChangeReason": reason}}}


SUBMITTED = {"engine": "emr-ec2-steps", "run_id": "r", "cluster": "j-1", "id": "s-1"}
YOUNG = {"Timeline": {"CreationDateTime": datetime.now(UTC)}}


@pytest.mark.parametrize(
    ("responses", "followed"),
    [
        ([step_response("PENDING", **YOUNG)], ("RUNNING", None)),
        ([step_response("RUNNING", **YOUNG)], ("RUNNING", None)),
        ([step_response("CANCEL_PENDING", **YOUNG)], ("RUNNING", None)),
        ([step_response("COMPLETED")], ("SUCCEEDED", None)),
        (
            [
                step_response(
                    "FAILED",
                    FailureDetails={"Reason": "Unknown Error.", "Message": "exit 1", "LogFile": "s3://l"},
                )
            ],
            ("FAILED", "Unknown Error.; exit 1; s3://l"),
        ),
        (
            [step_response("INTERRUPTED"), cluster_response("TERMINATED", Code="USER_REQUEST")],
            ("FAILED", None),
        ),
        (
            [
                step_response("CANCELLED", StateChangeReason={"Message": "Cancelled by user"}),
                cluster_response("WAITING"),
            ],
            ("CANCELLED", "Cancelled by user"),
        ),
        (
            [
                step_response("CANCELLED"),
                cluster_response("TERMINATED_WITH_ERRORS", Code="VALIDATION_ERROR", Message="No capacity"),
            ],
            ("FAILED", "the EMR cluster j-1 ended: No capacity"),
        ),
    ],
)
def test_each_state_of_a_step(responses: list[dict[str, Any]], followed: tuple[str, str | None]) -> None:
    aws, stubber = stubbed("emr")
    for response in responses:
        operation = "describe_step" if "Step" in response else "describe_cluster"
        stubber.add_response(operation, response)
    assert emr.follow(SUBMITTED, aws) == emr.Followed(*followed)
    stubber.assert_no_pending_responses()


def test_a_run_is_cancelled_with_its_cluster() -> None:
    """The cluster is ended, because the driver of a cancelled step would keep it busy."""
    aws, stubber = stubbed("emr")
    stubber.add_response("describe_step", step_response("RUNNING"), {"ClusterId": "j-1", "StepId": "s-1"})
    stubber.add_response("terminate_job_flows", {}, {"JobFlowIds": ["j-1"]})
    emr.cancel(SUBMITTED, aws)
    stubber.assert_no_pending_responses()


def test_a_pending_run_is_cancelled_without_its_cluster() -> None:
    """The run has no driver yet, and another run still uses the cluster."""
    aws, stubber = stubbed("emr")
    stubber.add_response("describe_step", step_response("PENDING"), {"ClusterId": "j-1", "StepId": "s-1"})
    expected = {"ClusterId": "j-1", "StepIds": ["s-1"], "StepCancellationOption": "TERMINATE_PROCESS"}
    stubber.add_response("cancel_steps", {"CancelStepsInfoList": []}, expected)
    emr.cancel(SUBMITTED, aws)
    stubber.assert_no_pending_responses()


def test_cancelling_a_run_ends_its_own_cluster_even_while_it_starts() -> None:
    aws, stubber = stubbed("emr")
    stubber.add_response("terminate_job_flows", {}, {"JobFlowIds": ["j-1"]})
    emr.cancel({**SUBMITTED, "engine": "emr-ec2-transient"}, aws)
    stubber.assert_no_pending_responses()


def test_cancelling_a_run_whose_cluster_has_ended_is_no_error() -> None:
    aws, stubber = stubbed("emr")
    stubber.add_response("describe_step", step_response("RUNNING"))
    stubber.add_client_error("terminate_job_flows", "InvalidRequestException", "Cluster is terminated")
    emr.cancel(SUBMITTED, aws)


def test_a_duplicate_step_is_cancelled_without_its_cluster() -> None:
    aws, stubber = stubbed("emr")
    steps = [{"Id": one, "Name": "n", "Status": {"Timeline": {}}} for one in ("s-1", "s-2")]
    stubber.add_response("list_steps", {"Steps": steps}, {"ClusterId": "j-1"})
    expected = {"ClusterId": "j-1", "StepIds": ["s-2"], "StepCancellationOption": "TERMINATE_PROCESS"}
    stubber.add_response("cancel_steps", {"CancelStepsInfoList": []}, expected)
    assert emr._settle_step("j-1", "s-2", "n", aws) == "s-1"
    stubber.assert_no_pending_responses()


def test_a_cluster_without_a_creation_time_counts_as_the_later() -> None:
    made = {"Id": "j-2", "Name": "n", "Status": {"Timeline": {"CreationDateTime": datetime.now(UTC)}}}
    making = {"Id": "j-1", "Name": "n", "Status": {"Timeline": {}}}
    assert emr._first(emr._named("n", [making, made])) == "j-2"
