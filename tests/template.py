"""Helpers for templates: values as text, and the actions that policies allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.assembly import Assembly, Resource

KEPT = ("RetainExceptOnCreate", "Retain")
DELETED = ("Delete", "Delete")


def policies(resource: Resource) -> tuple[str, str]:
    """Returns a resource's policy for its removal from the stack, and its policy for its replacement."""
    return resource.body["DeletionPolicy"], resource.body["UpdateReplacePolicy"]


def flat(value: Any) -> str:
    """Returns a value as text; a reference becomes the name of its target."""
    match value:
        case {"Ref": name}:
            return str(name).removeprefix("AWS::")
        case {"Fn::GetAtt": [name, attribute]}:
            return f"{name}{attribute}"
        case {"Fn::ImportValue": name}:
            return str(name)
        case {"Fn::Sub": text}:
            return str(text)
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(map(flat, parts))
    return str(value)


def allowed(assembly: Assembly, stack: str, role: str) -> Iterator[tuple[str, str, Any]]:
    """Yields the action, the resource and the condition of everything that a role may do.

    `role` is the role's name without its hash, or without the name of its part too.
    """
    names = {role, f"{stack.capitalize()}{role}"}
    for policy in assembly.resources("AWS::IAM::Policy"):
        if policy.stack != stack or not any(one["Ref"][:-8] in names for one in policy.properties["Roles"]):
            continue
        for statement in policy.properties["PolicyDocument"]["Statement"]:
            if statement["Effect"] == "Allow":
                for action in _listed(statement["Action"]):
                    for where in _listed(statement["Resource"]):
                        yield action, flat(where), statement.get("Condition", {})


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
