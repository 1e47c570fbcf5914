"""The stacks that other stacks depend on."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.settings.deployment import DeploymentSettings
from stacks.assets import Assets
from stacks.database import DatabaseStack
from stacks.network import NetworkStack
from stacks.storage import StorageStack


@dataclass(frozen=True)
class Foundation:
    """The stacks that are always deployed. Adding or removing optional stacks does not change them."""

    settings: DeploymentSettings
    assets: Assets
    network: NetworkStack
    storage: StorageStack
    database: DatabaseStack
