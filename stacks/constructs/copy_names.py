"""What the copy in another region is called, which no reference can tell from there to here."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.settings.deployment import DeploymentSettings


@dataclass(frozen=True)
class CopyNames:
    """Names of the copy's resources; all of one account."""

    account: str
    region: str
    bucket: str
    """At most 62 characters, as the id has 20: S3 takes 63."""

    alias: str
    """Of the key."""

    vault: str


def copy_names(settings: DeploymentSettings) -> CopyNames | None:
    """None without a copy."""
    region = settings.backup.copy_region if settings.backup else None
    if region is None or settings.account is None:
        return None
    name = f"dormouse-{settings.id}-copy"
    bucket = f"{name}-{settings.account}-{region}"
    return CopyNames(settings.account, region, bucket, f"alias/{name}", name)
