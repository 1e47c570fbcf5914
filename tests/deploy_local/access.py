"""Checks of the access to the database from outside of its VPC, with the rights of a reader."""

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
    """Returns the descriptions of the EC2 instances that run."""
    reservations = cloud.client("ec2").describe_instances()["Reservations"]
    instances = [instance for each in reservations for instance in each["Instances"]]
    return [instance for instance in instances if instance["State"]["Name"] == "running"]


def reach(cloud: Cloud, reader: Mapping[str, str], operator: Mapping[str, str]) -> str:
    """Reads tables through the session that `dormouse access` describes; returns the result in words."""
    session = open_session(cloud, reader, operator)
    with _forwarded(cloud) as address:
        names = _tables(cloud, reader, address)
    return f"{session}, {len(names)} tables seen through it"


def open_session(cloud: Cloud, reader: Mapping[str, str], operator: Mapping[str, str]) -> str:
    """Checks that a reader can open the session that `dormouse access` describes.

    A session of an operator, with another document or to another host is refused.
    """
    described = json.loads(cloud.dormouse("access", "--instance", "local", "--json", **reader))
    session = _session(described["command"])
    (host,) = hosts(cloud)
    if (described["host"], session["target"]) != (host["InstanceId"],) * 2:
        raise RunFailed(f"it names the host {described['host']}, and {host['InstanceId']} runs")
    if host.get("PublicIpAddress"):
        raise RunFailed(f"the host has the public address {host['PublicIpAddress']}")
    for person, request, wanted in (
        (reader, session, None),
        (operator, session, "AccessDenied"),
        (reader, session | {"document": "SSM-SessionManagerRunShell"}, "AccessDenied"),
        (reader, session | {"target": "i-0123456789abcdef0"}, "AccessDenied"),
    ):
        refusal = cloud.ask("/session", access_key=person["AWS_ACCESS_KEY_ID"], **request)["refusal"]
        if str(refusal).partition(":")[0] != str(wanted):
            raise RunFailed(f"a session {request} is refused with {refusal}, not {wanted}")
    return f"a session to {described['host']}"


def wrong_resources(cloud: Cloud) -> str:
    """Compares the resources parameter of the stack for access with the running host.

    Returns the difference in words, or an empty string if there is none.
    """
    name = resources_parameter("local", "access")
    parameter = cloud.client("ssm").get_parameter(Name=name)["Parameter"]
    recorded, running = json.loads(parameter["Value"]), [host["InstanceId"] for host in hosts(cloud)]
    if recorded["host"] != "".join(running) or recorded["endpoints"] != 2:
        host, endpoints = recorded["host"], recorded["endpoints"]
        return f"its stack names the host {host!r} with {endpoints} endpoints, not {running}"
    return ""


def _session(command: str) -> dict[str, Any]:
    """Returns the target, document and parameters in a command of the AWS CLI."""
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
    """Returns the names of the tables that a reader sees through the port that is forwarded at `address`."""
    printed = cloud.dormouse(
        "env", "--instance", "local", "--role", "dormouse_read", "--forwarded", "--json", **reader
    )
    variables = json.loads(printed)
    # The variables name 127.0.0.1, as on a laptop; the run forwards from another loopback address.
    dsn = variables.pop("DORMOUSE_DSN").replace("hostaddr=127.0.0.1", f"hostaddr={address}")
    trusting = f"{dsn}&sslrootcert={cloud.database.certificates}"
    listed = cloud.dormouse("table", "list", "--json", DORMOUSE_DSN=trusting, **variables, **reader)
    names = [str(one["name"] if isinstance(one, dict) else one) for one in json.loads(listed)]
    if "events" not in names:
        raise RunFailed(f"the tables that a reader sees through the host are {', '.join(names) or 'none'}")
    return names


@contextmanager
def _forwarded(cloud: Cloud) -> Iterator[str]:
    """Yields a loopback address with a port that leads to the database, as Session Manager's plugin
    opens it.
    """
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
