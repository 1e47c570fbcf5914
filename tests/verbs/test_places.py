"""The places in the doors that list the options of a verb. A new option must be added to each of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import dormouse
from tests.support.verbs import VERBS, OfWire

PACKAGE = Path(dormouse.__file__).parent
DOORS = ("verbs", "service", "client", "cli", "datasource")
OPTIONS_MIN = 4
"""The number of options from which a place counts as listing a verb's options, unless the verb has fewer."""

PLACES: dict[str, list[str]] = {
    "query": ["client/client.py:query"],
    "sql": ["client/client.py:sql", "client/client.py:sql"],
    "changes": ["client/client.py:changes"],
    "ingest": [],
    "compact": [],
    # a download takes the options of a query
    "rows query": ["client/rows.py:query", "client/rows.py:download_csv", "client/rows.py:Dict"],
    "rows change": ["client/rows.py:change"],
    "rows upsert": ["client/rows.py:upsert"],
    "rows upload": ["client/rows.py:upload_csv"],
}
"""The places that list a verb's options, other than its request and its method of the Python API."""


def names_in(node: ast.AST) -> set[str]:
    """Returns the names in a signature, in a call or in the fields of a class, or the texts in a literal."""
    names: list[object] = []
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            names = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
        case ast.ClassDef():
            names = [getattr(one.target, "id", None) for one in node.body if isinstance(one, ast.AnnAssign)]
        case ast.List() | ast.Tuple() | ast.Set():
            names = [one.value for one in node.elts if isinstance(one, ast.Constant)]
        case ast.Dict():
            names = [one.value for one in node.keys if isinstance(one, ast.Constant)]
        case ast.Call():
            names = [one.arg for one in node.keywords]
    return {name for name in names if isinstance(name, str)}


@cache
def places() -> list[tuple[str, set[str]]]:
    """Returns each place in the doors that has several option names, with these names."""
    found = []
    for path in sorted(path for room in DOORS for path in (PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if len(names := names_in(node)) > 1:
                place = getattr(node, "name", type(node).__name__)
                found.append((f"{path.relative_to(PACKAGE)}:{place}", names))
    return found


@pytest.mark.parametrize("verb", PLACES)
def test_a_verb_is_described_once(verb: str) -> None:
    request = VERBS[verb].request
    options = {name for name, field in request.model_fields.items() if OfWire() not in field.metadata} - {
        "table"
    }
    described = [
        place
        for place, names in places()
        if len(names & options) >= min(OPTIONS_MIN, len(options))
        and place.partition(":")[2] not in {each.__name__ for each in request.__mro__}
    ]
    assert described == PLACES[verb]
