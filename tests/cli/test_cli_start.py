"""Tests of the modules that the program loads: none for --version, and one for each command."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer

from dormouse.cli.program import HOMES, whole

NEVER_FOR_A_VERSION = {
    "typer",
    "pydantic",
    "psycopg",
    "rich",
    "asyncio",
    "dormouse.settings",
    "dormouse.api.instance",
}


def loaded_by(*words: str) -> set[str]:
    script = (
        "import sys, dormouse_command as program\n"
        f"sys.argv[1:] = {list(words)!r}\n"
        "try: program.main()\n"
        "finally: sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_the_version_is_printed_without_loading_commands() -> None:
    loaded = loaded_by("--version")
    assert loaded & NEVER_FOR_A_VERSION == set()
    assert {name for name in loaded if name.startswith("dormouse.cli.")} == {"dormouse.cli.failures"}


def commands(app: typer.Typer) -> set[str]:
    return set(typer.main.get_group(app).commands)


@pytest.mark.parametrize("module", sorted(set(HOMES.values())))
def test_each_command_is_in_the_module_that_the_list_names(module: str) -> None:
    app = import_module(f"dormouse.cli.{module}").app
    assert commands(app) == {name for name, home in HOMES.items() if home == module}
    assert commands(app) <= commands(whole())


def test_a_command_loads_few_modules_of_other_commands() -> None:
    loaded = {name.removeprefix("dormouse.cli.") for name in loaded_by("holds", "--help")}
    assert loaded & set(HOMES.values()) == {"backups", "system"}
