"""The functions that a statement may call: some of DuckDB's tell of other statements, so a list allows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from dormouse.errors import InvalidQuery
from dormouse.model.text import did_you_mean


@dataclass(frozen=True, slots=True)
class Functions:
    """The reviewed functions of one kind, by their names in lower case."""

    allowed: frozenset[str]
    refused: dict[str, str]
    """Why each of the others is refused."""


def check_expressions(called: Iterable[str]) -> None:
    """Raises `InvalidQuery` for the first function, operator or macro in expressions that is not allowed."""
    known = reviewed("expressions")
    for name in sorted(name.lower() for name in called):
        if name not in known.allowed:
            raise InvalidQuery(
                f"SQL reads tables only, not {name}(…): {known.refused[name]}"
                if name in known.refused
                else f"unknown function {name!r}{did_you_mean(name, known.allowed)}"
            )


def check_tables(called: Iterable[str]) -> None:
    """Raises `InvalidQuery` for the first function in FROM that is not allowed."""
    known = reviewed("tables")
    for name in sorted(name.lower() for name in called):
        if name not in known.allowed:
            listed = ", ".join(sorted(known.allowed))
            why = f": {known.refused[name]}" if name in known.refused else ""
            raise InvalidQuery(
                f"SQL reads tables only, not {name}(…){why}; of functions in FROM there are {listed}"
            )


@cache
def reviewed(kind: str) -> Functions:
    """Returns the functions of a kind: of "expressions", or of "tables", which stand in FROM."""
    found = review()
    allowed = (names for names in found["allowed"][kind].values())
    return Functions(
        frozenset(name.lower() for names in allowed for name in names.split()),
        {name: one["why"] for one in found["refused"][kind].values() for name in one["names"].split()},
    )


def review() -> dict[str, Any]:
    """Returns the whole review, and the version of DuckDB that it is of."""
    return tomllib.loads(resources.files(__package__ or "").joinpath("functions.toml").read_text("utf-8"))
