"""A statement as it is planned: without EXPLAIN, with parts of variables where its parameters stand."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import duckdb

from dormouse.errors import InvalidQuery
from dormouse.reading.sql.parsed import Parsed, words

_UNSETTLED = {
    "age", "current_database", "current_query", "current_schema", "current_schemas", "current_setting",
    "getvariable", "in_search_path", "query", "txid_current",
}  # fmt: skip
"""Functions that are folded when planning, but may tell something else when the statement runs."""
_SECRET = f"parameter_{secrets.token_hex(8)}"
"""No statement can name the variables, or their parts."""
TOGETHER = 16
"""Parameters of one variable, a STRUCT: to set one is a statement, and to take a part of one copies it."""
_PARAMETER = re.compile(rb'\?(\d*)|\$(\d+|"(?:[^"]|"")*"|[A-Za-z_\x80-\xff][\w$\x80-\xff]*)')


@dataclass(frozen=True, slots=True)
class Placed:
    """What is planned of a statement, and the values of its variables."""

    text: str
    planned: str
    variables: Mapping[str, Mapping[str, Any]]
    """The parts of each, by their names."""
    is_settled: bool
    """Whether it is planned as it runs."""


def placed(
    statement: Parsed, parameters: Sequence[Any] | Mapping[str, Any], tree: Callable[[str], Any]
) -> Placed:
    """Raises `InvalidQuery` for parameters that a statement does not have, or that it lacks.

    `tree` is DuckDB's parser, whose answer is JSON.
    """
    text = statement.select
    values = _values(statement.parameters, parameters)
    planned, names = _with_variables(text, values, tree)
    if names is None:
        return Placed(text, text, {}, is_settled=False)
    variables: dict[str, dict[str, Any]] = {}
    for n, (part, one) in enumerate(names.items()):
        variables.setdefault(_variable(n), {})[part] = values[one]
    return Placed(text, planned, variables, is_settled=not _is_unsettled(text))


def _is_unsettled(text: str) -> bool:
    if not any(name in text.lower() for name in _UNSETTLED):
        return False
    found = [word for _, word in words(text)]
    return any(word in _UNSETTLED and following == "(" for word, following in pairwise(found))


def _values(names: frozenset[str], parameters: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """By the parameters' names in lower case; `InvalidQuery` when they are not those of the statement."""
    if isinstance(parameters, Mapping):
        given = {str(name).lower(): value for name, value in parameters.items()}
    else:
        given = {str(n): value for n, value in enumerate(parameters, 1)}
    if names == given.keys():
        return given
    numbered = not isinstance(parameters, Mapping) and all(name.isdecimal() for name in names)
    count = max(map(int, names), default=0) if numbered else len(given)
    if count != len(given):
        raise InvalidQuery(f"the statement has {_counted(count)}, but {len(given)} values were given")
    if missing := sorted(names - given.keys()):
        raise InvalidQuery(f"parameter ${missing[0]} has no value")
    raise InvalidQuery(f"the statement has no parameter ${min(given.keys() - names)}")


def _counted(count: int) -> str:
    return "1 parameter" if count == 1 else f"{count} parameters"


def _with_variables(
    text: str, values: Mapping[str, Any], tree: Callable[[str], Any]
) -> tuple[str, Mapping[str, str] | None]:
    """The text with a part of a variable at each parameter, and parameters by parts; None when unsure."""
    if not values:
        return text, {}
    raw, parts, end = text.encode(), [], 0
    names: dict[str, str | None] = {}
    for start, kind in duckdb.tokenize(text):
        found = _PARAMETER.match(raw, start) if kind == duckdb.token_type.operator else None
        if found is None:
            continue
        name = (found[1] or found[2] or b"").decode().lower()
        variable, part = _variable(len(names)), f"{_SECRET}_{len(names)}"
        names[part] = _unquoted(name) or None
        # no parentheses: those of IN (…) would be around a list
        parts += [raw[end:start].decode(), f" struct_extract(getvariable('{variable}'), '{part}') "]
        end = found.end()
    planned = "".join(parts) + raw[end:].decode()
    return planned, _numbered(names, lambda: (list(_placed(tree(one))) for one in (text, planned)))


def _variable(number: int) -> str:
    return f"{_SECRET}_of_{number // TOGETHER}"


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _numbered(
    names: Mapping[str, str | None], placed: Callable[[], Iterable[list[str]]]
) -> Mapping[str, str] | None:
    """With the number of each `?`, which DuckDB does not always count from left to right."""
    if len(names) == 1:
        return {part: name or "1" for part, name in names.items()}
    known = {part: name for part, name in names.items() if name is not None}
    if len(known) == len(names):
        return known
    # both trees have the same at each place
    before, after = placed()
    found = dict(zip(after, before, strict=False))
    return found if len(before) == len(after) and found.keys() == names.keys() else None


def _placed(tree: Any) -> Iterator[str]:
    """The parameters, or the parts of variables, of a statement's tree, in its order."""
    pending = [tree]
    while pending:
        match pending.pop():
            case {"class": "PARAMETER", "identifier": str(name)}:
                yield name
            case {
                "class": "FUNCTION",
                "function_name": "struct_extract",
                "children": [_, {"value": {"value": str(name)}}],
            } if name.startswith(_SECRET):
                yield name
            case dict() as node:
                pending.extend(node.values())
            case list() as nodes:
                pending.extend(nodes)
