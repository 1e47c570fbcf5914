"""The way to the database of a deployed instance, through its host for access."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from dormouse.errors import InstanceError
from dormouse.settings.resources import FORWARDING
from dormouse.system.instance import DeployedInstance


@dataclass(frozen=True)
class Access:
    """How the database comes to a port of this machine, the same as its own: tokens are for that."""

    instance: str
    host: str
    """The id of the EC2 instance."""

    database: str
    """Where the database is, within the VPC."""

    port: int
    command: str
    """For a shell: it goes on until it is ended."""


def access(instance: DeployedInstance, profile: str | None = None) -> Access:
    """Raises InstanceError when there is no such host, or it sleeps."""
    told, database = instance.resources.access, instance.resources.database
    if told is None or database is None:
        raise InstanceError(
            f"{instance.id} has no host for access: give it the table [access], and deploy it"
        )
    if not told.host:
        raise InstanceError(f"the host for access sleeps: dormouse resume --instance {instance.id}")
    where, port = database.proxy or database.endpoint, database.port
    given = {"host": [where], "portNumber": [str(port)], "localPortNumber": [str(port)]}
    command = ["aws", "ssm", "start-session", "--region", instance.region]
    command += [] if profile is None else ["--profile", profile]
    command += ["--target", told.host, "--document-name", FORWARDING, "--parameters", json.dumps(given)]
    return Access(instance.id, told.host, where, port, shlex.join(command))
