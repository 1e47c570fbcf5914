"""What keeps an instance as it is wanted, while commands die, calls are denied and events are lost."""

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
from tests.weeks import DAY, HOUR, RULES, SLEEPERS, Fault, Weeks, refusal
from tests.weeks_queue import Killed

STATES = [
    "available", "stopped", "starting", "a state of next year", "stopping", "backing-up", "creating",
    "failing-over", "maintenance", "modifying", "rebooting", "storage-optimization", "upgrading",
    "inaccessible-encryption-credentials-recoverable",
]  # fmt: skip
FAULTS = {"killed": Killed, "denied": lambda: refusal("AccessDenied", "SomeCall")}


def paused(status: str, **more: Any) -> Weeks:
    rules, sleepers = {**dict.fromkeys(RULES, False), "keeper": True}, dict.fromkeys(SLEEPERS, False)
    return Weeks(status, "paused", rules=rules, mapping="Disabled", sleepers=sleepers, **more)


def interrupted(weeks: Weeks, command: Callable[..., Any], fault: Fault) -> bool:
    """Whether the command met the fault."""
    with suppress(Killed, InstanceError):
        command(weeks.instance(fault), wait=True, clock=weeks.clock)
        return False
    return True


def at(wanted: tuple[str, int], fault: str) -> Fault:
    """Of a call, when it comes for the second time, say."""
    counts: Counter[str] = Counter()

    def look(call: str) -> BaseException | None:
        counts[call] += 1
        return FAULTS[fault]() if (call, counts[call]) == wanted else None

    return look


def calls(weeks: Weeks, command: Callable[..., Any]) -> list[tuple[str, int]]:
    """Each call of the whole command, and its second time: later ones only wait."""
    counts: Counter[str] = Counter()
    assert not interrupted(weeks, command, lambda call: counts.update([call]))
    return [(call, time) for call in counts for time in (1, 2) if time <= counts[call]]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
@pytest.mark.parametrize("status", STATES)
def test_an_interrupted_pause_costs_hours_and_not_weeks(status: str, fault: str) -> None:
    """Interrupted at each of its calls; then AWS starts the database twice, and tells of neither."""
    for call in calls(Weeks(status), pause):
        weeks = Weeks(status)
        assert interrupted(weeks, pause, at(call, fault)) or call[0].startswith("get_metric_data")
        if weeks.desired == "running":
            continue  # it was interrupted before anything was asked for
        for sent in range(32):
            weeks.send(sent)
            weeks.until(weeks.now + DAY / 2)
        weeks.until(weeks.now + 4 * HOUR)
        assert weeks.is_asleep, (call, weeks)
        assert weeks.awake_while_paused <= 6 * HOUR, (call, weeks)
        assert weeks.waiting | weeks.applied == set(range(32)) and not weeks.dead | weeks.lost


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.few(2)
@pytest.mark.parametrize("status", STATES)
def test_an_interrupted_resume_is_finished(status: str, fault: str) -> None:
    for call in calls(paused(status), resume):
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
def test_the_lambda_itself_may_fail_at_every_call(fault: str, loses_events: bool) -> None:
    """Two of three invocations, at one of their calls."""
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
def test_an_update_that_fails_is_asked_for_once_an_hour_and_told(wanted: str) -> None:
    weeks = paused("stopped") if wanted == "paused" else Weeks()
    weeks.sleepers, weeks.updates_fail = dict.fromkeys(SLEEPERS, wanted == "paused"), True
    weeks.until(12 * HOUR)
    for times in weeks.updated.values():
        assert 6 <= len(times) - 1 <= 12
    state = "running" if wanted == "paused" else "asleep"
    left = (f"the query service is {state}", f"the host for access is {state}")
    [found, *_] = [one for one in weeks.looks if one is not None and one.left == left]
    assert (found.ended, found.runs_while_paused) == (False, wanted == "paused")


def test_without_anybody_who_looks_it_runs_for_weeks() -> None:
    """So the simulation can tell."""
    weeks = Weeks(is_kept=False)
    assert interrupted(weeks, pause, at(("stop_db_cluster ", 1), "killed"))
    weeks.until(14 * DAY)
    assert not weeks.is_asleep and weeks.awake_while_paused > 13 * DAY


def test_a_mapping_that_is_on_while_the_database_sleeps_makes_no_dead_letter() -> None:
    """As after a change of its tags, which writes it anew."""
    weeks = Weeks("stopped", "paused")
    weeks.send(0)
    weeks.until(5 * HOUR)
    assert weeks.is_asleep and not weeks.dead and weeks.messages[0].received < 20


@pytest.mark.slow
@pytest.mark.parametrize("tells_ages", [True, False])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_messages_outlive_a_pause_of_months(tells_ages: bool, fault: str | None) -> None:
    """SQS forgets them after 14 days; the lambda sends them again before, whatever its calls come to."""
    for at_call in range(0, 30, 3) if fault else (0,):
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
@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("tells_ages", [True, False])
@pytest.mark.parametrize("sender", SENDERS)
def test_passes_make_no_dead_letters_and_go_on(sender: str, tells_ages: bool, fault: str | None) -> None:
    """SQS counts what a pass only looks at: what it received often is no longer told of, and then buried."""
    weeks = paused("stopped", tells_ages=tells_ages, looks_hourly=True, wanted_since=0.0)
    if fault:  # between the sending and the deleting, among others
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
def test_a_pass_comes_once_in_a_quarter_of_the_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dormouse.aws.renewal")
    weeks = paused("stopped", looks_hourly=True, wanted_since=0.0)
    for number in range(24):
        weeks.send(number)
        weeks.until(weeks.now + DAY)
    passes = [one for one in caplog.messages if one.startswith("sending old messages again")]
    assert 24 / 3.5 <= len(passes) <= 24 / 3.5 + 1


def test_without_the_lambda_they_are_forgotten() -> None:
    """So the simulation can tell."""
    weeks = paused("stopped", is_kept=False)
    weeks.send(0)
    weeks.until(15 * DAY)
    assert weeks.lost == {0}


@pytest.mark.slow
def test_runs_are_waited_for_but_not_longer_than_a_day() -> None:
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
    """Its rule is off; what was sent before is still delivered."""
    weeks = Weeks("stopped", rules=dict.fromkeys([*RULES, "keeper"], False), mapping="Disabled")
    assert weeks.look()
    assert (weeks.status, weeks.mapping, set(weeks.rules.values())) == ("stopped", "Disabled", {False})


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["paused", "running"])
@pytest.mark.parametrize("status", ["available", "starting", "stopping", "stopped"])
def test_the_last_wish_counts_whatever_comes_between_the_calls_of_a_look(wanted: str, status: str) -> None:
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
def test_what_only_people_can_mend_is_said(status: str) -> None:
    with pytest.raises(InstanceError, match=f"cluster db is {status}: "):
        keep(paused(status).instance())


def test_a_deploy_that_may_need_the_database_is_waited_for() -> None:
    """A database that is restored comes awake, and adopts the store before it may sleep."""
    weeks = paused("available")
    weeks.deploying = True
    found = keep(weeks.instance())
    assert found.left == ("the stack dormouse-dev-migrate is being deployed",)
    assert (found.ended, found.runs_while_paused, weeks.status) == (False, True, "available")
    weeks.deploying = False
    assert keep(weeks.instance()).left == ("cluster db is stopping",)


def test_lambdas_of_schedules_that_were_on_until_now_are_waited_for() -> None:
    """However long ago the pause was wished for: they may have been called a moment before."""
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
    """In moto, and the lambda's environment."""
    monkeypatch.setenv("DORMOUSE_INSTANCE_ID", "dev")
    monkeypatch.setenv("AWS_REGION", REGION)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield deploy()


EVENT = {"Records": [{"messageId": str(number), "body": "{}"} for number in range(2)]}


@pytest.mark.slow
def test_the_lambda_answers_when_all_is_as_wanted(
    deployed: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert handler(EVENT, None) == {"batchItemFailures": []}
    assert deployed.state() == RUNNING
    deployed.client("ssm").put_parameter(Name=state_parameter("dev"), Value="paused", Overwrite=True)
    assert handler(EVENT, None) == {"batchItemFailures": []}
    assert deployed.state() == {**PAUSED, "spark": "STARTED"}  # which stops itself
    metric = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (metric["instance"], metric["RunningWhilePaused"]) == ("dev", [0.0])
    [told] = metric["_aws"]["CloudWatchMetrics"]
    assert (told["Namespace"], told["Dimensions"]) == ("Dormouse", [["instance"]])


@pytest.mark.slow
def test_the_lambda_wants_its_messages_back_while_something_is_left(
    deployed: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed.client("ssm").put_parameter(Name=state_parameter("dev"), Value="paused", Overwrite=True)
    deployed.client("stepfunctions").start_execution(stateMachineArn=deployed.machine)
    again = {"batchItemFailures": [{"itemIdentifier": "0"}, {"itemIdentifier": "1"}]}
    assert handler(EVENT, None) == again
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["RunningWhilePaused"] == [1.0]


def test_what_aws_does_not_tell_counts_as_running(
    deployed: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed.client("ssm").delete_parameter(Name=state_parameter("dev"))
    with pytest.raises(
        InstanceError, match="the parameter /dormouse/dev/desired is missing: deploy dev again"
    ):
        handler(EVENT, None)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["RunningWhilePaused"] == [1.0]
