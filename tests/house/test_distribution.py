"""Installation commands in messages and guides, which name the distribution and extras of pyproject.toml."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import dormouse as dm
import dormouse_command
from dormouse import errors
from dormouse.errors import DISTRIBUTION, EXTRAS, DependencyMissing, not_installed, pip_install

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = CONFIG["project"]
FOLDERS = ("dormouse", "benchmarks", "docs", "lambdas", "emr", "query_image", "packages", "stacks")
TEXTS = [
    *ROOT.glob("*.md"),
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md"}),
]
INSTALL = re.compile(r"pip install (?:-\S+ )*['\"]?([\w.-]+)(?:\[([^\]]*)\])?")
HINTS = {"not_installed": slice(1, 2), "pip_install": slice(None)}
"""The functions that return an installation command, each with the positions of those arguments that are
extras.
"""


def commands(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the distribution and the extra of each `pip install` in a file, also of those made by HINTS."""
    text = path.read_text("utf-8")
    if path != Path(errors.__file__):
        yield from ((name, extra) for name, extras in INSTALL.findall(text) for extra in extras.split(","))
    if path.suffix == ".py" and any(name in text for name in HINTS):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HINTS:
                given = [one.value for one in node.args[HINTS[node.func.id]] if isinstance(one, ast.Constant)]
                yield from ((DISTRIBUTION, str(extra)) for extra in given)


def test_name_version_and_script_are_those_of_pyproject() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert dm.__version__ == PROJECT["version"]
    assert PROJECT["scripts"].keys() == {"dormouse"}


def test_every_file_of_the_package_is_in_its_wheel() -> None:
    package, patterns = ROOT / "dormouse", CONFIG["tool"]["setuptools"]["package-data"]["dormouse"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*.*") if path.suffix not in {".py", ".pyc", ".so"}}
    assert others - packed == set()


def test_spark_finds_the_data_source_in_an_installation(tmp_path: Path) -> None:
    """The modules are listed in the way of Spark. An editable installation of an older version must be
    renewed.
    """
    code = "import pkgutil; print('pyspark_dormouse' in {one.name for one in pkgutil.iter_modules()})"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


def test_every_command_names_the_distribution_and_an_extra_that_exists() -> None:
    found = [(path.relative_to(ROOT), name, extra) for path in TEXTS for name, extra in commands(path)]
    assert {path.parts[0] for path, _, _ in found} >= {"dormouse", "benchmarks", "docs", "lambdas"}
    known = {"", *PROJECT["optional-dependencies"]}
    assert [one for one in found if one[1] != DISTRIBUTION or one[2] not in known] == []


def test_each_optional_library_is_in_an_extra() -> None:
    assert set(EXTRAS.values()) <= PROJECT["optional-dependencies"].keys()


def test_a_missing_library_is_one_line_with_the_command_to_install_it() -> None:
    error = not_installed("boto3", "aws")
    assert isinstance(error, DependencyMissing)
    assert str(error) == "boto3 is not installed: pip install 'dormouse-lake[aws]'"
    assert pip_install("query", "service") == "pip install 'dormouse-lake[query,service]'"


def test_the_extra_all_has_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]
    [named] = extras["all"]
    of_the_project = {"all", "demo", "docs", "test", "benchmark", "lambdas"}
    assert set(named.partition("[")[2].rstrip("]").split(",")) == extras.keys() - of_the_project


def test_without_typer_the_program_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dormouse_command, "_ENDINGS", {})  # keeps the signal handlers of the tests
    for name in [name for name in sys.modules if name.partition(".")[0] in {"typer", "rich"}]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("dormouse.cli")]:
        monkeypatch.delitem(sys.modules, name)
    assert dormouse_command.main() == 1
    assert capsys.readouterr().err == "dormouse: typer is not installed: pip install 'dormouse-lake[cli]'\n"


def test_without_httpx_the_client_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for name in [name for name in sys.modules if name.startswith("dormouse.client")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DependencyMissing, match=r"httpx is not installed: .*\[client\]"):
        import dormouse.client  # noqa: F401


def test_links_of_a_published_readme_lead_to_the_repository() -> None:
    made = runpy.run_path(str(ROOT / "setup.py"))
    readme = made["readme"]("https://example.com/lake")
    assert f"](https://example.com/lake/blob/v{PROJECT['version']}/docs/quickstart.md)" in readme
    assert re.findall(r"\]\((?!https?:|#)", readme) == []
    assert "<!--" not in readme
    assert made["urls"]("") == {}
