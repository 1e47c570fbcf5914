"""The settings of the stack that watches an instance."""

from __future__ import annotations

from collections.abc import Iterator

from dormouse.settings.section import Section, TopicArn, pattern, setting


class MonitoringSettings(Section):
    """Dashboard, alarms and a budget."""

    email: str | None = setting(None, change="replacement", pattern=pattern("email"))
    """The address for alarms, once confirmed; left out, the topic has no subscriber until you add one."""

    topic_arn: TopicArn | None = setting(None)
    """An existing SNS topic for alarms and the budget, whose policy lets CloudWatch and AWS Budgets in."""

    warning_topic_arn: TopicArn | None = setting(None)
    """An existing SNS topic for alarms that begin with `Warning`, which can wait for the next working day."""

    slack_workspace: str | None = setting(None, pattern=pattern("slack"))
    """The id of a Slack workspace that AWS Chatbot (Amazon Q Developer) was once let into in its console."""

    slack_channel: str | None = setting(None, pattern=pattern("slack"))
    """The id of the channel there that is told of alarms."""

    teams_tenant: str | None = setting(None, change="replacement", pattern=pattern("teams"))
    """The id of a Microsoft Teams tenant that AWS Chatbot was once let into, likewise."""

    teams_team: str | None = setting(None, change="replacement", pattern=pattern("teams"))
    """The id of the team there, as that console shows it."""

    teams_channel: str | None = setting(None, pattern=pattern("teams_channel"))
    """The id of the team's channel that is told of alarms."""

    budget_usd_month: float | None = setting(None, gt=0)
    """The monthly budget whose excess is reported; left out, there is no budget."""

    oldest_message_seconds_max: int = setting(900, ge=60, le=86_400)
    """The age of the oldest commit request that raises an alarm."""

    connections_max: int = setting(500, ge=10, le=5_000)
    """The number of database connections that raises an alarm."""

    orphaned_gb_max: float = setting(100, gt=0)
    """How many GB of objects that nothing refers to raise an alarm."""

    payload_backlog_days_max: int = setting(3, ge=1)
    """How many days whose payloads wait to be offloaded raise an alarm."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.topic_arn and self.email:
            yield "email", "it is of an own topic: leave it out, or topic_arn"
        for names in (("slack_workspace", "slack_channel"), ("teams_tenant", "teams_team", "teams_channel")):
            given = [name for name in names if getattr(self, name) is not None]
            if given and (missing := [name for name in names if name not in given]):
                together = f"{', '.join(names[:-1])} and {names[-1]} go together"
                yield given[0], f"{together}: give {' and '.join(missing)} too, or none"
