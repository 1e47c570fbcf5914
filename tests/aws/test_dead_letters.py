"""The dead letters of a deployed instance, listed and sent again, in moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from moto import mock_aws

from dormouse.aws.dead_letters import dead_letters
from dormouse.errors import InstanceError
from dormouse.settings import resources
from dormouse.settings.resources import CommitResources, Resources
from tests.deployed import REGION, Deployed, StubSession, deploy
from tests.stored import file, ref
from tests.support.aws import Aws, DeployedInstance
from tests.support.commits import AddFiles, encode

GOOD = encode(AddFiles(commit_id="good", table="t", files=(file("a", ref("a")),)), table_id=1)
TOO_NEW = json.dumps({**json.loads(GOOD), "version": 999})


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    monkeypatch.setattr("dormouse.aws.renewal.WAIT_SECONDS", 0)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        yield deploy()


def bodies(deployed: Deployed, *, dead: bool) -> list[str]:
    commit = deployed.find().resources.commit
    assert commit is not None
    sqs, found = deployed.client("sqs"), []
    for url in commit.dead_letters if dead else commit.queues:
        while messages := sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
            found += [one["Body"] for one in messages]
    return sorted(found)


def bury(deployed: Deployed, *messages: str, number: int = 0, **more: Any) -> None:
    commit = deployed.find().resources.commit
    assert commit is not None
    for uuid in deployed.mappings:  # moto would call the lambda
        deployed.client("lambda").update_event_source_mapping(UUID=uuid, Enabled=False)
    for body in messages:
        deployed.client("sqs").send_message(QueueUrl=commit.dead_letters[number], MessageBody=body, **more)


def test_listed_dead_letters_stay_in_their_queues(deployed: Deployed) -> None:
    reason = {"reason": {"DataType": "String", "StringValue": "tried 41 times"}}
    bury(deployed, GOOD, MessageAttributes=reason)
    bury(deployed, "nonsense", TOO_NEW, number=1)
    good, *others = dead_letters(deployed.find(), 100)
    assert (good.commit_id, good.reason, good.can_be_sent, good.is_sent_again) == (
        "good", "tried 41 times", True, False,
    )  # fmt: skip
    assert [(one.can_be_sent, bool(one.reason)) for one in others] == [(False, True)] * 2
    assert next(iter(dead_letters(deployed.find(), 100))).body == GOOD, "a listing hides no message"
    assert len(bodies(deployed, dead=True)) == 3 and not bodies(deployed, dead=False)


def test_only_readable_dead_letters_are_sent_again(deployed: Deployed) -> None:
    bury(deployed, *[GOOD] * 12, "nonsense")
    bury(deployed, GOOD, TOO_NEW, number=1)
    found = dead_letters(deployed.find(), 100, send_again=True)
    assert sum(one.is_sent_again for one in found) == 13
    unread = [one for one in found if not one.can_be_sent]
    assert len(unread) == 2 and all(one.reason and "\n" not in one.reason for one in unread)
    assert bodies(deployed, dead=False) == [GOOD] * 13
    assert bodies(deployed, dead=True) == sorted(["nonsense", TOO_NEW])


def test_a_dead_letter_of_another_queue_is_listed_and_not_sent() -> None:
    """Another queue can send its dead letters to ours, even if its owner may not send commit requests."""
    stubs, arn = StubSession(), f"arn:aws:sqs:{REGION}:123456789012"
    commit = CommitResources(
        queues=("https://sqs/123456789012/queue",), dead_letters=("dead",), mappings=(), function="commit"
    )
    sources = {"own": f"{arn}:queue", "foreign": f"{arn}:foreign"}
    messages = [
        {
            "Body": GOOD,
            "ReceiptHandle": name,
            "Attributes": {"SentTimestamp": "0", "DeadLetterQueueSourceArn": source},
        }
        for name, source in sources.items()
    ]
    sqs = stubs.stub("sqs")
    sqs.add_response("receive_message", {"Messages": messages})
    sqs.add_response("send_message", {}, {"QueueUrl": commit.queues[0], "MessageBody": GOOD})
    sqs.add_response("delete_message", {}, {"QueueUrl": "dead", "ReceiptHandle": "own"})
    sqs.add_response("change_message_visibility", {})
    instance = DeployedInstance("dev", "123456789012", REGION, Resources(commit=commit), Aws(stubs))
    own, foreign = dead_letters(instance, 2, send_again=True)
    assert (own.is_sent_again, foreign.is_sent_again) == (True, False)
    assert foreign.reason == f"it is a dead letter of another queue, {arn}:foreign"
    stubs.assert_all_stubs_were_used()


def test_a_dead_letter_that_could_not_be_sent_is_not_deleted(deployed: Deployed) -> None:
    bury(deployed, GOOD)
    deployed.client("sqs").delete_queue(QueueUrl=deployed.queues[0])
    with pytest.raises(InstanceError, match="AWS refuses sqs:SendMessage"):
        dead_letters(deployed.find(), 100, send_again=True)
    commit = deployed.find().resources.commit
    assert commit is not None
    counted = deployed.client("sqs").get_queue_attributes(
        QueueUrl=commit.dead_letters[0], AttributeNames=["All"]
    )["Attributes"]
    assert counted["ApproximateNumberOfMessagesNotVisible"] == "1"


def test_the_limit_of_dead_letters_is_kept(deployed: Deployed) -> None:
    bury(deployed, *[GOOD] * 5)
    assert len(dead_letters(deployed.find(), 3, send_again=True)) == 3
    assert len(bodies(deployed, dead=True)) == 2


@pytest.mark.slow
def test_an_instance_without_commit_queues_is_one_line(deployed: Deployed) -> None:
    deployed.client("ssm").delete_parameter(Name=resources.resources_parameter("dev", "commit"))
    with pytest.raises(InstanceError, match="dev has no commit queues"):
        dead_letters(deployed.find(), 1)
