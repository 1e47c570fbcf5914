"""The options of commands that read CSV: those of `TextFormat`, with its texts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dormouse.sources.text_format import HELP, TextFormat

_FLAGS = {"separator": ["--separator", "--delimiter"], "header": ["--header/--no-header"]}
_TYPES: dict[str, Any] = {"header": bool, "skip_lines": int, "null": list[str]}


def with_text_options(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each of `TextFormat` in place of its parameter `how`.

    `how` is what was said, as `text_format` takes it.
    """
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _TYPES.get(name, str) | None,
                typer.Option(*_FLAGS.get(name, []), help=text, show_default=False),
            ],
        )
        for name, text in HELP.items()
    ]
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    at = [parameter.name for parameter in parameters].index("how")

    @functools.wraps(function)
    def command(*session: Any, **given: Any) -> None:
        said = {name: given.pop(name) for name in TextFormat.model_fields}
        function(*session, **given, how={name: value for name, value in said.items() if value is not None})

    parameters[at : at + 1] = options
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters[1:]]
    command.__signature__ = inspect.Signature([parameters[0], *named])  # type: ignore[attr-defined]
    return command
