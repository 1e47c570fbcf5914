"""Stopping a cluster again that AWS started: every state of it, and every race with people and deliveries."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from dormouse.errors import InstanceError
from dormouse.system.aws import Aws
from dormouse.system.repause import Repaused, repause
from lambdas.pause import handler
from tests.deployed import REGION, StubSession

PARAMETER = "/dormouse/dev/state"
REFUSING = [
    "backing-up", "creating", "failing-over", "maintenance", "migrating", "modifying", "rebooting",
    "renaming", "resetting-master-credentials", "starting", "storage-full", "storage-optimization",
    "upgrading", "inaccessible-encryption-credentials", "deleting", "cloning-failed", "a state of next year",
]  # fmt: skip


@pytest.fixture
def stubs() -> Iterator[StubSession]:
    session = StubSession()
    yield session
    session.assert_all_were_asked()


def wanted(stubs: StubSession, *states: str) -> None:
    for state in states:
        answer = {"Parameter": {"Name": PARAMETER, "Value": state}}
        stubs.stub("ssm").add_response("get_parameter", answer, {"Name": PARAMETER})


def described(stubs: StubSession, *states: str) -> None:
    for state in states:
        answer = {"DBClusters": [{"DBClusterIdentifier": "db", "Status": state}]}
        stubs.stub("rds").add_response("describe_db_clusters", answer, {"DBClusterIdentifier": "db"})


def asked(stubs: StubSession, operation: str, refusal: str | None = None) -> None:
    if refusal is None:
        stubs.stub("rds").add_response(operation, {}, {"DBClusterIdentifier": "db"})
    else:
        stubs.stub("rds").add_client_error(operation, refusal, "not now")


def look(stubs: StubSession) -> Repaused:
    return repause(Aws(stubs), "db", PARAMETER)


@pytest.mark.parametrize("state", REFUSING)
@pytest.mark.parametrize("refusal", ["InvalidDBClusterStateFault", "InvalidDBInstanceState"])
def test_a_cluster_that_cannot_be_stopped_yet_is_looked_at_again(
    stubs: StubSession, state: str, refusal: str
) -> None:
    wanted(stubs, "paused", "paused")
    asked(stubs, "stop_db_cluster", refusal)
    described(stubs, state)
    found = look(stubs)
    assert (found, found.runs_while_paused) == (Repaused("paused", state, ended=False), True)


def test_it_is_stopped_first_and_looked_at_until_it_has_stopped(stubs: StubSession) -> None:
    wanted(stubs, *["paused"] * 6)
    asked(stubs, "stop_db_cluster")
    described(stubs, "stopping")
    found = look(stubs)
    assert (found, found.runs_while_paused) == (Repaused("paused", "stopping", ended=False), False)
    for state, ended in (("stopping", False), ("stopped", True)):
        asked(stubs, "stop_db_cluster", "InvalidDBClusterStateFault")
        described(stubs, state)
        assert look(stubs) == Repaused("paused", state, ended=ended)


def test_a_cluster_whose_key_is_gone_for_now_sleeps(stubs: StubSession) -> None:
    wanted(stubs, "paused", "paused")
    asked(stubs, "stop_db_cluster", "InvalidDBClusterStateFault")
    described(stubs, "inaccessible-encryption-credentials-recoverable")
    assert look(stubs).ended


@pytest.mark.parametrize("state", ["starting", "available", "backing-up", "upgrading"])
def test_a_resume_starts_it_and_nothing_stops_it(stubs: StubSession, state: str) -> None:
    """Event 0151 also comes of starts that people asked for."""
    wanted(stubs, "running")
    described(stubs, state)
    assert look(stubs) == Repaused("running", state, ended=True)


def test_a_resume_between_the_reading_and_the_stop_is_given_its_database_back(stubs: StubSession) -> None:
    wanted(stubs, "paused", "running")
    asked(stubs, "stop_db_cluster")
    described(stubs, "stopping", "stopping")
    assert not look(stubs).ended
    wanted(stubs, "running")
    described(stubs, "stopping")
    assert not look(stubs).ended  # a cluster that is being stopped cannot be started
    wanted(stubs, "running")
    described(stubs, "stopped")
    asked(stubs, "start_db_cluster")
    assert not look(stubs).ended
    wanted(stubs, "running")
    described(stubs, "starting")
    assert look(stubs).ended


def test_a_start_that_somebody_else_was_quicker_with_is_fine(stubs: StubSession) -> None:
    wanted(stubs, "running")
    described(stubs, "stopped")
    asked(stubs, "start_db_cluster", "InvalidDBClusterStateFault")
    assert not look(stubs).ended


def test_without_the_parameter_nothing_is_touched(stubs: StubSession) -> None:
    stubs.stub("ssm").add_client_error("get_parameter", "ParameterNotFound")
    described(stubs, "available")
    assert look(stubs) == Repaused(None, "available", ended=True)


def test_a_cluster_that_is_deleted_is_none_to_wait_for(stubs: StubSession) -> None:
    wanted(stubs, "paused", "paused")
    stubs.stub("rds").add_client_error("stop_db_cluster", "DBClusterNotFoundFault")
    stubs.stub("rds").add_client_error("describe_db_clusters", "DBClusterNotFoundFault")
    found = look(stubs)
    assert (found, found.runs_while_paused) == (Repaused("paused", None, ended=True), False)


def test_what_aws_refuses_otherwise_is_raised_so_that_the_message_comes_back(stubs: StubSession) -> None:
    wanted(stubs, "paused")
    stubs.stub("rds").add_client_error("stop_db_cluster", "AccessDenied", http_status_code=403)
    with pytest.raises(InstanceError, match="no right to rds:StopDBCluster"):
        look(stubs)


@dataclass
class Model:
    """AWS with one cluster whose starts and stops take a while, and something that happens before a call."""

    wanted: str
    status: str
    meanwhile: dict[int, Callable[[], None]] = field(default_factory=dict)
    calls: Iterator[int] = field(default_factory=itertools.count)
    events: int = 1
    """Messages in the queue: each start of the cluster sends one."""
    operator: tuple[str, str, set[str]] | None = None
    """In which state it asks for what, and in which states it has what it wants."""

    def client(self, service: str, **options: Any) -> Model:
        return self

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(**given: Any) -> Any:
            self.meanwhile.pop(next(self.calls), lambda: None)()
            return self._answer(operation)

        return call

    def _answer(self, operation: str) -> Any:
        match operation:
            case "get_parameter":
                return {"Parameter": {"Value": self.wanted}}
            case "describe_db_clusters":
                return {"DBClusters": [{"Status": self.status}]}
        before, after = {
            "stop_db_cluster": ("available", "stopping"),
            "start_db_cluster": ("stopped", "starting"),
        }[operation]
        if self.status != before:
            error = {"Error": {"Code": "InvalidDBClusterStateFault", "Message": self.status}}
            raise ClientError(error, operation)  # type: ignore[arg-type]
        self.status = after
        self.events += after == "starting"
        return {}

    def ends(self) -> None:
        """What AWS is at ends; then the operator's process looks again, until it has what it wants."""
        self.status = {"stopping": "stopped", "starting": "available"}.get(self.status, self.status)
        self._operate()

    def resumes(self) -> None:
        """An operator writes what is wanted; an earlier one sees it, and ends."""
        self.wanted, self.operator = "running", ("stopped", "start_db_cluster", {"available"})
        self._operate()

    def pauses(self) -> None:
        self.wanted, self.operator = "paused", ("available", "stop_db_cluster", {"stopping", "stopped"})
        self._operate()

    def _operate(self) -> None:
        if self.operator is None:
            return
        where, operation, goal = self.operator
        if self.status == where:
            self._answer(operation)
        if self.status in goal:
            self.operator = None

    def delivers(self) -> None:
        """Another delivery, whole."""
        repause(Aws(self), "db", PARAMETER)


@pytest.mark.parametrize("wanted_first", ["paused", "running"])
@pytest.mark.parametrize("status", ["available", "starting", "stopping", "stopped"])
def test_whoever_comes_between_has_his_way_in_the_end(wanted_first: str, status: str) -> None:
    """Before each two calls of a delivery, two of: resume, pause, another delivery, the end of AWS's work."""
    happenings = ["resumes", "pauses", "delivers", "ends"]
    for (first, one), (second, other) in itertools.product(
        itertools.product(range(7), happenings), itertools.product(range(7), happenings)
    ):
        model = Model(wanted_first, status)
        model.meanwhile = {first: getattr(model, one)}
        before = model.meanwhile.get(second, lambda: None)
        model.meanwhile[second] = lambda model=model, before=before, other=other: (  # type: ignore[misc]
            before(), getattr(model, other)()
        )  # fmt: skip
        _delivered_until_it_ends(model)
        asleep = {"stopping", "stopped"}
        goal = asleep if model.wanted == "paused" else {"available", "starting"}
        assert model.status in goal, (first, one, second, other)


def _delivered_until_it_ends(model: Model) -> None:
    for _ in range(30):
        if model.events:
            ended = repause(Aws(model), "db", PARAMETER).ended
            model.events -= ended
        elif model.meanwhile:
            model.meanwhile.pop(min(model.meanwhile))()
        elif model.operator is None:
            return
        model.ends()
    raise AssertionError(f"it never ends: {model.wanted}, {model.status}")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The lambda's, and a cluster in moto that runs though it should sleep."""
    monkeypatch.setenv("DORMOUSE_CLUSTER", "db")
    monkeypatch.setenv("DORMOUSE_STATE_PARAMETER", PARAMETER)
    monkeypatch.setenv("DORMOUSE_INSTANCE_ID", "dev")
    monkeypatch.setenv("AWS_REGION", REGION)
    with mock_aws():
        session = boto3.session.Session(region_name=REGION)
        rds = session.client("rds")
        rds.create_db_cluster(
            DBClusterIdentifier="db", Engine="aurora-postgresql", MasterUsername="owner",
            MasterUserPassword="a password",
        )  # fmt: skip
        session.client("ssm").put_parameter(Name=PARAMETER, Value="paused", Type="String")
        yield session


EVENT = {
    "Records": [{"messageId": str(number), "body": json.dumps({"detail": {"EventID": "RDS-EVENT-0153"}})}
                for number in range(2)]
}  # fmt: skip


def test_the_lambda_answers_when_the_cluster_has_stopped(
    environment: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert handler(EVENT, None) == {"batchItemFailures": []}
    assert environment.client("rds").describe_db_clusters()["DBClusters"][0]["Status"] == "stopped"
    metric = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (metric["instance"], metric["RunningWhilePaused"]) == ("dev", [0.0])
    [told] = metric["_aws"]["CloudWatchMetrics"]
    assert (told["Namespace"], told["Dimensions"]) == ("Dormouse", [["instance"]])


def test_the_lambda_wants_its_messages_back_while_the_cluster_starts(
    environment: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model("paused", "starting")
    monkeypatch.setattr("lambdas.pause.open_session", lambda region: model)
    again = {"batchItemFailures": [{"itemIdentifier": "0"}, {"itemIdentifier": "1"}]}
    assert handler(EVENT, None) == again
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["RunningWhilePaused"] == [1.0]
    model.ends()
    assert handler(EVENT, None) == again  # it is stopping
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["RunningWhilePaused"] == [0.0]
    model.ends()
    assert handler(EVENT, None) == {"batchItemFailures": []}
