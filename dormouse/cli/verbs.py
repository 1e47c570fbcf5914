"""What all commands share: which instance, text or JSON, and how errors end."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.failures import report
from dormouse.errors import InvalidInput, NotAnInstance
from dormouse.model.values import json_value
from dormouse.settings import load_settings

if TYPE_CHECKING:
    from dormouse.instance import Instance

DEFAULT_FOLDER = Path("lake")

_SHARED = {
    "instance": Annotated[
        Path | None,
        typer.Option(
            "--instance", "-i", help="The folder of an embedded instance [DORMOUSE_INSTANCE, else ./lake]."
        ),
    ],
    "dsn": Annotated[
        str | None, typer.Option("--dsn", help="A PostgreSQL to connect to; with --objects [DORMOUSE_DSN].")
    ],
    "objects": Annotated[
        str | None,
        typer.Option(
            "--objects", help="An object store: s3://bucket/prefix or file:///path [DORMOUSE_OBJECTS]."
        ),
    ],
}
_COMMON = {
    "as_json": Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")],
    "debug": Annotated[bool, typer.Option("--debug", help="A traceback when something fails.")],
}
_DEFAULTS = {"instance": None, "dsn": None, "objects": None, "as_json": False, "debug": False}


@dataclass(frozen=True)
class Session:
    """One run of a command."""

    instance: Path | None = None
    dsn: str | None = None
    objects: str | None = None
    as_json: bool = False
    debug: bool = False

    def open(self, *, read_only: bool = False, create: bool = False) -> Instance:
        """The instance that the options and settings name; made only when told so."""
        settings = load_settings()
        objects = self.objects or (settings.objects if self.instance is None else None)
        if objects is not None or self.dsn is not None:
            from dormouse.instance import connect

            dsn = self.dsn or settings.dsn
            if dsn is None or objects is None:
                raise InvalidInput("--dsn and --objects go together: give both, or --instance FOLDER")
            if self.instance is not None:
                raise InvalidInput("give --instance, or --dsn and --objects, not both")
            return connect(dsn, objects, read_only=read_only)
        from dormouse.embedded.local import local, prepare

        folder = (self.instance or settings.instance or DEFAULT_FOLDER).expanduser()
        if not create and not folder.exists():
            raise NotAnInstance(
                f"there is no instance in {folder}: name one with --instance, or make one with "
                "'dormouse table create' or 'dormouse demo'"
            )
        if not create:
            prepare(folder, read_only=True)
        return local(folder, read_only=read_only)

    def show(self, value: Any, text: Callable[[], Any]) -> None:
        """The value as JSON, or what `text` makes of it: a line, or something that rich renders."""
        if self.as_json:
            sys.stdout.write(json.dumps(json_value(value)) + "\n")
            sys.stdout.flush()
        else:
            from dormouse.cli.console import stdout

            stdout().print(text(), highlight=False, soft_wrap=True)


def verb(
    app: typer.Typer, name: str, *, example: str, opens: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function `(session, …)`, with the options that all commands share."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shared = {**(_SHARED if opens else {}), **_COMMON}

        @functools.wraps(function)
        def command(**given: Any) -> None:
            session = Session(**{key: given.pop(key) for key in shared})
            try:
                function(session, **given)
                sys.stdout.flush()
            except typer.TyperException:
                raise
            except typer.Exit:
                raise
            except (Exception, KeyboardInterrupt) as error:
                raise typer.Exit(report(error, debug=session.debug)) from None

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        options = [
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[key], annotation=annotation
            )
            for key, annotation in shared.items()
        ]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + options
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, help=inspect.getdoc(function), epilog=f"Example: {example}")(command)
        return function

    return decorate
