"""What is switched off and on: the desired state, the schedules, the mappings from queues to lambdas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dormouse.aws.instance import DeployedInstance
from dormouse.aws.steps import STEP_SECONDS_MAX, Left
from dormouse.errors import InstanceError
from dormouse.settings.resources import DesiredState, state_parameter

SETTLED = {"Enabled": True, "Disabled": False}
"""The states in which a mapping can be changed; in others it is changing already."""


def schedules(instance: DeployedInstance) -> tuple[str, ...]:
    """The names of the rules that start work; never that which keeps a paused instance asleep."""
    told = instance.resources
    found = [one.rules for one in (told.garbage, told.compaction, told.maintenance) if one is not None]
    return tuple(rule_name(rule) for rules in found for rule in rules)


def mappings(instance: DeployedInstance) -> tuple[str, ...]:
    """The UUIDs of the event source mappings."""
    return instance.resources.commit.mappings if instance.resources.commit else ()


def rule_name(rule: str) -> str:
    """Of a name, an ARN, or a bus and a name."""
    return rule.rpartition("/")[2].rpartition("|")[2]


def rule_state(instance: DeployedInstance, rule: str) -> str | None:
    """ENABLED or DISABLED; None if it is not there."""
    return (instance.aws.look("events", "describe_rule", Name=rule) or {}).get("State")


def mapping_state(instance: DeployedInstance, uuid: str) -> str | None:
    """None if it is not there."""
    return (instance.aws.look("lambda", "get_event_source_mapping", UUID=uuid) or {}).get("State")


@dataclass(frozen=True)
class WriteDesiredState:
    """First of all, so that what acts on the desired state helps, and does not hinder."""

    instance: DeployedInstance
    wanted: DesiredState
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"write the desired state: {self.wanted}"

    def left(self, waited: float) -> Iterator[Left]:
        if (now := self.instance.desired) != self.wanted:
            name = state_parameter(self.instance.id)
            given: Any = {"Name": name, "Value": self.wanted, "Type": "String", "Overwrite": True}
            yield Left(
                f"the desired state is {now}",
                partial(self.instance.aws.ask, "ssm", "put_parameter", **given),
            )


@dataclass(frozen=True)
class SwitchRules:
    """Rules of EventBridge. One that is gone is as good as disabled."""

    instance: DeployedInstance
    rules: tuple[str, ...]
    enabled: bool
    what: str
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"{'enable' if self.enabled else 'disable'} {self.what}"

    def left(self, waited: float) -> Iterator[Left]:
        operation = "enable_rule" if self.enabled else "disable_rule"
        for rule in self.rules:
            state = rule_state(self.instance, rule)
            if state is None and self.enabled:
                raise InstanceError(
                    f"the rule {rule} is gone: deploy {self.instance.id} again, then resume it"
                )
            if state is not None and self.enabled == (state == "DISABLED"):
                ask = partial(self.instance.aws.ask, "events", operation, Name=rule)
                yield Left(f"{rule} is {state.lower()}", ask)


@dataclass(frozen=True)
class SwitchMappings:
    """Event source mappings, which take a minute or so. One that is gone is as good as disabled."""

    instance: DeployedInstance
    enabled: bool
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"{'enable' if self.enabled else 'disable'} the mappings of the queues"

    def left(self, waited: float) -> Iterator[Left]:
        change = partial(self.instance.aws.ask, "lambda", "update_event_source_mapping", Enabled=self.enabled)
        for uuid in mappings(self.instance):
            state = mapping_state(self.instance, uuid)
            if state in (None, "Deleting"):
                if self.enabled:
                    again = f"deploy {self.instance.id} again, then resume it"
                    raise InstanceError(f"the event source mapping {uuid} is gone: {again}")
            elif SETTLED.get(str(state)) is not self.enabled:
                ask = partial(change, UUID=uuid) if state in SETTLED else None
                yield Left(f"mapping {uuid} is {str(state).lower()}", ask)
