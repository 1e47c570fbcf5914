"""The command line, from its own help."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from documentation import cell, made_of
from dormouse.cli.program import GROUPS, whole

_HEAD = """# The command line

{made}

`dormouse COMMAND --help` says the same. Every command has `--json` (one document on standard output; of a failure one on
standard error, its last line there: `error`, `message`, `exit_code`, and the [fields](errors.md) of the error) and `--debug` (a
traceback). `dormouse completion bash` prints what has a shell complete commands and options.

What works on an instance takes one of these: `--instance FOLDER` (`-i`; also `DORMOUSE_INSTANCE`, else `./lake`), or `--dsn` with
`--objects` (`DORMOUSE_DSN`, `DORMOUSE_OBJECTS`); `table`, `status` and what stands under _Instances on AWS_ take the id of a
deployed one, with `--region` and `--profile`.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | bad usage: another command line, or another setting, would put it right |
| 130, 143 | ended by Ctrl-C, by SIGTERM |
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
        yield "The properties are [here](table-properties.md).\n"
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
