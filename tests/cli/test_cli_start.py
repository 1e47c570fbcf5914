"""What the program loads: nothing for --version, and for a command the module of that one alone."""

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


def test_a_version_is_told_without_loading_anything() -> None:
    loaded = loaded_by("--version")
    assert loaded & NEVER_FOR_A_VERSION == set()
    assert {name for name in loaded if name.startswith("dormouse.cli.")} == {"dormouse.cli.failures"}


def commands(app: typer.Typer) -> set[str]:
    return {str(one.name) for one in app.registered_commands}


@pytest.mark.parametrize("home", sorted(set(HOMES.values())))
def test_each_command_is_found_where_it_is_said_to_be(home: str) -> None:
    app = typer.Typer()
    import_module(f"dormouse.cli.{home}").add_to(app)
    assert commands(app) == {name for name, there in HOMES.items() if there == home}
    assert commands(app) <= commands(whole())
