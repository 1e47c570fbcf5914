"""What the optional stacks stand on."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.settings.deployment import DeploymentSettings
from stacks.assets import Assets
from stacks.database import DatabaseStack
from stacks.network import NetworkStack
from stacks.storage import StorageStack


@dataclass(frozen=True)
class Foundation:
    """Always deployed, and never changed by what is deployed on it."""

    settings: DeploymentSettings
    assets: Assets
    network: NetworkStack
    storage: StorageStack
    database: DatabaseStack
