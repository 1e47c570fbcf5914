"""The pages about properties of tables and settings of processes, generated from the models that check them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from documentation import cell, made_of
from dormouse.model.table import TableProperties, allowed_values
from dormouse.settings.process import Settings
from dormouse.settings.service import ServiceSettings

_PROPERTIES = """# Properties of a table

{made}

- To set properties of a new table, use `--property name=value` or `dm.TableProperties(name=value)`.
- To change one, run `dormouse table set TABLE name=value`. `name=` restores the default.
- To list the properties that differ from their defaults, run `dormouse table show TABLE`.

The last part of a name is its unit.

| property | default | allowed | meaning |
| --- | --- | --- | --- |
{rows}
"""
_SETTINGS = """# Settings of a process

{made}

These are environment variables. A process reads them when it opens an instance. If a variable is unknown or its value is invalid,
opening fails with a message that names the variable. For the settings file of an instance on AWS, see
[Settings of a deployment](deployment-settings.md).

## Every process

| variable | default | allowed | meaning |
| --- | --- | --- | --- |
{process}

## The query service

Each setting except the token is also an option of `dormouse serve`, like `--queries-max`.

| variable | default | allowed | meaning |
| --- | --- | --- | --- |
{service}
"""


def table_properties() -> str:
    rows = [
        f"| `{name}` | {_default(field.default)} | {cell(allowed_values(name))} | {cell(field.description or '')} |"
        for name, field in TableProperties.model_fields.items()
    ]
    return _PROPERTIES.format(made=made_of("dormouse/model/table.py"), rows="\n".join(rows))


def process_settings() -> str:
    return _SETTINGS.format(
        made=made_of("dormouse/settings"),
        process="\n".join(_settings(Settings)),
        service="\n".join(_settings(ServiceSettings)),
    )


def _settings(model: type[BaseModel]) -> Iterator[str]:
    prefix = str(model.model_config["env_prefix"])  # type: ignore[typeddict-item]
    described = _docstrings(model)
    for name, field in model.model_fields.items():
        words = cell(field.description or described.get(name, ""))
        yield f"| `{prefix}{name.upper()}` | {_default(field.default)} | {_allowed(field)} | {words} |"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring of each field that has one."""
    from pydantic._internal._docs_extraction import extract_docstrings_from_cls

    return extract_docstrings_from_cls(model, use_inspect=True)


def _allowed(field: Any) -> str:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(field.annotation))
    words = {int: "a whole number", float: "a number", bool: "`true` or `false`", str: "text"}
    said = words.get(kinds[0], "a path")
    limits = {
        key: getattr(item, key) for item in field.metadata for key in ("gt", "ge", "le") if hasattr(item, key)
    }
    if "ge" in limits:
        said += f" from {limits['ge']:,}"
    if "gt" in limits:
        said += f" above {limits['gt']:,}"
    return said + (f" to {limits['le']:,}" if "le" in limits else "")


def _default(value: Any) -> str:
    return "none" if value is None else f"`{value}`"
