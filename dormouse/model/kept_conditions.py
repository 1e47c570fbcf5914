"""Conditions of deletions as they are kept: by the names that columns had then."""

from __future__ import annotations

from json import dumps, loads
from typing import Any

from dormouse.errors import InvalidQuery
from dormouse.model.schema import Schema

VERSION = "__schema"
"""Beside a condition's columns, whose names begin otherwise: their version of the schema, if it is not 1."""


def kept(schema: Schema, condition: dict[str, Any]) -> str:
    """A condition on the columns of a schema, in JSON, as it is kept."""
    version = {} if schema.version == 1 else {VERSION: schema.version}
    return dumps({**condition, **version})


def shown(condition: str) -> str:
    """A kept condition as it was given."""
    found = loads(condition)
    return dumps({name: wanted for name, wanted in found.items() if name != VERSION})


def as_now(schema: Schema, condition: str) -> dict[str, Any]:
    """A condition that is kept, by what its columns are called in a schema; in JSON.

    `InvalidQuery` when a column of it is not there, `SchemaMoved` when it is of a later version.
    """
    found = loads(condition)
    version = found.pop(VERSION, 1)
    schema.shape.check_known(version)
    names = {}
    for name, one in zip(schema.names, schema.shape.columns, strict=True):
        if (then := one.at(version)) is not None:
            names[then.name] = name
    if gone := [name for name in found if name not in names]:
        raise InvalidQuery(f"a deletion names column {gone[0]!r}, which is there no more")
    return {names[name]: wanted for name, wanted in found.items()}
