"""The names of the copy in another region, as stacks cannot refer to resources of other regions."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.settings.deployment import DeploymentSettings


@dataclass(frozen=True)
class CopyNames:
    """The names of the copy's resources, which are all in one account."""

    account: str
    region: str
    bucket: str
    """At most 62 characters, as the id has 20: S3 takes 63."""

    alias: str
    """The alias of the key."""

    vault: str


def copy_names(settings: DeploymentSettings) -> CopyNames | None:
    """Returns the names of the copy; None when the settings have none."""
    region = settings.backup.copy_region if settings.backup else None
    if region is None or settings.account is None:
        return None
    name = f"dormouse-{settings.id}-copy"
    bucket = f"{name}-{settings.account}-{region}"
    return CopyNames(settings.account, region, bucket, f"alias/{name}", name)
