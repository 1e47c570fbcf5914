"""The messages that wait in the commit queues: how old they are, and when SQS forgets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from dormouse.aws.drain import depth, queues
from dormouse.aws.instance import DeployedInstance
from dormouse.errors import InstanceError
from dormouse.settings.section import LOSS_NEAR_SHARE

METRIC = "ApproximateAgeOfOldestMessage"
PERIOD_SECONDS = 300
LOOK_BACK = timedelta(minutes=20)


@dataclass(frozen=True)
class Waiting:
    """What is in a queue, and is not being worked on."""

    url: str
    messages: int
    """About."""

    oldest_seconds: float | None
    """None where CloudWatch does not tell."""

    retention_seconds: float

    @property
    def lost_at(self) -> datetime | None:
        """When SQS forgets the oldest; None where nothing waits, or it is not known."""
        if self.oldest_seconds is None or not self.messages:
            return None
        return datetime.now(UTC) + timedelta(seconds=self.retention_seconds - self.oldest_seconds)

    @property
    def loss_is_near(self) -> bool:
        """As it is when the alarm rings."""
        return (self.oldest_seconds or 0.0) >= self.retention_seconds * LOSS_NEAR_SHARE and self.messages > 0

    def __str__(self) -> str:
        name = self.url.rpartition("/")[2]
        if (lost := self.lost_at) is None:
            return f"about {self.messages:,} messages wait in {name}"
        days = (self.oldest_seconds or 0.0) / 86_400
        return (
            f"about {self.messages:,} messages wait in {name}, the oldest for {days:.1f} days; "
            f"SQS forgets it on {lost:%Y-%m-%d}"
        )


def waiting(instance: DeployedInstance, urls: tuple[str, ...] | None = None) -> tuple[Waiting, ...]:
    """Of each of these, else of each commit queue, in their order."""
    urls = queues(instance) if urls is None else urls
    ages = _ages(instance, urls)
    return tuple(
        Waiting(url, sum(_counts(instance, url)), ages.get(url), _retention_seconds(instance, url))
        for url in urls
    )


def offer(found: tuple[Waiting, ...], instance_id: str) -> str | None:
    """What to do when messages are about to be lost; None when none are."""
    near = [one.lost_at for one in found if one.loss_is_near and one.lost_at is not None]
    if not near:
        return None
    return f"messages are lost from {min(near):%Y-%m-%d}: run dormouse resume --instance {instance_id} before"


def _counts(instance: DeployedInstance, url: str) -> Iterator[int]:
    found = depth(instance.aws, url)
    return (found[name] for name in found if not name.endswith("NotVisible"))


def _retention_seconds(instance: DeployedInstance, url: str) -> float:
    given = {"QueueUrl": url, "AttributeNames": ["MessageRetentionPeriod"]}
    found = instance.aws.look("sqs", "get_queue_attributes", **given) or {}
    return float(found.get("Attributes", {}).get("MessageRetentionPeriod", 14 * 86_400))


def _ages(instance: DeployedInstance, urls: tuple[str, ...]) -> dict[str, float]:
    """In seconds; of those that CloudWatch tells of."""
    if not urls:
        return {}
    now = datetime.now(UTC)
    queries = [
        {
            "Id": f"q{number}",
            "MetricStat": {
                "Metric": {
                    "Namespace": "AWS/SQS",
                    "MetricName": METRIC,
                    "Dimensions": [{"Name": "QueueName", "Value": url.rpartition("/")[2]}],
                },
                "Period": PERIOD_SECONDS,
                "Stat": "Maximum",
            },
        }
        for number, url in enumerate(urls)
    ]
    given: Any = {"MetricDataQueries": queries, "StartTime": now - LOOK_BACK, "EndTime": now}
    try:
        found = instance.aws.call("cloudwatch", "get_metric_data", ScanBy="TimestampDescending", **given)
    except InstanceError:
        return {}
    results = found["MetricDataResults"]
    return {urls[int(one["Id"][1:])]: float(one["Values"][0]) for one in results if one["Values"]}
