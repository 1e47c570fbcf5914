"""The settings of what is kept beside the instance: backups, a copy in another region, a log of who read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from dormouse.settings.certificates import no_certificates
from dormouse.settings.section import Section, pattern, setting


class BackupSettings(Section):
    """AWS Backup: snapshots of the database by day, the data bucket at any moment; a copy in another region.

    AWS backs no stopped database up: while the instance is paused there are no new snapshots of it, and the
    old ones expire.
    """

    retention_days: int = setting(14, ge=1, le=35)
    """How many days backups are kept, also in the other region; how far back both can be restored."""

    hour_utc: int = setting(3, ge=0, le=23)
    """The hour in which the daily snapshot of the database begins."""

    objects: bool = setting(True)
    """Whether the data bucket is backed up, too; if not, retention_days is at most storage.restore_days."""

    copy_region: str | None = setting(None, change="replacement", pattern=pattern("region"))
    """Another region that gets each object as it is written, and each snapshot of the database; account and
    region must be given, too, and `cdk bootstrap` have been run there."""

    def problems(
        self, account: str | None, region: str | None, restore_days: int
    ) -> Iterator[tuple[str, str]]:
        """What does not go with the other tables: the setting, and why."""
        if not self.objects and self.retention_days > restore_days:
            yield (
                "retention_days",
                f"it must be at most storage.restore_days, which is {restore_days}, unless objects = true: "
                "the bucket forgets before what older snapshots of the database refer to",
            )
        if self.copy_region is None:
            return
        if account is None or region is None:
            yield "copy_region", "it needs account and region: CloudFormation must know both regions"
        elif self.copy_region == region:
            yield "copy_region", f"it must be another region than {region}, which is the instance's own"
        elif trouble := no_certificates(self.copy_region):
            yield "copy_region", trouble


class AuditSettings(Section):
    """CloudTrail's data events of the data bucket: who wrote, or read, which object."""

    events: Literal["write", "all"] = setting("write")
    """Writes and deletions, or reads as well, of which queries and compactions make many."""

    log_days: int = setting(90, ge=1, le=3_650)
    """How long they are kept."""
