"""What messages and guides say to install is what pyproject.toml names: the distribution and its extras."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import dormouse as dm
from dormouse import errors
from dormouse.cli.failures import _EXTRAS
from dormouse.errors import DISTRIBUTION, DependencyMissing, not_installed, pip_install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FOLDERS = ("dormouse", "benchmarks", "docs", "lambdas", "emr", "query_image", "packages", "stacks")
TEXTS = [
    *ROOT.glob("*.md"),
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md"}),
]
INSTALL = re.compile(r"pip install (?:-\S+ )*['\"]?([\w.-]+)(?:\[([^\]]*)\])?")
HINTS = {"not_installed": slice(1, 2), "pip_install": slice(None)}
"""The functions that say what to install, and which of their arguments are extras."""


def commands(path: Path) -> Iterator[tuple[str, str]]:
    """The distribution and the extras of each `pip install` that a file spells out, or has said for it."""
    text = path.read_text("utf-8")
    if path != Path(errors.__file__):
        yield from ((name, extra) for name, extras in INSTALL.findall(text) for extra in extras.split(","))
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HINTS:
                said = [one.value for one in node.args[HINTS[node.func.id]] if isinstance(one, ast.Constant)]
                yield from ((DISTRIBUTION, str(extra)) for extra in said)


def test_the_constant_is_the_name_that_is_published() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert dm.__version__ == PROJECT["version"]
    assert PROJECT["scripts"].keys() == {"dormouse"}


def test_every_command_names_the_distribution_and_an_extra_that_exists() -> None:
    found = [(path.relative_to(ROOT), name, extra) for path in TEXTS for name, extra in commands(path)]
    assert {path.parts[0] for path, _, _ in found} >= {"dormouse", "benchmarks", "docs", "lambdas"}
    known = {"", *PROJECT["optional-dependencies"]}
    assert [one for one in found if one[1] != DISTRIBUTION or one[2] not in known] == []


def test_what_a_command_lacks_is_in_an_extra() -> None:
    assert set(_EXTRAS.values()) <= PROJECT["optional-dependencies"].keys()


def test_what_is_missing_is_one_line_with_the_command() -> None:
    error = not_installed("boto3", "aws")
    assert isinstance(error, DependencyMissing)
    assert str(error) == "boto3 is not installed: pip install 'dormouse-lake[aws]'"
    assert pip_install("query", "service") == "pip install 'dormouse-lake[query,service]'"
