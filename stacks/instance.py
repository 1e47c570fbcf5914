"""The CDK app of one instance."""

from __future__ import annotations

import json
from typing import Any

import aws_cdk as cdk
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from stacks.access import AccessStack
from stacks.assets import Assets, refuse_deploys
from stacks.audit import AuditStack
from stacks.backup import BackupStack
from stacks.commit import CommitStack
from stacks.compaction import CompactionStack
from stacks.constructs.copy_names import copy_names
from stacks.copy import CopyStack
from stacks.database import DatabaseStack
from stacks.foundation import Foundation
from stacks.garbage import GarbageStack
from stacks.home import SOURCES
from stacks.maintenance import MaintenanceStack
from stacks.migrate import MigrateStack
from stacks.monitoring import MonitoringStack, Watched
from stacks.network import NetworkStack
from stacks.pause import PauseStack, Switched
from stacks.policies import PoliciesStack
from stacks.query import QueryStack
from stacks.storage import StorageStack
from stacks.tables import TablesStack


def context() -> dict[str, Any]:
    """Returns the context in cdk.json. It contains the CDK's feature flags, on which templates depend."""
    found: dict[str, Any] = json.loads((SOURCES / "cdk.json").read_text("utf-8"))["context"]
    return found


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


def stacks_of(settings: DeploymentSettings, assets: Assets, app: Construct) -> tuple[Foundation, Watched]:
    """Builds the stacks of the settings within an app, a Stage or another construct.

    Returns the stacks that are always deployed and the optional ones.
    """
    network = NetworkStack(app, settings)
    copy = CopyStack(app, settings, names) if (names := copy_names(settings)) else None
    storage = StorageStack(app, settings)
    database = DatabaseStack(app, settings, network, assets)
    foundation = Foundation(settings, assets, network, storage, database)
    migrate = MigrateStack(app, foundation)
    watched = _optional(app, foundation, migrate)
    if settings.audit is not None:
        AuditStack(app, foundation, settings.audit)
    if settings.backup is not None:
        backup = BackupStack(app, foundation, settings.backup)
        if copy is not None:
            for stack in (storage, backup):
                stack.add_stack_dependency(copy, "it copies to there")
    if settings.monitoring is not None:
        MonitoringStack(app, foundation, settings.monitoring, watched)
    if settings.iam.policies:
        PoliciesStack(app, foundation, watched)
    if assets.to_run:
        refuse_deploys(app, not_built(assets))
    return foundation, watched


def not_built(assets: Assets) -> str:
    """Returns an error message that names the commands to build the missing files."""
    commands = ", ".join(assets.to_run)
    return f"placeholders stand in for files that are not built, so a deploy is refused: run {commands}"


def _optional(app: Construct, foundation: Foundation, migrate: MigrateStack) -> Watched:
    """Builds the optional stacks for which the settings have a table."""
    settings = foundation.settings
    query = QueryStack(app, foundation, settings.query) if settings.query else None
    commit = CommitStack(app, foundation, settings.commit, query) if settings.commit else None
    garbage = GarbageStack(app, foundation, settings.garbage) if settings.garbage else None
    compaction = CompactionStack(app, foundation, settings.compaction) if settings.compaction else None
    maintenance = (
        MaintenanceStack(app, foundation, settings.maintenance, compaction) if settings.maintenance else None
    )
    access = AccessStack(app, foundation, settings.access) if settings.access else None
    tables = TablesStack(app, foundation)
    for stack in (tables, commit, garbage, compaction, maintenance, query):
        if stack is not None:
            stack.add_stack_dependency(migrate, "it needs the newest schema")
    if access is not None:
        access.add_stack_dependency(migrate, "it reads the desired state")
    switched = Switched(commit, garbage, compaction, maintenance, query, access)
    pause = PauseStack(app, foundation, settings.pause, switched) if settings.pause else None
    if pause is not None:
        pause.add_stack_dependency(migrate, "it makes the desired state")
    return Watched(**vars(switched), pause=pause, tables=tables)
