"""Reads the file of a deployment's settings, and reports all of its problems at once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings

FILES = Path("config")


def load(path: str | Path) -> DeploymentSettings:
    """The settings of a TOML file; raises InvalidInput, a line for each problem: key, value and rule."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}{_others(path)}") from None
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is not TOML: {error}") from None
    return parse(content, str(path))


def parse(content: Mapping[str, Any], name: str = "settings") -> DeploymentSettings:
    """The settings of a document; `name` is what a message calls it."""
    try:
        return DeploymentSettings.model_validate(content)
    except ValidationError as error:
        problems = [_line(one, content) for one in error.errors(include_url=False)]
        raise InvalidInput("\n".join(f"{name}: {problem}" for problem in problems)) from None


def _line(error: Any, content: Mapping[str, Any]) -> str:
    keys = [str(key) for key in error["loc"]]
    where = _place(keys, content)
    shown = ".".join(where) or "the file"
    match error["type"]:
        case "extra_forbidden":
            return f"{shown} is not a setting{_nearest(where)}"
        case "missing":
            return f"{shown} is missing"
        case "union_tag_not_found":
            return f"{shown}.{_bare(error['ctx']['discriminator'])} is missing"
        case "union_tag_invalid":
            context = error["ctx"]
            key = f"{shown}.{_bare(context['discriminator'])}"
            return f"{key} = {context['tag']!r}: it must be {context['expected_tags']}"
    reason = error["msg"].removeprefix("Value error, ")
    value = _value(where, content)
    if isinstance(value, Mapping) or value is None:
        return f"{shown}: {reason}"
    return f"{shown} = {value!r}: {reason[0].lower()}{reason[1:]}"


def _place(keys: list[str], content: Any) -> list[str]:
    """The keys of the file; pydantic also names the kind of database or engine that it took."""
    where: list[str] = []
    for number, key in enumerate(keys):
        inside = content.get(key) if isinstance(content, Mapping) else None
        last = number == len(keys) - 1
        if inside is None and not last and number and key in content.values():
            continue
        if isinstance(content, Mapping) and key not in content and key in map(str, content.values()):
            continue
        where.append(key)
        content = inside if isinstance(inside, Mapping) else {}
    return where


def _value(where: Iterable[str], content: Any) -> Any:
    for key in where:
        if not isinstance(content, Mapping) or key not in content:
            return content if not isinstance(content, Mapping) else None
        content = content[key]
    return content


def _nearest(where: list[str]) -> str:
    names = _names(where[:-1])
    near = difflib.get_close_matches(where[-1], names, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else f"; known there: {', '.join(sorted(names))}"


def _names(where: list[str]) -> set[str]:
    models: list[type[BaseModel]] = [DeploymentSettings]
    for key in where:
        models = [inner for model in models for inner in _models_of(model, key)]
    return {name for model in models for name in model.model_fields}


def _models_of(model: type[BaseModel], key: str) -> list[type[BaseModel]]:
    field = model.model_fields.get(key)
    return [] if field is None else list(_models_in(field.annotation))


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models_in(inner)


def _bare(name: str) -> str:
    return name.strip("'")


def _others(path: Path) -> str:
    known = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else sorted(FILES.glob("*.toml"))
    near = difflib.get_close_matches(str(path), [str(one) for one in known], 1, 0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(str(one) for one in known)}" if known else ""
