"""The CDK app of one instance."""

from __future__ import annotations

import json
from typing import Any

import aws_cdk as cdk
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from stacks.application import ApplicationStack
from stacks.assets import Assets, refuse_deploys
from stacks.copy import CopyStack, copy_names
from stacks.database import DatabaseStack
from stacks.foundation import Foundation
from stacks.home import SOURCES
from stacks.migrate import MigrateStack
from stacks.network import NetworkStack
from stacks.storage import StorageStack


def context() -> dict[str, Any]:
    """Returns the context in cdk.json. It contains the CDK's feature flags, on which templates depend.

    The CDK's command line adds the paths of constructs; the key is not in cdk.json, where it is reserved.
    """
    found = json.loads((SOURCES / "cdk.json").read_text("utf-8"))
    return {**found["context"], "aws:cdk:enable-path-metadata": found["pathMetadata"]}


def new_app(outdir: str | None = None) -> cdk.App:
    """Returns a CDK app with the context of cdk.json, as the CDK's command line would create it."""
    # The output must not depend on the machine.
    return cdk.App(context=context(), outdir=outdir, analytics_reporting=False, stack_traces=False)


def build(settings: DeploymentSettings, *, assets: Assets, app: cdk.App | None = None) -> cdk.App:
    """Builds the stacks of the settings in an app.

    Deploys are refused while placeholders stand in for files.
    """
    app = app or new_app()
    stacks_of(settings, assets, app)
    return app


def stacks_of(
    settings: DeploymentSettings, assets: Assets, app: Construct
) -> tuple[Foundation, ApplicationStack]:
    """Builds the stacks of the settings within an app, a Stage or another construct."""
    network = NetworkStack(app, settings)
    copy = CopyStack(app, settings, names) if (names := copy_names(settings)) else None
    storage = StorageStack(app, settings)
    database = DatabaseStack(app, settings, network, assets)
    foundation = Foundation(settings, assets, network, storage, database)
    migrate = MigrateStack(app, foundation)
    application = ApplicationStack(app, foundation)
    application.add_stack_dependency(migrate, "it needs the newest schema and the desired state")
    if copy is not None:
        for stack in (storage, application):
            stack.add_stack_dependency(copy, "it copies to there")
    if assets.to_run:
        refuse_deploys(app, not_built(assets))
    return foundation, application


def not_built(assets: Assets) -> str:
    """Returns an error message that names the commands to build the missing files."""
    commands = ", ".join(assets.to_run)
    return f"placeholders stand in for files that are not built, so a deploy is refused: run {commands}"
