"""The way to the database from outside of its VPC, as a person takes it who may read."""

from __future__ import annotations

import json
import shlex
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from dormouse.settings.resources import resources_parameter
from tests.deploy_local.cloud import Cloud
from tests.deploy_local.database import PORT, free_address
from tests.deploy_local.processes import RunFailed

START = ["aws", "ssm", "start-session"]


def hosts(cloud: Cloud) -> list[Any]:
    """The instances of EC2 that run."""
    found = cloud.client("ec2").describe_instances()["Reservations"]
    made = [one for each in found for one in each["Instances"]]
    return [one for one in made if one["State"]["Name"] == "running"]


def reach(cloud: Cloud, reader: Mapping[str, str], operator: Mapping[str, str]) -> str:
    """The session that `dormouse access` tells opens, for who may, and tables are read through it."""
    told = json.loads(cloud.dormouse("access", "--instance", "local", "--json", **reader))
    session = _session(told["command"])
    (host,) = hosts(cloud)
    if (told["host"], session["target"]) != (host["InstanceId"],) * 2:
        raise RunFailed(f"it names the host {told['host']}, and {host['InstanceId']} runs")
    if host.get("PublicIpAddress"):
        raise RunFailed(f"the host has the public address {host['PublicIpAddress']}")
    for who, asked, wanted in (
        (reader, session, None),
        (operator, session, "AccessDenied"),
        (reader, session | {"document": "SSM-SessionManagerRunShell"}, "AccessDenied"),
        (reader, session | {"target": "i-0123456789abcdef0"}, "AccessDenied"),
    ):
        refusal = cloud.ask("/session", access_key=who["AWS_ACCESS_KEY_ID"], **asked)["refusal"]
        if str(refusal).partition(":")[0] != str(wanted):
            raise RunFailed(f"a session {asked} is refused with {refusal}, not {wanted}")
    with _forwarded(cloud) as address:
        names = _tables(cloud, reader, address)
    return f"a session to {told['host']}, {len(names)} tables seen through it"


def is_told(cloud: Cloud) -> str:
    """What the stack says of itself, which a command reads; empty when it is so."""
    name = resources_parameter("local", "access")
    parameter = cloud.client("ssm").get_parameter(Name=name)["Parameter"]
    told, found = json.loads(parameter["Value"]), [one["InstanceId"] for one in hosts(cloud)]
    if told["host"] != "".join(found) or told["endpoints"] != 2:
        return f"its stack tells of the host {told['host']!r} with {told['endpoints']} endpoints, not {found}"
    return ""


def _session(command: str) -> dict[str, Any]:
    """What a command of the AWS CLI asks for."""
    words = shlex.split(command)
    if words[:3] != START:
        raise RunFailed(f"this starts no session: {command}")
    given = dict(zip(words[3::2], words[4::2], strict=True))
    return {
        "target": given["--target"],
        "document": given["--document-name"],
        "parameters": json.loads(given["--parameters"]),
    }


def _tables(cloud: Cloud, reader: Mapping[str, str], address: str) -> list[str]:
    """Those that a reader sees through the forwarded port; here it has another address than a laptop's."""
    told = cloud.dormouse(
        "env", "--instance", "local", "--role", "dormouse_read", "--forwarded", "--json", **reader
    )
    variables = json.loads(told)
    dsn = variables.pop("DORMOUSE_DSN").replace("hostaddr=127.0.0.1", f"hostaddr={address}")
    trusting = f"{dsn}&sslrootcert={cloud.database.certificates}"
    listed = cloud.dormouse("table", "list", "--json", DORMOUSE_DSN=trusting, **variables, **reader)
    names = [str(one["name"] if isinstance(one, dict) else one) for one in json.loads(listed)]
    if "events" not in names:
        raise RunFailed(f"the tables that a reader sees through the host are {', '.join(names) or 'none'}")
    return names


@contextmanager
def _forwarded(cloud: Cloud) -> Iterator[str]:
    """The address of a port that leads to the database, as the plugin of Session Manager makes one."""
    address = free_address(PORT)
    with socket.create_server((address, PORT)) as listener:
        threading.Thread(target=_serve, args=(listener, cloud.database.host), daemon=True).start()
        yield address
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, host: str) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            server = socket.create_connection((host, PORT))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
