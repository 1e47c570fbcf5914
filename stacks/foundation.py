"""The stacks that are always deployed, and the base class of the stacks on top of them."""

from __future__ import annotations

from dataclasses import dataclass

from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from stacks.assets import Assets
from stacks.database import DatabaseStack
from stacks.instance_stack import InstanceStack, stack_of
from stacks.network import NetworkStack
from stacks.storage import StorageStack


@dataclass(frozen=True)
class Foundation:
    """The stacks that are always deployed. Adding or removing parts does not change them."""

    settings: DeploymentSettings
    assets: Assets
    network: NetworkStack
    storage: StorageStack
    database: DatabaseStack


class UpperStack(InstanceStack):
    """The base class of the stacks that use the foundation."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        foundation: Foundation,
        *,
        description: str,
        stateful: bool = False,
    ) -> None:
        super().__init__(scope, name, foundation.settings, description=description, stateful=stateful)
        self.foundation = foundation


def foundation_of(scope: Construct) -> Foundation:
    """Returns the foundation of the stack of a construct."""
    stack = stack_of(scope)
    assert isinstance(stack, UpperStack)  # noqa: S101
    return stack.foundation
