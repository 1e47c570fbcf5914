"""Imports of internals in tests, which come from `tests.support`: moving a module then changes one line."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.parsed import statements

TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"

pytestmark = pytest.mark.usefixtures("trees_stay")


@cache
def imports(path: Path) -> frozenset[tuple[str, str]]:
    """Returns the module and the name of each import in a file."""
    froms = [node for node, _, _ in statements(path) if isinstance(node, ast.ImportFrom)]
    return frozenset((node.module or "", one.name) for node in froms for one in node.names)


def test_tests_import_internals_through_the_support_modules() -> None:
    """Only test modules must do so. A module that a separate process runs may import internals directly."""
    homes = {found: path.stem for path in SUPPORT.glob("*.py") for found in imports(path)}
    paths = [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]
    wrong = [
        f"{path.relative_to(TESTS)}: import {name} from tests.support.{homes[module, name]}"
        for path in paths
        for module, name in imports(path)
        if (module, name) in homes and module != "__future__"
    ]
    assert wrong == []


def test_every_name_of_the_support_modules_is_used() -> None:
    used = {found for path in TESTS.rglob("*.py") for found in imports(path)}
    has = {(f"tests.support.{path.stem}", name) for path in SUPPORT.glob("*.py") for _, name in imports(path)}
    assert {one for one in has if one[1] != "annotations"} <= used
