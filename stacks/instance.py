"""The app of one instance."""

from __future__ import annotations

import json
from pathlib import Path

import aws_cdk as cdk

from dormouse.settings.deployment import DeploymentSettings
from stacks.access import AccessStack
from stacks.assets import Assets, refuse_deploys
from stacks.commit import CommitStack
from stacks.compaction import CompactionStack
from stacks.database import DatabaseStack
from stacks.foundation import Foundation
from stacks.garbage import GarbageStack
from stacks.maintenance import MaintenanceStack
from stacks.migrate import MigrateStack
from stacks.monitoring import MonitoringStack, Watched
from stacks.network import NetworkStack
from stacks.pause import PauseStack, Switched
from stacks.policies import PoliciesStack
from stacks.query import QueryStack
from stacks.storage import StorageStack
from stacks.tables import TablesStack

CDK_JSON = Path(__file__).parents[1] / "cdk.json"


def new_app(outdir: str | None = None) -> cdk.App:
    """An app with the context of cdk.json, which the CLI would give it."""
    context = json.loads(CDK_JSON.read_text("utf-8"))["context"]
    # What differs from machine to machine stays out of what is synthesized.
    return cdk.App(context=context, outdir=outdir, analytics_reporting=False, stack_traces=False)


def build(settings: DeploymentSettings, *, assets: Assets, app: cdk.App | None = None) -> cdk.App:
    """The stacks that the settings have; a deploy is refused while placeholders stand in for files."""
    app = app or new_app()
    network = NetworkStack(app, settings)
    storage = StorageStack(app, settings)
    database = DatabaseStack(app, settings, network)
    foundation = Foundation(settings, assets, network, storage, database)
    migrate = MigrateStack(app, foundation)
    watched = _optional(app, foundation, migrate)
    if settings.monitoring is not None:
        MonitoringStack(app, foundation, settings.monitoring, watched)
    if settings.iam.policies:
        PoliciesStack(app, foundation, watched)
    if assets.to_run:
        refuse_deploys(app, not_built(assets))
    return app


def not_built(assets: Assets) -> str:
    """The line for placeholders."""
    commands = ", ".join(assets.to_run)
    return f"placeholders stand in for what is not built, and a deploy is refused: run {commands}"


def _optional(app: cdk.App, foundation: Foundation, migrate: MigrateStack) -> Watched:
    """The stacks that have a table in the settings, and those that need a migrated database."""
    settings = foundation.settings
    commit = CommitStack(app, foundation, settings.commit) if settings.commit else None
    garbage = GarbageStack(app, foundation, settings.garbage) if settings.garbage else None
    compaction = CompactionStack(app, foundation, settings.compaction) if settings.compaction else None
    maintenance = (
        MaintenanceStack(app, foundation, settings.maintenance, compaction) if settings.maintenance else None
    )
    query = QueryStack(app, foundation, settings.query) if settings.query else None
    access = AccessStack(app, foundation, settings.access) if settings.access else None
    tables = TablesStack(app, foundation)
    for stack in (tables, commit, garbage, compaction, maintenance, query):
        if stack is not None:
            stack.add_stack_dependency(migrate, "it needs the newest schema")
    switched = Switched(commit, garbage, compaction, maintenance, query, access)
    pause = PauseStack(app, foundation, settings.pause, switched) if settings.pause else None
    if pause is not None:
        pause.add_stack_dependency(migrate, "it makes the desired state")
    return Watched(**vars(switched), pause=pause, tables=tables)
