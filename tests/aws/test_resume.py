"""Resuming a deployed instance, in moto; and pauses and resumes interrupted at every call of AWS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.client import BaseClient
from moto import mock_aws

from dormouse.errors import InstanceError
from dormouse.settings import resources
from tests.deployed import PAUSED, RUNNING, Deployed, deploy
from tests.fake_clock import FakeClock
from tests.lambda_states import StatefulLambda
from tests.support.aws import pause, resume, status

AWAKE = {**RUNNING, "spark": "STOPPED"}  # the application starts itself with the first run


@pytest.fixture
def deployed() -> Iterator[Deployed]:
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield deploy()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_all_parts_are_started_again(deployed: Deployed, clock: FakeClock) -> None:
    pause(deployed.find(), clock=clock.clock)
    report = resume(deployed.find(), clock=clock.clock)
    assert deployed.state() == AWAKE
    assert (report.database, report.desired, report.changed) == ("available", "running", True)
    assert [one.step for one in report.steps] == [
        "write the desired state: running", "start the database", "wake the scheduled lambdas",
        "enable the mappings of the queues", "enable the schedules", "verify",
    ]  # fmt: skip


def replace_garbage(deployed: Deployed, monkeypatch: pytest.MonkeyPatch, idle: StatefulLambda) -> None:
    """Replaces the lambda of garbage collection by `idle`. The other lambdas stay those of moto."""
    moto = deployed.client("lambda")

    class Client:
        def __getattr__(self, operation: str) -> Callable[..., Any]:
            def call(**given: Any) -> Any:
                return getattr(idle if given.get("FunctionName") == "garbage" else moto, operation)(**given)

            return call

    monkeypatch.setitem(deployed.session._clients, "lambda", Client())


def test_inactive_lambdas_are_active_before_their_schedules_start(
    deployed: Deployed, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(deployed.find(), clock=clock.clock)
    idle = StatefulLambda(lambda event: pytest.fail("it runs"), clock, pending_seconds=200)

    def look() -> None:
        seen.append((idle.state, deployed.state()["rules"]))

    seen: list[Any] = []
    clock.at.append((clock.seconds + 199, look))
    replace_garbage(deployed, monkeypatch, idle)
    report = resume(deployed.find(), clock=clock.clock)
    [woken] = [one for one in report.steps if one.step == "wake the scheduled lambdas"]
    assert (woken.outcome, woken.what) == ("done", ("garbage is inactive: The function is idle.",))
    assert deployed.state() == AWAKE
    assert (idle.state, idle.calls) == ("Active", ["Inactive"])
    assert seen == [("Pending", {"DISABLED"})]


def test_a_lambda_that_cannot_become_active_is_named_by_the_resume(
    deployed: Deployed, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(deployed.find(), clock=clock.clock)
    failed = StatefulLambda(lambda event: pytest.fail("it runs"), clock, state="Failed")
    replace_garbage(deployed, monkeypatch, failed)
    with pytest.raises(InstanceError, match=r"the lambda garbage is failed: .*; deploy it again"):
        resume(deployed.find(), clock=clock.clock)


def test_a_running_instance_may_be_resumed(deployed: Deployed, clock: FakeClock) -> None:
    report = resume(deployed.find(), clock=clock.clock)
    assert deployed.state() == RUNNING
    assert not report.changed


def test_a_partly_paused_instance_is_resumed(deployed: Deployed, clock: FakeClock) -> None:
    deployed.client("events").disable_rule(Name=deployed.rules[1])
    deployed.client("lambda").update_event_source_mapping(UUID=deployed.mappings[0], Enabled=False)
    resume(deployed.find(), clock=clock.clock)
    assert deployed.state() == RUNNING


def test_a_dry_run_changes_nothing(deployed: Deployed, clock: FakeClock) -> None:
    pause(deployed.find(), clock=clock.clock)
    report = resume(deployed.find(), dry_run=True, clock=clock.clock)
    assert deployed.state() == PAUSED
    assert [one.outcome for one in report.steps] == [
        "would", "would", "already", "would", "would",
    ]  # fmt: skip


def test_a_cluster_replaced_by_a_restore_is_reported(deployed: Deployed, clock: FakeClock) -> None:
    """The resume and the status report the former cluster: it is not used any more, but costs money."""
    deployed.client("rds").create_db_cluster(
        DBClusterIdentifier="the-former", Engine="aurora-postgresql", MasterUsername="owner",
        MasterUserPassword="a password", Tags=[{"Key": resources.INSTANCE_TAG, "Value": "dev"}],
    )  # fmt: skip
    lines: list[str] = []
    resume(deployed.find(), tell=lines.append, clock=clock.clock)
    assert lines == [
        "the database cluster the-former is no longer used by dev but still costs money: delete it"
    ]
    assert status(deployed.find()).left_behind == ("the-former",)


def test_an_instance_is_not_resumed_during_a_deploy(
    deployed: Deployed, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deploy has already read the desired state "paused", and leaves schedules and mappings disabled."""
    pause(deployed.find(), clock=clock.clock)
    stacks = [{"StackName": "dormouse-dev-storage", "StackStatus": "UPDATE_IN_PROGRESS"}]
    monkeypatch.setattr("dormouse.aws.pause.stacks_of", lambda aws, instance_id: iter(stacks))
    with pytest.raises(
        InstanceError, match="storage is in update in progress: resume it when the deploy has ended"
    ):
        resume(deployed.find(), clock=clock.clock)
    assert deployed.state() == PAUSED


def test_messages_sent_during_a_pause_are_kept(deployed: Deployed, clock: FakeClock) -> None:
    pause(deployed.find(), clock=clock.clock)
    sqs = deployed.client("sqs")
    for number in range(10):
        sqs.send_message(QueueUrl=deployed.queues[1], MessageBody=str(number))
    resume(deployed.find(), clock=clock.clock)
    found = sqs.receive_message(QueueUrl=deployed.queues[1], MaxNumberOfMessages=10)["Messages"]
    assert {one["Body"] for one in found} == {str(number) for number in range(10)}


@pytest.mark.slow
def test_a_resume_ends_when_another_user_pauses_meanwhile(deployed: Deployed) -> None:
    pause(deployed.find(), clock=FakeClock().clock)
    events, ssm = deployed.client("events"), deployed.client("ssm")

    def tell(line: str) -> None:
        if "start the database" in line:
            name = resources.state_parameter("dev")
            ssm.put_parameter(Name=name, Value="paused", Overwrite=True)

    with pytest.raises(InstanceError, match="another user paused the instance meanwhile"):
        resume(deployed.find(), tell=tell, clock=FakeClock().clock)
    assert {events.describe_rule(Name=rule)["State"] for rule in deployed.rules} == {"DISABLED"}


def test_a_deleted_part_cannot_be_started(deployed: Deployed, clock: FakeClock) -> None:
    pause(deployed.find(), clock=clock.clock)
    deployed.client("events").delete_rule(Name=deployed.rules[0])
    with pytest.raises(InstanceError, match=f"the rule {deployed.rules[0]} is missing: deploy dev again"):
        resume(deployed.find(), clock=clock.clock)
    deployed.client("lambda").delete_event_source_mapping(UUID=deployed.mappings[0])
    with pytest.raises(InstanceError, match=f"mapping {deployed.mappings[0]} is missing: deploy dev again"):
        resume(deployed.find(), clock=clock.clock)


class Interrupted(BaseException):
    """A simulated Ctrl-C, SIGKILL or loss of the network."""


def _interrupted_at(number: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> bool:
    """Runs `act`, and interrupts it at its call number `number` of AWS, counted from 0.

    Returns whether there was such a call.
    """
    counted, original = iter(range(number)), BaseClient._make_api_call  # type: ignore[attr-defined]

    def call(self: Any, *given: Any) -> Any:
        if next(counted, None) is None:
            raise Interrupted
        return original(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(BaseClient, "_make_api_call", call)
        try:
            act()
        except Interrupted:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("first", "every"), [(3, 7), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_a_pause_and_a_resume_may_be_interrupted_at_every_call(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, first: int, every: int
) -> None:
    """The process keeps no state, so each command succeeds when it is run again."""
    clock = FakeClock().clock
    done = {"pause": 0, "resume": 0}
    for number in range(first, 1_000, every):
        again = False
        for verb, act, goal in (("pause", pause, PAUSED), ("resume", resume, AWAKE)):
            cut = _interrupted_at(number, monkeypatch, lambda act=act: act(deployed.find(), clock=clock))  # type: ignore[misc]
            done[verb] += cut
            again |= cut
            act(deployed.find(), clock=clock)
            assert deployed.state() == goal, (verb, number)
        if not again:
            break
    assert done["pause"] > 30 // every and done["resume"] > 20 // every


def test_the_status_names_stacks_that_no_deploy_has(deployed: Deployed) -> None:
    """Older deployments had a stack for each part."""
    tags = [{"Key": resources.INSTANCE_TAG, "Value": "dev"}]
    for part in ("network", "application", "copy", "query"):
        name = resources.stack_name("dev", part)
        deployed.client("cloudformation").create_stack(
            StackName=name, TemplateBody='{"Resources": {}}', Tags=tags
        )
    assert status(deployed.find()).left_stacks == ("dormouse-dev-query",)
