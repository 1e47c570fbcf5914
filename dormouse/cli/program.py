"""All commands as one program, which loads only the module of the requested command if possible."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]
from typer.core import TyperGroup

from dormouse.cli.failures import complain
from dormouse.errors import InvalidInput

GROUPS: dict[str, dict[str, str | None]] = {
    "Begin": {"demo": "demo", "table": "tables", "completion": None},
    "Data": {
        "ingest": "loading", "upsert": "loading", "query": "data", "sql": "data", "update": "editing",
        "merge-into": "editing", "replace": "editing", "delete": "data", "erase": "data",
        "erasures": "data", "rows": "rows", "payloads": "payloads",
    },
    "History": {"history": "history", "changes": "data", "restore-table": "data"},
    "Maintenance": {
        "status": "system", "maintain": "maintenance", "compact": "maintenance", "split": "maintenance",
        "merge": "maintenance", "gc": "maintenance", "holds": "backups", "check": "backups",
        "orphans": "backups",
    },
    "Backups": {
        "backup": "backups", "backups": "backups", "restore": "backups", "restore-metadata": "backups",
        "adopt": "backups",
    },
    "Programs and queues": {
        "serve": "serve", "jobs": "jobs", "committer": "committing", "commit-status": "jobs", "queue": "jobs",
    },
    "Instances on AWS": {
        "doctor": "deployment", "cost": "deployment", "pause": "system", "resume": "system",
        "destroy": "deployment", "env": "system", "access": "system", "dead-letters": "system",
        "restore-objects": "system",
    },
}  # fmt: skip
"""The commands in the groups that the help shows, and the module of each command in this folder."""
HOMES = {name: module for names in GROUPS.values() for name, module in names.items() if module is not None}
"""The module of each command."""

_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def width() -> int:
    """Returns the width of help texts: that of the terminal, or 80 columns without one."""
    return shutil.get_terminal_size((80, 24)).columns


class Grouped(TyperGroup):
    """A group that lists its commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {name: command for name, command in self.commands.items() if not command.hidden}
        limit = formatter.width - 6 - max(map(len, known))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, known[name].get_short_help_str(limit)) for name in names])


def run(arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code."""
    home = HOMES.get(arguments[0]) if arguments else None
    try:
        return int(_program(home)(list(arguments), prog_name="dormouse", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return complain(error)


def whole() -> typer.Typer:
    """Returns the program with all commands."""
    return _program(None)


@cache
def _program(home: str | None) -> typer.Typer:
    app = typer.Typer(
        name="dormouse",
        help="Very large key-sorted tables: Parquet files, PostgreSQL for everything transactional, Spark.",
        epilog="Start with: dormouse demo. The instance is the folder ./lake, unless --instance or "
        "DORMOUSE_INSTANCE says otherwise.",
        cls=Grouped,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": width()},
    )
    app.callback()(_root)
    for module in dict.fromkeys(HOMES.values()) if home is None else (home,):
        app.add_typer(import_module(f"dormouse.cli.{module}").app)
    if home is None:
        app.command(
            "completion",
            help="Print the completion script for a shell; --install-completion installs it permanently.",
            epilog='Example: eval "$(dormouse completion bash)"',
        )(completion)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from dormouse import __version__

        typer.echo(f"dormouse {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def completion(
    shell: Annotated[str, typer.Argument(help=f"The shell: {', '.join(_SHELLS)}.", show_default=False)],
) -> None:
    """Prints the completion script for a shell. Raises `InvalidInput` for an unknown shell."""
    if shell not in _SHELLS:
        raise InvalidInput(f"there is no completion for {shell!r}: name one of {', '.join(_SHELLS)}")
    script = get_completion_script(prog_name="dormouse", complete_var="_DORMOUSE_COMPLETE", shell=shell)
    sys.stdout.write(f"{script}\n")
