"""The names of the copy in another region.

They are fixed, because stacks cannot refer to other regions' resources.
"""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.settings.deployment import DeploymentSettings


@dataclass(frozen=True)
class CopyNames:
    """The names of the copy's resources, which are all in one account."""

    account: str
    region: str
    bucket: str
    """The name of the bucket, of at most 62 characters: the instance's id has up to 20, and S3 allows 63."""

    alias: str
    """The alias of the KMS key."""

    vault: str


def copy_names(settings: DeploymentSettings) -> CopyNames | None:
    """Returns the names of the copy, or None if the settings have no copy."""
    region = settings.backup.copy_region if settings.backup else None
    if region is None or settings.account is None:
        return None
    name = f"dormouse-{settings.id}-copy"
    bucket = f"{name}-{settings.account}-{region}"
    return CopyNames(settings.account, region, bucket, f"alias/{name}", name)
