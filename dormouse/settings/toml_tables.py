"""The tables of a deployment's file and what each setting allows, in words; read from the models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.section import PATTERNS

_WORDS = dict(PATTERNS.values())


@dataclass(frozen=True)
class Table:
    """A table of the file, or one kind of it; the top of the file has no key."""

    key: str
    description: str
    properties: dict[str, dict[str, Any]]
    kind: tuple[str, str] | None = None
    """The setting that tells the kinds of the table apart, and its value in this one."""

    optional: bool = False
    """Whether what it sets is deployed only when the table is in the file."""


@cache
def tables() -> tuple[Table, ...]:
    """The top of the file, then its tables in their order."""
    schema = DeploymentSettings.model_json_schema()
    top, found = {}, []
    for key, node in schema["properties"].items():
        kinds, optional = _kinds(node, schema["$defs"]), node.get("default", ...) is None
        if not kinds:
            top[key] = node
        for kind, model in kinds:
            found.append(Table(key, model["description"], model["properties"], kind, optional))
    return Table("", schema["description"], top), *found


def tables_of(key: str) -> list[Table]:
    """One, or one for each kind."""
    return [table for table in tables() if table.key == key]


def allowed(node: dict[str, Any]) -> str:
    """What may stand in the file: `a whole number, 2 to 1,000`."""
    if "anyOf" in node:
        return allowed(next(one for one in node["anyOf"] if one.get("type") != "null"))
    if "const" in node:
        return literal(node["const"])
    if "enum" in node:
        *first, last = map(literal, node["enum"])
        return f"{', '.join(first)} or {last}"
    return _of_type(node)


def literal(value: Any) -> str:
    """As TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    return (
        f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )


def _of_type(node: dict[str, Any]) -> str:
    match node.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number":
            return _number(node)
        case "array":
            return f"a list, each {allowed(node['items'])}"
        case "object":
            return f"a table, each {allowed(node['additionalProperties'])}"
    words = _WORDS.get(node.get("pattern", ""))
    return f"text in quotes: {words}" if words else "text in quotes"


def _number(node: dict[str, Any]) -> str:
    whole = node["type"] == "integer"
    words = "a whole number" if whole else "a number"
    low, high, over = (node.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    if whole and over is not None:
        low = over + 1
    if low is not None and high is not None:
        words += f", {low:,} to {high:,}"
    elif over is not None:
        words += f", more than {over:,}"
    return f"{words}, in steps of {node['multipleOf']:g}" if "multipleOf" in node else words


def _kinds(
    node: dict[str, Any], models: dict[str, Any]
) -> list[tuple[tuple[str, str] | None, dict[str, Any]]]:
    """The models that a node refers to, each with what tells it apart."""
    if "discriminator" in node:
        name, mapping = node["discriminator"]["propertyName"], node["discriminator"]["mapping"]
        order = [one["$ref"] for one in node["oneOf"]]
        kinds = sorted(mapping.items(), key=lambda item: order.index(item[1]))
        return [((name, value), models[ref.rpartition("/")[2]]) for value, ref in kinds]
    if "$ref" in node:
        return [(None, models[node["$ref"].rpartition("/")[2]])]
    return [kind for one in node.get("anyOf", ()) for kind in _kinds(one, models)]
