"""Deployed instances, and AWS's API."""

from __future__ import annotations

from dormouse.aws.aws import Aws
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.pause import pause, resume
from dormouse.aws.schedules.migration import bring_up_to_date
from dormouse.aws.status import status
from dormouse.postgres.roles import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE

__all__ = [
    "OWNER_ROLE",
    "READ_ROLE",
    "RUN_ROLE",
    "SCHEMA_ROLE",
    "Aws",
    "DeployedInstance",
    "bring_up_to_date",
    "pause",
    "resume",
    "status",
]
