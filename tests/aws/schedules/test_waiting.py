"""Messages that wait in a paused instance: reports of their age, and renewal before they expire."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from moto import mock_aws
from moto.sqs.models import sqs_backends

from dormouse.aws.renewal import renew
from tests.deployed import REGION, Deployed, deploy
from tests.fake_clock import FakeClock
from tests.support.aws import pause, status

DAY = 86_400
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    monkeypatch.setattr("dormouse.aws.renewal.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("dormouse.aws.renewal.WAIT_SECONDS", 0)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        commit = found.find().resources.commit
        assert commit is not None
        for url in (*commit.queues, *commit.dead_letters):
            attributes = {"MessageRetentionPeriod": str(14 * DAY)}
            found.client("sqs").set_queue_attributes(QueueUrl=url, Attributes=attributes)
        for uuid in found.mappings:
            found.client("lambda").update_event_source_mapping(UUID=uuid, Enabled=False)
        yield found


def send(deployed: Deployed, body: str, days: float) -> None:
    """Sends a message, and makes moto and CloudWatch report that it has waited for `days`."""
    url = deployed.queues[0]
    deployed.client("sqs").send_message(QueueUrl=url, MessageBody=body)
    name = url.rpartition("/")[2]
    queue = next(one for key, one in sqs_backends["123456789012"][REGION].queues.items() if key == name)
    queue._messages[-1].sent_timestamp -= int(days * DAY * 1_000)
    measured: Any = {
        "MetricName": "ApproximateAgeOfOldestMessage",
        "Dimensions": [{"Name": "QueueName", "Value": name}],
        "Timestamp": datetime.now(UTC) - timedelta(minutes=2),
        "Value": days * DAY,
    }
    deployed.client("cloudwatch").put_metric_data(Namespace="AWS/SQS", MetricData=[measured])


def messages(deployed: Deployed) -> list[Any]:
    """Returns the messages of the first queue, as moto stores them."""
    name = deployed.queues[0].rpartition("/")[2]
    return list(sqs_backends["123456789012"][REGION].queues[name]._messages)


def bodies(deployed: Deployed) -> list[str]:
    return sorted(one.body for one in messages(deployed))


def ages(deployed: Deployed) -> dict[str, float]:
    now = datetime.now(UTC).timestamp()
    return {one.body: now - int(one.sent_timestamp) / 1_000 for one in messages(deployed)}


def test_a_pause_reports_waiting_messages_their_age_and_expiry(deployed: Deployed) -> None:
    send(deployed, "old", days=2)
    report = pause(deployed.find(), clock=FakeClock().clock)
    lost = datetime.now(UTC) + timedelta(days=12)
    name = deployed.queues[0].rpartition("/")[2]
    assert report.waiting == (
        f"about 1 messages wait in {name}, the oldest for 2.0 days; SQS deletes it on {lost:%Y-%m-%d}",
    )


@pytest.mark.slow
def test_before_messages_expire_status_and_pause_propose_a_resume(deployed: Deployed, cli: Cli) -> None:
    send(deployed, "old", days=12)
    day = f"{datetime.now(UTC) + timedelta(days=2):%Y-%m-%d}"
    line = f"SQS deletes messages from {day} on: run dormouse resume --instance dev before that"
    assert pause(deployed.find(), clock=FakeClock().clock).waiting[-1] == line
    found = status(deployed.find())
    assert found.offer == line and found.queues[0].oldest_seconds == 12 * DAY
    assert found.queues[1].lost_at is None
    code, out, _ = cli("status", "--instance", "dev", "--region", REGION)
    assert code == 0 and line in " ".join(out.split()) and "12.0 days" in out
    assert json.loads(cli("status", "--instance", "dev", "--region", REGION, "--json")[1])["offer"] == line


def test_only_old_messages_are_sent_again(deployed: Deployed) -> None:
    for number in range(12):
        send(deployed, f"young-{number:02}", days=1)
    for number in range(13):
        send(deployed, f"old-{number:02}", days=8)
    before = bodies(deployed)
    assert renew(deployed.find())
    assert bodies(deployed) == before
    found = ages(deployed)
    assert all(age < DAY / 2 for body, age in found.items() if body.startswith("old"))
    assert all(age > DAY / 2 for body, age in found.items() if body.startswith("young"))


def test_no_message_is_sent_again_while_lambdas_receive_messages(deployed: Deployed) -> None:
    opened: list[str] = []
    send(deployed, "old", days=8)
    deployed.client("lambda").update_event_source_mapping(UUID=deployed.mappings[1], Enabled=True)
    assert renew(deployed.find(), opened.append) and not opened  # type: ignore[arg-type]


def test_a_deleted_mapping_counts_as_disabled(deployed: Deployed) -> None:
    send(deployed, "old", days=8)
    deployed.client("lambda").delete_event_source_mapping(UUID=deployed.mappings[1])
    assert renew(deployed.find())
    assert ages(deployed)["old"] < DAY / 2


@pytest.mark.slow
def test_a_message_received_twice_is_sent_again_even_if_young(deployed: Deployed) -> None:
    send(deployed, "young", days=1)
    for number, age in enumerate((DAY, DAY, 0)):
        assert ages(deployed)["young"] == pytest.approx(age, abs=60), number
        at = time.time() + number * 4 * DAY
        assert renew(deployed.find(), now=lambda at=at: at)  # type: ignore[misc]
        assert renew(deployed.find(), now=lambda at=at + 3 * DAY: at)  # type: ignore[misc]
        for one in messages(deployed):
            one.change_visibility(0)


def test_old_dead_letters_are_sent_again_to_their_own_queue(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQS counts a dead letter's age from its first sending to the commit queue, and deletes old ones."""
    commit = deployed.find().resources.commit
    assert commit is not None
    dead, sqs = commit.dead_letters[0], deployed.client("sqs")
    reason = {"reason": {"DataType": "String", "StringValue": "tried 41 times"}}
    for body in ("old", "young", "of others"):
        sqs.send_message(QueueUrl=dead, MessageBody=body, MessageAttributes=reason)
    queue = sqs_backends["123456789012"][REGION].queues[dead.rpartition("/")[2]]
    for number in (0, 2):
        queue._messages[number].sent_timestamp -= 8 * DAY * 1_000
    # moto does not set the source queue of dead letters
    monkeypatch.setattr("dormouse.aws.renewal.foreign", lambda queue, one: one["Body"] == "of others")
    assert renew(deployed.find())
    now = datetime.now(UTC).timestamp()
    kept = [(one.body, round((now - int(one.sent_timestamp) / 1_000) / DAY)) for one in queue._messages]
    assert sorted(kept) == [("of others", 8), ("old", 0), ("young", 0)], (
        "a renewed foreign letter would look like one of this queue"
    )
    assert all("tried 41 times" in str(one.message_attributes) for one in queue._messages)


@pytest.mark.slow
def test_messages_that_one_call_has_no_time_for_are_left_to_the_next(deployed: Deployed) -> None:
    for number in range(30):
        send(deployed, f"old-{number}", days=8)
    moments = iter([0.0, 1.0, 99.0])
    assert not renew(deployed.find(), now=lambda: next(moments))
    assert renew(deployed.find())
