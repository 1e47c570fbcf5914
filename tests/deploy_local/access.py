"""Checks of the access to the database from outside of its VPC, with the rights of a reader."""

from __future__ import annotations

import json
from typing import Any

from dormouse.settings.deployment import ACCESS_TAG
from dormouse.settings.resources import resources_parameter
from tests.deploy_local.account import Account, Person, words_of_session
from tests.deploy_local.cloud import Cloud
from tests.deploy_local.processes import RunFailed


def hosts(account: Account) -> list[Any]:
    """Returns the descriptions of the instance's EC2 instances that run."""
    ours = [{"Name": f"tag:{ACCESS_TAG}", "Values": [account.instance_id]}]
    reservations = account.client("ec2").describe_instances(Filters=ours)["Reservations"]
    instances = [instance for each in reservations for instance in each["Instances"]]
    return [instance for instance in instances if instance["State"]["Name"] in ("pending", "running")]


def described(account: Account, reader: Person) -> dict[str, Any]:
    """Returns what `dormouse access` prints, once its host is the one that runs, without a public address."""
    found: dict[str, Any] = json.loads(
        account.dormouse("access", "--instance", account.instance_id, "--json", **reader)
    )
    target = _session(found["command"])["target"]
    (host,) = hosts(account)
    if (found["host"], target) != (host["InstanceId"],) * 2:
        raise RunFailed(f"it names the host {found['host']}, and {host['InstanceId']} runs")
    if host.get("PublicIpAddress"):
        raise RunFailed(f"the host has the public address {host['PublicIpAddress']}")
    return found


def reach(account: Account, reader: Person) -> str:
    """Reads tables through the session that `dormouse access` describes; returns the result in words."""
    found = described(account, reader)
    with account.forwarded(found["command"]) as address:
        names = _tables(account, reader, address)
    return f"a session to {found['host']}, {len(names)} tables seen through it"


def refused_sessions(cloud: Cloud, reader: Person, operator: Person) -> str:
    """Checks that a reader may open the session that `dormouse access` describes.

    A session of an operator, with another document or to another host is refused.
    """
    session = _session(described(cloud, reader)["command"])
    for person, request, wanted in (
        (reader, session, None),
        (operator, session, "AccessDenied"),
        (reader, session | {"document": "SSM-SessionManagerRunShell"}, "AccessDenied"),
        (reader, session | {"target": "i-0123456789abcdef0"}, "AccessDenied"),
    ):
        refusal = cloud.ask("/session", access_key=person["AWS_ACCESS_KEY_ID"], **request)["refusal"]
        if str(refusal).partition(":")[0] != str(wanted):
            raise RunFailed(f"a session {request} is refused with {refusal}, not {wanted}")
    return f"a session to {session['target']}"


def wrong_resources(account: Account) -> str:
    """Compares the resources parameter of the host for access with the running host.

    Returns the difference in words, or an empty string if there is none.
    """
    name = resources_parameter(account.instance_id, "access")
    parameter = account.client("ssm").get_parameter(Name=name)["Parameter"]
    recorded, running = json.loads(parameter["Value"]), [host["InstanceId"] for host in hosts(account)]
    if recorded["host"] != "".join(running) or recorded["endpoints"] != 2:
        host, endpoints = recorded["host"], recorded["endpoints"]
        return f"its stack names the host {host!r} with {endpoints} endpoints, not {running}"
    return ""


def _session(command: str) -> dict[str, Any]:
    """Returns the target, document and parameters in a command of the AWS CLI."""
    words = words_of_session(command)[3:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    return {
        "target": given["--target"],
        "document": given["--document-name"],
        "parameters": json.loads(given["--parameters"]),
    }


def _tables(account: Account, reader: Person, address: str) -> list[str]:
    """Returns the names of the tables that a reader sees through the port that is forwarded at `address`."""
    role = ("--role", "dormouse_read", "--forwarded")
    printed = account.dormouse("env", "--instance", account.instance_id, *role, "--json", **reader)
    variables = json.loads(printed)
    dsn = account.trusting(variables.pop("DORMOUSE_DSN"), address)
    listed = account.dormouse("table", "list", "--json", DORMOUSE_DSN=dsn, **variables, **reader)
    names = [str(one["name"] if isinstance(one, dict) else one) for one in json.loads(listed)]
    if "events" not in names:
        raise RunFailed(f"the tables that a reader sees through the host are {', '.join(names) or 'none'}")
    return names
