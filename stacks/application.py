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
from stacks.foundation import Foundation, UpperStack
from stacks.garbage import Garbage
from stacks.instance_stack import APPLICATION
from stacks.maintenance import Maintenance
from stacks.monitoring import Monitoring
from stacks.part import Part
from stacks.pause import Pause
from stacks.policies import Policies
from stacks.query import Query
from stacks.tables import Tables


class ApplicationStack(UpperStack):
    """The parts for which the settings have a table, and the lambdas that work on tables.

    They are one stack, so that a deploy deletes the parts that were taken out of the settings.
    """

    def __init__(self, scope: Construct, foundation: Foundation) -> None:
        settings = foundation.settings
        super().__init__(
            scope, APPLICATION, foundation, description="all parts that work on tables", stateful=True
        )
        query = Query(self, settings.query) if settings.query else None
        self.commit = Commit(self, settings.commit, query) if settings.commit else None
        garbage = Garbage(self, settings.garbage) if settings.garbage else None
        compaction = Compaction(self, settings.compaction) if settings.compaction else None
        maintenance = Maintenance(self, settings.maintenance, compaction) if settings.maintenance else None
        access = Access(self, settings.access) if settings.access else None
        found = (self.commit, garbage, compaction, maintenance, query, access)
        parts: list[Part] = [part for part in found if part is not None]
        switch = Switch(self, foundation.assets) if self.sleeps else None
        if settings.pause:
            parts.append(Pause(self, settings.pause, parts, switch))
        parts.append(Tables(self))
        if settings.iam.policies:
            Policies(self, parts, switch)
        if settings.monitoring:
            Monitoring(self, settings.monitoring, parts)
        if settings.audit:
            Audit(self, settings.audit)
        if settings.backup:
            Backup(self, settings.backup)
        if switch is not None:
            switch.let_read_parameters()
        self.describe(
            ApplicationResources(
                stack=self.stack_name,
                switch=switch.function.function_name if switch else None,
                parts=tuple(part.name for part in parts),
            )
        )
