"""The keeper: it holds an instance in its desired state while commands die and calls and events fail."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from moto import mock_aws

from dormouse.aws.database import HOPELESS
from dormouse.aws.keeper import keep
from dormouse.errors import InstanceError
from dormouse.settings.resources import state_parameter
from lambdas.pause import handler
from tests.deployed import PAUSED, REGION, RUNNING, Deployed, deploy
from tests.support.aws import pause, resume
from tests.weeks import DAY, HOUR, RULES, Fault, Weeks, refusal
from tests.weeks_queue import Killed

STATES = [
    "available", "stopped", "starting", "a state of next year", "stopping", "backing-up", "creating",
    "failing-over", "maintenance", "modifying", "rebooting", "storage-optimization", "upgrading",
    "inaccessible-encryption-credentials-recoverable",
]  # fmt: skip
FAULTS = {"killed": Killed, "denied": lambda: refusal("AccessDenied", "SomeCall")}


def paused(status: str, **more: Any) -> Weeks:
    rules = {**dict.fromkeys(RULES, False), "keeper": True}
    more = {"rules": rules, "mapping": "Disabled", "sleepers": False, "read": "paused", **more}
    return Weeks(status, "paused", **more)


def interrupted(weeks: Weeks, command: Callable[..., Any], fault: Fault) -> bool:
    """Runs a command on the simulated instance; returns whether the fault interrupted it."""
    with suppress(Killed, InstanceError):
        command(weeks.instance(fault), wait=True, clock=weeks.clock)
        return False
    return True


def at(place: tuple[str, int], fault: str) -> Fault:
    """Returns a fault at one call of AWS. `place` is (name, n) for the nth call of that name."""
    counts: Counter[str] = Counter()

    def look(call: str) -> BaseException | None:
        counts[call] += 1
        return FAULTS[fault]() if (call, counts[call]) == place else None

    return look


def calls(weeks: Weeks, command: Callable[..., Any]) -> list[tuple[str, int]]:
    """Runs a command to its end; returns (name, n) of the first two calls of AWS of each name.

    `n` is 1 or 2. Later calls of a name only poll.
    """
    counts: Counter[str] = Counter()
    assert not interrupted(weeks, command, lambda call: counts.update([call]))
    return [(call, time) for call in counts for time in (1, 2) if time <= counts[call]]


def with_faults(status: str, places: list[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], str]]:
    """Yields each call with one of the faults. The next state of the list has the other one at this call."""
    faults = itertools.islice(itertools.cycle(FAULTS), STATES.index(status) % 2, None)
    return zip(places, faults, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("status", STATES)
def test_an_interrupted_pause_is_finished_within_hours(status: str) -> None:
    """Interrupts the pause at each of its calls in turn. The keeper finishes it.

    In the 16 days after it, AWS starts the database twice, and sends no event of it.
    """
    for call, fault in with_faults(status, calls(Weeks(status), pause)):
        weeks = Weeks(status)
        assert interrupted(weeks, pause, at(call, fault)) or call[0].startswith("get_metric_data")
        if weeks.desired == "running":
            continue  # it was interrupted before the desired state changed
        for sent in range(32):
            weeks.send(sent)
            weeks.until(weeks.now + DAY / 2)
        weeks.until(weeks.now + 4 * HOUR)
        assert weeks.is_asleep, (call, weeks)
        assert weeks.awake_while_paused <= 6 * HOUR, (call, weeks)
        assert weeks.waiting | weeks.applied == set(range(32)) and not weeks.dead | weeks.lost


@pytest.mark.few(1)
@pytest.mark.parametrize("status", STATES)
def test_an_interrupted_resume_is_finished(status: str) -> None:
    for call, fault in with_faults(status, calls(paused(status), resume)):
        weeks = paused(status)
        weeks.send(0)
        assert interrupted(weeks, resume, at(call, fault))
        if weeks.desired == "paused":
            continue
        weeks.until(weeks.now + 5 * HOUR)
        assert weeks.is_awake, (call, weeks)
        assert weeks.applied == {0}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("loses_events", [True, False])
def test_the_keeper_succeeds_although_its_calls_fail(fault: str, loses_events: bool) -> None:
    """Two of three invocations of the keeper fail, each at the same call of AWS; covers 30 calls."""
    for call in range(30):
        weeks = Weeks(
            "available", "paused", loses_events,
            lambda_fault=lambda at, number, call=call: FAULTS[fault]() if at == call and number % 3 else None,
        )  # fmt: skip
        weeks.wanted_since = 0.0
        weeks.until(16 * DAY)
        assert weeks.is_asleep, (call, weeks)
        assert weeks.awake_while_paused <= 12 * HOUR, (call, weeks.awake_while_paused)


@pytest.mark.few(1)
@pytest.mark.parametrize("wanted", ["paused", "running"])
def test_a_failing_update_is_retried_once_an_hour_and_reported(wanted: str) -> None:
    weeks = paused("stopped") if wanted == "paused" else Weeks()
    weeks.sleepers, weeks.read, weeks.updates_fail = wanted == "paused", "running", True
    weeks.until(12 * HOUR)
    assert 6 <= len(weeks.updated) - 1 <= 12
    state = "running" if wanted == "paused" else "asleep"
    left = (f"the query service and the host for access: {state}",)
    [look, *_] = [look for look in weeks.looks if look is not None and look.left == left]
    assert (look.ended, look.runs_while_paused) == (False, wanted == "paused")


def test_without_the_keeper_an_instance_runs_for_weeks() -> None:
    """Shows that the simulation can detect a missing keeper."""
    weeks = Weeks(is_kept=False)
    assert interrupted(weeks, pause, at(("stop_db_cluster ", 1), "killed"))
    weeks.until(14 * DAY)
    assert not weeks.is_asleep and weeks.awake_while_paused > 13 * DAY


def test_a_mapping_enabled_while_the_database_is_stopped_makes_no_dead_letter() -> None:
    """A change of tags, for example, makes CloudFormation rewrite the mapping, which also enables it."""
    weeks = Weeks("stopped", "paused")
    weeks.send(0)
    weeks.until(5 * HOUR)
    assert weeks.is_asleep and not weeks.dead and weeks.messages[0].received < 20


@pytest.mark.slow
@pytest.mark.parametrize("tells_ages", [True, False])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_messages_outlive_a_pause_of_months(tells_ages: bool, fault: str | None) -> None:
    """SQS deletes a message after 14 days. The keeper sends old messages again, even if some calls fail.

    Each of ten calls fails in both ways, one of them while CloudWatch returns ages, the other one while not.
    """
    first = 3 * (tells_ages == (fault == "killed"))
    for at_call in range(first, 30, 6) if fault else (0,):
        weeks = paused("stopped", tells_ages=tells_ages)
        weeks.wanted_since = 0.0
        if fault:
            weeks.lambda_fault = lambda call, number, at_call=at_call: (
                FAULTS[fault]() if call == at_call and number % 3 else None
            )
        for sent in range(40):
            weeks.send(sent)
            weeks.until(weeks.now + DAY)
        assert weeks.waiting == set(range(40)) and not weeks.lost | weeks.dead, at_call
        weeks.wishes("running")
        weeks.until(weeks.now + 5 * HOUR)
        assert weeks.is_awake and weeks.applied == set(range(40))


SENDERS = {
    "that stop on day 2": [hour * HOUR for hour in range(48)],
    "of one message an hour": [hour * HOUR for hour in range(14 * 24)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sender", "tells_ages", "fault"),
    [
        *itertools.product(SENDERS, [True, False], [None]),
        # with faults, each pair of a sender, a kind of queue and a fault, but not all three crossed
        *(
            (sender, (number + other) % 2 == 0, fault)
            for number, sender in enumerate(SENDERS)
            for other, fault in enumerate(FAULTS)
        ),
    ],
)
def test_repeated_passes_over_the_queue_make_no_dead_letters(
    sender: str, tells_ages: bool, fault: str | None
) -> None:
    """The keeper receives messages to learn their age, and SQS counts how often it does.

    After many receives, SQS omits a message's age, or makes it a dead letter.
    """
    weeks = paused("stopped", tells_ages=tells_ages, looks_hourly=True, wanted_since=0.0)
    if fault:  # also between the sending and the deleting of a message
        weeks.lambda_fault = lambda call, number: FAULTS[fault]() if number % 3 and call % 5 == 4 else None
    for number, at_second in enumerate(SENDERS[sender]):
        weeks.until(at_second)
        weeks.send(number)
    most = 0.0
    while weeks.now < 35 * DAY:
        weeks.until(weeks.now + DAY / 2)
        most = max([most, *(one.received for one in weeks.messages)])
    everything = set(range(len(SENDERS[sender])))
    assert not weeks.lost | weeks.dead and weeks.waiting == everything
    assert most <= (2 if fault is None else 20)
    assert len(weeks.messages) == len(everything) or fault
    weeks.wishes("running")
    weeks.until(weeks.now + 5 * HOUR)
    assert weeks.is_awake and weeks.applied == everything


@pytest.mark.slow
def test_a_pass_comes_once_in_a_quarter_of_the_retention(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dormouse.aws.renewal")
    weeks = paused("stopped", looks_hourly=True, wanted_since=0.0)
    for number in range(24):
        weeks.send(number)
        weeks.until(weeks.now + DAY)
    passes = [one for one in caplog.messages if one.startswith("sending old messages again")]
    assert 24 / 3.5 <= len(passes) <= 24 / 3.5 + 1


def test_without_the_keeper_messages_are_lost() -> None:
    """Shows that the simulation can detect a missing keeper."""
    weeks = paused("stopped", is_kept=False)
    weeks.send(0)
    weeks.until(15 * DAY)
    assert weeks.lost == {0}


@pytest.mark.slow
def test_a_pause_waits_for_runs_for_at_most_a_day() -> None:
    weeks = Weeks("available", "paused", wanted_since=0.0, run_ends=3 * HOUR)
    weeks.until(2.9 * HOUR)
    assert weeks.status == "available" and weeks.mapping == "Disabled"
    weeks.until(5 * HOUR)
    assert weeks.is_asleep
    weeks = Weeks("available", "paused", wanted_since=0.0, run_ends=90 * DAY)
    weeks.until(23 * HOUR)
    assert weeks.status == "available"
    weeks.until(27 * HOUR)
    assert weeks.is_asleep


def test_an_instance_that_is_being_destroyed_is_left_alone() -> None:
    """`dormouse destroy` has disabled the keeper's rule, but earlier events still call the keeper."""
    weeks = Weeks("stopped", rules=dict.fromkeys([*RULES, "keeper"], False), mapping="Disabled")
    assert weeks.look()
    assert (weeks.status, weeks.mapping, set(weeks.rules.values())) == ("stopped", "Disabled", {False})


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["paused", "running"])
@pytest.mark.parametrize("status", ["available", "starting", "stopping", "stopped"])
def test_the_last_desired_state_wins_even_if_it_changes_during_a_call_of_the_keeper(
    wanted: str, status: str
) -> None:
    happenings: dict[str, Callable[[Weeks], object]] = {
        "resume": lambda weeks: weeks.wishes("running"),
        "pause": lambda weeks: weeks.wishes("paused"),
        "look": Weeks.look,
        "end": Weeks.ends,
    }
    for number, one, other in itertools.product(range(24), ["resume", "pause"], happenings):
        weeks = Weeks(status, wanted) if wanted == "running" else paused(status)
        meanwhile = {number: happenings[one], number + 2: happenings[other]}
        counted = itertools.count()

        def happen(
            call: str, weeks: Weeks = weeks, meanwhile: Any = meanwhile, counted: Any = counted
        ) -> None:
            meanwhile.pop(next(counted), lambda weeks: None)(weeks)

        keep(weeks.instance(happen))
        for happening in meanwhile.values():
            happening(weeks)
        weeks.until(weeks.now + 4 * HOUR)
        assert weeks.is_asleep if weeks.desired == "paused" else weeks.is_awake, (number, one, other, weeks)


@pytest.mark.parametrize("status", sorted(HOPELESS))
def test_a_cluster_state_that_only_an_operator_can_fix_is_an_error(status: str) -> None:
    with pytest.raises(InstanceError, match=f"cluster db is {status}: "):
        keep(paused(status).instance())


def test_the_keeper_waits_for_a_deploy_that_may_need_the_database() -> None:
    """A restored database starts running, and must adopt the store before it is stopped."""
    weeks = paused("available")
    weeks.deploying = True
    found = keep(weeks.instance())
    assert found.left == ("the stack dormouse-dev-migrate is being deployed",)
    assert (found.ended, found.runs_while_paused, weeks.status) == (False, True, "available")
    weeks.deploying = False
    assert keep(weeks.instance()).left == ("cluster db is stopping",)


def test_the_keeper_waits_for_lambdas_whose_schedules_were_just_disabled() -> None:
    """The keeper finds a schedule enabled and disables it. Its lambda may have started just before."""
    weeks = Weeks("available", "paused", mapping="Disabled")
    found = keep(weeks.instance())
    assert found.left == (
        "garbage may still run, for 210 s at most",
        "maintenance may still run, for 210 s at most",
    )
    assert (found.ended, weeks.status) == (False, "available")
    assert not any(weeks.rules[rule] for rule in RULES)
    assert keep(weeks.instance()).left == ("cluster db is stopping",)


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    """Yields an instance in moto, which the lambda's environment names."""
    monkeypatch.setenv("DORMOUSE_INSTANCE_ID", "dev")
    monkeypatch.setenv("AWS_REGION", REGION)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield deploy()


EVENT = {"Records": [{"messageId": str(number), "body": "{}"} for number in range(2)]}


@pytest.mark.slow
def test_the_lambda_acknowledges_its_messages_when_the_desired_state_is_reached(
    deployed: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert handler(EVENT, None) == {"batchItemFailures": []}
    assert deployed.state() == RUNNING
    deployed.client("ssm").put_parameter(Name=state_parameter("dev"), Value="paused", Overwrite=True)
    assert handler(EVENT, None) == {"batchItemFailures": []}
    assert deployed.state() == {**PAUSED, "spark": "STARTED"}  # Spark stops itself
    metric = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (metric["instance"], metric["RunningWhilePaused"]) == ("dev", [0.0])
    [described] = metric["_aws"]["CloudWatchMetrics"]
    assert (described["Namespace"], described["Dimensions"]) == ("Dormouse", [["instance"]])


@pytest.mark.slow
def test_the_lambda_asks_for_its_messages_again_while_something_is_left(
    deployed: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed.client("ssm").put_parameter(Name=state_parameter("dev"), Value="paused", Overwrite=True)
    deployed.client("stepfunctions").start_execution(stateMachineArn=deployed.machine)
    again = {"batchItemFailures": [{"itemIdentifier": "0"}, {"itemIdentifier": "1"}]}
    assert handler(EVENT, None) == again
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["RunningWhilePaused"] == [1.0]


def test_an_unknown_state_counts_as_running(deployed: Deployed, capsys: pytest.CaptureFixture[str]) -> None:
    deployed.client("ssm").delete_parameter(Name=state_parameter("dev"))
    with pytest.raises(
        InstanceError, match="the parameter /dormouse/dev/desired is missing: deploy dev again"
    ):
        handler(EVENT, None)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["RunningWhilePaused"] == [1.0]


# --- an update of the stack that switches the sleeping parts


def test_a_failed_update_in_a_pause_leaves_rules_and_mappings_off() -> None:
    """The rollback turns them on again; the pause turns them off once more before it stops the database."""
    weeks = Weeks(updates_fail=True)
    with pytest.raises(InstanceError, match="could not stop the query service and the host for access"):
        pause(weeks.instance(), wait=True, clock=weeks.clock)
    assert weeks.sleepers and weeks.read == "running"  # rolled back
    assert not any(weeks.rules[rule] for rule in RULES) and weeks.mapping == "Disabled"
    assert weeks.status == "stopped"


def test_a_failed_update_in_a_resume_leaves_rules_and_mappings_on() -> None:
    """The rollback turns them off; the resume turns them on after it, and ends with the error."""
    weeks = paused("stopped", updates_fail=True)
    with pytest.raises(InstanceError, match="could not start the query service and the host for access"):
        resume(weeks.instance(), clock=weeks.clock)
    assert not weeks.sleepers and weeks.read == "paused"  # rolled back
    assert all(weeks.rules.values()) and weeks.mapping == "Enabled"
    assert weeks.status == "available"


def test_one_update_switches_all_sleeping_parts() -> None:
    weeks = Weeks()
    steps = [one.step for one in pause(weeks.instance(), wait=True, clock=weeks.clock).steps]
    assert steps.count("stop the query service and the host for access") == 1
    assert weeks.is_asleep and len(weeks.updated) == 2
    resume(weeks.instance(), clock=weeks.clock)
    assert weeks.is_awake and len(weeks.updated) == 3


@pytest.mark.parametrize("command", [pause, resume])
def test_a_deploy_of_the_stack_is_awaited(command: Callable[..., Any]) -> None:
    """The deploy began before the command, so it read the former desired state."""
    weeks = Weeks() if command is pause else paused("stopped")
    weeks.update(runs=weeks.sleepers)
    command(weeks.instance(), wait=True, clock=weeks.clock)
    assert len(weeks.updated) == 3
    assert weeks.is_asleep if command is pause else weeks.is_awake
