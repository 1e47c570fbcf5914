"""`dormouse pause`, `resume` and `status --instance ID`: their output and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws

from dormouse.aws.cost import prices_of
from dormouse.aws.status import QueueState
from dormouse.settings import resources
from tests.deployed import (
    PAUSED,
    REGION,
    RUNNING,
    Deployed,
    deploy,
    receive_request,
    start_emr_cluster,
    start_job_run,
)
from tests.support.aws import status

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield


@pytest.fixture
def deployed(moto: None) -> Deployed:
    return deploy()


def on(verb: str, *more: str, instance: str = "dev") -> tuple[str, ...]:
    return verb, "--instance", instance, "--region", REGION, *more


def test_each_step_is_shown_even_if_there_is_nothing_to_do(deployed: Deployed, cli: Cli) -> None:
    code, out, _ = cli(*on("pause"))
    assert (code, deployed.state()) == (0, PAUSED)
    # a slow step also shows its seconds
    assert [re.sub(r" \(\d+ s\)$", "", line) for line in out.splitlines()] == [
        "✓ write the desired state: paused",
        "✓ disable the schedules",
        "✓ disable the mappings of the queues",
        "· let scheduled lambdas end: nothing to do",
        "· let runs end: nothing to do",
        "✓ stop EMR",
        "· let running commits end: nothing to do",
        "✓ stop the database",
        "· enable the rule that keeps the database asleep: nothing to do",
        "✓ verify",
        "dev is paused, its database is stopped",
    ]
    code, out, _ = cli(*on("pause", "--wait"))
    assert (code, out.splitlines()[-1]) == (0, "dev was paused, its database is stopped")
    code, out, _ = cli(*on("resume"))
    assert (code, out.splitlines()[-1]) == (0, "dev runs, its database is available")
    code, out, _ = cli(*on("resume"))
    assert (code, out.splitlines()[-1]) == (0, "dev was already running, its database is available")


@pytest.mark.slow
def test_a_pause_with_json_is_one_document(deployed: Deployed, cli: Cli) -> None:
    code, out, err = cli(*on("pause", "--json"))
    report = json.loads(out)
    assert (code, err, report["desired"], report["database"]) == (0, "", "paused", "stopped")
    assert report["steps"][1]["outcome"] == "done" and len(report["steps"][1]["what"]) == 3


@pytest.mark.slow
def test_a_dry_run_reports_the_steps_without_doing_them(deployed: Deployed, cli: Cli) -> None:
    code, out, _ = cli(*on("pause", "--dry-run"))
    assert (code, deployed.state()) == (0, RUNNING)
    assert f"→ stop the database: cluster {deployed.cluster} is available" in out.splitlines()
    assert out.splitlines()[-1] == "dev: nothing was changed"
    assert cli(*on("resume", "--dry-run"))[0] == 0


@pytest.mark.slow
def test_the_wait_for_running_work_can_be_shortened(deployed: Deployed, cli: Cli) -> None:
    receive_request(deployed)
    code, _, _ = cli(*on("pause", "--drain-seconds", "0"))
    assert (code, deployed.state()) == (0, PAUSED)


@pytest.mark.slow
def test_mistakes_are_one_line(deployed: Deployed, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*args: str) -> tuple[int, str]:
        code, out, err = cli(*args)
        assert (out, err.count("\n")) == ("", 1) and err.startswith("dormouse: ")
        return code, err.removeprefix("dormouse: ").strip()

    nowhere = f"there is no instance 'prod' in account 123456789012, {REGION}; there is dev"
    for verb in ("pause", "resume", "status"):
        assert failed(*on(verb, instance="prod")) == (1, nowhere)
        code, line = failed(*on(verb, instance="Lake"))
        assert code == 2 and "is not the id of an instance" in line
    for verb in ("pause", "resume", "status", "env", "access", "dead-letters", "table list"):
        code, line = failed(*verb.split(), "--instance", "dev")
        assert code == 2 and line.endswith("no AWS region is given: use --region, or set AWS_REGION"), verb
    assert failed(*on("pause", "--profile", "missing"))[0] == 2
    assert failed("pause")[0] == 2
    assert failed(*on("pause", "--drain-seconds", "-1"))[0] == 2
    assert failed(*on("status", "a-table"))[0] == 2
    code, line = failed("status", "--instance", "lake")
    assert code == 2 and line.startswith(
        "there is no folder lake, and it cannot be used as a deployed instance: no AWS region"
    )
    assert failed("status", "--region", REGION)[0] == 2
    code, line = failed("query", "flights", "--instance", "dev")
    assert code == 1 and line.endswith('for a deployed one run first eval "$(dormouse env --instance ID)"')
    assert deployed.state() == RUNNING


@pytest.mark.slow
def test_the_status_shows_what_runs_and_its_cost(deployed: Deployed, cli: Cli) -> None:
    code, out, _ = cli(*on("status"))
    assert code == 0
    for words in (
        "dev in 123456789012",
        ": running",
        "available",
        "enabled",
        "in flight",
        "USD an hour",
        "in all",
    ):
        assert words in out
    code, out, _ = cli(*on("status", "--json"))
    found = json.loads(out)
    assert (code, found["desired"], found["summary"], found["database"]) == (
        0, "running", "running", "available",
    )  # fmt: skip
    cli(*on("pause"))
    found = json.loads(cli(*on("status", "--json"))[1])
    assert (found["summary"], found["runs"]) == ("paused", [])
    assert dict(found["usd_hour"])["database"] == 0.0


@pytest.mark.slow
def test_an_id_needs_no_region_option_if_the_environment_has_a_region(
    deployed: Deployed, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder whose name equals the id takes precedence."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    assert json.loads(cli("status", "-i", "dev", "--json")[1])["summary"] == "running"
    (tmp_path / "dev").mkdir()
    code, _, err = cli("status", "-i", "dev")
    assert code == 1 and "is not a Dormouse instance" in err


def test_the_status_counts_messages_and_runs(deployed: Deployed) -> None:
    receive_request(deployed)
    run = start_job_run(deployed)
    sqs, dead = deployed.client("sqs"), deployed.find().resources.commit
    assert dead is not None
    for number in range(3):
        sqs.send_message(QueueUrl=dead.dead_letters[1], MessageBody=str(number))
    found = status(deployed.find())
    assert found.runs == (f"job run {run}, running",)
    assert found.queues == (
        QueueState(deployed.queues[0], waiting=0, in_flight=1, delayed=0, dead=0),
        QueueState(deployed.queues[1], waiting=0, in_flight=0, delayed=0, dead=3),
    )
    assert (found.spark, dict(found.usd_hour)["runs"]) == ("STARTED", None)


@pytest.mark.slow
def test_the_cost_of_a_database_follows_its_capacity(deployed: Deployed) -> None:
    assert dict(status(deployed.find()).usd_hour)["database"] is None  # there is no metric yet
    dimensions = [{"Name": "DBClusterIdentifier", "Value": deployed.cluster}]
    measured = {"MetricName": "ServerlessDatabaseCapacity", "Dimensions": dimensions, "Value": 2.0}
    deployed.client("cloudwatch").put_metric_data(
        Namespace="AWS/RDS", MetricData=[{**measured, "Timestamp": datetime.now(UTC) - timedelta(minutes=6)}]
    )
    usd = dict(status(deployed.find()).usd_hour)["database"]
    assert usd is not None and 0.1 < usd < 1


@pytest.mark.slow
def test_the_cost_of_row_clusters_follows_their_current_capacity(deployed: Deployed) -> None:
    """The cost is None while a cluster has no metric, and missing if there are no clusters."""
    assert "clusters of rows" not in dict(status(deployed.find()).usd_hour)
    database = deployed.find().resources.database
    assert database is not None
    database = database.model_copy(update={"row_clusters": ("rows-1", "rows-2")})
    where = resources.resources_parameter("dev", "database")
    deployed.client("ssm").put_parameter(Name=where, Value=database.model_dump_json(), Overwrite=True)

    def measure(cluster: str, name: str, value: float) -> None:
        data = {"MetricName": name, "Dimensions": [{"Name": "DBClusterIdentifier", "Value": cluster}]}
        then = datetime.now(UTC) - timedelta(minutes=6)
        one = {**data, "Value": value, "Timestamp": then}
        deployed.client("cloudwatch").put_metric_data(Namespace="AWS/RDS", MetricData=[one])

    measure("rows-1", "ServerlessDatabaseCapacity", 2.0)
    measure("rows-1", "VolumeBytesUsed", 50e9)
    usd = dict(status(deployed.find()).usd_hour)
    assert (usd["clusters of rows"], usd["their storage"]) == (None, None)
    measure("rows-2", "ServerlessDatabaseCapacity", 0.0)  # it is stopped
    measure("rows-2", "VolumeBytesUsed", 23e9)
    usd, prices = dict(status(deployed.find()).usd_hour), prices_of(REGION)
    assert usd["clusters of rows"] == pytest.approx(2 * prices["acu_hour"])
    assert usd["their storage"] == pytest.approx(0.1 * prices["aurora_gb_month"])


@pytest.mark.parametrize("engine", ["emr-ec2-steps", "emr-ec2-transient"])
def test_clusters_of_emr_are_listed_as_runs(moto: None, engine: Any) -> None:
    deployed = deploy(engine=engine)
    assert (status(deployed.find()).spark, status(deployed.find()).runs) == ("no cluster", ())
    cluster = start_emr_cluster(deployed)
    found = status(deployed.find())
    assert (found.spark, found.runs) == ("1 cluster", (f"cluster {cluster}, waiting",))


def test_the_summary_names_a_wrong_state(deployed: Deployed) -> None:
    rule = deployed.rules[0]
    deployed.client("events").disable_rule(Name=rule)
    assert status(deployed.find()).summary == "should be running, but a part of it is not: resume it again"
    name = resources.state_parameter("dev")
    deployed.client("ssm").put_parameter(Name=name, Value="paused", Overwrite=True)
    assert status(deployed.find()).summary == "should be paused, but a part of it is not: pause it again"


def test_an_instance_without_options_has_a_status_too(deployed: Deployed) -> None:
    """The instance's deployment has no queues, compaction and buckets."""
    found = deployed.find()
    recorded = resources.Resources(database=found.resources.database, pause=found.resources.pause)
    small = status(replace(found, resources=recorded))
    assert (small.summary, small.queues, small.spark, small.runs) == ("running", (), None, ())
