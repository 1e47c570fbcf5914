"""The backups that AWS Backup makes of the database and of the data bucket."""

from __future__ import annotations

import hashlib

import aws_cdk as cdk
from aws_cdk import aws_backup as backup
from aws_cdk import aws_events as events
from aws_cdk import aws_iam as iam

from dormouse.settings.deployment import BackupSettings
from dormouse.settings.resources import INSTANCE_TAG
from stacks.constructs.permissions import acknowledge, role_of_this_account
from stacks.constructs.retained import vault
from stacks.copy import copy_names
from stacks.foundation import UpperStack
from stacks.part import Part

POLICIES = ("AWSBackupServiceRolePolicyForBackup", "AWSBackupServiceRolePolicyForS3Backup")


class Backup(Part):
    """Backups: daily snapshots of the database, and a continuous backup of the bucket.

    The bucket can be restored to the moment of any snapshot. A continuous backup of the database would change
    Aurora's own backups.
    """

    def __init__(self, stack: UpperStack, settings: BackupSettings) -> None:
        super().__init__(stack, "backup")
        self._backup, foundation = settings, self.foundation
        self._role = self._made_role()
        self._vault = vault(self, key=foundation.storage.key, name=self._vault_name())
        self._plan("Database", foundation.database.arn(stack), self._copies())
        if settings.objects:
            self._plan("Objects", foundation.storage.data_bucket.bucket_arn, None)

    def _vault_name(self) -> str:
        """Returns a name that is never used again, as the vault outlives this part and its stack.

        It has the unique id of the role, which is another one each time that the part is added.
        """
        unique = cdk.Fn.select(1, cdk.Fn.split("AROA", self._role.role_id))  # the prefix of all ids of roles
        return f"dormouse-{self.settings.id}-{unique}"

    def _made_role(self) -> iam.Role:
        key = self.settings.storage.key_arn
        of_key = hashlib.sha256(key.encode()).hexdigest()[:6] if key else ""
        # another key replaces the vault, which then needs another name
        role = role_of_this_account(self, f"Role{of_key}", "backup")
        for name in POLICIES if self._backup.objects else POLICIES[:1]:
            policy = f"service-role/{name}"
            role.add_managed_policy(iam.ManagedPolicy.from_aws_managed_policy_name(policy))
            acknowledge(
                role,
                f"AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/{policy}]",
                "AWS's own policy, which AWS updates with AWS Backup; only AWS Backup assumes the role",
            )
        return role

    def _copies(self) -> list[backup.BackupPlanCopyActionProps] | None:
        if (names := copy_names(self.settings)) is None:
            return None
        arn = f"arn:{self.stack.partition}:backup:{names.region}:{names.account}:backup-vault:{names.vault}"
        there = backup.BackupVault.from_backup_vault_arn(self, "Copies", arn)
        kept = cdk.Duration.days(self._backup.retention_days)
        return [backup.BackupPlanCopyActionProps(destination_backup_vault=there, delete_after=kept)]

    def _plan(self, what: str, resource: str, copies: list[backup.BackupPlanCopyActionProps] | None) -> None:
        """Adds a plan with one rule, for snapshots of the database or for continuous backup of the bucket."""
        is_bucket = what == "Objects"
        rule = backup.BackupPlanRule(
            rule_name=what,
            backup_vault=self._vault,
            schedule_expression=events.Schedule.cron(minute="0", hour=str(self._backup.hour_utc)),
            start_window=cdk.Duration.hours(1),
            # the first backup of a large bucket takes long
            completion_window=cdk.Duration.days(7 if is_bucket else 1),
            delete_after=cdk.Duration.days(self._backup.retention_days),
            enable_continuous_backup=is_bucket,
            recovery_point_tags={INSTANCE_TAG: self.settings.id, **self.settings.tags},
            copy_actions=copies,
        )
        name = f"{self.title}-{what.lower()}"
        plan = backup.BackupPlan(self, f"{what}Plan", backup_plan_name=name, backup_plan_rules=[rule])
        backup.BackupSelection(
            self,
            f"{what}Selection",
            backup_plan=plan,
            backup_selection_name=what.lower(),
            resources=[backup.BackupResource.from_arn(resource)],
            role=self._role,
            disable_default_backup_policy=True,
        )
