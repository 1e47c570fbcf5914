"""The stack with the parts of an instance that can be added and removed."""

from __future__ import annotations

from constructs import Construct

from dormouse.settings.resources import ApplicationResources
from stacks.access import Access
from stacks.audit import Audit
from stacks.backup import Backup
from stacks.commit import Commit
from stacks.compaction import Compaction
from stacks.constructs.sleeping import Switch
from stacks.foundation import Foundation
from stacks.garbage import Garbage
from stacks.instance_stack import APPLICATION, InstanceStack
from stacks.maintenance import Maintenance
from stacks.monitoring import Monitoring
from stacks.part import Part
from stacks.pause import Pause
from stacks.policies import Policies
from stacks.query import Query
from stacks.tables import Tables


class ApplicationStack(InstanceStack):
    """The parts for which the settings have a table, and the lambdas that work on tables.

    They are one stack, so that a deploy deletes the parts that were taken out of the settings.
    """

    def __init__(self, scope: Construct, foundation: Foundation) -> None:
        settings = foundation.settings
        super().__init__(
            scope, APPLICATION, settings, description="all parts that work on tables", stateful=True
        )
        query = Query(self, foundation, settings.query) if settings.query else None
        self.commit = Commit(self, foundation, settings.commit, query) if settings.commit else None
        garbage = Garbage(self, foundation, settings.garbage) if settings.garbage else None
        compaction = Compaction(self, foundation, settings.compaction) if settings.compaction else None
        maintenance = (
            Maintenance(self, foundation, settings.maintenance, compaction) if settings.maintenance else None
        )
        access = Access(self, foundation, settings.access) if settings.access else None
        found = (self.commit, garbage, compaction, maintenance, query, access)
        parts: list[Part] = [part for part in found if part is not None]
        switch = Switch(self, foundation.assets) if self.sleeps else None
        if settings.pause:
            parts.append(Pause(self, foundation, settings.pause, parts, switch))
        parts.append(Tables(self, foundation))
        if settings.iam.policies:
            Policies(self, foundation, parts, switch)
        if settings.monitoring:
            Monitoring(self, foundation, settings.monitoring, parts)
        if settings.audit:
            Audit(self, foundation, settings.audit)
        if settings.backup:
            Backup(self, foundation, settings.backup)
        if switch is not None:
            switch.let_read_parameters()
        self.describe(
            ApplicationResources(
                stack=self.stack_name,
                switch=switch.function.function_name if switch else None,
                parts=tuple(part.name for part in parts),
            )
        )
