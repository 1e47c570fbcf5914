"""The host for access of a deployed instance: its address, pause and resume, and cost."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from moto import mock_aws
from psycopg.conninfo import conninfo_to_dict

from dormouse.aws.cost import Assumptions, estimate
from dormouse.aws.keeper import keep
from dormouse.aws.switches import sleeper_state
from dormouse.errors import InstanceError
from dormouse.postgres import session
from dormouse.settings.resources import AccessResources, resources_parameter
from tests.application import add_application, break_application, parameters, wake_application, write_part
from tests.aws.schedules.test_query_switch import described, expect_switch, ran, step
from tests.deployed import REGION, Deployed, StubSession, deploy
from tests.fake_clock import FakeClock
from tests.support.aws import pause, resume, status
from tests.support.settings import parse

HOST = AccessResources(host="i-0123456789abcdef0", endpoints=2)
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        add_application(found, monkeypatch, access=HOST)
        yield found


@pytest.mark.slow
def test_the_host_is_paused_and_resumed_with_the_instance(deployed: Deployed) -> None:
    clock = FakeClock().clock
    assert (status(deployed.find()).access, status(deployed.find()).summary) == ("running", "running")
    report = pause(deployed.find(), wait=True, clock=clock)
    assert "stop the host for access" in [one.step for one in report.steps]
    assert parameters(deployed)["Running"] == "false"
    found = status(deployed.find())
    assert (found.access, found.summary) == ("asleep", "paused")
    assert dict(found.usd_hour)["host for access and endpoints"] == 0.0
    resume(deployed.find(), clock=clock)
    assert parameters(deployed)["Running"] == "true"
    assert dict(status(deployed.find()).usd_hour)["host for access and endpoints"] > 0.02


@pytest.fixture
def on_ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    """Yields an instance with compaction on EC2, with an endpoint that sleeps."""
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy(engine="emr-ec2-steps")
        described = found.find().resources.compaction
        assert described is not None
        compaction = described.model_copy(update={"has_endpoint": True})
        add_application(found, monkeypatch, compaction=compaction)
        yield found


@pytest.mark.slow
def test_the_endpoint_of_emr_is_deleted_after_the_clusters_and_created_before_the_schedules(
    on_ec2: Deployed,
) -> None:
    clock = FakeClock().clock
    steps = [one.step for one in pause(on_ec2.find(), wait=True, clock=clock).steps]
    order = ("stop EMR", "stop the endpoint of EMR", "stop the database")
    assert sorted(order, key=steps.index) == [*order]
    found = status(on_ec2.find())
    assert (found.emr_endpoint, found.summary) == ("asleep", "paused")
    assert dict(found.usd_hour)["endpoint of EMR"] == 0.0
    steps = [one.step for one in resume(on_ec2.find(), clock=clock).steps]
    assert steps.index("start the endpoint of EMR") < steps.index("enable the schedules")
    assert dict(status(on_ec2.find()).usd_hour)["endpoint of EMR"] == 0.011


def test_an_endpoint_of_emr_that_cannot_be_deleted_does_not_keep_the_database_awake(on_ec2: Deployed) -> None:
    break_application()
    with pytest.raises(InstanceError, match="could not stop the endpoint of EMR"):
        pause(on_ec2.find(), wait=True, clock=FakeClock().clock)
    assert on_ec2.state()["database"] == "stopped"


@pytest.mark.slow
def test_a_host_that_runs_while_paused_is_reported_and_stopped(deployed: Deployed) -> None:
    pause(deployed.find(), wait=True, clock=FakeClock().clock)
    wake_application(deployed)
    assert status(deployed.find()).summary == "should be paused, but a part of it is not: pause it again"
    assert keep(deployed.find()).ended
    assert parameters(deployed)["Running"] == "false"


def test_a_host_created_while_paused_starts_with_the_resume() -> None:
    """The stack was created with `Running` true, but did not start the host, as the desired state was paused.

    The resume updates the stack with the same parameter. The update reads the new desired state.
    """
    stubs = StubSession()
    described(stubs, *[("CREATE_COMPLETE", "true", 1)] * 3, desired="paused")
    expect_switch(stubs, "true")
    described(stubs, ("UPDATE_IN_PROGRESS", "true", 2), ("UPDATE_COMPLETE", "true", 2))
    sleeper = step(stubs, runs=False)
    assert sleeper_state(sleeper.instance) == "asleep"
    assert ran(sleeper).outcome == "already"
    assert ran(step(stubs, runs=True)).outcome == "done"
    stubs.assert_all_stubs_were_used()


@pytest.mark.slow
def test_the_command_that_forwards_the_port_is_printed(deployed: Deployed, cli: Cli) -> None:
    code, out, err = cli("access", "--instance", "dev", "--region", REGION)
    assert (code, err) == (0, "")
    [line] = [line for line in out.splitlines() if "start-session" in line]
    assert f"dormouse env --instance dev --region {REGION} --forwarded" in out
    found = json.loads(cli("access", "--instance", "dev", "--region", REGION, "--json")[1])
    assert found["command"] == line.strip()
    words = shlex.split(found["command"])
    assert words[:7] == ["aws", "ssm", "start-session", "--region", REGION, "--target", HOST.host]
    assert words[7:10] == ["--document-name", "AWS-StartPortForwardingSessionToRemoteHost", "--parameters"]
    assert json.loads(words[10]) == {"host": ["db"], "portNumber": ["5432"], "localPortNumber": ["5432"]}


@pytest.mark.slow
def test_a_forwarded_connection_is_verified_against_the_database_name(
    deployed: Deployed, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client connects to 127.0.0.1, but checks the certificate, and signs its token, for the database."""
    given = json.loads(cli("env", "--instance", "dev", "--region", REGION, "--forwarded", "--json")[1])
    signed: list[Any] = []
    monkeypatch.setattr(session, "_token", lambda *what: signed.append(what) or "token")
    found = conninfo_to_dict(session.with_token(session.to_conninfo(given["DORMOUSE_DSN"])))
    assert (found["host"], found["hostaddr"], found["sslmode"]) == ("db", "127.0.0.1", "verify-full")
    assert signed == [("db", "5432", "dormouse_owner", REGION)]
    assert "hostaddr" not in cli("env", "--instance", "dev", "--region", REGION)[1]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (
            HOST.model_copy(update={"host": ""}),
            "the host for access is stopped: run dormouse resume --instance dev",
        ),
        (None, "dev has no host for access: give it the table [access], and deploy it"),
    ],
)
def test_a_missing_or_stopped_host_is_one_line(
    host: AccessResources | None, message: str, deployed: Deployed, cli: Cli
) -> None:
    if host is None:
        deployed.client("ssm").delete_parameter(Name=resources_parameter("dev", "access"))
    else:
        write_part(deployed, "access", host)
    assert cli("access", "--instance", "dev", "--region", REGION) == (1, "", f"dormouse: {message}\n")


@pytest.mark.parametrize(("given", "usd"), [({}, 3.066 + 0.64 + 14.6), ({"endpoints": "existing"}, 3.706)])
def test_the_host_costs_money_only_while_it_runs(given: dict[str, str], usd: float) -> None:
    found = estimate(parse({"id": "dev", "access": given}), "us-east-1", Assumptions())
    lines = [line for line in found.lines if line.stack == "access"]
    assert sum(line.running for line in lines) == pytest.approx(usd, abs=0.01)
    assert sum(line.paused for line in lines) == 0


def test_an_existing_vpc_needs_the_setting_endpoints() -> None:
    from dormouse.errors import InvalidInput
    from tests.assembly import EXISTING_VPC

    with pytest.raises(InvalidInput, match=r'access\.endpoints: it must be "create" or "existing"'):
        parse({"id": "dev", "network": EXISTING_VPC, "access": {}})
