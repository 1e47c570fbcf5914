"""The environment in which Dormouse works on a deployed instance."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Literal

from dormouse.aws.instance import DeployedInstance
from dormouse.errors import InstanceError
from dormouse.settings.resources import FORWARDING

# The way to the database of a deployed instance, through its host for access.


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


Role = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


def environment(
    instance: DeployedInstance, role: Role = "dormouse_owner", *, forwarded: bool = False
) -> dict[str, str]:
    """Variables by name, for a process that may log in as this role of the database.

    The database may be `forwarded` to this machine: its name is still what certificates and tokens are for.
    """
    found = instance.resources
    if found.database is None or found.storage is None:
        raise InstanceError(f"{instance.id} has no database or no storage stack: deploy it")
    database = found.database
    host, more = (database.proxy, "&proxy=true") if database.proxy else (database.endpoint, "")
    variables = {
        "AWS_REGION": instance.region,
        "AWS_DEFAULT_REGION": instance.region,
        "DORMOUSE_DSN": f"rds-iam://{role}@{host}:{database.port}/{database.name}"
        f"?region={instance.region}{more}{'&hostaddr=127.0.0.1' if forwarded else ''}",
        "DORMOUSE_OBJECTS": found.storage.objects,
    }
    if database.row_indexes is not None:
        # indexes belong to who makes them, and any may
        own = "dormouse_read" if role == "dormouse_read" else "dormouse_run"
        variables["DORMOUSE_ROW_INDEXES"] = " ".join(
            f"rds-iam://{own}@{where}?region={instance.region}{more if where.startswith(host) else ''}"
            for where in database.row_indexes
        )
    if found.commit is not None:
        variables["DORMOUSE_COMMIT_QUEUE"] = ",".join(found.commit.queues)
        variables["DORMOUSE_QUEUES"] = str(len(found.commit.queues))
    return variables
