"""The settings of the database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dormouse.settings.section import (
    Acu,
    ClientCidr,
    InstanceClass,
    KeyArn,
    Section,
    SecurityGroupId,
    SnapshotArn,
    client_problems,
    pattern,
    setting,
)


class _Database(Section):
    engine_version: str = setting("17.7", pattern=pattern("engine_version"))
    """The version of Aurora PostgreSQL; a change must not go back behind what minor_upgrades have brought,
    and a new `snapshot` must not be of a later one."""

    minor_upgrades: bool = setting(True)
    """Whether AWS upgrades it to later minor versions by itself, in the weekly window for maintenance."""

    backup_days: int = setting(7, ge=1, le=35)
    """How far back the database alone can be restored; all of the instance, storage.restore_days."""

    idle_session_seconds: int = setting(300, ge=60, le=86_400)
    """After how long the server ends a session that does nothing."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How long the database's log is kept in CloudWatch."""

    readers: int = setting(0, ge=0, le=15)
    """Read replicas, which also take over when the writer fails."""

    key_arn: KeyArn | None = setting(None, change="replacement")
    """An existing KMS key, whose policy leaves its use to IAM; left out, one of its own."""

    snapshot: SnapshotArn | None = setting(None, change="replacement")
    """A snapshot that the cluster is made from, by its ARN; keep the setting as long as the cluster."""

    proxy: bool = setting(False)
    """An RDS Proxy in front; its connections keep a serverless database awake."""

    client_security_groups: tuple[SecurityGroupId, ...] = setting((), strict=False)
    """Security groups, of this VPC or one peered with it, whose machines may connect."""

    client_cidrs: tuple[ClientCidr, ...] = setting((), strict=False)
    """Private networks whose machines may connect: of peered VPCs, say, or behind a VPN. No others may."""

    @property
    def pause_after_seconds(self) -> int | None:
        """After how long without connections it pauses itself; None when it never does."""
        return None

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from client_problems(self.client_cidrs, self.client_security_groups)

    @property
    def pauses_itself(self) -> bool:
        return self.pause_after_seconds is not None


class ServerlessDatabase(_Database):
    """Aurora Serverless v2: capacity follows the load."""

    kind: Literal["serverless"] = setting()
    """`serverless`, or `fixed`."""

    min_acu: Annotated[Acu, Field(ge=0)] = setting(0)
    """The least capacity; with 0 the database pauses itself when no client is connected."""

    max_acu: Annotated[Acu, Field(ge=1)] = setting(4)
    """The most capacity."""

    auto_pause_seconds: int | None = setting(None, ge=300, le=86_400)
    """After how long without connections it pauses itself; 300 if left out, and only with min_acu = 0."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        if self.max_acu <= self.min_acu:
            yield "max_acu", f"it must be more than min_acu, which is {self.min_acu:g}"
        if self.min_acu > 0 and self.auto_pause_seconds is not None:
            yield "auto_pause_seconds", f"it goes with min_acu = 0 only, which is {self.min_acu:g}"
        if self.min_acu == 0 and self.proxy:
            yield "proxy", "it keeps the database awake: set min_acu to 0.5 or more, or proxy to false"

    @property
    def pause_after_seconds(self) -> int | None:
        return (self.auto_pause_seconds or 300) if self.min_acu == 0 else None


class FixedDatabase(_Database):
    """Aurora with instances of a fixed size."""

    kind: Literal["fixed"] = setting()
    """`serverless`, or `fixed`."""

    instance_class: InstanceClass = setting("r8g.large")
    """The class of the writer and the readers, without `db.`"""


DatabaseSettings = Annotated[ServerlessDatabase | FixedDatabase, Field(discriminator="kind")]
