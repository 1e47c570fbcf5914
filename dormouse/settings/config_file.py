"""The settings file of a deployment: its tables, the allowed values, and a report of all mistakes.

Pydantic looks for contradictions only where everything else is right, so one check does not find all
mistakes. This module records each mistake, takes its setting out, and checks the rest again, until no new
mistake is found.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.section import PATTERNS

_WORDS = dict(PATTERNS.values())

Keys = tuple[str, ...]

FILES = Path("config")
BYTES_MAX = 1_000_000
ROUNDS_MAX = 8
SHOWN_MAX = 60
_TEXT = "text in quotes: "
_PLACEHOLDERS = {"id": "placeholder"}


@dataclass(frozen=True)
class Table:
    """A table of the file. Some tables have several kinds, and each kind is one object.

    The settings before the first table of the file belong to a table with an empty key.
    """

    key: str
    description: str
    properties: dict[str, dict[str, Any]]
    kind: tuple[str, str] | None = None
    """The name of the setting that selects the kind of the table, and the value that selects this kind."""

    optional: bool = False
    """True if a part of the instance is deployed only when the file contains the table."""


@cache
def tables() -> tuple[Table, ...]:
    """Returns all tables in the order of the file, first the one with the empty key."""
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
    """Returns the tables with this key: one for each kind, or a single one."""
    return [table for table in tables() if table.key == key]


def allowed(node: dict[str, Any]) -> str:
    """Returns the values that a setting allows, in words such as `a whole number, 2 to 1,000`.

    `node` is the setting's part of the JSON schema.
    """
    if "anyOf" in node:
        return allowed(next(one for one in node["anyOf"] if one.get("type") != "null"))
    if "const" in node:
        return literal(node["const"])
    if "enum" in node:
        *first, last = map(literal, node["enum"])
        return f"{', '.join(first)} or {last}"
    return _of_type(node)


def literal(value: Any) -> str:
    """Returns a value in the notation of TOML."""
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
    return f"{_TEXT}{words}" if words else "text in quotes"


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
    """Returns the models to which a node of the JSON schema refers.

    Each comes with the name and value of the setting that selects its kind, or with None.
    """
    if "discriminator" in node:
        name, mapping = node["discriminator"]["propertyName"], node["discriminator"]["mapping"]
        order = [one["$ref"] for one in node["oneOf"]]
        kinds = sorted(mapping.items(), key=lambda item: order.index(item[1]))
        return [((name, value), models[ref.rpartition("/")[2]]) for value, ref in kinds]
    if "$ref" in node:
        return [(None, models[node["$ref"].rpartition("/")[2]])]
    return [kind for one in node.get("anyOf", ()) for kind in _kinds(one, models)]


def problems_of(content: Mapping[str, Any]) -> tuple[DeploymentSettings | None, list[str]]:
    """Returns the settings and an empty list, or None and a line for each mistake."""
    found = _Problems(content)
    rest = copy.deepcopy(dict(content))
    for number in range(ROUNDS_MAX):
        try:
            settings = DeploymentSettings.model_validate(rest)
        except ValidationError as error:
            errors: list[Any] = error.errors(include_url=False, include_input=False)
            for each in errors:
                found.note(each, rest)
        else:
            return (settings if number == 0 else None), found.lines
    return None, found.lines


class _Problems:
    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.lines: list[str] = []
        self.gone: set[Keys] = set()
        """The keys of settings that were taken out. Neither these settings nor comparisons with them give
        more messages."""
        self.guessed: set[str] = set()
        """The keys of tables whose kind was missing or wrong, and was guessed."""

    def note(self, error: Any, rest: dict[str, Any]) -> None:
        """Records a mistake that pydantic found, and takes its setting out of `rest`.

        A second mistake of the same setting is not recorded.
        """
        path, kind = _in_file(error["loc"])
        match error["type"]:
            case "contradiction":
                for key, why in error["ctx"]["problems"]:
                    self._contradiction((*path, *str(key).split(".", 1)), str(why), rest)
            case "union_tag_not_found" | "union_tag_invalid":
                self._kind(path[0], rest)
            case "missing":
                self._say(path, f"{_dotted(path)} is missing: it must be {_allowed(path, kind)}")
                _put(rest, path, _PLACEHOLDERS.get(path[-1]))
            case "extra_forbidden":
                if path[0] not in self.guessed or not any(
                    path[-1] in one.properties for one in tables_of(path[0])
                ):
                    self._say(path, _unknown(path, kind))
                self._take(path, rest)
            case _:
                self._wrong(path, kind, error, rest)

    def _wrong(self, path: Keys, kind: str | None, error: Any, rest: dict[str, Any]) -> None:
        given = _at(self.content, path)
        if len(path) == 1 and tables_of(path[0]):
            words = f"a table, which begins with [{path[0]}]"
        else:
            words = _allowed(path, kind) or error["msg"]
        if isinstance(given, str):
            words = words.removeprefix(_TEXT)  # it is in quotes already
        self._say(path, f"{_dotted(path)} = {_short_text(given)}: it must be {words}")
        self._take(path, rest)

    def _contradiction(self, path: Keys, why: str, rest: dict[str, Any]) -> None:
        names = {gone[:2][-1] for gone in self.gone if gone[0] == path[0] or gone[0] in why}
        compared = any(re.search(rf"\b{re.escape(name)}\b", why) for name in names)
        if path not in self.gone and not compared:
            value = _at(self.content, path)
            self._say(
                path, f"{_dotted(path)}{f' = {_short_text(value)}' if value is not None else ''}: {why}"
            )
        # a default that contradicts another setting: take that one out, so that the rest is still checked
        table = _at(rest, path[:-1]) if len(path) > 1 else None
        keys = [key for key in table or () if re.search(rf"\b{re.escape(key)}\b", why)]
        for taken in (path, *((*path[:-1], key) for key in keys), path[:-1] or path):
            if self._take(taken, rest):
                break

    def _kind(self, key: str, rest: dict[str, Any]) -> None:
        """Adds a line for a table of the file whose kind, such as `engine`, is missing or wrong.

        Then puts the kind that has most of the given settings into `rest`, to find further problems.
        """
        kinds = tables_of(key)
        name = next(table.kind[0] for table in kinds if table.kind)
        given = rest[key]
        known = [f'"{table.kind[1]}"' for table in kinds if table.kind]
        words = f"it must be {', '.join(known[:-1])} or {known[-1]}"
        value = f" = {_short_text(given[name])}:" if name in given else " is missing:"
        self._say((key, name), f"{key}.{name}{value} {words}")
        best = max(kinds, key=lambda table: len(table.properties.keys() & given.keys()))
        given[name] = best.kind[1] if best.kind else None
        self.guessed.add(key)
        self.gone.add((key, name))

    def _say(self, path: Keys, line: str) -> None:
        if path not in self.gone:
            self.lines.append(line)
        self.gone.add(path)

    def _take(self, path: Keys, rest: dict[str, Any]) -> bool:
        """Takes a setting out of `rest`, and returns whether it was there.

        A list, and the table of tags, are taken out as a whole. The setting that selects a kind stays.
        """
        self.gone.add(path)
        owner: Any = rest if len(path) == 1 or not isinstance(rest.get(path[0]), dict) else rest[path[0]]
        key = path[0] if owner is rest else path[1]
        return isinstance(owner, dict) and owner.pop(key, None) is not None


def _in_file(loc: tuple[Any, ...]) -> tuple[Keys, str | None]:
    """Splits the location of a mistake into the keys in the file and the kind of the table.

    Pydantic puts the kind between the keys. The kind is None if the table has no kinds.
    """
    keys = tuple(str(key) for key in loc)
    kinds = [table.kind[1] for table in tables_of(keys[0]) if table.kind] if keys else []
    if len(keys) > 1 and keys[1] in kinds:
        return (keys[0], *keys[2:]), keys[1]
    return keys, None


def _allowed(path: Keys, kind: str | None) -> str:
    """Returns the allowed values of a setting in words; empty if they are not known."""
    key, name = ("", path[0]) if len(path) == 1 or not tables_of(path[0]) else path[:2]
    depth = len(path) - (1 if key == "" else 2)
    for table in tables_of(key):
        node = table.properties.get(name)
        if node is not None and (kind is None or table.kind is None or table.kind[1] == kind):
            inner = node.get("items") or node.get("additionalProperties") if depth else node
            return allowed(inner if isinstance(inner, dict) else node)
    return ""


def _unknown(path: Keys, kind: str | None) -> str:
    """Returns the message for an unknown setting.

    It names the table that has such a setting, or a similar setting.
    """
    name, shown = path[-1], f"{_dotted(path)} is not a setting"
    mine = [table for table in tables_of(path[0] if len(path) > 1 else "") if _is(table, kind)]
    for table in tables_of(path[0]) if len(path) > 1 else ():
        if name in table.properties and table.kind and kind:
            here = f'{path[0]}.{table.kind[0]} = "{kind}"'
            return f'{shown} of {here}: it belongs to {table.kind[0]} = "{table.kind[1]}"'
    known = {one for table in mine for one in table.properties}
    known |= {table.key for table in tables() if table.key} if len(path) == 1 else set()
    if near := difflib.get_close_matches(name, sorted(known), 1, 0.7):
        return f"{shown}; did you mean {near[0]}?"
    for table in tables():
        if name in table.properties:
            where = (
                f"of [{table.key}]" if table.key else "of the file itself: put it before the first [table]"
            )
            return f"{shown}; it is one {where}"
    near = difflib.get_close_matches(name, sorted(known), 1, 0.5)
    return (
        f"{shown}; did you mean {near[0]}?" if near else f"{shown}; known there: {', '.join(sorted(known))}"
    )


def _is(table: Table, kind: str | None) -> bool:
    return kind is None or table.kind is None or table.kind[1] == kind


def _at(content: Any, path: Keys) -> Any:
    for key in path:
        if isinstance(content, Mapping):
            content = content.get(key)
        elif isinstance(content, list | tuple) and key.isdigit() and int(key) < len(content):
            content = content[int(key)]
        else:
            return None
    return content


def _put(rest: dict[str, Any], path: Keys, value: Any) -> None:
    owner = rest if len(path) == 1 else rest[path[0]]
    owner[path[-1]] = value


def _dotted(path: Keys) -> str:
    parts = [key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _short_text(key) for key in path]
    return ".".join(parts) or "the file"


def _short_text(value: Any) -> str:
    """Returns a value as one line of TOML, shortened if it is long."""
    if isinstance(value, date | time):
        return value.isoformat()
    try:
        text = json.dumps(
            value, ensure_ascii=not (isinstance(value, str) and value.isprintable()), default=str
        )
    except (ValueError, RecursionError):  # a number of 5,000 digits
        text = "…"
    text = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text, text)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def load(path: str | Path) -> DeploymentSettings:
    """Returns the settings in a TOML file.

    Raises `InvalidInput` with a line for each mistake: the key, its value and the allowed values.
    """
    name = str(path)
    try:
        content = tomllib.loads(_text(Path(path)))
    except InvalidInput:
        raise
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {name}{_others(Path(path))}") from None
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror or error}") from None
    except RecursionError:
        raise InvalidInput(f"{name} is not TOML that can be read: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} is not TOML: it is not text in UTF-8") from None
    except (
        ValueError
    ) as error:  # ValueError also for values that Python refuses, like a number of 5,000 digits
        raise InvalidInput(f"{_printable(name)} is not TOML: {_printable(str(error))}") from None
    return parse(content, name)


def parse(content: Mapping[str, Any], name: str = "settings") -> DeploymentSettings:
    """Returns the settings in a parsed document. Raises `InvalidInput` with a line for each mistake.

    Messages call the document `name`.
    """
    settings, problems = problems_of(content)
    if settings is None:
        raise InvalidInput("\n".join(f"{name}: {problem}" for problem in problems))
    return settings


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is not a file: name a TOML file, like config/dev.toml{_others(path)}")
    with path.open("rb") as file:
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise InvalidInput(f"{path} has more than {BYTES_MAX:,} bytes: it is not a file of settings")
    return content.decode("utf-8-sig")


def _others(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    beside = sorted(one for one in folder.glob("*.toml") if one.name != "pyproject.toml")
    known = [str(one) for one in beside or sorted(FILES.glob("*.toml"))]
    near = difflib.get_close_matches(str(path), known, 1, 0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else ""


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
