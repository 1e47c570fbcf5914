"""The app of one instance."""

from __future__ import annotations

import json
from pathlib import Path

import aws_cdk as cdk

from dormouse.settings.deployment import DeploymentSettings
from stacks.assets import Assets
from stacks.commit import CommitStack
from stacks.database import DatabaseStack
from stacks.foundation import Foundation
from stacks.garbage import GarbageStack
from stacks.migrate import MigrateStack
from stacks.network import NetworkStack
from stacks.storage import StorageStack

CDK_JSON = Path(__file__).parents[1] / "cdk.json"


def new_app(outdir: str | None = None) -> cdk.App:
    """An app with the context of cdk.json, which the CLI would give it."""
    return cdk.App(context=json.loads(CDK_JSON.read_text("utf-8"))["context"], outdir=outdir)


def build(settings: DeploymentSettings, *, assets: Assets, app: cdk.App | None = None) -> cdk.App:
    """The stacks that the settings have."""
    app = app or new_app()
    network = NetworkStack(app, settings)
    storage = StorageStack(app, settings)
    database = DatabaseStack(app, settings, network)
    foundation = Foundation(settings, assets, network, storage, database)
    migrate = MigrateStack(app, foundation)
    if settings.commit is not None:
        CommitStack(app, foundation, settings.commit).add_stack_dependency(migrate)
    if settings.garbage is not None:
        GarbageStack(app, foundation, settings.garbage).add_stack_dependency(migrate)
    return app
