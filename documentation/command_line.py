"""The generator of the page about the command line, from the commands' help texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from documentation import cell, made_of
from dormouse.cli.program import GROUPS, whole

_HEAD = """# The command line

{made}

`dormouse COMMAND --help` prints the same texts. Every command has these options:

- `--json` writes one JSON document to standard output. If the command fails, it writes one to standard error instead, as the last
  line, with `error`, `message`, `exit_code` and the [fields](errors.md) of the error.
- `--debug` also prints a traceback if the command fails.

`dormouse completion bash` prints a script with which the shell completes commands and options.

Commands that work on an instance take one of these:

- `--instance FOLDER` (`-i`) for an instance in a folder. The default is `DORMOUSE_INSTANCE`, or else `./lake`.
- `--dsn` with `--objects` for a database and an object store. The defaults are `DORMOUSE_DSN` and `DORMOUSE_OBJECTS`.
- The id of a deployed instance, with `--region` and `--profile`, for `table`, `status` and the commands under _Instances on AWS_.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | bad usage: correct the command line or a setting |
| 130 | ended by Ctrl-C |
| 143 | ended by SIGTERM |
"""
_OF_ALL = {"as_json", "debug", "help", "instance", "dsn", "objects", "region", "profile"}


def render() -> str:
    commands = typer.main.get_group(whole()).commands
    parts = [_HEAD.format(made=made_of("dormouse/cli"))]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _pages(f"dormouse {name}", commands[name])
    return "\n".join(parts)


def _pages(path: str, command: Any) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        yield f"### {path}\n\n{' '.join((command.help or '').split())}\n"
        for name, each in inner.items():
            yield from _pages(f"{path} {name}", each)
        return
    about, *more = (command.help or "").split("\n\n")
    yield f"### {path}\n\n{cell(about)}\n"
    if more and path != "dormouse table set":
        yield "\n\n".join(" ".join(part.split()) for part in more) + "\n"
    if path == "dormouse table set":
        yield "[Properties of a table](table-properties.md) lists the properties.\n"
    if command.epilog:
        yield f"`{command.epilog.removeprefix('Example: ')}`\n"
    rows = [row for parameter in command.params if parameter.name not in _OF_ALL if (row := _row(parameter))]
    if rows:
        yield "\n".join(["| argument or option | meaning |", "| --- | --- |", *rows, ""])


@cache
def _context() -> Any:
    return typer.main.get_group(whole()).make_context("dormouse", [], resilient_parsing=True)


def _row(parameter: Any) -> str:
    name, words = parameter.get_help_record(_context()) or (parameter.human_readable_name, "")
    return f"| `{cell(name)}` | {cell(words)} |"
